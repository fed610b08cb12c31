"""``celery lease``: look at a lease, take it, make its tables, check its database.

Exit status: 0 yes, 1 no (somebody else leads, a check failed), 2 a setting or an option
is wrong, 3 the lease database did not do what it was asked.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn, TypeVar

import click

from celery_lease import canary
from celery_lease.elector import Elector
from celery_lease.errors import (
    CeleryLeaseError,
    ConfigurationError,
    StoreError,
    StoreUnavailable,
)
from celery_lease.lease import MAX_EPOCH, Holder, Lease, TermRecord
from celery_lease.settings import Settings, positive_duration
from celery_lease.stores import ddl
from celery_lease.stores.dialects import file_of, is_certainly_wrong, masked
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.ledger import pending
from celery_lease.transition import Action, Transition

__all__ = ["lease"]

F = TypeVar("F", bound=Callable[..., Any])

#: Seconds between two looks at a lease that is held.
_LOOK = 0.2
#: Seconds that ``status`` and ``history`` wait for each answer. The first question is asked
#: twice, and whatever probes a container gives up after about ten.
_PATIENCE = 2.0


class _Failure(click.ClickException):
    """One line on stderr and an exit status: never a traceback."""

    def __init__(self, error: CeleryLeaseError) -> None:
        super().__init__(" ".join(str(error).split()))
        self.error = error

    @property
    def exit_code(self) -> int:  # type: ignore[override] # click reads it from the instance
        """Tell a wrong setting from a database that did not do its part."""
        return 2 if isinstance(self.error, ConfigurationError) else 3


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what this package raises becomes one line."""
        try:
            return super().invoke(ctx)
        except CeleryLeaseError as error:
            raise _Failure(error) from None


@click.group(cls=_Group)
def lease() -> None:
    """Look at the beats' lease, take it, make its tables, check its database."""


def _options(command: F) -> F:
    """Add what every command understands."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--url", help="The lease database, instead of the app's beat_lease_url."),
    ):
        command = option(command)
    return command


def _named(command: F) -> F:
    return click.option("--name", help="The lease, instead of the app's beat_lease_name.")(command)


def _settings(**given: Any) -> Settings:
    """Read the app's settings, with the options that were given in their place."""
    # Lazily: --help must work where the settings are wrong.
    settings = Settings.from_conf(click.get_current_context().obj.app.conf)
    return dataclasses.replace(
        settings, **{key: value for key, value in given.items() if value is not None}
    )


@contextmanager
def _store(settings: Settings, *, statement_wait: float = 10.0) -> Iterator[SQLLeaseStore]:
    store = SQLLeaseStore(settings.url, settings.engine_options, statement_wait=statement_wait)
    try:
        with _one_line(settings.url):
            yield store
    finally:
        store.dispose()


@contextmanager
def _one_line(url: str) -> Iterator[None]:
    """Name the setting and the database where that did not do what it was asked."""
    shown = masked(url)
    try:
        yield
    except StoreError as error:
        said = str(error)
        if shown not in said:
            said = f"beat_lease_url = {shown!r}: {said}"
        if isinstance(error, StoreUnavailable):
            on_a_server = file_of(url) is None
            if is_certainly_wrong(error, url):
                what = "user, password or database" if on_a_server else "directory"
                raise ConfigurationError(
                    f"{said}; correct its {what}", setting="beat_lease_url"
                ) from None
            if on_a_server:
                said += "; is the database up?"
            elif "unable to open" in said:
                said += "; may this user open it?"
        error.args = (said,)
        raise


# --- looking ------------------------------------------------------------------------------


@lease.command()
@_options
@click.option("--name", help="Show this lease only.")
def status(url: str | None, name: str | None, as_json: bool) -> None:
    """Show who leads, under which epoch and for how long yet.

    With --name, exit status 1 says that nobody leads, or that there is no such lease.
    """
    settings = _settings(url=url)
    with _store(settings, statement_wait=_PATIENCE) as store:
        store.prepare(create=False, write=False)
        found = list(store.read_all()) if name is None else [store.read(name)]
        known = [each for each in found if each is not None]
        fences = {each.name: store.read_fence(each.name) for each in known}
        unsettled = {each.name: pending(store.engine, each.name) for each in known}
    if as_json:
        shown = []
        for each in known:
            fence, (count, since) = fences[each.name], unsettled[each.name]
            more = {"held": each.held, "fence": fence and fence.epoch}
            shown.append({**_plain(each), **more, "unsettled": count, "unsettled_since": since})
        _print_json({"url": store.shown, "leases": shown})
    else:
        for each in known:
            click.echo(_sentence(each))
            count, since = unsettled[each.name]
            if count:
                click.echo(
                    f"  {count} fenced runs not settled, the oldest since {_instant(since)}"
                )
        if not known:
            click.echo("there is no lease" if name is None else f"there is no lease {name!r}")
    if name is not None and not any(each.held for each in known):
        raise click.exceptions.Exit(1)


