"""How the values of options are read: each function takes what was given and returns what is used.

What won't do is a ``ValueError`` that says what would. Strings are understood where ``app.config.from_prefixed_env()``
can give nothing else.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from .bodies import BodyStore
from .fingerprint import pointer_tokens
from .keyring import Keyring

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
_STORE: Final = (
    "claim take record release hold resume keep_steps note_secret renew find settle free prunable prune tokens_in_use"
)

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


def boolean(value: Any) -> bool:
    """True or false, also as a word."""
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError("it must be true or false")


def whole(low: int, high: int | None = None) -> Callable[[Any], int]:
    """A whole number within bounds."""
    wanted = f"it must be a whole number from {low}" + (f" to {high}" if high else " up")

    def read(value: Any) -> int:
        if isinstance(value, bool) or not re.fullmatch(r"\s*[0-9]{1,18}\s*", str(value)):
            raise ValueError(wanted)
        number = int(value)
        if number < low or (high is not None and number > high):
            raise ValueError(wanted)
        return number

    return read


def optional_whole(low: int) -> Callable[[Any], int | None]:
    """A whole number from a bound up, or ``None``, also as a word."""
    number = whole(low)
    return lambda value: None if value is None or value in ("", "None", "none", "null") else number(value)


def seconds(zero: bool = False) -> Callable[[Any], float]:
    """Seconds, from a ``timedelta``, a number or a text of digits."""
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


def choice(*allowed: Any) -> Callable[[Any], Any]:
    """One of the allowed values, in any case of letters."""

    def read(value: Any) -> Any:
        for one in allowed:
            if not isinstance(value, bool) and str(value).strip().lower() == str(one):
                return one
        raise ValueError("it must be one of " + ", ".join(map(str, allowed)))

    return read


def header(value: Any) -> str:
    """A header's name."""
    if not isinstance(value, str) or not _TOKEN.fullmatch(value):
        raise ValueError("it must be the name of a header")
    return value


def optional_header(value: Any) -> str | None:
    """A header's name, or ``None``, also as a word."""
    return None if value is None or value in ("", "None", "none", "null") else header(value)


def words(value: Any) -> list[str]:
    """A list of strings, or one string with commas."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(isinstance(one, str) for one in value):
        raise ValueError("it must be a list of strings, or one string with commas between them")
    return [one.strip() for one in value if one.strip()]


def methods(value: Any) -> frozenset[str]:
    """Unsafe HTTP methods."""
    methods = frozenset(one.upper() for one in words(value))
    if methods & SAFE_METHODS:
        raise ValueError(f"{', '.join(sorted(methods & SAFE_METHODS))}: a safe method is never guarded")
    if not methods or methods - UNSAFE_METHODS:
        raise ValueError("it must be a list of HTTP methods, or one string with commas between them: 'POST, PATCH'")
    return methods


def header_names(value: Any) -> frozenset[str]:
    """Headers' names in lower case."""
    return frozenset(header(one).lower() for one in words(value or ()))


def function(value: Any) -> Any:
    """A callable, or ``None``."""
    if value is not None and not callable(value):
        raise ValueError("it must be a callable")
    return value


def scope(value: Any) -> Any:
    """A callable, a fixed scope, or ``None``."""
    if value is None or callable(value) or (isinstance(value, str) and value):
        return value
    raise ValueError("it must be a callable, or a fixed scope that is not empty")


def fingerprint(value: Any) -> Any:
    """A callable, JSON members to leave out, or ``None``."""
    if value is None or callable(value):
        return value
    # In a list a name is taken as it is written: blanks belong to it, and commas may.
    members = words(value) if isinstance(value, str) else value
    if not isinstance(members, (list, tuple, set, frozenset)) or not all(isinstance(one, str) for one in members):
        raise ValueError("it must be a callable, or a list of JSON members to leave out")
    for member in members:
        if not member:
            raise ValueError("'' is the whole document as a JSON pointer; a member whose name is empty is '/'")
        pointer_tokens(member)  # raises ValueError for a JSON pointer that is none
    return tuple(members)


def text(value: Any) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("it must be a string that is not empty")
    return value


def optional_text(value: Any) -> str | None:
    """A string that is not empty, or ``None``."""
    return None if value is None else text(value)


def store(value: Any) -> Any:
    """A store object, or ``None``."""
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


def body_store(value: Any) -> BodyStore | None:
    """A body store by its URL, or ``None``; an empty text, which an environment variable may be, is none too."""
    return None if value is None or value == "" else BodyStore(text(value))


def encryption_keys(value: Any) -> Keyring | None:
    """The app's encryption keys, or ``None``. An empty text is an error: an unset variable must not end encryption."""
    if value is None:
        return None
    keys = [one for one in value.split(",") if one.strip()] if isinstance(value, str) else value
    if isinstance(keys, bytes) or not isinstance(keys, (list, tuple)):
        keys = [b""]  # no key: refused with the sentence that says what is wanted
    return Keyring([one if isinstance(one, (str, bytes)) else b"" for one in keys])
