"""The wrapper around ``app.wsgi_app``: it sees every way in which a request ends.

It runs after the contexts are popped, so that the app's session has given its connection back, and before any
byte of the body leaves: what the client reads is recorded already. A stream is recorded when it has passed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from flask import has_app_context
from flask.globals import app_ctx

from .changes import noting
from .forking import notice
from .passing import size_of
from .slot import SLOT, Slot
from .state import AppState
from .store.writer import working

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment


class Settling:
    """A WSGI application that settles the claims of the one it wraps."""

    def __init__(self, wsgi_app: Callable[..., Iterable[bytes]], state: AppState) -> None:
        self.wsgi_app = wsgi_app
        self.state = state

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve the request, and settle its claim if it took one."""
        notice()
        self.state.prepare()
        outer = environ.get(SLOT)
        # A context that is there already, a test's, outlives the request, and so does the session within it.
        context = app_ctx._get_current_object() if has_app_context() else object()  # type: ignore[attr-defined]
        before = working.set(context)
        try:
            return self._served(environ, start_response, outer)
        finally:
            working.reset(before)

    def _served(self, environ: WSGIEnvironment, start_response: StartResponse, outer: Slot | None) -> Iterable[bytes]:
        slot = environ[SLOT] = Slot(wrapped=True)
        try:
            answer = self._call(environ, start_response, outer)
        except Exception as error:
            if slot.attempt is not None:
                slot.attempt._settle(error)
            slot.close()
            raise
        except BaseException:
            _crash(slot)
            raise
        if slot.attempt is None and slot.body is None:
            slot.close()
            return answer
        return _ended(answer, slot)

    def _call(self, environ: WSGIEnvironment, start_response: StartResponse, outer: Slot | None) -> Iterable[bytes]:
        try:
            return self.wsgi_app(environ, start_response)
        finally:
            # A view of another app may have called this one on its own request's environ.
            if outer is not None:
                environ[SLOT] = outer


def _ended(answer: Iterable[bytes], slot: Slot) -> Iterable[bytes]:
    try:
        streaming = _settle_if_complete(slot)
    except BaseException:
        _crash(slot)
        raise
    if streaming or _streams(slot):
        return _Passing(answer, slot)
    slot.close()
    return answer


def _streams(slot: Slot) -> bool:
    """Whether there is a stream that may still read the request's body."""
    if slot.body is None or slot.attempt is None:
        return slot.body is not None  # a hook may have answered with what it reads of the body
    answer = slot.attempt._answer
    return slot.passed or (answer is not None and answer.streamed)


def _settle_if_complete(slot: Slot) -> bool:
    """Settle, unless the answer is a stream that has not passed yet; then return true."""
    attempt = slot.attempt
    if attempt is None or not attempt._running:
        return False
    answer = attempt._answer
    if answer is None or answer.complete:
        attempt._unconcluded()
        return False
    return True


def _forgotten(slot: Slot) -> None:
    if slot.attempt is not None:
        slot.attempt._give_up()
    slot.close()


def _crash(slot: Slot) -> None:
    if slot.attempt is not None:
        slot.attempt._abandon()
    slot.close()


def _announced(slot: Slot) -> int | None:
    """How long a stream that is to be recorded says that it is."""
    answer = slot.attempt._answer if slot.attempt is not None else None
    return None if answer is None or answer.tee is None else answer.length


def _raise(error: Exception) -> bytes:
    raise error


class _Passing:
    """An answer on its way to the client, settled when it has passed, can't be kept, or is given up."""

    def __init__(self, answer: Iterable[bytes], slot: Slot) -> None:
        self._answer = answer
        self._chunks: Iterator[bytes] = iter(answer)
        self._slot = slot
        # Of the length that the answer has by its own account, what has not passed yet.
        self._left = _announced(slot)
        # Whoever takes an answer and neither reads it to its end nor closes it must not keep the key for ever.
        self._finalizer = weakref.finalize(self, _forgotten, slot)
        self._finalizer.atexit = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        chunk = self._take()
        if self._left is not None:
            self._left -= size_of(chunk)
            if self._left <= 0:
                self._left = None
                self._look_ahead()
        return chunk

    def _look_ahead(self) -> None:
        """All that was announced is there: see whether the stream ends with it, before the last of it leaves.

        A server need not ask on, and asgiref's ``WsgiToAsgi`` neither does nor closes what it has read. A client that
        has read it all may come again at once. What does follow goes out in its turn, an exception as well.
        """
        try:
            self._chunks = chain([self._take()], self._chunks)
        except StopIteration:
            self._chunks = iter(())
        except Exception as error:
            self._chunks = iter(partial(_raise, error), b"")

    def _take(self) -> bytes:
        attempt = self._slot.attempt
        try:
            with noting(attempt._changes) if attempt is not None else nullcontext():
                return next(self._chunks)
        except BaseException as error:
            if not isinstance(error, Exception):
                _crash(self._slot)
            raise
        finally:
            _settle_if_complete(self._slot)

    def close(self) -> None:
        """The server is done, or the client has gone: take in what is left of a stream, and settle."""
        self._finalizer.detach()
        try:
            self._drain()
        except Exception:
            # The app's own clean-up failed. What there is to record is certain all the same.
            _settle_if_complete(self._slot)
            raise
        except BaseException:
            _crash(self._slot)
            raise
        else:
            _settle_if_complete(self._slot)
        finally:
            close: Any = getattr(self._answer, "close", None)
            if close is not None:
                close()
            self._slot.close()

    def _drain(self) -> None:
        attempt = self._slot.attempt
        if attempt is None or not attempt._running or attempt._answer is None:
            return
        tee = attempt._answer.tee
        if tee is None:
            return
        try:
            tee.close()
        finally:
            if tee.crashed:
                attempt._abandon()
