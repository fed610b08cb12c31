"""What all private servers have in common: a directory, a port, processes and their signals."""

from __future__ import annotations

import atexit
import itertools
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

import psutil
import sqlalchemy as sa

from tests.services.guardian import GUARDIAN

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

#: The folder that ``tests`` and ``example_project`` are imported from.
ROOT = Path(__file__).parents[2]


class ServiceMissing(Exception):
    """A server's program is not installed, or the server is not ours to do this with."""


class ServiceFailed(Exception):
    """A server was there but did not do what it was asked to."""


def wait_until(
    condition: Callable[[], T],
    *,
    timeout: float = 30.0,
    interval: float = 0.02,
    message: str = "the condition",
) -> T:
    """Poll until `condition()` is true and return its value; TimeoutError after `timeout`."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {timeout:g} s in vain for {message}")
        time.sleep(interval)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on right now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def unprivileged() -> pwd.struct_passwd | None:
    """The user to run servers as that refuse to run as root; None when we are not root."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def reachable(path: Path) -> bool:
    """Whether every user may enter the folders that lead to `path`, and `path` itself."""
    path = path.resolve()
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents))


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants that still run, the process itself first."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def signal_all(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal to each of these processes that still is there."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            pass  # gone by itself: as good


def freeze_tree(pid: int) -> list[psutil.Process]:
    """SIGSTOP a process and all its descendants, those born meanwhile included; return them."""
    frozen: list[psutil.Process] = []
    while new := [process for process in process_tree(pid) if process not in frozen]:
        signal_all(new, signal.SIGSTOP)
        frozen += new
    return frozen


