"""The settings: read once, validated together, never changed.

Nothing is added to Celery's own defaults: ``add_defaults`` overrides what the user
set under a namespace on Celery 5.7, and loses the defaults before
``config_from_object``. Plain ``conf.get(name)`` answers rightly for attributes,
objects, modules and namespaces alike.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from celery_lease.errors import ConfigurationError
from celery_lease.occurrence import MisfirePolicy

__all__ = ["PREFIX", "Settings", "duration", "misfire_policy", "positive_duration"]

#: Every setting of this package begins with this.
PREFIX = "beat_lease_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All ``beat_lease_*`` settings. Durations are seconds.

    Raises:
        ConfigurationError: A value is out of range, or two values cannot both hold.
    """

    #: SQLAlchemy URL of the lease database. The default is good for one host only.
    url: str = field(default="sqlite:///celery-lease.sqlite3", repr=False)
    #: Options for ``sqlalchemy.create_engine``.
    engine_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    #: Name of the lease: one for each schedule.
    name: str = "celery"
    #: How long a grant or renewal is good for, by the database clock.
    ttl: float = 30.0
    #: How often the holder renews.
    renew_interval: float = 10.0
    #: How long before its expiry the holder stops trusting the lease.
    margin: float = 3.0
    #: How often a standby tries, jittered.
    retry_interval: float = 5.0
    #: How late the beat loop may be for its next tick before renewing stops.
    stall_timeout: float = 60.0
    #: What to do with occurrences found late: ``latest``, ``all`` or ``skip``.
    misfire: MisfirePolicy = MisfirePolicy.LATEST
    #: How late an occurrence may be and still fire; None for no limit.
    grace: float | None = None
    #: How many missed occurrences of one entry the policy ``all`` fires at most.
    catch_up_limit: int = 100
    #: How long after its publish an unsettled fenced run of an older epoch is sent again.
    redispatch_after: float = 600.0
    #: How many times one occurrence is dispatched at most.
    max_attempts: int = 5
    #: How long a worker may be silent in a guard's last round trip, on the server's side.
    guard_idle: float = 5.0
    #: How long runs, commits and terms are kept.
    retention: float = 7 * 86400.0
    #: Whether missing tables are made at the first start.
    auto_init: bool = True

    def __post_init__(self) -> None:
        _require(self.url != "", "url", self.url, "give an SQLAlchemy URL")
        _require(
            isinstance(self.engine_options, Mapping),
            "engine_options",
            self.engine_options,
            "give a dict of options for sqlalchemy.create_engine",
        )
        _require(isinstance(self.name, str), "name", self.name, "give a string")
        _require(
            0 < len(self.name) <= 128, "name", self.name, "give a name of 1 to 128 characters"
        )
        # MariaDB takes 'a' and 'a ' for one name, and the other databases for two.
        bare = self.name == self.name.strip()
        _require(bare, "name", self.name, "remove the white space around it")
        _require(self.name.isprintable(), "name", self.name, "give a name that can be printed")
        positive = ("ttl", "renew_interval", "margin", "retry_interval", "stall_timeout")
        for name in (*positive, "redispatch_after", "guard_idle", "retention"):
            value = getattr(self, name)
            _require(value > 0, name, value, "give a number of seconds above 0")
        if not 2 * self.renew_interval < self.ttl - self.margin:
            raise ConfigurationError(
                f"{PREFIX}renew_interval = {self.renew_interval:g} leaves no time for a second "
                f"try: 2 * {PREFIX}renew_interval must be less than {PREFIX}ttl - "
                f"{PREFIX}margin ({self.ttl:g} - {self.margin:g} = {self.ttl - self.margin:g}); "
                f"lower {PREFIX}renew_interval or raise {PREFIX}ttl",
                setting=f"{PREFIX}renew_interval",
            )
        _require(
            self.grace is None or self.grace >= 0,
            "grace",
            self.grace,
            "give seconds, 0 or more, or None for no limit",
        )
        for name in ("catch_up_limit", "max_attempts"):
            value = getattr(self, name)
            _require(value >= 1, name, value, "give a whole number, 1 or more")

    @classmethod
    def from_conf(cls, conf: Mapping[str, Any]) -> Settings:
        """Read the settings from a Celery configuration.

        Args:
            conf: ``app.conf``, or any mapping with the same names.

        Raises:
            ConfigurationError: A setting is unknown, of the wrong kind, out of
                range, or cannot hold together with another one.
        """
        _reject_unknown(conf)
        given: dict[str, Any] = {}
        for name, read in _READERS.items():
            value = conf.get(PREFIX + name)
            if value is not None:
                given[name] = read(PREFIX + name, value)
        settings = cls(**given)
        if conf.get("task_protocol") == 1:
            raise ConfigurationError(
                "task_protocol = 1 cannot carry stamps, so no worker could tell a stale task "
                "from a current one; remove the setting or set task_protocol = 2",
                setting="task_protocol",
            )
        loop = duration("beat_max_loop_interval", conf.get("beat_max_loop_interval") or 0)
        if loop > settings.ttl:
            raise ConfigurationError(
                f"beat_max_loop_interval = {loop:g} is longer than {PREFIX}ttl = "
                f"{settings.ttl:g}: a beat would sleep through its own takeover; lower "
                f"beat_max_loop_interval or raise {PREFIX}ttl",
                setting="beat_max_loop_interval",
            )
        return settings

    @classmethod
    def names(cls) -> list[str]:
        """Return the full names of all settings."""
        return [PREFIX + each.name for each in fields(cls)]


