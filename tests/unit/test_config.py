"""The table of options: what each takes, from code and from the environment, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from flask import Flask

from flask_idempotency.config import (
    OPTIONS,
    Settings,
    overlay,
    read_config,
    read_duration,
    read_keywords,
)
from flask_idempotency.errors import ConfigurationError, OptionError, UnknownOption
from flask_idempotency.policy import Policy
from flask_idempotency.reading import SAFE_METHODS
from flask_idempotency.store.base import Store

#: The contract's table, and which options are the app's alone.
DEFAULTS: dict[str, Any] = {
    "HEADER": "Idempotency-Key",
    "KEY_MIN_LENGTH": 8,
    "METHODS": frozenset({"POST", "PATCH"}),
    "KEY": None,
    "SCOPE": None,
    "FINGERPRINT": None,
    "RETENTION": 86_400,
    "LOCK_TIMEOUT": 30,
    "STALE": "reexecute",
    "RETRY_AFTER": 2,
    "WAIT": 0,
    "ON_MISMATCH": "reject",
    "MISMATCH_STATUS": 422,
    "RECORD": None,
    "ON_ERROR": "auto",
    "REPLAY_HEADER": "Idempotent-Replay",
    "EXCLUDED_HEADERS": frozenset(),
    "MAX_BODY": 1024 * 1024,
    "ON_STORE_ERROR": "reject",
    "ATOMIC": False,
    "ATOMIC_RETRIES": 0,
    "REDACT": None,
}
APP_ONLY = {
    "BODY_STORE": None,
    "STORE": None,
    "TABLE_NAME": "idempotency_keys",
    "BIND_KEY": None,
    "PROBLEM_BASE": "urn:problem-type:idempotency:",
    "ENABLED": True,
    "COUNT_REPLAYS": False,
    "MAX_LIVE_KEYS": None,
    "ENCRYPTION_KEYS": None,
    "POOL_SIZE": 5,
}
LATER: dict[str, Any] = {}


def function(*_: Any) -> str:
    """Any callable."""
    return "x"


def config(name: str, value: Any) -> Any:
    """What the app gets for one key of its configuration."""
    policy, settings = read_config({f"IDEMPOTENCY_{name}": value})
    return getattr(policy if hasattr(policy, name.lower()) else settings, name.lower())


def test_the_table_is_complete() -> None:
    """Every option of the contract is there, the app's own ones marked, each with a sentence that says what it does."""
    assert {*DEFAULTS, *APP_ONLY, *LATER} == {one.name.upper() for one in OPTIONS}
    assert set(APP_ONLY) == {one.name.upper() for one in OPTIONS if one.app_only}
    assert all(one.meaning for one in OPTIONS)
    assert all(one.config_key == f"IDEMPOTENCY_{one.name.upper()}" for one in OPTIONS)


