"""How fast the scheduler is, beside stock beat and its peers: ``python -m benchmarks``."""
