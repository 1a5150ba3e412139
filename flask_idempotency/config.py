"""The table of ``IDEMPOTENCY_…`` keys: name, default, how a value is read, and what it means.

Every option is a config key, and, unless it is the app's alone, a keyword of ``required``, ``optional`` and
``protect`` (lower case, without the prefix). The nearer one wins.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, cast

from . import reading
from .bodies import BodyStore
from .errors import PROBLEM_BASE, OptionError, UnknownOption
from .key import MAX_LENGTH
from .keyring import Keyring
from .policy import Policy

PREFIX: Final = "IDEMPOTENCY_"


@dataclass(frozen=True)
class Option:
    """One row of the table. ``read`` turns a given value into the one that is used, or raises ``ValueError``."""

    name: str
    default: Any
    read: Callable[[Any], Any]
    meaning: str
    app_only: bool = False

    @property
    def config_key(self) -> str:
        """The key in ``app.config``."""
        return PREFIX + self.name.upper()


@dataclass(frozen=True)
class Settings:
    """What is the app's alone."""

    enabled: bool = True
    store: Any = None
    body_store: BodyStore | None = None
    table_name: str = "idempotency_keys"
    bind_key: str | None = None
    pool_size: int = 5
    problem_base: str = PROBLEM_BASE
    count_replays: bool = False
    max_live_keys: int | None = None
    encryption_keys: Keyring | None = None


OPTIONS: Final[tuple[Option, ...]] = (
    Option("header", "Idempotency-Key", reading.header, "request header that carries the key"),
    Option(
        "key_min_length", 8, reading.whole(1, MAX_LENGTH), "shortest key that the header may carry; the longest is 255"
    ),
    Option("methods", ("POST", "PATCH"), reading.methods, "methods that are guarded; safe methods never are"),
    Option(
        "key", None, reading.function, "a callable that finds the key elsewhere, in the body of a webhook for example"
    ),
    Option("scope", None, reading.scope, "a fixed scope, or a callable; beats the scope loader"),
    Option(
        "fingerprint",
        None,
        reading.fingerprint,
        "a callable giving the value to fingerprint in place of the body, or a list of JSON members to leave out",
    ),
    Option("retention", 86_400.0, reading.seconds(), "how long a record is kept: `timedelta` or seconds"),
    Option("lock_timeout", 30.0, reading.seconds(), "the lease: `timedelta` or seconds"),
    Option(
        "stale",
        "reexecute",
        reading.choice("reexecute", "reject"),
        "what a retry gets when a lease ran out; no effect on atomic views",
    ),
    Option("retry_after", 2.0, reading.seconds(), "`Retry-After` of 409 in flight and of 503, in seconds"),
    Option(
        "wait",
        0.0,
        reading.seconds(zero=True),
        "seconds a duplicate waits before 409; only two wait per process and app",
    ),
    Option("on_mismatch", "reject", reading.choice("reject", "replay"), "what another request under a used key gets"),
    Option("mismatch_status", 422, reading.choice(422, 409), "the status of that rejection"),
    Option("record", None, reading.function, "a callable on the response: true records it, false releases"),
    Option(
        "on_error", "auto", reading.choice("auto", "release", "record", "hold"), "what a 5xx or an exception leaves"
    ),
    Option(
        "replay_header", "Idempotent-Replay", reading.optional_header, "set to `true` on replays; `None` for no marker"
    ),
    Option("excluded_headers", (), reading.header_names, "further headers that are never recorded"),
    Option("max_body", 1024 * 1024, reading.whole(0), "largest body kept in the table, in bytes"),
    Option("on_store_error", "reject", reading.choice("reject", "execute"), "503, or run the view unguarded"),
    Option("atomic", False, reading.boolean, "the view's work in `db.session` and the record in one transaction"),
    Option(
        "atomic_retries", 0, reading.whole(0, 100), "with `atomic`: how often to run again on a serialization failure"
    ),
    Option("redact", None, reading.function, "a callable that edits a copy of the response, which is what is stored"),
    Option(
        "body_store",
        None,
        reading.body_store,
        "the URL of a folder where larger bodies go: `file:`, `s3:`, `gs:`, `az:` …",
        app_only=True,
    ),
    Option("store", None, reading.store, "a store object; SQLAlchemy's if left out", app_only=True),
    Option("table_name", "idempotency_keys", reading.text, "name of the table", app_only=True),
    Option("bind_key", None, reading.optional_text, "Flask-SQLAlchemy's bind for the table", app_only=True),
    Option("pool_size", 5, reading.whole(1), "connections of the extension's own pool", app_only=True),
    Option("problem_base", PROBLEM_BASE, reading.text, "what `type` in problem documents begins with", app_only=True),
    Option("enabled", True, reading.boolean, "off: nothing is guarded, said as a warning at start", app_only=True),
    Option(
        "count_replays",
        False,
        reading.boolean,
        "count replays, conflicts and mismatches per key, in the background",
        app_only=True,
    ),
    Option(
        "max_live_keys",
        None,
        reading.optional_whole(1),
        "cap of kept keys per scope; past it a new key gets 429 with `Retry-After`",
        app_only=True,
    ),
    Option(
        "encryption_keys",
        None,
        reading.encryption_keys,
        "encrypt what is recorded, and key the fingerprints: the first key encrypts, all of them decrypt",
        app_only=True,
    ),
)