@lease.command()
@_options
@_named
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True)
def history(url: str | None, name: str | None, limit: int, as_json: bool) -> None:
    """Show the newest terms: who led when, under which epoch, and how it ended."""
    settings = _settings(url=url, name=name)
    with _store(settings, statement_wait=_PATIENCE) as store:
        store.prepare(create=False, write=False)
        terms = store.history(settings.name, limit)
        known = bool(terms) or store.read(settings.name) is not None
    if as_json:
        _print_json(
            {"url": store.shown, "name": settings.name, "terms": [_plain(each) for each in terms]}
        )
    else:
        for each in terms:
            click.echo(_line(each))
        if not known:
            click.echo(f"there is no lease {settings.name!r}")
        elif not terms:
            click.echo(f"{settings.name}: no term yet")
    if not known:
        raise click.exceptions.Exit(1)


# --- taking -------------------------------------------------------------------------------


@lease.command()
@_options
@_named
@click.option("--ttl", type=float, help="Seconds, instead of the app's beat_lease_ttl.")
@click.option("--hold", is_flag=True, help="Renew until SIGTERM or SIGINT, then release.")
def acquire(
    url: str | None, name: str | None, ttl: float | None, hold: bool, as_json: bool
) -> None:
    """Take the lease if it is free or expired, and raise the fence, as a takeover does.

    Exit status 0: granted. 1: somebody else has it, or it was lost while it was held.
    """
    settings = _durations(_settings(url=url, name=name), ttl)
    told: list[Transition] = []
    with _store(settings) as store:
        store.prepare(create=settings.auto_init)
        store.ensure(settings.name)
        elector = Elector(store, settings, holder=Holder.current(), observe=told.append)
        if not elector.campaign():
            _say_no(told[-1], as_json)
        term = elector.check()
        seen = store.read(settings.name)
        if as_json:
            _print_json({"granted": True, **_plain(seen), "previous_holder": term.previous_holder})
        elif seen is not None:
            click.echo(f"granted: {_sentence(seen)}")
        # Otherwise it is not closed: the lease outlives this process, until it expires.
        if hold:
            _hold(elector, told, as_json)


def _durations(settings: Settings, ttl: float | None) -> Settings:
    """Return settings whose other durations fit this ttl."""
    if ttl is None:
        return settings
    seconds = positive_duration("--ttl", ttl)
    return dataclasses.replace(
        settings,
        ttl=seconds,
        renew_interval=seconds / 4,
        margin=seconds / 10,
        retry_interval=seconds / 6,
    )


def _say_no(last: Transition, as_json: bool) -> NoReturn:
    if last.action is Action.UNAVAILABLE:
        raise StoreUnavailable(last.reason or last.action.value)
    if as_json:
        why = {"reason": last.reason} if last.lease is None else _plain(last.lease)
        _print_json({"granted": False, **why})
    else:
        why_not = last.reason if last.lease is None else _sentence(last.lease)
        click.echo(f"not granted: {why_not}")
    raise click.exceptions.Exit(1)


def _hold(elector: Elector, told: list[Transition], as_json: bool) -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    while elector.leading and not stop.wait(_LOOK):
        elector.progress(_LOOK)
    elector.close()
    last = told[-1]
    if as_json:
        _print_json({"ended": last.action.value, "epoch": last.epoch, "reason": last.reason})
    else:
        click.echo(f"{last.action.value}: epoch {last.epoch}" + _because(last.reason))
    if last.action is not Action.RELEASED:
        raise click.exceptions.Exit(1)


# --- repairing ----------------------------------------------------------------------------


