"""Settings: read once, validated together; what is wrong names itself and the way out."""

from __future__ import annotations

import dataclasses
import types
from datetime import timedelta

import pytest
import sqlalchemy as sa
from celery import Celery

from celery_lease.errors import ConfigurationError
from celery_lease.occurrence import MisfirePolicy
from celery_lease.settings import _READERS, Settings


def read(**conf: object) -> Settings:
    """Read the settings of an app that is configured by attributes."""
    app = Celery("tests", set_as_current=False)
    app.conf.update(conf)
    return Settings.from_conf(app.conf)


def wrong(**conf: object) -> ConfigurationError:
    """Return the error that these settings are."""
    with pytest.raises(ConfigurationError) as error:
        read(**conf)
    assert "\n" not in str(error.value)
    return error.value


def test_the_defaults_hold_together():
    """An app that sets nothing must work."""
    assert read() == Settings()


# --- where Celery finds them --------------------------------------------------------------


def test_settings_are_found_under_a_namespace():
    """``CELERY_BEAT_LEASE_TTL`` in a Django settings module: the usual way."""
    app = Celery("tests", set_as_current=False)
    app.config_from_object({"CELERY_BEAT_LEASE_TTL": 60}, namespace="CELERY")

    assert Settings.from_conf(app.conf).ttl == 60


def test_settings_are_found_on_an_object():
    """``config_from_object`` without a namespace."""
    app = Celery("tests", set_as_current=False)
    app.config_from_object(types.SimpleNamespace(beat_lease_ttl=60, beat_lease_name="mine"))

    found = Settings.from_conf(app.conf)

    assert (found.ttl, found.name) == (60, "mine")


def test_nothing_is_added_to_the_apps_configuration():
    """Celery 5.7 lets a plug-in's defaults override what the user set under a namespace."""
    app = Celery("tests", set_as_current=False)
    Settings.from_conf(app.conf)

    assert app.conf.get("beat_lease_ttl") is None


def test_a_setting_that_is_none_is_not_set():
    """A settings module that takes values from the environment often has it."""
    assert read(beat_lease_ttl=None) == Settings()


def test_durations_may_be_timedeltas():
    """As in Celery's own settings."""
    assert read(beat_lease_ttl=timedelta(minutes=2)).ttl == 120.0


def test_a_url_object_keeps_its_password():
    """``str()`` of it would mask the password, and beat could not connect."""
    url = sa.make_url("postgresql+psycopg://me:secret@db/lease")

    assert read(beat_lease_url=url).url == "postgresql+psycopg://me:secret@db/lease"


def test_the_password_is_in_no_repr():
    """Settings end up in logs and tracebacks."""
    settings = read(
        beat_lease_url="postgresql+psycopg://me:secret@db/lease",
        beat_lease_engine_options={"connect_args": {"password": "secret"}},
    )

    assert "secret" not in repr(settings)


def test_settings_never_change():
    """Each process reads them once; a later change would be half a change."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().ttl = 1


# --- what is wrong ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("beat_lease_tt1", "beat_lease_ttl"),
        ("beat_lease_retry_intervall", "beat_lease_retry_interval"),
        ("beat_lease_uri", "beat_lease_url"),
    ],
)
def test_a_misspelt_setting_names_the_one_that_was_meant(name, meant):
    """Silently ignored, it would let the defaults rule."""
    error = wrong(**{name: 1})

    assert name in str(error)
    assert meant in str(error)
    assert error.setting == name


@pytest.mark.parametrize("namespace", ["CELERY", "MY_APP", "celery"])
def test_a_misspelt_setting_is_found_under_a_namespace(namespace):
    """The same, in the spelling that the user sees."""
    name = f"{namespace}_BEAT_LEASE_TT1"
    app = Celery("tests", set_as_current=False)
    app.config_from_object({name: 60}, namespace=namespace)

    with pytest.raises(ConfigurationError, match=f"{name}.*beat_lease_ttl"):
        Settings.from_conf(app.conf)


def test_two_apps_may_have_their_settings_in_one_module():
    """Each reads those of its own namespace; the other's are neither misspelt nor forgotten."""
    module = {"CELERY_BEAT_LEASE_TTL": 60, "MY_APP_BEAT_LEASE_NAME": "mine"}
    found = []
    for namespace in ("CELERY", "MY_APP"):
        app = Celery("tests", set_as_current=False)
        app.config_from_object(module, namespace=namespace)
        found.append(Settings.from_conf(app.conf))

    assert [(each.ttl, each.name) for each in found] == [(60, "celery"), (30, "mine")]


