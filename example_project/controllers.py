"""A second story: two controllers of one resource, without beat or tasks.

``python -m example_project.controllers [--dir DIRECTORY]`` starts two processes that set
the same thermostat, freezes the leading one inside its transaction, lets the other take
over, wakes the first up, and shows that its write was refused.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from celery_lease import LeaderElection, StaleEpoch
from example_project.freezing import freeze_here

TTL = 2.0
PATIENCE = 30.0

metadata = sa.MetaData()
#: The resource: one row, and every write that it ever took, in order.
thermostat = sa.Table(
    "thermostat",
    metadata,
    sa.Column("write", sa.Integer, primary_key=True),
    sa.Column("controller", sa.String(20), nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
)


def control(name: str, directory: Path) -> int:
    """Lead, and set the thermostat until the lease is lost; then stand by again."""
    url = f"sqlite:///{directory}/controllers.sqlite3"
    engine = sa.create_engine(url, pool_pre_ping=True)
    election = LeaderElection(url, "thermostat", ttl=TTL, retry_interval=0.2)
    while True:
        with election.lead() as leadership:
            print(f"{name} leads under epoch {leadership.epoch}", flush=True)
            try:
                while leadership.trusted:
                    with leadership.transaction(engine) as connection:
                        freeze_here(f"controller-{name}")
                        connection.execute(
                            sa.insert(thermostat),
                            {"controller": name, "epoch": leadership.epoch},
                        )
                    time.sleep(0.1)  # The controller's own pace.
            except StaleEpoch as error:
                print(f"{name} was refused: {error}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Play the story and return its exit status."""
    parser = argparse.ArgumentParser(description="Two controllers, one resource.")
    parser.add_argument("--dir", default=None, help="leave the database and the logs there")
    parser.add_argument("--controller", help="be one controller of that name")
    given = parser.parse_args(arguments)
    directory = Path(given.dir or tempfile.mkdtemp(prefix="celery-lease-controllers-")).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if given.controller:
        return control(given.controller, directory)
    metadata.create_all(sa.create_engine(f"sqlite:///{directory}/controllers.sqlite3"))
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        return _story(directory, processes)
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def _story(directory: Path, processes: dict[str, subprocess.Popen[bytes]]) -> int:
    engine = sa.create_engine(f"sqlite:///{directory}/controllers.sqlite3")

    def start(name: str) -> None:
        with (directory / f"{name}.log").open("wb") as log:
            processes[name] = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, "--controller", name, "--dir", directory],
                env={**os.environ, "EXAMPLE_FREEZE_DIR": str(directory)},
                stdout=log,
                stderr=log,
            )

    def writes(name: str) -> list[Any]:
        with engine.connect() as connection:
            query = sa.select(thermostat).where(thermostat.c.controller == name)
            return list(connection.execute(query))

    def wait_for(what: str, seen: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE
        while not seen():
            if time.monotonic() > end:
                raise SystemExit(f"FAILED: waited in vain for {what}")
            time.sleep(0.05)
        print(what, flush=True)

    start("first")
    wait_for("the first controller leads and writes", lambda: writes("first"))
    (directory / "controller-first.armed").touch()
    frozen = directory / "controller-first.frozen"
    wait_for("it is frozen inside its transaction", frozen.exists)
    start("second")
    wait_for("the second takes over and writes", lambda: writes("second"))
    processes["first"].send_signal(signal.SIGCONT)
    log = directory / "first.log"
    wait_for("the first wakes up, and is refused", lambda: "refused" in log.read_text("utf-8"))
    with engine.connect() as connection:
        epochs = connection.scalars(
            sa.select(thermostat.c.epoch).order_by(thermostat.c.write)
        ).all()
    in_order = list(epochs) == sorted(epochs) and set(epochs) >= {1, 2}
    print(f"{len(epochs)} writes, epochs {sorted(set(epochs))}, in order: {in_order}")
    return 0 if in_order else 1


if __name__ == "__main__":
    sys.exit(main())
