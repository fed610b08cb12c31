"""A Celery app for the processes of these tests."""

import os
import time

from celery import Celery

app = Celery("selftest", broker=os.environ.get("SELFTEST_BROKER", "memory://"))
app.conf.beat_schedule = {"nothing": {"task": "nothing", "schedule": 3600}}


@app.task(name="nap")
def nap(seconds):
    """Say so, sleep, and say so."""
    print(f"asleep in {os.getpid()}", flush=True)
    time.sleep(seconds)
    print("awake", flush=True)
