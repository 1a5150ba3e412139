"""Answers: taken down as they go out, and put back on a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from itertools import chain
from types import MethodType
from typing import Final

from flask import Response, has_request_context, request
from werkzeug.datastructures import Headers
from werkzeug.http import HTTP_STATUS_CODES
from werkzeug.wrappers import Response as _Plain
from werkzeug.wsgi import ClosingIterator

from .bodies import Sink
from .errors import BodyStoreError
from .origins import left_off
from .passing import Ready, Tee, size_of
from .policy import NEVER_RECORDED, Policy
from .recorded import Elsewhere, Recorded

#: Streams that have no end by their nature: nobody waits for it, and none goes to the body store.
ENDLESS: Final = frozenset({"text/event-stream", "multipart/x-mixed-replace"})

_TOO_LARGE: Final = (
    "An atomic view's stream is larger than IDEMPOTENCY_MAX_BODY. Its answer has to be made before the commit, so it "
    "is kept in memory."
)
_CUT_SHORT: Final = "An atomic view's stream ended before the length that its Content-Length announces."


class AnswerNotKept(Exception):
    """The view ran and the key is completed, but retries can't be given the answer."""


class Answer:
    """What the first client gets, complete now or, for a stream, once it has passed.

    :ivar keep: whether it is to be recorded; otherwise the claim is released or held.
    :ivar spoiled: whether it was decided that nothing but the status is kept.
    :ivar streamed: whether it is made while it goes out.
    :ivar length: how many bytes a stream says that it has; ``None`` where it does not say.
    """

    def __init__(
        self,
        response: Response,
        policy: Policy,
        *,
        keep: bool,
        watch: bool = False,
        sink: Callable[[], Sink] | None = None,
    ) -> None:
        """Take it down. With ``watch`` a stream is complete when it has passed, though nothing of it is kept.

        :param sink: makes a place for a body over the limit; ``None``: there is none.
        """
        self.keep = keep
        self.status = response.status_code
        _make_plain(response)
        if _whole(response, policy.max_body):
            response.make_sequence()
        self.streamed = not response.is_sequence
        self.length = response.content_length if self.streamed else None
        self._reason = _own_reason(response)
        self._headers = _recordable(response.headers, policy)
        self.tee: Tee | None = None
        self._ready: Ready | None = None
        self.spoiled = False
        if not (keep or (watch and self.streamed)) or _bodiless(self.status):
            return  # what is released is so before its first byte leaves, and passes untouched
        if response.is_sequence and not response.direct_passthrough:
            self._ready = Ready(list(response.iter_encoded()), policy.max_body, sink)
            if response.automatically_set_content_length and not response.headers.getlist("Content-Length"):
                self._headers += (("Content-Length", str(self._ready.size)),)
        else:
            endless = response.mimetype in ENDLESS
            patience = 0.0 if endless else policy.lock_timeout
            limit = policy.max_body if keep else None
            source = response.response
            self.tee = Tee(
                response.iter_encoded(), source, limit, patience, None if endless else sink, self.length
            )
            response.direct_passthrough = False
            response.response = self.tee
        if not 100 <= self.status <= 999:  # no status at all (RFC 9110, section 15); each server makes its own of it
            self.status = 500
            self.spoil()

    @property
    def complete(self) -> bool:
        """Whether it is certain what there is to record: at once, or when the stream ended or can't be kept."""
        return self.tee is None or self.tee.complete

    @property
    def trouble(self) -> BodyStoreError | None:
        """Why the body store does not have the body, where that is so."""
        body = self.tee or self._ready
        return None if body is None else body.trouble

    @property
    def why(self) -> str:
        """Why the body is not kept, where that is so."""
        body = self.tee or self._ready
        return "it has no status" if body is None or self.spoiled else body.why

    def spoil(self, *, now: bool = True) -> None:
        """Keep nothing but the status: the key is completed, and the view never runs again.

        :param now: false where the body store can't be spoken to; :meth:`drop` is called later then.
        """
        self.spoiled = True
        if self.tee is not None:
            self.tee.give_up(now=now)

    def drop(self) -> None:
        """No record will refer to the body: delete what the body store has of it. Never raises.

        May be called from another thread than that which the stream passes through.
        """
        body = self.tee or self._ready
        if body is not None:
            body.drop()

    def read(self) -> None:
        """Take a stream in now: there is no client that it would pass to."""
        for _ in self.tee or ():
            pass

    def recorded(self) -> Recorded:
        """The record of it. Without body and headers where the body can't be kept.

        A ready body over the limit is written to the body store now.
        """
        if not 100 <= self.status <= 999:  # Werkzeug makes 0 of a status without a number; no row could say so
            return Recorded(500)
        if self.spoiled:
            return Recorded(self.status)
        body: bytes | Elsewhere | None = b""
        if self.tee is not None:
            body = self.tee.body
        elif self._ready is not None:
            body = self._ready.body()
        return Recorded(self.status) if body is None else Recorded(self.status, self._headers, body, self._reason)


