"""The table of ``IDEMPOTENCY_…`` keys: name, default, how a value is read, and what it means.

Every option is a config key, and, unless it is the app's alone, a keyword of ``required``, ``optional`` and
``protect`` (lower case, without the prefix). The nearer one wins.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Final, cast

from .errors import PROBLEM_BASE, OptionError, UnknownOption
from .fingerprint import pointer_tokens
from .key import MAX_LENGTH
from .policy import Policy

PREFIX: Final = "IDEMPOTENCY_"

#: RFC 9110, section 9.2.1, and the QUERY method: they change nothing, so there is nothing to guard.
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "QUERY"})

#: The other methods of IANA's registry. Another name is a typing error, which would leave a view unguarded.
UNSAFE_METHODS: Final = frozenset(
    {
        "POST", "PATCH", "PUT", "DELETE", "ACL", "BASELINE-CONTROL", "BIND", "CHECKIN", "CHECKOUT", "CONNECT",
        "COPY", "LABEL", "LINK", "LOCK", "MERGE", "MKACTIVITY", "MKCALENDAR", "MKCOL", "MKREDIRECTREF",
        "MKWORKSPACE", "MOVE", "ORDERPATCH", "PROPPATCH", "REBIND", "UNBIND", "UNCHECKOUT", "UNLINK", "UNLOCK",
        "UPDATE", "UPDATEREDIRECTREF", "VERSION-CONTROL",
    }
)  # fmt: skip

#: A century. Past it the databases' arithmetic on times overflows.
LONGEST: Final = 100 * 365 * 86_400.0

#: What can be asked of a store.
_STORE: Final = "claim take record release hold resume keep_steps note_secret renew find settle free prunable prune"

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


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
    table_name: str = "idempotency_keys"
    bind_key: str | None = None
    pool_size: int = 5
    problem_base: str = PROBLEM_BASE


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError("it must be true or false")


def _whole(low: int, high: int | None = None) -> Callable[[Any], int]:
    wanted = f"it must be a whole number from {low}" + (f" to {high}" if high else " up")

    def read(value: Any) -> int:
        if isinstance(value, bool) or not re.fullmatch(r"\s*[0-9]{1,18}\s*", str(value)):
            raise ValueError(wanted)
        number = int(value)
        if number < low or (high is not None and number > high):
            raise ValueError(wanted)
        return number

    return read


def _seconds(zero: bool = False) -> Callable[[Any], float]:
    wanted = "it must be a timedelta or a number of seconds, " + ("zero or more" if zero else "more than zero")

    def read(value: Any) -> float:
        if isinstance(value, timedelta):
            value = value.total_seconds()
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(wanted)
        try:
            seconds = float(value)
        except (ValueError, OverflowError):
            raise ValueError(wanted) from None
        if not math.isfinite(seconds) or seconds < 0 or (seconds == 0 and not zero):
            raise ValueError(wanted)
        if seconds > LONGEST:
            raise ValueError("it must be less than a century")
        return seconds

    return read


def _choice(*allowed: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        for one in allowed:
            if not isinstance(value, bool) and str(value).strip().lower() == str(one):
                return one
        raise ValueError("it must be one of " + ", ".join(map(str, allowed)))

    return read


def _header(value: Any) -> str:
    if not isinstance(value, str) or not _TOKEN.fullmatch(value):
        raise ValueError("it must be the name of a header")
    return value


def _optional_header(value: Any) -> str | None:
    return None if value is None or value in ("", "None", "none", "null") else _header(value)


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(one, str) for one in value):
        raise ValueError("it must be a list of strings, or one string with commas between them")
    return [one.strip() for one in value if one.strip()]


def _methods(value: Any) -> frozenset[str]:
    methods = frozenset(one.upper() for one in _words(value))
    if methods & SAFE_METHODS:
        raise ValueError(f"{', '.join(sorted(methods & SAFE_METHODS))}: a safe method is never guarded")
    if not methods or methods - UNSAFE_METHODS:
        raise ValueError("it must be a list of HTTP methods, or one string with commas between them: 'POST, PATCH'")
    return methods


def _header_names(value: Any) -> frozenset[str]:
    return frozenset(_header(one).lower() for one in _words(value or ()))


def _callable(value: Any) -> Any:
    if value is not None and not callable(value):
        raise ValueError("it must be a callable")
    return value


def _scope(value: Any) -> Any:
    if value is None or callable(value) or (isinstance(value, str) and value):
        return value
    raise ValueError("it must be a callable, or a fixed scope that is not empty")


def _fingerprint(value: Any) -> Any:
    if value is None or callable(value):
        return value
    try:
        members = tuple(_words(value))
    except ValueError:
        raise ValueError("it must be a callable, or a list of JSON members to leave out") from None
    for member in members:
        pointer_tokens(member)  # raises ValueError for a JSON pointer that is none
    return members


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("it must be a string that is not empty")
    return value


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _store(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError("a store is given as an object in this release; URLs are not available yet")
    if value is None:
        return None
    missing = [name for name in _STORE.split() if not callable(getattr(value, name, None))]
    # Not asked of the store itself, which may look at its database to answer.
    if inspect.getattr_static(value, "separate", None) is None and not hasattr(type(value), "__getattr__"):
        missing.append("separate")
    if missing:
        raise ValueError(f"it must be a store, see flask_idempotency.store.base.Store, and lacks {', '.join(missing)}")
    return value


def _later(default: Any = None) -> Callable[[Any], Any]:
    """For options that a release does not implement yet: refused rather than accepted and ignored."""

    def read(value: Any) -> Any:
        if value == default or (default is False and str(value).strip().lower() in _FALSE):
            return default
        raise ValueError("this option is not available in this release yet")

    return read


OPTIONS: Final[tuple[Option, ...]] = (
    Option("header", "Idempotency-Key", _header, "request header that carries the key"),
    Option("key_min_length", 8, _whole(1, MAX_LENGTH), "shortest key that the header may carry; the longest is 255"),
    Option("methods", ("POST", "PATCH"), _methods, "methods that are guarded; safe methods never are"),
    Option("key", None, _callable, "a callable that finds the key elsewhere, in the body of a webhook for example"),
    Option("scope", None, _scope, "a fixed scope, or a callable; beats the scope loader"),
    Option(
        "fingerprint",
        None,
        _fingerprint,
        "a callable giving the value to fingerprint in place of the body, or a list of JSON members to leave out",
    ),
    Option("retention", 86_400.0, _seconds(), "how long a record is kept: `timedelta` or seconds"),
    Option("lock_timeout", 30.0, _seconds(), "the lease: `timedelta` or seconds"),
    Option(
        "stale",
        "reexecute",
        _choice("reexecute", "reject"),
        "what a retry gets when a lease ran out; no effect on atomic views",
    ),
    Option("retry_after", 2.0, _seconds(), "`Retry-After` of 409 in flight and of 503, in seconds"),
    Option("wait", 0.0, _seconds(zero=True), "seconds a duplicate waits before 409; only two wait per process and app"),
    Option("on_mismatch", "reject", _choice("reject", "replay"), "what another request under a used key gets"),
    Option("mismatch_status", 422, _choice(422, 409), "the status of that rejection"),
    Option("record", None, _callable, "a callable on the response: true records it, false releases"),
    Option("on_error", "auto", _choice("auto", "release", "record", "hold"), "what a 5xx or an exception leaves"),
    Option("replay_header", "Idempotent-Replay", _optional_header, "set to `true` on replays; `None` for no marker"),
    Option("excluded_headers", (), _header_names, "further headers that are never recorded"),
    Option("max_body", 1024 * 1024, _whole(0), "largest body kept in the table, in bytes"),
    Option("on_store_error", "reject", _choice("reject", "execute"), "503, or run the view unguarded"),
    Option("atomic", False, _boolean, "the view's work in `db.session` and the record in one transaction"),
    Option("atomic_retries", 0, _whole(0, 100), "with `atomic`: how often to run again on a serialization failure"),
    Option("redact", None, _later(), "a callable that edits what is stored"),
    Option("body_store", None, _later(), "where large bodies go", app_only=True),
    Option("store", None, _store, "a store object; SQLAlchemy's if left out", app_only=True),
    Option("table_name", "idempotency_keys", _text, "name of the table", app_only=True),
    Option("bind_key", None, _optional_text, "Flask-SQLAlchemy's bind for the table", app_only=True),
    Option("pool_size", 5, _whole(1), "connections of the extension's own pool", app_only=True),
    Option("problem_base", PROBLEM_BASE, _text, "what `type` in problem documents begins with", app_only=True),
    Option("enabled", True, _boolean, "off: nothing is guarded, said as a warning at start", app_only=True),
    Option("count_replays", False, _later(False), "counts of replays per key", app_only=True),
    Option("max_live_keys", None, _later(), "cap of kept keys per scope", app_only=True),
    Option("encryption_keys", None, _later(), "encrypt what is recorded", app_only=True),
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
