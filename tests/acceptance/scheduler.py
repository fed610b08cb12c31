"""The leased scheduler with points around the moment when the broker gets messages."""

from celery_lease import LeasedScheduler
from tests.acceptance.points import pass_point


class StoppingScheduler(LeasedScheduler):
    """Passes points in a turn, after the claim, before the mark, and between ticks."""

    def turn(self, term, *args, **kwargs):
        """Do what is due."""
        pass_point("in a turn")
        return super().turn(term, *args, **kwargs)

    def flush(self, sendings):
        """Give the broker messages."""
        pass_point("claimed")
        super().flush(sendings)
        pass_point("published")

    def should_sync(self):
        """Be asked between two ticks, and after each task that is sent."""
        if not self._ticking:
            pass_point("between ticks")
        return super().should_sync()