def test_defaults_are_those_of_the_contract() -> None:
    """Without configuration everything has its default, and the table's defaults are the ones that are used."""
    policy, settings = read_config({})
    assert (Policy(), Settings()) == (policy, settings)
    used = {name.upper(): value for name, value in (vars(policy) | vars(settings)).items()}
    expected = DEFAULTS | APP_ONLY | LATER
    assert {name: expected[name] for name in used} == used
    for option in OPTIONS:
        assert expected[option.name.upper()] == option.read(option.default)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("HEADER", "X-Request-Key", "X-Request-Key"),
        ("KEY_MIN_LENGTH", 1, 1),
        ("KEY_MIN_LENGTH", 255, 255),
        ("KEY_MIN_LENGTH", "20", 20),
        ("METHODS", ["post", "Delete"], frozenset({"POST", "DELETE"})),
        ("METHODS", ("PUT",), frozenset({"PUT"})),
        ("METHODS", {"PUT"}, frozenset({"PUT"})),
        ("METHODS", "POST,PATCH", frozenset({"POST", "PATCH"})),
        ("METHODS", " post , delete,", frozenset({"POST", "DELETE"})),
        ("KEY", function, function),
        ("SCOPE", function, function),
        ("SCOPE", "stripe", "stripe"),
        ("FINGERPRINT", function, function),
        ("FINGERPRINT", ["sent_at", "nonce"], ("sent_at", "nonce")),
        ("FINGERPRINT", "sent_at, nonce", ("sent_at", "nonce")),
        ("RETENTION", timedelta(days=7), 7 * 86_400),
        ("RETENTION", 60, 60),
        ("RETENTION", 0.5, 0.5),
        ("RETENTION", "3600", 3600),
        ("LOCK_TIMEOUT", timedelta(milliseconds=500), 0.5),
        ("LOCK_TIMEOUT", " 1.5 ", 1.5),
        ("STALE", "reexecute", "reexecute"),
        ("STALE", " Reject ", "reject"),
        ("RETRY_AFTER", 10, 10),
        ("WAIT", 0, 0),
        ("WAIT", timedelta(0), 0),
        ("WAIT", "5", 5),
        ("ON_MISMATCH", "replay", "replay"),
        ("ON_MISMATCH", " Replay", "replay"),
        ("MISMATCH_STATUS", 409, 409),
        ("MISMATCH_STATUS", "409", 409),
        ("RECORD", function, function),
        *(("ON_ERROR", value, value) for value in ("auto", "release", "record", "hold")),
        ("ON_ERROR", " Hold ", "hold"),
        ("REPLAY_HEADER", "X-Replayed", "X-Replayed"),
        ("REPLAY_HEADER", None, None),
        ("REPLAY_HEADER", "", None),
        ("REPLAY_HEADER", "None", None),
        ("EXCLUDED_HEADERS", ["X-Trace", "x-span"], frozenset({"x-trace", "x-span"})),
        ("EXCLUDED_HEADERS", "X-Trace, X-Span", frozenset({"x-trace", "x-span"})),
        ("EXCLUDED_HEADERS", "", frozenset()),
        ("MAX_BODY", 0, 0),
        ("MAX_BODY", "1024", 1024),
        ("ON_STORE_ERROR", "execute", "execute"),
        ("ATOMIC", True, True),
        ("ATOMIC", "true", True),
        ("ATOMIC", "off", False),
        ("ATOMIC_RETRIES", 0, 0),
        ("ATOMIC_RETRIES", "3", 3),
        ("ATOMIC_RETRIES", 100, 100),
        ("TABLE_NAME", "keys", "keys"),
        ("BIND_KEY", "other", "other"),
        ("BIND_KEY", None, None),
        ("POOL_SIZE", "2", 2),
        ("PROBLEM_BASE", "https://example.com/errors#", "https://example.com/errors#"),
        ("ENABLED", "False", False),
        ("ENABLED", "off", False),
        ("ENABLED", 0, False),
        ("ENABLED", " TRUE ", True),
        ("ENABLED", "1", True),
    ],
)
def test_values_and_strings_that_mean_the_same(name: str, value: Any, read: Any) -> None:
    """A value is understood as Python has it, and as an environment variable spells it."""
    assert read == config(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("HEADER", value) for value in ("", "Idempotency Key", "Idempotency-Key:", "Schlüssel", 7, None)),
        *(("KEY_MIN_LENGTH", value) for value in (0, -1, 256, 8.5, "eight", True, None)),
        *(("METHODS", value) for value in ([], "", ",", "GET", ["POST", "HEAD"], "options", "PO ST", 7, None, [7])),
        *(("METHODS", method) for method in sorted(SAFE_METHODS)),
        *(("KEY", value) for value in ("X-Delivery", 7)),
        *(("SCOPE", value) for value in ("", 7, True, ["stripe"])),
        *(("FINGERPRINT", value) for value in (7, [7], True, {"sent_at": 1})),
        *(("RETENTION", value) for value in (0, -1, None, "", "a day", True, float("nan"), float("inf"), "nan")),
        *(("RETENTION", value) for value in (10**400, timedelta.max, 4e9, "1e300", [60], timedelta(0))),
        *(("LOCK_TIMEOUT", value) for value in (0, -1, None, 0.0, "0", timedelta(0), timedelta(seconds=-1), False)),
        *(("STALE", value) for value in ("never", None, "", 1)),
        *(("RETRY_AFTER", value) for value in (0, -1, None, "soon", float("nan"))),
        *(("WAIT", value) for value in (-0.1, None, "soon", float("inf"), False)),
        *(("ON_MISMATCH", value) for value in ("ignore", None, True, 422)),
        *(("MISMATCH_STATUS", value) for value in (400, "four", None, True, 422.5)),
        *(("RECORD", value) for value in ("x", 200, [200])),
        *(("ON_ERROR", value) for value in ("retry", None, True)),
        *(("REPLAY_HEADER", value) for value in ("Idempotent Replay", 7, True)),
        *(("EXCLUDED_HEADERS", value) for value in (["X Trace"], 7, "X-Trace; X-Span", [None])),
        *(("MAX_BODY", value) for value in (-1, 1.5, "1 MiB", None, True)),
        *(("ON_STORE_ERROR", value) for value in ("run", None, False)),
        *(("ATOMIC", value) for value in ("maybe", None, "", 2)),
        *(("ATOMIC_RETRIES", value) for value in (-1, 101, 1.5, "some", None, True)),
        *(("STORE", value) for value in (object(), 7, {})),
        *(("TABLE_NAME", value) for value in ("", "  ", None, 7)),
        *(("BIND_KEY", value) for value in ("", 7)),
        *(("POOL_SIZE", value) for value in (0, -1, 2.5, "many", None)),
        *(("PROBLEM_BASE", value) for value in ("", None, 7)),
        *(("ENABLED", value) for value in ("maybe", None, "", 2)),
    ],
)
@pytest.mark.scenario(9)
def test_wrong_values_are_refused(name: str, value: Any) -> None:
    """A value that an option can't have is an error, which names the key as the app's configuration spells it."""
    with pytest.raises(OptionError, match=rf"^IDEMPOTENCY_{name}: .*it must.*\.$|a safe method is never guarded\.$"):
        config(name, value)


