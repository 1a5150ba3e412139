"""A request's body as it comes from the server: taken in whole, and checked, before anybody sees a part of it."""

from __future__ import annotations

import io
import tempfile
import weakref
from collections.abc import Callable
from typing import IO, Any, BinaryIO, Final, cast

from flask import Request
from werkzeug.exceptions import ClientDisconnected, LengthRequired
from werkzeug.wsgi import LimitedStream, get_content_length, get_input_stream

from .slot import slot_of

#: What is held in memory of a body, in bytes; a larger one goes to a temporary file. Werkzeug's form parser
#: draws the line for uploaded files at the same size.
IN_MEMORY: Final = 500 * 1024

#: Where the input is that stands in for the server's.
INPUT: Final = "flask_idempotency.input"

_CHUNK: Final = 64 * 1024


def length_of(request: Request) -> int | None:
    """How long the body is by the request's own account. ``request.content_length`` would keep it from a hook that
    puts another body in its place.
    """
    return get_content_length(request.environ)


def is_sent(request: Request) -> bool:
    """Whether there may be a body. Without a length and a transfer coding there is none (RFC 9112, section 6.3), unless
    the server knows the end in another way, as under HTTP/2.
    """
    length = length_of(request)
    if length is not None:
        return length > 0
    return "Transfer-Encoding" in request.headers or "wsgi.input_terminated" in request.environ


class Standing(io.RawIOBase):
    """Stands in for an input whose body is there as a whole, wherever other readers of it are.

    :ivar at: how much of it was read.
    """

    def __init__(self) -> None:
        self.at = 0

    def body(self) -> BinaryIO:
        """All of the body.

        :raises HTTPException: it is too large, has no length that the server can tell, or broke off.
        """
        raise NotImplementedError

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes.

        :raises HTTPException: as :meth:`body`.
        """
        data = self._next(lambda body: body.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def readline(self, size: int | None = -1) -> bytes:
        """Read the next line: byte by byte, as it would be done without this, is slow.

        :raises HTTPException: as :meth:`body`.
        """
        return self._next(lambda body: body.readline(-1 if size is None else size))

    def rewind(self) -> None:
        """Read from the start again."""
        self.at = 0

    def _next(self, read: Callable[[BinaryIO], bytes]) -> bytes:
        body = self.body()
        body.seek(self.at)
        data = read(body)
        self.at += len(data)
        return data


class Input(Standing):
    """Stands in for a server's input, which is taken in whole, and checked, as soon as somebody reads of it."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self._server = request.environ["wsgi.input"]
        self._body: BinaryIO | None = None
        self._error: Exception | None = None
        # The request leads here, and is not to be kept by what it leads to.
        self._request = weakref.ref(request)
        request.environ["wsgi.input"] = request.environ[INPUT] = self

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes.

        :raises HTTPException: as :meth:`body`.
        """
        if not self._passes_on():
            return super().readinto(buffer)
        data = self._server.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readline(self, size: int | None = -1) -> bytes:
        """Read the next line.

        :raises HTTPException: as :meth:`body`.
        """
        return io.RawIOBase.readline(self, size) if self._passes_on() else super().readline(size)

    def _passes_on(self) -> bool:
        """Whether the request is over, and came to no guard."""
        return self._body is None and self._error is None and self._request() is None

    def body(self) -> BinaryIO:
        """All of the body.

        :raises HTTPException: it is too large, has no length that the server can tell, or broke off.
        """
        if self._error is not None:
            # A part of it is gone. Whoever reads again must not take the rest for all of it.
            raise self._error
        if self._body is None:
            request = self._request()
            assert request is not None
            try:
                self._body = _whole(request, self._server)
            except BaseException as error:  # a time-out of gevent's also leaves but the rest
                self._error = error if isinstance(error, Exception) else ClientDisconnected()
                raise
            # What is in memory needs no closing, and may be looked at when the request is over, by a test say.
            if not isinstance(self._body, io.BytesIO):
                slot_of(request.environ).keep(self._body)
        return self._body

    def is_read_by(self, request: Request) -> bool:
        """Whether no hook has put another input in its place, and the body is still there."""
        if self._body is not None and self._body.closed:
            return False
        return self._error is not None or request.environ["wsgi.input"] in (self, self._body)

    def give_way(self, request: Request) -> None:
        """Let the body itself stand in its place, or the server's input where the body was not taken in.

        Not where somebody has read of it, and reads on, or is about to by a stream of his own. A body that was read
        since is as at its start again: it is for a view that is to be run again.
        """
        if self.at or self._error is not None or has_own_stream(request):
            return
        slot_of(request.environ).input = self._server
        # The view's own stream is made anew, so that limits hold in it as ever.
        request.__dict__.pop("stream", None)
        request.environ["wsgi.input"] = self._server if self._body is None else self._body
        if self._body is not None:
            self._body.seek(0)

    def withdraw(self, request: Request) -> None:
        """Be gone: the body was taken away before, and what is left of it is not the body."""
        request.environ["wsgi.input"] = self._server
        del request.environ[INPUT]


class Reader(Standing):
    """Reads a body from its start.

    :param body: gives the body, and may raise an HTTP exception in its place.
    """

    def __init__(self, body: Callable[[], BinaryIO]) -> None:
        super().__init__()
        self._body = body

    def body(self) -> BinaryIO:
        """All of the body."""
        return self._body()


class OwnStream(Standing):
    """A stream that a hook has put in the place of the request's, taken in whole, so that it can be read again.

    :ivar kept: what it gave, in memory or in a temporary file.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.kept = _copy(stream)
        self._original = stream

    def body(self) -> BinaryIO:
        """All of the body."""
        return self.kept

    def __getattr__(self, name: str) -> Any:
        """What a view asks of the hook's own stream beside reading: a digest of what was read, for example."""
        return getattr(self._original, name)


