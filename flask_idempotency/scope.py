"""The scope: who a key belongs to, in the form in which it is stored.

A loader's value is stored as it is. Every other origin has a prefix that begins with ``~``, and a loader's
value that begins with ``~`` is hashed: no two origins ever meet.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Final

#: They have a text, but not one that names somebody: an exception that was returned, where it should be raised, say.
_NO_IDS: Final = (bool, bytes, bytearray, BaseException)

#: Python has no other text for them than their ``repr()``, and that is theirs.
_IDS: Final = (str, int, float)

#: The width of the column.
MAX_LENGTH: Final = 255

FIXED: Final = "~fixed:"
USER: Final = "~user:"
AUTHORIZATION: Final = "~auth:"
HASHED: Final = "~hash:"

#: What Python shows of an object that has no text of its own.
_ADDRESS: Final = re.compile(r" at 0x[0-9A-Fa-f]+")


def from_loader(value: object, is_credential: Callable[[str], bool] = lambda text: False) -> str | None:
    """The scope for what a scope loader or a callable option returned.

    :param value: the caller's stable id: a string, a number, a UUID, or anything with a text form of its
        own (``__str__``). ``None`` and ``""`` are no scope.
    :param is_credential: tells a secret of this request. A scope that is one is kept as its hash, since a
        credential is never stored.
    :raises TypeError: the value has no text form that is the same in every process.
    """
    text = as_text(value)
    if text is None:
        return None
    if text.startswith("~") or not fits(text) or is_credential(text):
        return hashed(text)
    return text


def fixed(name: str) -> str:
    """The scope of a configured name, a webhook's source for example."""
    return _with_origin(FIXED, name)


def from_user(value: object) -> str | None:
    """The scope of a logged-in user's id."""
    text = as_text(value)
    return None if text is None else _with_origin(USER, text)


def from_authorization(header: str) -> str:
    """The scope of an ``Authorization`` header: its hash, since a credential is never stored."""
    return AUTHORIZATION + _digest(header)


def hashed(text: str) -> str:
    """The stored form of a scope that can't be stored as it is."""
    return HASHED + _digest(text)


def as_text(value: object, meant: str = "A scope must be the caller's stable id") -> str | None:
    """The text of an id; ``None`` for no id.

    :param meant: how an error begins.
    :raises TypeError: the value has no text form that is the same in every process.
    """
    if value is None or value == "":
        return None
    if not _is_id(value):
        raise TypeError(f"{meant}, a string or a number for example, not {type(value).__name__}.")
    return str(value) or None


def fits(text: str) -> bool:
    """Whether the column can hold it, on every database, exactly."""
    if len(text) > MAX_LENGTH or "\x00" in text:
        return False
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def _with_origin(origin: str, text: str) -> str:
    scope = origin + text
    # No text is encoded with the byte 255, so that the hash is none that a loader's value can have.
    return scope if fits(scope) else HASHED + _digest(scope, b"\xff")


def _is_id(value: object) -> bool:
    if isinstance(value, _NO_IDS):
        return False
    if isinstance(value, _IDS):
        return True
    # What a repr() shows of an object (a response, a row, a dataclass) is all that it holds, and changes with it; so is
    # the text of what contains others. A proxy gives the class of what it stands for.
    kind = value.__class__
    # Of the class itself: a plain Enum's member is no container, though its class is.
    if kind.__str__ is object.__str__ or any("__iter__" in vars(one) for one in kind.__mro__):
        return False
    # The text of a plain object is another in every process, also as a part of another's.
    return _ADDRESS.search(str(value)) is None


def _digest(text: str, before: bytes = b"") -> str:
    return hashlib.sha256(before + text.encode("utf-8", "surrogatepass")).hexdigest()
