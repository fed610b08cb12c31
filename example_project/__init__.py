"""A small document service: a daily summary and retention planning, each done once.

``celery -A example_project beat`` in two terminals and ``celery -A example_project
worker`` in a third; ``python -m example_project.failover`` tells the story by itself.
"""

from example_project.app import app

__all__ = ["app"]