def gather(response: Response, limit: int) -> str | None:
    """Take a stream in whole, so that all of the answer is made; returns what is in the way of that.

    It may be larger than ``limit`` bytes, or end before the length that it announces.
    """
    _make_plain(response)
    if _whole(response, limit):
        response.make_sequence()
    if _bodiless(response.status_code) or (response.is_sequence and not response.direct_passthrough):
        return None
    stream = response.iter_encoded()
    chunks: list[bytes] = []
    size = 0
    try:
        for chunk in stream:
            size += size_of(chunk)
            chunks.append(bytes(chunk))
            if size > limit:
                return _TOO_LARGE
    finally:
        close = getattr(response.response, "close", None)
        if close is not None:
            close()
    if size < (response.content_length or 0):
        return _CUT_SHORT
    response.direct_passthrough = False
    response.response = chunks
    return None


def restore(recorded: Recorded, response: Response, policy: Policy, chunks: Iterable[bytes] | None = None) -> Response:
    """Make ``response`` the recorded answer, with the replay marker, and without cross-origin headers: see origins.py.

    :param chunks: the body, where it lies elsewhere.
    """
    response.direct_passthrough = False
    _own_nothing(response)
    response.status = f"{recorded.status} {recorded.reason}" if recorded.reason else str(recorded.status)
    response.headers = Headers(left_off(recorded.headers))
    if chunks is not None:
        response.response = chunks
    else:
        body = [recorded.body if isinstance(recorded.body, bytes) else b""]
        # What was sent without a length was a stream, and is one again, also for the hooks around the extension.
        streamed = "Content-Length" not in response.headers and not _bodiless(recorded.status)
        response.response = iter(body) if streamed else body
    if policy.replay_header:
        response.headers[policy.replay_header] = "true"
    return response


class Restored:
    """A replay as it was restored, to be told from one that somebody has changed on its way."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._as_made = _seen(response)

    def is_still(self, response: Response) -> bool:
        """Whether the response is as it was made. Of a stream nobody knows: a part may have been read."""
        return response is self._response and response.is_sequence and _seen(response) == self._as_made


def _seen(response: Response) -> tuple[object, ...]:
    body = list(response.response) if response.is_sequence else None
    return (
        type(response),  # force_type() changes it in place, and with it what is done to the answer when that is sent
        response.status,
        list(response.headers),
        body,
        response.direct_passthrough,
        response.autocorrect_location_header,
    )


def _bodiless(status: int) -> bool:
    """Whether it is sent without a body, so that a stream behind it never starts (RFC 9110, section 6.4.1)."""
    return status in (204, 304) or 100 <= status < 200


def _whole(response: Response, limit: int) -> bool:
    """Whether it only looks like a stream: Flask runs an HTTP exception as a WSGI application, for its answer.

    Its body has a length then, and is there already. As a stream it would be settled when the client has read it,
    and in tests many a client never does.
    """
    length = response.content_length if isinstance(response.response, ClosingIterator) else None
    return length is not None and length <= limit


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
    if _has_own(response, "get_wsgi_headers") or response.autocorrect_location_header:
        _add_own_headers(response)
    if _has_own(response, "get_app_iter") and has_request_context():
        _wrap_now(response)
    elif _has_own(response, "iter_encoded") and not response.direct_passthrough:
        _encode_now(response)
    _own_nothing(response)  # so that a second time changes nothing
    if response.is_sequence:  # no stream, though its bytes were to pass as they are: they do
        response.direct_passthrough = False


def _has_own(response: Response, name: str) -> bool:
    """Whether its class does that in its own way, and it has not been done yet."""
    return name not in vars(response) and getattr(type(response), name) is not getattr(_Plain, name)


def _add_own_headers(response: Response) -> None:
    if has_request_context():  # or it is the server's own 500
        had_length = "Content-Length" in response.headers
        response.headers = response.get_wsgi_headers(request.environ)
        if not had_length and response.is_sequence and response.automatically_set_content_length:
            # Werkzeug adds it, and will do so again: until then a hook may change the body.
            response.headers.remove("Content-Length")


def _wrap_now(response: Response) -> None:
    """What ``get_app_iter`` makes of the body, as the body."""
    if _bodiless(response.status_code):
        return
    # Made of a copy, which it closes as if it were the answer; what is to be done when that is closed is done once.
    twin = copy(response)
    twin._on_close = []
    made = twin.get_app_iter(request.environ)
    close = getattr(made, "close", None)
    if response.is_sequence:
        try:
            response.response = list(made)
        finally:
            if close is not None:
                close()
        return
    if close is not None:
        response.call_on_close(close)
    # A closing iterator only where the body was one: see _whole().
    response.response = made if isinstance(response.response, ClosingIterator) else chain(made)
    response.direct_passthrough = False


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
    response.autocorrect_location_header = False  # a replay's would be made of the retry's host
    for name in ("get_wsgi_headers", "get_app_iter", "iter_encoded"):
        if getattr(type(response), name) is not getattr(_Plain, name):
            setattr(response, name, MethodType(getattr(_Plain, name), response))
