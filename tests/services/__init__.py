"""
Private servers and processes for tests.

Each server has its own directory, port and processes, is started on demand and can be frozen,
killed and restarted without touching anything else on the machine. A server that is already there
can be named instead, by ``CELERY_LEASE_TEST_<SERVICE>_URL``; it is then used, never signalled.
"""

from tests.services.base import Service, ServiceFailed, ServiceMissing, free_port, wait_until
from tests.services.mariadb import MariaDB
from tests.services.postgresql import PostgreSQL
from tests.services.proxy import (
    COMMIT,
    Connection,
    TCPProxy,
    Verdict,
    cut_before,
    hold,
    lose_answer,
    once,
)
from tests.services.rabbitmq import RabbitMQ
from tests.services.redis import Redis

__all__ = [
    "COMMIT",
    "Connection",
    "MariaDB",
    "PostgreSQL",
    "RabbitMQ",
    "Redis",
    "Service",
    "ServiceFailed",
    "ServiceMissing",
    "TCPProxy",
    "Verdict",
    "cut_before",
    "free_port",
    "hold",
    "lose_answer",
    "once",
    "wait_until",
]
