"""Parts of the package together, in one process."""
