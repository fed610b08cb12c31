"""What must hold whatever happens, in whatever order."""
