"""
pytest-celery's nodes and clusters over processes.

The API is the one that Celery's own tests use over Docker; here each "container" is a
`CeleryProcess`, so that it works where there is no Docker.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pytest_celery import CeleryTestCluster, CeleryTestNode
from pytest_docker_tools.exceptions import TimeoutError as ContainerTimeout

from tests.services.processes import CeleryProcess

if TYPE_CHECKING:
    from typing_extensions import Self


class ProcessNode(CeleryTestNode):
    """A node whose container is a process."""

    container: CeleryProcess

    def start(self) -> Self:
        """Start the process, and do not wait."""
        self.container.start()
        return self

    def kill(
        self,
        signal: str | int = "SIGKILL",
        reload_container: bool = True,
        *,
        group: bool = False,
        pid: int | None = None,
    ) -> None:
        """Signal the process, or its whole group, or one of its children."""
        if self.container.status == "running" or group:
            self.container.kill(signal, group=group, pid=pid)

    def wait_for_log(  # returns what it found, which the base class does not
        self,
        log: str | re.Pattern[str],
        message: str = "",
        timeout: float = 30.0,
        *,
        after: int = 0,
    ) -> re.Match[str]:
        """Wait for a text, or for a match of a compiled expression."""
        try:
            return self.container.wait_for_log(log, timeout, after=after)
        except TimeoutError as error:
            # What the base class's assertions expect.
            raise ContainerTimeout(f"{message}\n{error}".strip()) from None


class BeatNode(ProcessNode):
    """A ``celery beat``."""


class WorkerNode(ProcessNode):
    """A ``celery worker``."""

    @property
    def pool(self) -> list[int]:
        """The processes of its pool."""
        return self.container.children


class ProcessCluster(CeleryTestCluster):
    """Nodes that start, get ready and end together."""

    def __init__(self, *nodes: ProcessNode | CeleryProcess) -> None:
        """Take nodes, or processes to make nodes of."""
        super().__init__(
            *(ProcessNode(node) if isinstance(node, CeleryProcess) else node for node in nodes)
        )

    def start(self) -> Self:
        """Start all, then wait until each is ready."""
        for node in self:
            node.start()
        self.ready()
        return self

    def teardown(self) -> None:
        """End all, the later ones first."""
        for node in reversed(self.nodes):
            node.teardown()

    def __enter__(self) -> Self:
        """Start."""
        try:
            return self.start()
        except BaseException:
            self.teardown()
            raise

    def __exit__(self, *exc: object) -> None:
        """End."""
        self.teardown()