#: Seconds of a hundred years.
LONGEST = 100 * 365.25 * 86400


def duration(setting: str, value: Any) -> float:
    """Return *value*, a number of seconds or a timedelta, as seconds.

    Raises:
        ConfigurationError: It is neither.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        finite = number and math.isfinite(value)
    except OverflowError:  # A whole number that no float can hold.
        finite = False
    if not finite:
        raise ConfigurationError(
            f"{setting} = {reprlib.repr(value)} is not a duration; give seconds as a number or a "
            f"timedelta",
            setting=setting,
        )
    if value > LONGEST:
        raise ConfigurationError(
            f"{setting} = {value:g} is more than a hundred years, which no database can add to "
            f"a date; give seconds",
            setting=setting,
        )
    return float(value)


def positive_duration(setting: str, value: Any) -> float:
    """Return *value*, a number of seconds or a timedelta above 0, as seconds.

    Raises:
        ConfigurationError: It is no such number.
    """
    seconds = duration(setting, value)
    if seconds <= 0:
        raise ConfigurationError(
            f"{setting} = {seconds:g} is not allowed; give a number of seconds above 0",
            setting=setting,
        )
    return seconds


def misfire_policy(setting: str, value: Any) -> MisfirePolicy:
    """Return the misfire policy that *value* names.

    Raises:
        ConfigurationError: There is no such policy.
    """
    try:
        return MisfirePolicy(value)
    except ValueError:
        known = ", ".join(repr(each.value) for each in MisfirePolicy)
        raise ConfigurationError(
            f"{setting} = {value!r} is not a misfire policy; choose one of {known}",
            setting=setting,
        ) from None


def _text(setting: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigurationError(f"{setting} = {value!r} is not a string", setting=setting)
    return value


def _url(setting: str, value: Any) -> str:
    # str() of an SQLAlchemy URL masks the password.
    render = getattr(value, "render_as_string", None)
    if render is not None:
        return str(render(hide_password=False))
    if not isinstance(value, str):
        raise ConfigurationError(
            f"{setting} is a {type(value).__name__}; give an SQLAlchemy URL", setting=setting
        )
    return value


def _options(setting: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{setting} = {value!r} is not a dict; give options for sqlalchemy.create_engine",
            setting=setting,
        )
    return dict(value)


def _count(setting: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(f"{setting} = {value!r} is not a whole number", setting=setting)
    return value


def _flag(setting: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{setting} = {value!r} is not True or False", setting=setting)
    return value


_READERS: dict[str, Any] = {
    "url": _url,
    "engine_options": _options,
    "name": _text,
    "ttl": duration,
    "renew_interval": duration,
    "margin": duration,
    "retry_interval": duration,
    "stall_timeout": duration,
    "misfire": misfire_policy,
    "grace": duration,
    "catch_up_limit": _count,
    "redispatch_after": duration,
    "max_attempts": _count,
    "guard_idle": duration,
    "retention": duration,
    "auto_init": _flag,
}


def _require(holds: bool, name: str, value: object, way_out: str) -> None:
    if not holds:
        raise ConfigurationError(
            f"{PREFIX}{name} = {value!r} is not allowed; {way_out}", setting=PREFIX + name
        )


def _reject_unknown(conf: Mapping[str, Any]) -> None:
    """Refuse a ``beat_lease_*`` name that nothing would read: it is a typing error.

    What has another namespace than this app may be another app's.
    """
    known = {each.name for each in fields(Settings)}
    keys = list(conf.keys())  # Before them Celery does not know the namespace.
    # Without a namespace, the usual one is there because it was not given to Celery.
    namespace = re.escape(getattr(conf, "prefix", None) or "CELERY_")
    pattern = re.compile(rf"(?:{namespace})?{PREFIX}(\w+)", re.IGNORECASE)
    for key in keys:
        spoken = pattern.fullmatch(str(key))
        if spoken is None:
            continue
        name = spoken.group(1).lower()
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0)
            raise ConfigurationError(
                f"{key} is not a setting; did you mean {PREFIX}{near[0]}?", setting=key
            )
        if conf.get(PREFIX + name) is None and conf.get(key) is not None:
            raise ConfigurationError(
                f"{key} is set but not read; write it as {PREFIX}{name}, or with the namespace "
                f"that was given to config_from_object",
                setting=key,
            )
