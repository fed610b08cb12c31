"""Cases on real processes."""
