"""Checked by mypy, not run."""