def alive(process: psutil.Process) -> bool:
    """Whether a process runs or is stopped; one that only waits to be reaped is dead."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Service:
    """
    One private server.

    A subclass says how to prepare a directory, what to run and how to tell that it answers.
    Usable as a context manager.
    """

    #: The name in messages, in the directory's name and in the variable that names an URL.
    name: ClassVar[str]
    #: The signal that asks for a clean, prompt stop.
    stop_signal: ClassVar[int] = signal.SIGTERM
    #: How long a start may take, in seconds.
    start_timeout: ClassVar[float] = 60.0
    #: Whether the server refuses to run as root.
    needs_unprivileged: ClassVar[bool] = False

    def __init__(self) -> None:
        self.external_url = os.environ.get(self.url_variable())
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None

    # For subclasses

    def check(self) -> None:
        """Raise ServiceMissing if the server's program is not installed."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Fill the new directory."""

    def choose_ports(self) -> None:
        """Choose the port, and any other that the server needs."""
        self.port = free_port()

    def command(self) -> list[str]:
        """The program and its arguments, for `self.port`."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """What the program finds in its environment."""
        return {**os.environ, "HOME": str(self.directory), "LC_ALL": "C.UTF-8"}

    def answers(self) -> bool:
        """Whether the server answers in its own protocol; must not raise, must not hang."""
        raise NotImplementedError

    def version(self) -> str:
        """The server's own word on its version."""
        raise NotImplementedError

    # Life

    @classmethod
    def url_variable(cls) -> str:
        """The environment variable that names a server to use instead of a private one."""
        return f"CELERY_LEASE_TEST_{cls.name.upper()}_URL"

    @property
    def external(self) -> bool:
        """Whether this is somebody else's server, named by an URL."""
        return self.external_url is not None

    @property
    def directory(self) -> Path:
        """The server's own directory: data, socket and log."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix=f"celery-lease-{self.name}-"))
            if user := self.user():
                os.chown(self._directory, user.pw_uid, user.pw_gid)
            atexit.register(self.stop)
        return self._directory

    @property
    def log(self) -> Path:
        """The file with everything the server said."""
        return self.directory / "server.log"

    def user(self) -> pwd.struct_passwd | None:
        """The user to run as; None for our own."""
        return unprivileged() if self.needs_unprivileged else None

    def start(self) -> Self:
        """Start the server, or start it again on its old data and port; wait until it answers."""
        if self.external:
            wait_until(self.answers, timeout=self.start_timeout, message=self.external_url or "")
            return self
        if self.running:
            return self
        self.check()
        if self._directory is None:
            self.prepare()
        if self.port:
            self._launch()
            return self
        for attempt in itertools.count(1):
            self.choose_ports()
            try:
                self._launch()
            except ServiceFailed:
                # Somebody else may have taken the port in between.
                if attempt == 3 or "in use" not in self.log.read_text(errors="replace"):
                    raise
            else:
                break
        return self

    def _launch(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env=self.environment(),
                start_new_session=True,
                **self._identity(),
            )
        GUARDIAN.watch(self.process.pid, self.directory)
        try:
            wait_until(self._settled, timeout=self.start_timeout, message=f"{self.name} to answer")
        except TimeoutError as error:
            self.kill()
            raise ServiceFailed(f"{error}\n{self._last_words()}") from None
        if not self.running:
            GUARDIAN.forget(self.process.pid)
            raise ServiceFailed(f"{self.name} ended at its start\n{self._last_words()}")

    def _settled(self) -> bool:
        return not self.running or self.answers()

    def _identity(self) -> dict[str, object]:
        user = self.user()
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}

    def _last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def run(self, *command: str) -> str:
        """Run a program to its end, as the server's user; ServiceFailed with its output."""
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.directory,
            env=self.environment(),
            text=True,
            check=False,
            **self._identity(),
        )
        if done.returncode:
            raise ServiceFailed(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}")
        return done.stdout

    @property
    def running(self) -> bool:
        """Whether the main process runs (frozen counts)."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """The main process."""
        self._must_be_ours()
        if self.process is None:
            raise ServiceFailed(f"{self.name} was never started")
        return self.process.pid

    @property
    def pids(self) -> list[int]:
        """The main process and all its children."""
        return [process.pid for process in process_tree(self.pid)]

    def freeze(self) -> None:
        """Stop all processes where they are (SIGSTOP); connections stay open and silent."""
        freeze_tree(self.pid)

    def thaw(self) -> None:
        """Let frozen processes go on (SIGCONT)."""
        signal_all(process_tree(self.pid), signal.SIGCONT)

    def kill(self) -> None:
        """Crash: SIGKILL to all processes at once."""
        self._must_be_ours()
        # Frozen first, so that none is born while we look.
        self._end(lambda: signal_all(freeze_tree(self.pid), signal.SIGKILL))

    def shut_down(self) -> None:
        """End the processes cleanly, by force after ten seconds; the data stay."""
        if not self.running:
            return
        self.thaw()
        try:
            self._end(lambda: os.kill(self.pid, self.stop_signal), timeout=10)
        except TimeoutError:
            self.kill()

    def restart(self) -> None:
        """Shut down if running, and start again on the same data and the same port."""
        self._must_be_ours()
        self.shut_down()
        self.start()

    def stop(self) -> None:
        """Shut down and remove the directory. Idempotent."""
        if self._directory is None:
            return
        self.shut_down()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = None
        self.port = 0
        atexit.unregister(self.stop)

    def _end(self, send: Callable[[], None], timeout: float = 10) -> None:
        if self.process is None:
            return
        tree = process_tree(self.process.pid)
        send()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} did not end within {timeout:g} s") from None
        wait_until(lambda: not any(map(alive, tree)), timeout=timeout, message="its children")
        GUARDIAN.forget(self.process.pid)

    def _must_be_ours(self) -> None:
        if self.external:
            raise ServiceMissing(f"{self.name} at {self.url_variable()} is not ours to signal")

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, *exc: object) -> None:
        """Stop."""
        self.stop()


class DatabaseService(Service):
    """A SQL server that gives each test a database of its own."""

    #: The URL of the database that is always there, without host and port.
    admin: ClassVar[sa.URL]
    _numbers = itertools.count(1)
    _engine: sa.Engine | None = None

    def url(self, database: str | None = None, *, port: int | None = None) -> str:
        """The URL of a database, by another port if a proxy stands in between."""
        base = (
            sa.make_url(self.external_url)
            if self.external_url
            else self.admin.set(host="127.0.0.1", port=self.port)
        )
        url = base.set(database=database or base.database, port=port or base.port)
        return url.render_as_string(hide_password=False)

    def create_database(self) -> str:
        """Create an empty database and return its URL."""
        name = f"t{os.getpid()}_{next(self._numbers)}"
        self.execute(self.create_statement(name))
        return self.url(name)

    def create_statement(self, name: str) -> str:
        """The statement that creates a database."""
        return f"CREATE DATABASE {name}"

    def drop_database(self, url: str) -> None:
        """Drop a database, whoever is still connected to it."""
        raise NotImplementedError

    @property
    def engine(self) -> sa.Engine:
        """The administrator's engine, in AUTOCOMMIT; it keeps one connection between tests."""
        if self._engine is None:
            self._engine = sa.create_engine(
                self.url(),
                isolation_level="AUTOCOMMIT",
                pool_size=1,
                pool_pre_ping=True,  # the server may have been restarted, or the session killed
            )
        return self._engine

    def stop(self) -> None:
        """Forget the connection too."""
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None
        super().stop()

    def execute(self, statement: str, **parameters: object) -> list[tuple[object, ...]]:
        """Run one statement as the administrator."""
        with self.engine.connect() as connection:
            result = connection.execute(sa.text(statement), parameters)
            return [tuple(row) for row in result] if result.returns_rows else []
