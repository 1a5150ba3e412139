"""Steps: what one operation has done in other systems, kept so that a later attempt goes on from there."""

from __future__ import annotations

import hashlib
import hmac
import inspect
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final

from .claim import Claim
from .errors import ClaimLost, SecretGone, StepError, WriterHeld
from .keyring import Keyring
from .sealing import opened_step, sealed_step
from .store.base import Store

#: What separates these uses of an app's secret from all others.
_DERIVE: Final = b"flask-idempotency: derived key\n"
_IDENTIFY: Final = b"flask-idempotency: which secret\n"

#: How deep a result may be nested. How deep the parser can go depends on its caller's stack, which may be fuller in a
#: later attempt: what was stored must always be readable.
MAX_DEPTH: Final = 64
_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')

#: What a view reads that goes on under a claim which is no longer its own.
TAKEN_OVER: Final = (
    "The claim is no longer this request's: a later one has taken it over, since its lease had run out, or somebody "
    "has settled or released the key. Stop here."
)
_PLAIN: Final = (
    "step() takes a plain function. In a coroutine, await asyncio.to_thread(idempotency.step, name, function), with a "
    "function that is none."
)
_IN_THE_WAY: Final = (
    "SQLite has one writer, and the app's own uncommitted work keeps it from the keys, which are written before and "
    "after a step. Commit or roll back (db.session.commit()) before step() and derive_key(), and in a step's function "
    "before it returns."
)


class Steps:
    """The steps of one attempt. Its claim proves itself to the store before each."""

    def __init__(self, store: Store, claim: Claim, secrets: Sequence[bytes], keys: Keyring | None = None) -> None:
        self._store = store
        self._claim = claim
        self._secrets = secrets
        self._keys = keys
        self._secret: bytes | None = None
        self._used: set[str] = set()
        #: As they are stored.
        self._results: dict[str, str] = {}
        self._lock = threading.Lock()

    def run(self, name: str, function: Callable[[], Any]) -> Any:
        """The stored result of an earlier attempt, or the function's own, stored at once.

        :raises ClaimLost: the claim was taken over; the function was not called, or its result not stored.
        :raises StepError: the name is not one, or was used before in this request, or the result is no JSON.
        :raises RowUnreadable: a stored result can't be opened; the function was not called.
        """
        where = (self._claim.scope, self._claim.key, name)
        _check(name, function)
        with self._lock:
            if name in self._used:
                raise StepError(f"The step {name!r} was used before in this request: give each step a name of its own.")
            self._used.add(name)
            # Others' steps run meanwhile in this request's other threads: theirs are in the store already, or follow.
            with _naming_the_work():
                self._results.update(self._proven(self._store.resume(self._claim)))
        if name in self._results:
            return json.loads(opened_step(self._keys, self._results[name], *where))
        text = _as_json(name, _called(function))
        with self._lock:
            self._results[name] = sealed_step(self._keys, text, *where)
            with _naming_the_work(f"The step {name!r} was carried out, and its result is not stored. "):
                kept = self._store.keep_steps(self._claim, self._results)
        if not kept:
            raise ClaimLost(TAKEN_OVER)
        # As every later attempt gets it: a tuple is a list from the first time on.
        return json.loads(text)

    def derive(self, name: str) -> str:
        """A key for the next system: the same on every attempt of this key and scope, unguessable from outside.

        :raises ClaimLost: the claim was taken over.
        :raises SecretGone: it was derived from a secret that the app no longer has.
        :raises StepError: the name is not one, or the app has no secret.
        """
        _check_name(name)
        with self._lock:
            if self._secret is None:
                self._secret = self._noted()
        return derived(self._secret, self._claim.scope, self._claim.key, name)

    def _noted(self) -> bytes:
        """The secret that this operation's first attempt used: noted before a key made of it can leave."""
        _check_secrets(self._secrets)
        known = {identity(secret): secret for secret in reversed(self._secrets)}
        with _naming_the_work():
            noted = self._proven(self._store.note_secret(self._claim, identity(self._secrets[0])))
        if noted not in known:
            raise SecretGone(
                "The keys of this operation were derived from a secret that the app no longer has. Another one would "
                "give other keys, and the next system would do its part again. Put the old secret into "
                "SECRET_KEY_FALLBACKS until the operations begun with it are past their retention."
            )
        return known[noted]

    def _proven(self, result: Any) -> Any:
        if result is None:
            raise ClaimLost(TAKEN_OVER)
        return result


def derive_unnoted(secrets: Sequence[bytes], scope: str, key: str, name: str) -> str:
    """A derived key where no claim is held that could note the secret: with the app's own of today.

    :raises StepError: the name is not one, or the app has no secret.
    """
    _check_name(name)
    _check_secrets(secrets)
    return derived(secrets[0], scope, key, name)


def derived(secret: bytes, scope: str, key: str, name: str) -> str:
    """HMAC-SHA256 of scope, key and name, in the form of a UUID.

    36 characters of hexadecimal digits and hyphens, version 8 (RFC 9562, section 5.8): every provider that takes
    idempotency keys takes this form, Square's limit of 45 and Adyen's of 64 characters included. 122 bits of the
    digest are in it.
    """
    # A JSON list of texts tells where each ends.
    message = _DERIVE + json.dumps([scope, key, name]).encode()
    number = bytearray(hmac.digest(secret, message, "sha256")[:16])
    number[6] = number[6] & 0x0F | 0x80
    number[8] = number[8] & 0x3F | 0x80
    return str(uuid.UUID(bytes=bytes(number)))


def identity(secret: bytes) -> str:
    """What names a secret without telling it: 64 bits of a hash."""
    return hashlib.sha256(_IDENTIFY + secret).hexdigest()[:16]


def _check(name: str, function: Callable[[], Any]) -> None:
    _check_name(name)
    if inspect.iscoroutinefunction(function):
        raise StepError(_PLAIN)
    if not callable(function):
        raise StepError(f"The step {name!r} is given {type(function).__name__}, not a function.")


def _check_secrets(secrets: Sequence[bytes]) -> None:
    if not secrets:
        raise StepError("derive_key() needs the app's SECRET_KEY, which is not set.")


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise StepError(f"{name!r} is no name: it must be a text of printable characters that is not empty.")


def _called(function: Callable[[], Any]) -> Any:
    result = function()
    if inspect.iscoroutine(result):  # of a lambda, or of an object's __call__
        result.close()
        raise StepError(_PLAIN)
    return result


@contextmanager
def _naming_the_work(state: str = "") -> Iterator[None]:
    """Say which work is in the way, where it is the app's own: the store knows of work before the view only."""
    try:
        yield
    except WriterHeld as error:
        raise WriterHeld(state + _IN_THE_WAY) from error


def _as_json(name: str, result: Any) -> str:
    try:
        text = json.dumps(result, allow_nan=False)
        if _depth(text) > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise StepError(
            f"The step {name!r} was carried out, but its result can't be kept, since it is no JSON: {error}. A retry "
            "will carry it out again. Return what the later steps need as plain data."
        ) from error


def _depth(text: str) -> int:
    brackets = _STRING.sub("", text)
    return max(accumulate((one in "[{") - (one in "]}") for one in brackets), default=0)
