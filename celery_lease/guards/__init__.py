"""Guards: the fence at the place that is written to."""
