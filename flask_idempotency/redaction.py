"""Redaction: the app edits what is stored (``IDEMPOTENCY_REDACT``). The first client's answer is not touched."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Final

from flask import Flask, Response, current_app, has_app_context

from .answer import Answer, AnswerNotKept, restore
from .policy import Policy
from .recorded import Recorded

#: Said after why a body is not kept.
NO_BODY_STORE: Final = ". What IDEMPOTENCY_REDACT has to edit is never kept in a body store"

#: Digests of the body's bytes (RFC 9530, section 3, and its predecessors).
_DIGESTS: Final = ("Content-Digest", "Repr-Digest", "Content-MD5", "Digest")


def redacted(recorded: Recorded, policy: Policy, app: Flask) -> Recorded:
    """The record that the app's function makes of a response that is made of ``recorded``.

    It edits the response in place, or returns another one; its status stays. Called in an app context: the
    request's own, where there still is one.

    :raises TypeError: it returned something that is no response.
    :raises ValueError: it changed the status.
    :raises AnswerNotKept: what it made is larger than ``IDEMPOTENCY_MAX_BODY``.
    :raises Exception: whatever the function raises.
    """
    assert policy.redact is not None
    response = restore(recorded, app.response_class(), replace(policy, replay_header=None))
    response.response = [_bytes(recorded)]
    with _in_context(app):
        returned = app.ensure_sync(policy.redact)(response)
        if returned is not None and not isinstance(returned, Response):
            raise TypeError(f"IDEMPOTENCY_REDACT returned {type(returned).__name__}: return a response, or nothing.")
        edited = response if returned is None else returned
        if edited.status_code != recorded.status:
            raise ValueError(
                f"IDEMPOTENCY_REDACT changed the status from {recorded.status} to {edited.status_code}. A replay has "
                "the status of the first answer: edit headers and body alone."
            )
        return _taken_down(edited, recorded, policy)


def _taken_down(edited: Response, recorded: Recorded, policy: Policy) -> Recorded:
    body = edited.get_data()
    had_length = any(name.lower() == "content-length" for name, _ in recorded.headers)
    if had_length:
        edited.headers["Content-Length"] = str(len(body))
    else:  # it was a stream, and is one again on a replay
        edited.headers.remove("Content-Length")
        edited.automatically_set_content_length = False
    if body != _bytes(recorded):
        _forget_the_bytes(edited, recorded)
    answer = Answer(edited, policy, keep=True)
    kept = answer.recorded()
    if not kept.available:
        raise AnswerNotKept(f"What IDEMPOTENCY_REDACT made of it: {answer.why}{NO_BODY_STORE}")
    return kept


def _forget_the_bytes(edited: Response, recorded: Recorded) -> None:
    """Drop digests of the bytes that were there before, and let an ETag name no exact bytes; unless they are new."""
    before = {name.lower(): value for name, value in recorded.headers}
    for name in _DIGESTS:
        if name in edited.headers and edited.headers[name] == before.get(name.lower()):
            del edited.headers[name]
    etag = edited.headers.get("ETag", "")
    if etag.startswith('"') and etag == before.get("etag"):
        edited.headers["ETag"] = f"W/{etag}"


def _bytes(recorded: Recorded) -> bytes:
    return recorded.body if isinstance(recorded.body, bytes) else b""


def _in_context(app: Flask) -> AbstractContextManager[object]:
    here = has_app_context() and current_app._get_current_object() is app  # type: ignore[attr-defined]
    return nullcontext() if here else app.app_context()
