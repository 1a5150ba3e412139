"""A request's slot: where the extension finds what it keeps for this one request, its attempt first of all."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from flask import has_request_context, request

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

    from .attempt import Attempt

#: Where a request's slot is kept: the environ is the one thing that belongs to exactly one request, whatever
#: contexts are copied, preserved or nested.
SLOT: Final = "flask_idempotency.slot"

#: The attempt that an event is about, for receivers that run when the request's context is gone; and the environ of
#: the context that is there instead, a test's or an outer request's.
emitting: ContextVar[tuple[Attempt, WSGIEnvironment | None] | None] = ContextVar(
    "flask_idempotency_emitting", default=None
)


class Slot:
    """What the extension keeps for one WSGI request.

    :ivar wrapped: whether the WSGI wrapper sees this request's end. Without it (a bare ``test_request_context()``)
        the hooks have to.
    :ivar body: the request's body, where it is a temporary file of ours.
    :ivar unguarded: the view runs without a claim, since the store could not answer and the app chose so.
    """

    def __init__(self, *, wrapped: bool) -> None:
        self.wrapped = wrapped
        #: The environ of the one request that it belongs to, once Flask has seen it; an environ may be copied.
        self.owner: object = None
        self.attempt: Attempt | None = None
        self.body: BinaryIO | None = None
        self.unguarded = False
        #: Whether the guard has let the request through to its view without a claim.
        self.passed = False
        #: Why its view runs without a claim, as it was told last.
        self.told: str | None = None
        #: What an atomic view that runs without a claim wants to be called when it has been answered.
        self.after_commit: list[Callable[[], Any]] | None = None
        #: Headers for this request's origin, which hooks made before the record was put over them.
        self.cross_origin: list[tuple[str, str]] = []
        #: How often an atomic view was run and undone.
        self.runs = 0
        #: The server's own input, where another one has its place.
        self.input: object = None
        self._earlier: list[BinaryIO] = []

    def keep(self, body: BinaryIO | None) -> None:
        """Close ``body`` in the end. One that was kept before may still be what the view reads."""
        if body is None:
            return
        if self.body is not None and self.body is not body:
            self._earlier.append(self.body)
        self.body = body

    def close(self) -> None:
        """Let go of the body."""
        for body in (self.body, *self._earlier):
            if body is not None:
                body.close()
                # For whoever reads on when the request is over: a middleware, of what the app has left.
                if self.input is not None and isinstance(self.owner, dict) and self.owner.get("wsgi.input") is body:
                    self.owner["wsgi.input"] = self.input
        self.body, self._earlier = None, []
        self.owner = Slot  # nobody's any more


def slot_of(environ: WSGIEnvironment) -> Slot:
    """The request's slot; made here where no wrapper made one."""
    slot: Slot | None = environ.get(SLOT)
    if slot is None or (slot.owner is not None and slot.owner is not environ):
        slot = environ[SLOT] = Slot(wrapped=False)
    slot.owner = environ
    return slot


def current() -> Attempt | None:
    """This request's attempt, or the one that the event being received is about."""
    here = own_environ()
    about = emitting.get()
    if about is not None and about[1] is here:
        return about[0]  # unless the receiver makes a request of its own
    slot: Slot | None = None if here is None else here.get(SLOT)
    return None if slot is None else slot.attempt


def own_environ() -> WSGIEnvironment | None:
    """The environ of the request whose context this is."""
    return request.environ if has_request_context() else None
