"""A private MariaDB, from the system's programs."""

from __future__ import annotations

import os
import shutil
from typing import ClassVar

import pymysql
import sqlalchemy as sa

from tests.services.base import DatabaseService, ServiceMissing

# Debian keeps servers where only root's PATH leads.
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))

#: What URLs begin with: another driver is for all tests on MariaDB. Only whether the server
#: answers is always asked with PyMySQL.
_DRIVER = os.environ.get("CELERY_LEASE_TEST_MARIADB_DRIVER", "mysql+pymysql")


class MariaDB(DatabaseService):
    """A MariaDB server on 127.0.0.1 and on a socket in its directory."""

    name = "mariadb"
    needs_unprivileged = True
    admin: ClassVar[sa.URL] = sa.make_url(f"{_DRIVER}://root@/mysql?charset=utf8mb4")

    def __init__(self, *, fsync: bool = False) -> None:
        """`fsync`: be as slow as a real one."""
        super().__init__()
        self.fsync = fsync

    def check(self) -> None:
        """Find the programs."""
        for program in ("mariadbd", "mariadb-install-db"):
            self.program(program)

    def program(self, name: str) -> str:
        """The path of one of MariaDB's programs."""
        path = shutil.which(name, path=_PATH)
        if path is None:
            raise ServiceMissing(f"MariaDB needs the program {name}, which is not installed")
        return path

    def environment(self) -> dict[str, str]:
        """With a place of its own for temporary tables.

        A MariaDB removes those that it finds when it starts, another one's too.
        """
        return {**super().environment(), "TMPDIR": str(self.directory)}

    def prepare(self) -> None:
        """Create the system tables, with no password for root."""
        self.run(
            self.program("mariadb-install-db"),
            "--no-defaults",
            f"--datadir={self.directory / 'data'}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        )

    def command(self) -> list[str]:
        """Small, and with no fsync unless asked."""
        return [
            self.program("mariadbd"),
            "--no-defaults",
            f"--datadir={self.directory / 'data'}",
            f"--socket={self.directory / 'socket'}",
            f"--pid-file={self.directory / 'pid'}",
            "--bind-address=127.0.0.1",
            f"--port={self.port}",
            "--skip-name-resolve",
            "--max-connections=300",
            "--character-set-server=utf8mb4",
            "--innodb-buffer-pool-size=64M",
            # 2: written at each commit, so a killed server loses nothing, a killed machine may.
            f"--innodb-flush-log-at-trx-commit={1 if self.fsync else 2}",
        ]

    def answers(self) -> bool:
        """Whether a query is answered."""
        url = sa.make_url(self.url())
        try:
            connection = pymysql.connect(
                host=url.host,
                port=url.port or 3306,
                user=url.username,
                password=url.password or "",
                connect_timeout=2,
                read_timeout=2,
            )
            with connection, connection.cursor() as cursor:
                return cursor.execute("SELECT 1") == 1
        except pymysql.OperationalError:  # not pymysql.err: a MySQLdb made of it replaces that
            return False

    def version(self) -> str:
        """The server's version."""
        return str(self.execute("SELECT VERSION()")[0][0])

    def create_statement(self, name: str) -> str:
        """With the character set that an administrator would choose today."""
        return f"CREATE DATABASE {name} CHARACTER SET utf8mb4"

    def drop_database(self, url: str) -> None:
        """Drop a database, after ending the sessions on it: their locks would hold us up."""
        name = sa.make_url(url).database
        sessions = self.execute(
            "SELECT id FROM information_schema.processlist WHERE db = :db", db=name
        )
        for (session,) in sessions:
            try:
                self.execute(f"KILL CONNECTION {session}")
            except sa.exc.OperationalError:
                pass  # gone by itself: as good
        self.execute(f"DROP DATABASE IF EXISTS {name}")
