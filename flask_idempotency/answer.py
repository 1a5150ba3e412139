"""Answers: taken down as they go out, and put back on a replay."""

from __future__ import annotations

import time
from collections.abc import Iterator
from copy import copy
from types import MethodType

from flask import Response, has_request_context, request
from werkzeug.datastructures import Headers
from werkzeug.http import HTTP_STATUS_CODES
from werkzeug.wrappers import Response as _Plain
from werkzeug.wsgi import ClosingIterator

from .policy import NEVER_RECORDED, Policy
from .recorded import Recorded


class Answer:
    """What the first client gets, complete now or, for a stream, once it has passed.

    :ivar keep: whether it is to be recorded; otherwise the claim is released or held.
    :ivar spoiled: whether it was decided that nothing but the status is kept.
    :ivar streamed: whether it is made while it goes out.
    :ivar length: how many bytes it says that it has; ``None`` where it does not say.
    """

    def __init__(self, response: Response, policy: Policy, *, keep: bool, watch: bool = False) -> None:
        """Take it down. With ``watch`` a stream is complete when it has passed, though nothing of it is kept."""
        self.keep = keep
        self.status = response.status_code
        _make_plain(response)
        if _whole(response, policy.max_body):
            response.make_sequence()
        self.streamed = not response.is_sequence
        self.length = response.content_length
        self._reason = _own_reason(response)
        self._headers = _recordable(response.headers, policy)
        self.tee: Tee | None = None
        self._body: bytes | None = b""
        self.spoiled = False
        if not (keep or (watch and self.streamed)) or _bodiless(self.status):
            return  # what is released is so before its first byte leaves, and passes untouched
        if response.is_sequence and not response.direct_passthrough:
            body = b"".join(response.iter_encoded())
            self._body = body if len(body) <= policy.max_body else None
            if response.automatically_set_content_length and "Content-Length" not in response.headers:
                self._headers += (("Content-Length", str(len(body))),)
        else:
            endless = response.mimetype == "text/event-stream"
            patience = 0.0 if endless else policy.lock_timeout
            self.tee = Tee(response.iter_encoded(), response.response, policy.max_body if keep else None, patience)
            response.direct_passthrough = False
            response.response = self.tee
        if not 100 <= self.status <= 999:  # no status at all (RFC 9110, section 15); each server makes its own of it
            self.status = 500
            self.spoil()

    @property
    def complete(self) -> bool:
        """Whether it is certain what there is to record: at once, or when the stream ended or can't be kept."""
        return self.tee is None or self.tee.complete

    def spoil(self) -> None:
        """Keep nothing but the status: the key is completed, and the view never runs again."""
        self.spoiled = True
        if self.tee is not None:
            self.tee.give_up()

    def read(self) -> None:
        """Take a stream in now: there is no client that it would pass to."""
        for _ in self.tee or ():
            pass

    def recorded(self) -> Recorded:
        """The record of it. Without body and headers where the body can't be kept."""
        body = self._body if self.tee is None else self.tee.body
        if not 100 <= self.status <= 999:  # Werkzeug makes 0 of a status without a number; no row could say so
            return Recorded(500)
        if body is None or self.spoiled:
            return Recorded(self.status)
        return Recorded(self.status, self._headers, body, self._reason)


class Tee:
    """A stream that keeps what passes through it, up to a limit; with ``None`` for it, nothing.

    :ivar body: what passed; ``None`` where it is too large or broke off.
    :ivar crashed: it ended in an exception that is no ``Exception``, so nothing is known of it.
    """

    def __init__(self, stream: Iterator[bytes], source: object, limit: int | None, patience: float) -> None:
        self._stream = stream
        self._source = source
        self._limit = limit
        self._patience = patience
        self._chunks: list[bytes] = []
        self._size = 0
        self.complete = False
        self.crashed = False
        self.body: bytes | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            chunk = next(self._stream)
            size = len(chunk)
        except StopIteration:
            if not self.complete:
                self.body, self.complete = b"".join(self._chunks), True
            raise
        except Exception:
            # Bytes may have left: the answer is not whole, and the view must not run again.
            self.give_up()
            raise
        except BaseException:
            self.crashed = True
            raise
        if self._limit is not None and not self.complete:
            self._chunks.append(bytes(chunk))  # a view may fill one buffer again and again
            self._size += size
            if self._size > self._limit:
                self.give_up()
        return chunk

    def give_up(self) -> None:
        """Keep nothing of it. What is left passes through."""
        self._chunks.clear()
        self.body, self.complete = None, True

    def close(self) -> None:
        """Close the stream behind. What the client did not wait for is taken in first."""
        try:
            self._drain()
        finally:
            for one in (self._stream, self._source):
                close = getattr(one, "close", None)
                if close is not None:
                    close()

    def _drain(self) -> None:
        """Take in the rest, within the limit and a bounded time."""
        until = time.monotonic() + self._patience
        try:
            while not (self.complete or self.crashed) and time.monotonic() < until:
                next(self)
        except Exception:
            # The end, or a generator that failed: __next__ has noted which.
            pass
        if not (self.complete or self.crashed):
            self.give_up()


