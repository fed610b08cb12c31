"""Lease databases. Empty on purpose: ``stores.base`` is to be had without SQLAlchemy."""