def test_a_setting_in_a_spelling_that_celery_does_not_read_is_an_error():
    """``CELERY_BEAT_LEASE_TTL`` without the namespace: set, and not in force."""
    error = wrong(CELERY_BEAT_LEASE_TTL=60)

    assert "CELERY_BEAT_LEASE_TTL" in str(error)
    assert "namespace" in str(error)


RELATIONS = {
    "two renewals must fit": {"beat_lease_ttl": 30, "beat_lease_renew_interval": 13.5},
    "the margin counts": {"beat_lease_renew_interval": 13, "beat_lease_margin": 4},
    "the ttl alone": {"beat_lease_ttl": 20},
}


@pytest.mark.parametrize("conf", RELATIONS.values(), ids=RELATIONS)
def test_a_renew_interval_without_time_for_a_second_try_is_refused(conf):
    """One lost packet would cost the lease; all the settings that meet are named."""
    error = wrong(**conf)

    assert error.setting == "beat_lease_renew_interval"
    for name in ("beat_lease_renew_interval", "beat_lease_ttl", "beat_lease_margin"):
        assert name in str(error)


def test_the_largest_renew_interval_that_leaves_a_second_try_is_taken():
    """The relation is strict, and no stricter."""
    assert read(beat_lease_renew_interval=13.4).renew_interval == 13.4


def test_a_loop_that_sleeps_longer_than_the_ttl_is_refused():
    """It would sleep through its own takeover."""
    error = wrong(beat_max_loop_interval=31)

    assert "beat_max_loop_interval" in str(error)
    assert "beat_lease_ttl" in str(error)


def test_protocol_1_is_refused():
    """It carries no stamps: nothing could tell a stale task from a current one."""
    assert "task_protocol = 2" in str(wrong(task_protocol=1))


POSITIVE = [
    "ttl", "renew_interval", "margin", "retry_interval", "stall_timeout", "redispatch_after",
    "guard_idle", "retention",
]  # fmt: skip


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("value", [0, -1, "30", True, float("nan"), float("inf"), [30]], ids=repr)
def test_what_is_no_duration_is_refused(name, value):
    """A comparison with it would fail later, on a thread, in the night."""
    error = wrong(**{f"beat_lease_{name}": value})

    assert error.setting == f"beat_lease_{name}"
    assert repr(value) in str(error) or f"{value:g}" in str(error)


@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["huge", "minus huge"])
def test_a_duration_that_no_float_can_hold_is_refused(value):
    """A unit that was mistaken twice; the whole number would fill the line."""
    error = wrong(beat_lease_ttl=value)

    assert "beat_lease_ttl = " in str(error)
    assert "000" in str(error)
    assert len(str(error)) < 200


OTHERS = {
    "url": ["", 7],
    "engine_options": ["pool_size=5", 7],
    "name": ["", "x" * 129, 7, "celery ", "\tcelery", "a\nb", "a\0b"],
    "misfire": ["sometimes", 7],
    "grace": [-1, "soon"],
    "catch_up_limit": [0, 1.5, True],
    "max_attempts": [0, "5"],
    "auto_init": ["yes", 1],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in OTHERS.items() for value in values]
)
def test_a_value_of_the_wrong_kind_is_refused(name, value):
    """The error names the setting; nothing is coerced, so nothing is guessed."""
    assert wrong(**{f"beat_lease_{name}": value}).setting == f"beat_lease_{name}"


def test_an_unknown_policy_names_those_there_are():
    """There are three."""
    error = wrong(beat_lease_misfire="sometimes")

    for policy in MisfirePolicy:
        assert repr(policy.value) in str(error)


def test_all_settings_have_a_way_to_be_read():
    """A field without a reader could be set, and would be ignored."""
    assert set(_READERS) == {each.name for each in dataclasses.fields(Settings)}