@lease.command("raise")
@_options
@_named
@click.option(
    "--to", required=True, type=click.IntRange(1, MAX_EPOCH - 2), help="Above any epoch ever used."
)
def raise_(url: str | None, name: str | None, to: int, as_json: bool) -> None:
    """Move the lease's epoch up, ending any term; the next grant is above it.

    For epochs that went back: a restored backup, a failover that lost commits.
    """
    settings = _settings(url=url, name=name)
    with _store(settings) as store:
        store.prepare(create=False)
        raised = store.raise_epoch(settings.name, to)
        seen = raised or store.read(settings.name)
    if as_json:
        _print_json({"raised": raised is not None, **(_plain(seen) if seen else {})})
    elif raised is not None:
        click.echo(f"{settings.name}: the epoch is {to} now, the next grant has {to + 1}")
    elif seen is not None:
        click.echo(f"{settings.name}: the epoch is {seen.epoch} already")
    else:
        click.echo(f"there is no lease {settings.name!r}")
    if raised is None:
        raise click.exceptions.Exit(1)


# --- making and checking ------------------------------------------------------------------


@lease.command()
@_options
@click.option("--sql", type=click.Choice(ddl.DIALECTS), help="Print the DDL; connect to nothing.")
@click.option("--grants", is_flag=True, help="With --sql: print the roles' grants instead.")
@click.option("--beat-role", default="celery_beat", show_default=True)
@click.option("--worker-role", default="celery_worker", show_default=True)
def init(
    url: str | None,
    sql: str | None,
    grants: bool,
    beat_role: str,
    worker_role: str,
    as_json: bool,
) -> None:
    """Make the tables, or print what an administrator would run."""
    if grants and sql is None:
        raise click.UsageError("--grants needs --sql: each database has its own words for them")
    if sql is not None:
        statements = (
            ddl.grants(sql, beat=beat_role, worker=worker_role) if grants else ddl.tables(sql)
        )
        if as_json:
            _print_json({"dialect": sql, "statements": statements})
        else:
            click.echo("\n\n".join(f"{each};" for each in statements))
        return
    settings = _settings(url=url)
    with _store(settings) as store:
        store.prepare(create=True)
        store.ensure(settings.name)
    if as_json:
        _print_json({"url": store.shown, "name": settings.name})
    else:
        click.echo(f"the tables are in {store.shown}, with the lease {settings.name!r}")


@lease.command()
@_options
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)
def check(url: str | None, rounds: int, as_json: bool) -> None:
    """Race two clients on your own database, and see whether it keeps the promises.

    It works on a lease of its own and removes its rows. Tables that are missing are made
    first, unless beat_lease_auto_init is off, and stay. Exit status 1: nobody should
    schedule on this database.
    """
    settings = _settings(url=url)
    with _one_line(settings.url):
        findings = canary.run(
            settings.url, settings.engine_options, rounds=rounds, create=settings.auto_init
        )
    ok = all(each.status is not canary.Status.FAILED for each in findings)
    if as_json:
        plain = [_plain(each) for each in findings]
        _print_json({"ok": ok, "checks": plain, "unknown": canary.UNKNOWN})
    else:
        for each in findings:
            click.echo(f"{each.status.value:7} {each.check}: {each.detail}")
        click.echo("what no check from here can know:")
        for text in canary.UNKNOWN:
            click.echo(f"  - {text}")
        click.echo("sound" if ok else "conflict: nobody should schedule on this database")
    if not ok:
        raise click.exceptions.Exit(1)


# --- words --------------------------------------------------------------------------------


def _sentence(seen: Lease) -> str:
    if seen.holder is None:
        return f"{seen.name}: nobody leads, the last epoch was {seen.epoch}"
    if not seen.held:
        return f"{seen.name}: nobody leads, {seen.holder}'s epoch {seen.epoch} has expired"
    return (
        f"{seen.name}: {seen.holder} leads under epoch {seen.epoch} since "
        f"{_instant(seen.acquired_at)}, for {seen.remaining:.1f} s more unless renewed"
    )


def _line(term: TermRecord) -> str:
    end = f"{_instant(term.ended_at)} {term.ended}" if term.ended_at else "..."
    return f"{term.name}: epoch {term.epoch}  {term.holder}  {_instant(term.acquired_at)} .. {end}"


def _because(reason: str | None) -> str:
    return f" ({reason})" if reason else ""


def _instant(at: datetime | None) -> str:
    return "never" if at is None else f"{at:%Y-%m-%d %H:%M:%S}Z"


def _plain(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, default=_jsonable, sort_keys=True))


def _jsonable(value: object) -> object:
    return value.isoformat() if isinstance(value, datetime) else str(value)