def gather(response: Response, limit: int) -> bool:
    """Take a stream in whole, so that all of the answer is made. False: it is larger than ``limit`` bytes."""
    _make_plain(response)
    if _whole(response, limit):
        response.make_sequence()
    if _bodiless(response.status_code) or (response.is_sequence and not response.direct_passthrough):
        return True
    stream = response.iter_encoded()
    chunks: list[bytes] = []
    size = 0
    try:
        for chunk in stream:
            chunks.append(bytes(chunk))
            size += len(chunk)
            if size > limit:
                return False
    finally:
        close = getattr(response.response, "close", None)
        if close is not None:
            close()
    response.direct_passthrough = False
    response.response = chunks
    return True


def restore(recorded: Recorded, response: Response, policy: Policy) -> Response:
    """Make ``response`` the recorded answer, with the replay marker."""
    response.direct_passthrough = False
    _own_nothing(response)
    response.status = f"{recorded.status} {recorded.reason}" if recorded.reason else str(recorded.status)
    response.headers = Headers(list(recorded.headers))
    body = [recorded.body or b""]
    # What was sent without a length was a stream, and is one again, also for the hooks around the extension.
    streamed = "Content-Length" not in response.headers and not _bodiless(recorded.status)
    response.response = iter(body) if streamed else body
    if policy.replay_header:
        response.headers[policy.replay_header] = "true"
    return response


def _bodiless(status: int) -> bool:
    """Whether it is sent without a body, so that a stream behind it never starts (RFC 9110, section 6.4.1)."""
    return status in (204, 304) or 100 <= status < 200


def _whole(response: Response, limit: int) -> bool:
    """Whether it only looks like a stream: Flask runs an HTTP exception as a WSGI application, for its answer.

    Its body has a length then, and is there already. As a stream it would be settled when the client has read it,
    and in tests many a client never does.
    """
    length = response.content_length
    return isinstance(response.response, ClosingIterator) and length is not None and length <= limit


def _own_reason(response: Response) -> str | None:
    reason = response.status.partition(" ")[2]
    standard = HTTP_STATUS_CODES.get(response.status_code, "Unknown").upper()
    return None if reason == standard else reason


def _recordable(headers: Headers, policy: Policy) -> tuple[tuple[str, str], ...]:
    # What Connection names belongs to the connection too (RFC 9110, section 7.6.1).
    named = {one.strip().lower() for value in headers.getlist("Connection") for one in value.split(",")}
    never = NEVER_RECORDED | policy.excluded_headers | named
    return tuple((name, value) for name, value in headers.items() if name.lower() not in never)


def _make_plain(response: Response) -> None:
    """Let a response class of the app's own do now, and once, what it does to the answer when that is sent.

    What it makes is recorded, and would otherwise be made again: of the stream that is put in the body's place, and,
    where it is the app's ``response_class``, of each replay.
    """
    if type(response).get_wsgi_headers is not _Plain.get_wsgi_headers:
        _add_own_headers(response)
    if type(response).iter_encoded is not _Plain.iter_encoded and not response.direct_passthrough:
        _encode_now(response)
    _own_nothing(response)  # so that a second time changes nothing


def _add_own_headers(response: Response) -> None:
    if has_request_context():  # or it is the server's own 500
        had_length = "Content-Length" in response.headers
        response.headers = response.get_wsgi_headers(request.environ)
        if not had_length:  # Werkzeug adds it, and will do so again: until then a hook may change the body
            response.headers.remove("Content-Length")


def _encode_now(response: Response) -> None:
    if response.is_sequence:
        response.response = list(response.iter_encoded())
        return
    # A copy, since the method may look for the body only when the first chunk is asked for: it is another one then.
    encoded = copy(response).iter_encoded()
    body = response.response
    close = getattr(body, "close", None)
    if isinstance(body, ClosingIterator):
        encoded = ClosingIterator(encoded)  # see _whole()
    if close is not None:
        response.call_on_close(close)
    response.response = encoded


def _own_nothing(response: Response) -> None:
    """Let it be sent as a plain response would, whatever its class."""
    for name in ("get_wsgi_headers", "iter_encoded"):
        if getattr(type(response), name) is not getattr(_Plain, name):
            setattr(response, name, MethodType(getattr(_Plain, name), response))
