"""A Celery app whose tasks log; what its logs look like comes from the environment."""

import json
import logging
import logging.config
import os

from celery import Celery
from celery.signals import setup_logging
from celery.utils.log import get_task_logger

from celery_lease import FencedTask

app = Celery("logging", broker=os.environ.get("LOGGING_BROKER", "memory://"), set_as_current=False)
app.conf.update(json.loads(os.environ.get("LOGGING_CONF", "{}")))
app.conf.broker_connection_retry_on_startup = True

if "LOGGING_DICT" in os.environ:

    @setup_logging.connect
    def configure(**_):
        """Set up logging as users of dictConfig do."""
        logging.config.dictConfig(json.loads(os.environ["LOGGING_DICT"]))


if "LOGGING_ROOT" in os.environ:
    # With worker_hijack_root_logger off, what stands on the root stays.
    logging.basicConfig(format="mine epoch=%(lease_epoch)s %(message)s", level="INFO", force=True)


@app.task(base=FencedTask, bind=True, shared=False, name="speak")
def speak(self, text):
    """Log a line as a task, a line as any module, and one with a field of its own."""
    get_task_logger("speaker").info("task %s", text)
    logging.getLogger("some.module").warning("module %s", text)
    logging.getLogger("some.module").warning("own %s", text, extra={"lease_epoch": "mine"})