def has_own_stream(request: Request) -> bool:
    """Whether the request's stream is neither made by Werkzeug nor the server's input."""
    stream, given = vars(request).get("stream"), request.environ.get(INPUT)
    if stream is None:
        return False
    # It may have been made before anything stood in for the server's input.
    inputs = (request.environ["wsgi.input"], given, None if given is None else given._server)
    if any(one is not None and one in (stream, getattr(stream, "_stream", None)) for one in inputs):
        return False
    # Werkzeug's own, of a request without a body.
    return not (isinstance(stream, io.BytesIO) and not stream.getbuffer())


def _source(request: Request, server: IO[bytes]) -> IO[bytes]:
    """The body as it comes, up to MAX_CONTENT_LENGTH: reading is what enforces it, as in the view."""
    limit = request.max_content_length
    stream = get_input_stream({**request.environ, "wsgi.input": server}, max_content_length=limit)
    if limit is not None and "wsgi.input_terminated" in request.environ:
        # Werkzeug's stream does not look whether a body of just the limit ends there: one byte more does.
        return cast(IO[bytes], LimitedStream(server, limit + 1, is_max=True))
    return stream


def _whole(request: Request, server: IO[bytes]) -> BinaryIO:
    """A copy of the body, from the server's input."""
    length = length_of(request)
    untold = length is None and "wsgi.input_terminated" not in request.environ
    if untold and "chunked" in request.headers.get("Transfer-Encoding", "").lower():
        # The server does not say where the body ends, so Werkzeug gives the view an empty one. Two bodies that
        # nobody can read must not pass for the same request.
        raise LengthRequired("This server can't read a chunked body. Send the request with a Content-Length.")
    body = _copy(_source(request, server))
    size = body.seek(0, io.SEEK_END)
    body.seek(0)
    if length is not None and size < length:
        body.close()
        raise ClientDisconnected()
    return body


def _copy(stream: IO[bytes]) -> BinaryIO:
    copy: BinaryIO = io.BytesIO()
    size = 0
    try:
        while chunk := stream.read(_CHUNK):
            size += len(chunk)
            if size > IN_MEMORY and isinstance(copy, io.BytesIO):
                on_disk = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - the slot closes it
                on_disk.write(copy.getbuffer())
                copy = on_disk
            copy.write(chunk)
    except BaseException:
        copy.close()
        raise
    copy.seek(0)
    return copy
