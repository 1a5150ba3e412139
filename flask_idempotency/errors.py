"""What can go wrong: one class per answer that a client can get, and per mistake that an app can make.

The first sentences of an HTTP error's docstring are what the client reads as ``detail``.
"""

from __future__ import annotations

import inspect
import json
from functools import lru_cache
from typing import Any, ClassVar

from werkzeug.exceptions import HTTPException

#: What every ``type`` begins with unless ``IDEMPOTENCY_PROBLEM_BASE`` names the app's own documentation.
PROBLEM_BASE = "urn:problem-type:idempotency:"


@lru_cache
def sentences(kind: type[Exception]) -> str:
    """An exception's docstring, on one line."""
    return " ".join((inspect.getdoc(kind) or "").split())


class ConfigurationError(RuntimeError):
    """The app is set up in a way that can't work; the message says what to change."""


class OptionError(ConfigurationError, ValueError):
    """An option is unknown, not available in this release, or has a value that it can't have."""


class UnknownOption(OptionError, TypeError):
    """A keyword of a decorator, or an ``IDEMPOTENCY_…`` config key, that does not exist."""


class StoreError(Exception):
    """The store could not carry out a call; nothing is known to have been written."""


class WriterHeld(StoreError):
    """The app's own uncommitted writes, in this very thread, hold the database's only writer.

    Waiting would be waiting for oneself, so the call ends at once.
    """


class RecordRefused(StoreError):
    """The store can't hold this answer, or this result of a step: a NUL in a header on PostgreSQL, for example.

    Repeating won't help.
    """


class RowUnreadable(StoreError):
    """A stored row is corrupt, or was written by a version that this one does not know."""


class BodyStoreError(StoreError):
    """The body store could not carry out a call."""


class BodyLost(Exception):
    """A recorded body is not in the body store any more, or what is there is not what was recorded."""


class Undone(StoreError):
    """The database undid the app's transaction because of a concurrent one.

    Nothing of it is left, and doing it again may succeed.
    """


class CommitUnknown(StoreError):
    """The connection was lost while the commit was under way; it may have been carried out."""


class ClaimLost(RuntimeError):
    """The claim is no longer this request's: taken over by a later one, its lease having run out, or settled or
    released by hand. Nothing more may be done under it.
    """


class StepError(RuntimeError):
    """A step can't be carried out as it is written; its function was not called, or its result can't be kept."""


class SecretGone(RuntimeError):
    """The secret that this operation's keys were derived from is no longer among the app's."""


class WorkPending(RuntimeError):
    """An atomic view's work can't be told from other work in ``db.session``: uncommitted writes of functions that ran
    before it, a session in the place of the bound one, or a guarded request made within the view.
    """


class SettleError(RuntimeError):
    """A key can't be settled or released by hand as it stands; the message says why and what to do."""


class KeyNotFound(SettleError, LookupError):
    """There is no such key in this scope."""


class IdempotencyError(HTTPException):
    """Base of the answers that the extension itself gives, as problem documents (RFC 9457).

    :param detail: the sentence for the client's developer; the class's own docstring if left out.
    :param retry_after: seconds, sent as ``Retry-After`` (RFC 9110, section 10.2.3), rounded up to one.
    :param base: what ``type`` begins with.
    :param status: an HTTP status in place of the class's own.
    :param members: further members of the problem document.
    """

    #: None of its own: Flask looks handlers up by the status of the class that they were registered for, and a
    #: handler for this one is to find all those below it.
    code: int | None = None
    slug: ClassVar[str] = "error"
    title: ClassVar[str] = "Idempotency error"

    def __init__(
        self,
        detail: str | None = None,
        *,
        retry_after: float | None = None,
        base: str = PROBLEM_BASE,
        status: int | None = None,
        **members: Any,
    ) -> None:
        # mypy takes the __hash__ of a class's instances for the class's own.
        detail = detail or sentences(type(self))  # type: ignore[arg-type]
        super().__init__(detail)
        if status is not None:
            self.code = status
        self.detail = detail
        self.retry_after = None if retry_after is None else max(1, -(-retry_after // 1))
        self.members = members
        self.under(base)

    def under(self, base: str) -> IdempotencyError:
        """The same error with a ``type`` that begins with ``base``."""
        self.type = base + self.slug
        #: What Flask-RESTful and Flask-RESTX send as the body of an HTTP exception.
        self.data = self.problem()
        return self

    def problem(self) -> dict[str, Any]:
        """The problem document's members (RFC 9457, section 3.1), and ``error`` with the sentence of ``detail``."""
        return {
            "type": self.type,
            "title": self.title,
            "status": self.code,
            "detail": self.detail,
            "error": self.detail,
            **self.members,
        }

    def get_body(self, environ: Any = None, scope: Any = None) -> str:
        """The problem document as JSON."""
        return json.dumps(self.problem())

    def get_headers(self, environ: Any = None, scope: Any = None) -> list[tuple[str, str]]:
        """``Content-Type``, and ``Retry-After`` in whole seconds where the answer has one."""
        headers = [("Content-Type", "application/problem+json")]
        if self.retry_after is not None:
            headers.append(("Retry-After", str(int(self.retry_after))))
        return headers


class KeyMissing(IdempotencyError):
    """This operation needs an idempotency key. Make one value per operation, a UUID for example, and send the same
    one on every retry.
    """

    code = 400
    slug = "key-missing"
    title = "Idempotency key missing"


class KeyInvalid(IdempotencyError):
    """The idempotency key is not valid. Send exactly one key of printable ASCII characters, bare or as a quoted
    string, without a comma unless it is quoted.
    """

    code = 400
    slug = "key-invalid"
    title = "Idempotency key invalid"


class ScopeMissing(IdempotencyError):
    """The caller could not be identified, and a key belongs to its caller. Send valid credentials."""

    code = 401
    slug = "scope-missing"
    title = "Caller not identified"

    def get_headers(self, environ: Any = None, scope: Any = None) -> list[tuple[str, str]]:
        """Adds the challenge that RFC 9110, section 15.5.2, asks of every 401."""
        return [*super().get_headers(environ, scope), ("WWW-Authenticate", 'Bearer realm="api"')]


class KeyReused(IdempotencyError):
    """This idempotency key was used before, with another request. Send a new key for a new operation, or the first
    request unchanged to retry it.
    """

    code = 422
    slug = "key-reused"
    title = "Idempotency key reused"


class InFlight(IdempotencyError):
    """The first request with this idempotency key is still being processed. Send the same request again after the
    number of seconds in Retry-After.
    """

    code = 409
    slug = "in-flight"
    title = "Request in flight"


class OutcomeUnknown(IdempotencyError):
    """The first request with this idempotency key ended without a known outcome, and is not run again by itself.
    Ask the operator of this API to settle it before you try another key.
    """

    code = 409
    slug = "outcome-unknown"
    title = "Outcome unknown"


class RecordUnavailable(IdempotencyError):
    """The first request with this idempotency key was carried out, but its answer can't be given again. Look up the
    result in another way; a new key would carry the operation out once more.
    """

    code = 409
    slug = "record-unavailable"
    title = "Answer not available"


class TooManyKeys(IdempotencyError):
    """Too many idempotency keys of this caller are kept. Try again after the number of seconds in Retry-After."""

    code = 429
    slug = "too-many-keys"
    title = "Too many idempotency keys"


class StoreUnavailable(IdempotencyError):
    """Idempotency keys can't be checked right now, and the request was not carried out. Send the same request with
    the same key again after the number of seconds in Retry-After.
    """

    code = 503
    slug = "store-unavailable"
    title = "Idempotency store unavailable"
