"""A private RabbitMQ, from the system's programs."""

from __future__ import annotations

import base64
import itertools
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from urllib.request import Request, urlopen

import amqp

from tests.services.base import Service, ServiceMissing, free_port
from tests.services.guardian import GUARDIAN

# First the real scripts: what Debian has on PATH changes the user and drops the environment.
_PATH = os.pathsep.join(("/usr/lib/rabbitmq/bin", os.environ.get("PATH", os.defpath), "/usr/sbin"))


class RabbitMQ(Service):
    """
    A RabbitMQ node of its own on 127.0.0.1, with a name server (epmd) of its own.

    Slow to start (ten seconds): once a session is enough, with a virtual host for each test.
    """

    name = "rabbitmq"
    needs_unprivileged = True

    def __init__(self) -> None:
        super().__init__()
        self.node = f"celery-lease-{secrets.token_hex(4)}@localhost"
        self.management_port = 0
        self.distribution_port = 0
        self.epmd_port = 0
        self.epmd: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)

    def check(self) -> None:
        """Find the programs."""
        for program in ("rabbitmq-server", "epmd"):
            self.program(program)

    def program(self, name: str) -> str:
        """The path of one of RabbitMQ's programs."""
        path = shutil.which(name, path=_PATH)
        if path is None:
            raise ServiceMissing(f"RabbitMQ needs the program {name}, which is not installed")
        return path

    def choose_ports(self) -> None:
        """Four: one for clients, one for its HTTP API and two that Erlang wants."""
        self.port, self.management_port = free_port(), free_port()
        self.distribution_port, self.epmd_port = free_port(), free_port()

    def command(self) -> list[str]:
        """Write the configuration, then run in the foreground."""
        self._write("enabled_plugins", "[rabbitmq_management].")
        self._write("env.conf", "")
        self._write(
            "rabbitmq.conf",
            f"listeners.tcp.1 = 127.0.0.1:{self.port}",
            "management.tcp.ip = 127.0.0.1",
            f"management.tcp.port = {self.management_port}",
        )
        return [self.program("rabbitmq-server")]

    def environment(self) -> dict[str, str]:
        """Everything in our directory, nothing in the system's."""
        files = {
            "RABBITMQ_MNESIA_BASE": "mnesia",
            "RABBITMQ_LOG_BASE": "log",
            "RABBITMQ_PID_FILE": "pid",
            "RABBITMQ_CONFIG_FILE": "rabbitmq.conf",
            "RABBITMQ_CONF_ENV_FILE": "env.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": "enabled_plugins",
        }
        return {
            **super().environment(),
            **{variable: str(self.directory / file) for variable, file in files.items()},
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_DIST_PORT": str(self.distribution_port),
            "RABBITMQ_LOGS": "-",
            # Two schedulers, which sleep rather than spin when there is nothing to do.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none +sbwtdcpu none",
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }

    def _launch(self) -> None:
        # Ours, as a child: the one that Erlang would start by itself never ends.
        if self.epmd is None or self.epmd.poll() is not None:
            self.epmd = subprocess.Popen(
                [self.program("epmd"), "-port", str(self.epmd_port), "-address", "127.0.0.1"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self.environment(),
                start_new_session=True,
                **self._identity(),
            )
            GUARDIAN.watch(self.epmd.pid)
        super()._launch()

    def stop(self) -> None:
        """Kill and remove the directory: a clean end takes seconds and is of no use here."""
        if self.running:
            self.kill()
        if self.epmd is not None:
            self.epmd.kill()
            self.epmd.wait()
            GUARDIAN.forget(self.epmd.pid)
            self.epmd = None
        super().stop()

    def answers(self) -> bool:
        """Whether a client may connect, and the HTTP API is there."""
        try:
            self._connect(self.url())
            if not self.external:
                self._api("GET", "overview")
        except (OSError, amqp.exceptions.AMQPError):
            return False
        return True

    def version(self) -> str:
        """The server's version."""
        return str(self._connect(self.url())["version"])

    def url(self, vhost: str = "/", *, port: int | None = None) -> str:
        """The URL of a virtual host, by another port if a proxy stands in between."""
        if self.external_url:
            return self.external_url
        return f"amqp://guest:guest@127.0.0.1:{port or self.port}/{quote(vhost, safe='')}"

    def create_vhost(self) -> str:
        """Create an empty virtual host and return its URL; an external server has only its own."""
        if self.external:
            return self.url()
        name = f"t{next(self._numbers)}"
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        self._api("PUT", f"vhosts/{name}", {})
        self._api("PUT", f"permissions/{name}/guest", everything)
        return self.url(name)

    def delete_vhost(self, url: str) -> None:
        """Delete a virtual host, whoever is still connected to it."""
        if not self.external:
            self._api("DELETE", f"vhosts/{urlsplit(url).path.lstrip('/')}")

    @contextmanager
    def alarm(self) -> Iterator[None]:
        """Be short of memory: whoever publishes is blocked."""
        self._watermark("0.000001")
        try:
            yield
        finally:
            self._watermark("0.6")

    def _watermark(self, fraction: str) -> None:
        control = self.program("rabbitmqctl")
        self.run(control, "--node", self.node, "set_vm_memory_high_watermark", fraction)

    def _connect(self, url: str) -> dict[str, Any]:
        parts = urlsplit(url)
        connection = amqp.Connection(
            f"{parts.hostname}:{parts.port or 5672}",
            userid=parts.username or "guest",
            password=parts.password or "guest",
            virtual_host=unquote(parts.path[1:]) or "/",
            connect_timeout=2,
            read_timeout=5,
        )
        with connection:
            return dict(connection.server_properties)

    def _api(self, method: str, path: str, body: dict[str, str] | None = None) -> None:
        request = Request(
            f"http://127.0.0.1:{self.management_port}/api/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": "Basic " + base64.b64encode(b"guest:guest").decode(),
                "Content-Type": "application/json",
            },
        )
        with urlopen(request, timeout=10):
            pass

    def _write(self, name: str, *lines: str) -> None:
        Path(self.directory / name).write_text("".join(f"{line}\n" for line in lines))