@pytest.mark.parametrize("missing", [name for name in vars(Store) if not name.startswith("_")])
def test_a_store_that_lacks_something(missing: str) -> None:
    """A store object has all that the protocol names, and is not asked for any of it before the app is complete."""

    def read(self: Any) -> bool:
        raise AssertionError("a database that is not there yet")

    names = {name: function for name in vars(Store) if not name.startswith("_")} | {"separate": property(read)}
    whole = type("Whole", (), names)()
    assert whole is config("STORE", whole)
    around = type("Around", (), {"__getattr__": lambda self, name: getattr(whole, name)})()
    assert around is config("STORE", around)
    del names[missing]
    with pytest.raises(OptionError, match=rf"^IDEMPOTENCY_STORE: it must be a store, .* lacks {missing}\.$"):
        config("STORE", type("Half", (), names)())


def test_a_stores_url_is_refused() -> None:
    """What this release can't do with a store is never accepted and ignored."""
    with pytest.raises(OptionError, match=r"^IDEMPOTENCY_STORE: .*not available.*\.$"):
        config("STORE", "redis://localhost")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ENCRYPTION_KEYS", ["s3cret-s3cret"]),
        ("ENCRYPTION_KEYS", "s3cret-s3cret"),
        ("ENCRYPTION_KEYS", b"s3cret-s3cret"),
        ("STORE", "redis://user:s3cret-s3cret@localhost"),
        ("BODY_STORE", "s3://key:s3cret-s3cret@bucket"),
    ],
)
def test_errors_hold_no_secret(name: str, value: Any) -> None:
    """The error about an encryption key, or about a URL that can hold a password, does not show it."""
    with pytest.raises(OptionError) as caught:
        config(name, value)
    assert f"IDEMPOTENCY_{name}" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("IDEMPOTENCY_RETENTON", "IDEMPOTENCY_RETENTION"),
        ("IDEMPOTENCY_LOCKTIMEOUT", "IDEMPOTENCY_LOCK_TIMEOUT"),
        ("IDEMPOTENCY_ENCRYPTION_KEY", "IDEMPOTENCY_ENCRYPTION_KEYS"),
        ("IDEMPOTENCY_XYZZY_0", None),
        ("IDEMPOTENCY_", None),
        ("IDEMPOTENCY_retention", None),
    ],
)
def test_unknown_config_keys(key: str, meant: str | None) -> None:
    """A key with the prefix that does not exist is an error, which names the one that was likely meant."""
    with pytest.raises(UnknownOption) as caught:
        read_config({key: "s3cret"})
    assert str(caught.value).startswith(f"{key}: there is no such option.")
    assert meant is None or f"Did you mean {meant}?" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_other_extensions_keys_are_not_looked_at() -> None:
    """Keys without the prefix are none of this extension's business."""
    given = {"IDEMPOTENT": 1, "SECRET_KEY": "x", "X_IDEMPOTENCY_FOO": 1, 7: 8}
    assert read_config({}) == read_config(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["required", "optional", "protect"])
