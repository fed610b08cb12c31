"""A private PgBouncer before a PostgreSQL, from the system's program."""

from __future__ import annotations

import os
import shutil
from typing import ClassVar

import psycopg
import sqlalchemy as sa

from tests.services.base import Service, ServiceMissing

# Debian keeps servers where only root's PATH leads.
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin"))


class PgBouncer(Service):
    """A pooler on 127.0.0.1 that hands out sessions for one transaction at a time."""

    name = "pgbouncer"
    needs_unprivileged: ClassVar[bool] = True

    def __init__(self, url: str, *, oldest_first: bool = True) -> None:
        """Stand before the database of `url`; lend the session that is idle for longest."""
        super().__init__()
        self.target = sa.make_url(url)
        self.oldest_first = oldest_first

    def check(self) -> None:
        """Find the program."""
        self.program()

    def program(self) -> str:
        """The path of ``pgbouncer``."""
        path = shutil.which("pgbouncer", path=_PATH)
        if path is None:
            raise ServiceMissing("PgBouncer needs the program pgbouncer, which is not installed")
        return path

    def command(self) -> list[str]:
        """Write the configuration, then run in the foreground."""
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            "default_pool_size": "4",
            "server_round_robin": str(int(self.oldest_first)),
        }
        target = self.target
        lines = [
            "[databases]",
            f"* = host={target.host} port={target.port} user={target.username}",
            "[pgbouncer]",
            *(f"{name} = {value}" for name, value in settings.items()),
        ]
        path = self.directory / "pgbouncer.ini"
        path.write_text("".join(f"{line}\n" for line in lines))
        return [self.program(), str(path)]

    def answers(self) -> bool:
        """Whether a query is answered."""
        try:
            with psycopg.connect(self._plain(), connect_timeout=2) as connection:
                return connection.execute("SELECT 1").fetchone() == (1,)
        except psycopg.OperationalError:
            return False

    def version(self) -> str:
        """The program's version."""
        return self.run(self.program(), "--version").split()[1]

    def url(self) -> str:
        """The database's URL, by way of the pooler."""
        return self.target.set(port=self.port).render_as_string(hide_password=False)

    def _plain(self) -> str:
        url = self.target.set(port=self.port, drivername="postgresql")
        return url.render_as_string(hide_password=False)