#: What is a secret, or a URL that can hold one.
_SECRET: Final = frozenset({"encryption_keys", "store", "body_store"})

_BY_NAME: Final = {option.name: option for option in OPTIONS}
_POLICY_FIELDS: Final = frozenset(one.name for one in fields(Policy))
_SETTINGS_FIELDS: Final = frozenset(one.name for one in fields(Settings))


def read_config(config: Mapping[str, Any]) -> tuple[Policy, Settings]:
    """The app's policy and settings, from its ``IDEMPOTENCY_…`` keys.

    :raises OptionError: a value is wrong, or not available in this release.
    :raises UnknownOption: a key with the prefix does not exist.
    """
    given: dict[str, Any] = {}
    for config_key in config:
        if isinstance(config_key, str) and config_key.startswith(PREFIX):
            name = config_key[len(PREFIX) :].lower()
            if name not in _BY_NAME or config_key != _BY_NAME[name].config_key:
                raise UnknownOption(_unknown(config_key, [one.config_key for one in OPTIONS]))
            given[name] = _read(_BY_NAME[name], config_key, config[config_key])
    policy = overlay(Policy(), {name: value for name, value in given.items() if name in _POLICY_FIELDS})
    settings = Settings(**{name: value for name, value in given.items() if name in _SETTINGS_FIELDS})
    if settings.body_store is not None and settings.encryption_keys is not None:
        settings = replace(settings, body_store=settings.body_store.sealing(settings.encryption_keys))
    return policy, settings


def read_keywords(where: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The options given to a decorator, read and checked.

    :param where: how the decorator is called in an error: ``required``, say.
    :raises OptionError: a value is wrong, or not available in this release.
    :raises UnknownOption: a keyword does not exist, or is the app's alone.
    """
    given = {}
    for name, value in keywords.items():
        option = _BY_NAME.get(name)
        if option is None:
            names = [one.name for one in OPTIONS if not one.app_only]
            raise UnknownOption(_unknown(f"{where}({name}=…)", names, name))
        if option.app_only:
            raise UnknownOption(f"{where}({name}=…): this option is the app's alone; set {option.config_key} instead.")
        value = _read(option, f"{where}({name}=…)", value)
        if name in _POLICY_FIELDS:
            given[name] = value
    overlay(Policy(), given)
    return given


def read_duration(spelled: str, value: Any) -> float:
    """A duration in seconds, from seconds or a ``timedelta``.

    :param spelled: how the value is called in an error.
    :raises OptionError: it is none, or not more than zero.
    """
    return cast(float, _read(_BY_NAME["retention"], spelled, value))


def overlay(policy: Policy, *nearer: Mapping[str, Any]) -> Policy:
    """``policy`` with nearer options over it, the last the nearest.

    :raises OptionError: two options that hold together contradict each other.
    """
    for options in nearer:
        policy = replace(policy, **options)
    if policy.atomic and policy.on_error == "hold":
        raise OptionError(
            "atomic and on_error='hold' contradict each other: what fails in atomic mode is rolled back, so that its "
            "outcome is never unknown. Leave one of the two away."
        )
    return policy


def _read(option: Option, spelled: str, value: Any) -> Any:
    try:
        return option.read(value)
    except ValueError as error:
        # The error goes to a log.
        shown = "" if option.name in _SECRET else f"{value!r} won't do: "
        raise OptionError(f"{spelled}: {shown}{str(error).rstrip('.')}.") from None


def _unknown(spelled: str, names: list[str], name: str | None = None) -> str:
    near = difflib.get_close_matches(name or spelled, names, n=1)
    return f"{spelled}: there is no such option." + (f" Did you mean {near[0]}?" if near else "")