@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("retenton", r"Did you mean retention\?"),
        ("IDEMPOTENCY_RETENTION", "there is no such option"),
        ("RETENTION", "there is no such option"),
        *((name.lower(), f"the app's alone; set IDEMPOTENCY_{name} instead") for name in sorted(APP_ONLY)),
    ],
)
def test_unknown_keywords(where: str, keyword: str, message: str) -> None:
    """A keyword that does not exist, or is the app's alone, is an error that says what to do."""
    with pytest.raises(UnknownOption, match=message) as caught:
        read_keywords(where, {keyword: "s3cret"})
    assert str(caught.value).startswith(f"{where}({keyword}=…): ")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(("name", "default"), sorted(DEFAULTS.items()))
def test_every_option_that_is_not_the_apps_alone_is_a_keyword(name: str, default: Any) -> None:
    """A keyword is the config key in lower case without the prefix, and is read as that is."""
    assert {name.lower(): default} == read_keywords("required", {name.lower(): default})


def test_the_nearer_option_wins() -> None:
    """Nearer options replace those that are farther away, and leave the others alone."""
    far, near = {"retention": 60.0, "wait": 1.0}, {"retention": 5.0}
    policy = overlay(Policy(wait=9.0, retry_after=9.0), far, near)
    assert (5.0, 1.0, 9.0) == (policy.retention, policy.wait, policy.retry_after)


@pytest.mark.parametrize("value", [None, 0, -1, "x", timedelta(0), True])
def test_durations_of_a_single_record(value: Any) -> None:
    """A view's own retention is read as the option is, and called by its own name in the error."""
    assert 1.5 == read_duration("current.retention", timedelta(seconds=1.5))
    with pytest.raises(OptionError, match=r"^current\.retention: "):
        read_duration("current.retention", value)


@pytest.mark.parametrize(
    ("variable", "check"),
    [
        ("METHODS=POST,DELETE", lambda policy, _: policy.methods == {"POST", "DELETE"}),
        ('METHODS=["PUT"]', lambda policy, _: policy.methods == {"PUT"}),
        ("RETENTION=3600", lambda policy, _: policy.retention == 3600),
        ("LOCK_TIMEOUT=0.5", lambda policy, _: policy.lock_timeout == 0.5),
        ("MISMATCH_STATUS=409", lambda policy, _: policy.mismatch_status == 409),
        ("ON_MISMATCH=replay", lambda policy, _: policy.on_mismatch == "replay"),
        ("SCOPE=stripe", lambda policy, _: policy.scope == "stripe"),
        ("FINGERPRINT=sent_at,nonce", lambda policy, _: policy.fingerprint == ("sent_at", "nonce")),
        ("REPLAY_HEADER=null", lambda policy, _: policy.replay_header is None),
        ("EXCLUDED_HEADERS=X-Trace", lambda policy, _: policy.excluded_headers == {"x-trace"}),
        ("ON_ERROR=hold", lambda policy, _: policy.on_error == "hold"),
        ("STALE=reject", lambda policy, _: policy.stale == "reject"),
        ("ATOMIC=true", lambda policy, _: policy.atomic is True),
        ("ATOMIC_RETRIES=2", lambda policy, _: policy.atomic_retries == 2),
        ("ENABLED=false", lambda _, settings: settings.enabled is False),
        ("ENABLED=False", lambda _, settings: settings.enabled is False),
        ("TABLE_NAME=keys", lambda _, settings: settings.table_name == "keys"),
        ("BIND_KEY=null", lambda _, settings: settings.bind_key is None),
    ],
)
def test_environment_variables(
    monkeypatch: pytest.MonkeyPatch, variable: str, check: Callable[[Policy, Settings], bool]
) -> None:
    """What ``app.config.from_prefixed_env()`` makes of an environment variable is understood."""
    name, _, value = variable.partition("=")
    monkeypatch.setenv(f"FLASK_IDEMPOTENCY_{name}", value)
    app = Flask("shop")
    app.config.from_prefixed_env()
    assert check(*read_config(app.config))


@pytest.mark.parametrize("variable", ["LOCK_TIMEOUT=0", "METHODS=GET", "ENABLED=maybe", "ATOMIC=maybe", "RETENTION=1d"])
def test_wrong_environment_variables(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """What is wrong in code is wrong in the environment."""
    name, _, value = variable.partition("=")
    monkeypatch.setenv(f"FLASK_IDEMPOTENCY_{name}", value)
    app = Flask("shop")
    app.config.from_prefixed_env()
    with pytest.raises(ConfigurationError, match=f"^IDEMPOTENCY_{name}: "):
        read_config(app.config)
