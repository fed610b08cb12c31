"""Tests without a database, a broker or a wait."""
