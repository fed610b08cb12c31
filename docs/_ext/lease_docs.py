"""What these pages take from the code itself, so that it cannot be told wrongly.

``.. setting:: beat_lease_ttl``
    A setting: default and meaning come from ``celery_lease.settings.Settings``.
    Refer to it with ``:setting:`beat_lease_ttl```.
``.. log-event:: lease-acquired``
    A log line: where it is one of a lease's transitions, its level and an example
    come from ``celery_lease.journal``. Refer to it with ``:log-event:```.
``.. lease-ddl:: postgresql``
    The statements that make the tables; with ``:grants:``, the least that two roles need.
"""

from __future__ import annotations

import inspect
import logging
import re
from dataclasses import MISSING, fields
from datetime import datetime, timezone
from enum import Enum
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.domains.std import GenericObject
from sphinx.util.docutils import SphinxDirective

from celery_lease import journal
from celery_lease.lease import Lease
from celery_lease.settings import PREFIX, Settings
from celery_lease.stores import ddl
from celery_lease.transition import Action, Transition

# --- settings -----------------------------------------------------------------------------

#: Defaults that read better in words.
_SPOKEN = {"grace": "None: no limit", "retention": "604800 (7 days)"}


def _comments(cls: type) -> dict[str, str]:
    """Return the ``#:`` comment above each field of a class."""
    found: dict[str, str] = {}
    gathered: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        text = line.strip()
        if text.startswith("#:"):
            gathered.append(text[2:].strip())
            continue
        name = re.match(r"(\w+): ", text)
        if name and gathered:
            found[name.group(1)] = " ".join(gathered)
        gathered = []
    return found


def default_of(name: str) -> str:
    """Return the default of a setting, as the page shows it."""
    short = name.removeprefix(PREFIX)
    if short in _SPOKEN:
        return _SPOKEN[short]
    field = next(each for each in fields(Settings) if each.name == short)
    value = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value)


class SettingDirective(GenericObject):
    """A setting, with what the code says of it."""

    def run(self) -> list[nodes.Node]:
        """Put the generated lines before the page's own."""
        short = self.arguments[0].removeprefix(PREFIX)
        comment = _comments(Settings).get(short)
        if comment is None:
            raise self.error(f"there is no setting {self.arguments[0]!r}")
        lines = [f"Default: ``{default_of(short)}``.", "", comment, ""]
        self.content = StringList(lines, source=__file__) + self.content
        return super().run()


# --- log lines ----------------------------------------------------------------------------

_THEN = datetime(2025, 3, 30, 6, 0, tzinfo=timezone.utc)
_HERE, _THERE = "beat-b:4711:9f2c01aa", "beat-a:4242:77d0e1b3"
#: What makes an example of each transition.
_EXAMPLES: dict[Action, dict[str, Any]] = {
    Action.ACQUIRED: {"epoch": 7, "previous_holder": _THERE},
    Action.JUMPED: {
        "epoch": 43,
        "reason": "epoch 42 was in use already, the lease row said 40",
    },
    Action.RAISING: {"epoch": 7, "reason": "lock timeout"},
    Action.RENEWED_LATE: {"epoch": 7, "seconds": 21.4},
    Action.RENEWAL_FAILED: {"epoch": 7, "seconds": 14.9, "reason": "connection refused"},
    Action.STALLED: {"epoch": 7, "seconds": 61.0},
    Action.RESUMED: {"epoch": 7},
    Action.LOST: {"epoch": 7, "reason": "its trust window closed"},
    Action.RELEASED: {"epoch": 7},
    Action.CONFLICT: {"epoch": 7, "reason": "the epoch was granted to another term"},
    Action.STANDING_BY: {
        "epoch": 7,
        "lease": Lease(
            name="documents",
            holder=_THERE,
            epoch=7,
            acquired_at=_THEN,
            renewed_at=_THEN,
            expires_at=_THEN,
            remaining=24.2,
        ),
    },
    Action.UNAVAILABLE: {"reason": "connection refused"},
}


def example_of(action: Action) -> str:
    """Return the line that a transition is logged as."""
    details = _EXAMPLES.get(action, {"epoch": 7, "reason": "…", "seconds": 1.0})
    return journal.sentence(Transition(action=action, name="documents", holder=_HERE, **details))


class LogEventDirective(GenericObject):
    """A log line: level and example, then what it means and what to do."""

    option_spec: ClassVar[dict[str, Any]] = {
        **GenericObject.option_spec,
        "level": directives.unchanged,
        "line": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        """Put level and example before the page's own lines."""
        name = self.arguments[0]
        try:
            action = Action(name.removeprefix("lease-"))
        except ValueError:
            action = None
        if action is not None:
            level = logging.getLevelName(journal.LEVELS[action])
            line = example_of(action)
        else:
            level, line = self.options.get("level"), self.options.get("line")
            if not level or not line:
                raise self.error(f"{name!r} is no transition: give :level: and :line:")
        lines = [f"``{level}``", "", ".. code-block:: text", "", f"   {line}", ""]
        self.content = StringList(lines, source=__file__) + self.content
        return super().run()


# --- tables -------------------------------------------------------------------------------


def _sql(statements: list[str]) -> str:
    text = "\n\n".join(f"{each};" for each in statements)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).replace("\t", "    ")


class DDLDirective(SphinxDirective):
    """The statements that make the tables, or the grants for two roles."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"grants": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Return one literal block."""
        dialect = self.arguments[0]
        if "grants" in self.options:
            text = _sql(ddl.grants(dialect, beat="celery_beat", worker="celery_worker"))
        else:
            text = _sql(ddl.tables(dialect))
        block = nodes.literal_block(text, text)
        block["language"] = "sql"
        return [block]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register roles and directives."""
    for name, directive in (("setting", SettingDirective), ("log-event", LogEventDirective)):
        app.add_object_type(name, name, objname=name, indextemplate=f"pair: %s; {name}")
        app.add_directive_to_domain("std", name, directive, override=True)
    app.add_directive("lease-ddl", DDLDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
