"""The request as the fingerprint needs it, read so that the view can still read all of it."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, BinaryIO, Final, cast
from urllib.parse import quote

from flask import Request, current_app
from werkzeug.exceptions import ClientDisconnected, LengthRequired
from werkzeug.wsgi import LimitedStream

from .errors import ConfigurationError
from .fingerprint import Form, Message, Value

#: What is held in memory of a body, in bytes; a larger one goes to a temporary file. Werkzeug's form parser
#: draws the line for uploaded files at the same size.
IN_MEMORY: Final = 500 * 1024

#: Where a request's body is kept once it has been read.
_BODY: Final = "flask_idempotency.body"

#: Where Werkzeug's request keeps what it has read.
_READ: Final = ("stream", "form", "files", "values", "_cached_data", "_cached_json")

_CHUNK: Final = 64 * 1024
_FORMS: Final = frozenset({"multipart/form-data", "application/x-www-form-urlencoded"})


def message(request: Request, instead: Value | None, leave_out: tuple[str, ...]) -> Message:
    """The parts of a request that give it its meaning.

    :param instead: what counts in place of the body, where an app's callable gave it.
    :param leave_out: JSON members that do not count.
    :raises HTTPException: the body is too large, has no length that the server can tell, or broke off.
    :raises ConfigurationError: a hook has read the body from ``request.stream`` and kept nothing of it.
    """
    return Message(
        method=request.method,
        path=_path(request),
        query=request.query_string,
        content_type=request.headers.get("Content-Type", ""),
        content_encoding=request.headers.get("Content-Encoding", ""),
        body=instead if instead is not None else _body(request),
        leave_out=leave_out,
        max_form_memory_size=request.max_form_memory_size,
    )


def kept(request: Request) -> BinaryIO | None:
    """The body as it was read before, if it is still what this request would read."""
    read: BinaryIO | None = request.environ.get(_BODY)
    if read is None or read.closed or read is not request.environ.get("wsgi.input"):
        return None
    return read


def on_disk(request: Request) -> BinaryIO | None:
    """The body as it was read before, if it has to be closed: in memory it may be looked at when all is over."""
    read = kept(request)
    return None if isinstance(read, io.BytesIO) else read


def keep(request: Request) -> BinaryIO | None:
    """Keep the body for a second reading, where nothing has read it; returns a copy of it that has to be closed."""
    before = kept(request)
    if any(name in request.__dict__ for name in _READ):
        return None  # kept by the request itself, or gone for the view as well
    body = _rewindable(request)
    return None if body is before else body


@contextmanager
def lent(request: Request) -> Iterator[None]:
    """While a callable of the app's looks at the request: what it reads of the body the view can read again, unparsed.

    Nothing is read for one that does not look at it. What a hook has read before is the hook's own doing.
    """
    before = read_so_far(request)
    given = None
    if not before and kept(request) is None:
        given = request.environ["wsgi.input"] = _Lent(request)
    try:
        yield
    finally:
        if given is not None:
            given.give_back()
        read = kept(request)
        if read is not None:
            unread(request, before)
            request.__dict__.pop("stream", None)
            read.seek(0)


def read_so_far(request: Request) -> frozenset[str]:
    """What the request keeps of its body, by having read it."""
    return frozenset(name for name in _READ if name in request.__dict__)


def unread(request: Request, before: frozenset[str]) -> None:
    """Let a view, or another run of it, read the body as the first one could.

    :param before: what :func:`read_so_far` gave then.
    """
    files = request.__dict__.get("files")
    for file in () if files is None else [file for _, file in files.items(multi=True)]:
        with suppress(ValueError):  # the view has closed it
            file.seek(0) if "files" in before else file.close()
    for name in _READ:
        # What JSON is parsed to, a view may have changed.
        if name not in before or name == "_cached_json":
            request.__dict__.pop(name, None)


def _path(request: Request) -> str:
    """Mount point and path, in which bytes that are no UTF-8 stay apart: Flask shows all of them as one character."""
    environ = request.environ
    path = environ.get("SCRIPT_NAME", "").rstrip("/") + "/" + environ.get("PATH_INFO", "").lstrip("/")
    # Other paths begin with a slash, and a quoted host has none: no two of them meet.
    return quote(_routed_host(request), safe="") + str(path).encode("latin-1").decode("utf-8", "surrogateescape")


def _routed_host(request: Request) -> str:
    """The host, or its subdomain, where the route is chosen by it; else nothing, for then every host is one app."""
    rule = request.url_rule
    if rule is None or not (rule.host if rule.map.host_matching else rule.subdomain):
        return ""
    adapter = current_app.create_url_adapter(request)
    assert adapter is not None  # it has matched the rule
    return (adapter.server_name if rule.map.host_matching else adapter.subdomain) or ""


def _body(request: Request) -> BinaryIO | Form:
    cached = getattr(request, "_cached_data", None)
    if cached:  # a hook called get_data() or get_json(); form parsing uses the same bytes
        return io.BytesIO(cached)
    parsed = "form" in request.__dict__ and request.mimetype in _FORMS
    if parsed and (request.form or request.files):  # then get_data() had nothing left to give
        return _parsed(request)
    if cached is not None:
        return io.BytesIO(cached)
    body = _rewindable(request)
    if body is not None:
        return body
    if parsed:  # to no fields: the body is broken, and the view sees as little of it
        return _parsed(request)
    raise ConfigurationError(
        "A function that runs before the view has read request.stream, so the request can't be fingerprinted. "
        "Let it call request.get_data() instead, which keeps the body for the view."
    )


def _parsed(request: Request) -> Form:
    """A form that a hook has parsed: its bytes are gone, what they said is not."""
    return Form(
        fields=list(request.form.items(multi=True)),
        files=[
            (name, file.filename, file.headers.get("Content-Type"), cast(BinaryIO, file.stream))
            for name, file in request.files.items(multi=True)
        ],
    )


def _rewindable(request: Request) -> BinaryIO | None:
    """The body, read and put in place of the server's at its start again; ``None`` where a hook has taken it away."""
    read = kept(request)
    if read is not None:  # for a first call of this view, which was refused
        request.__dict__.pop("stream", None)
        read.seek(0)
        return read
    chunked = "chunked" in request.headers.get("Transfer-Encoding", "").lower()
    if chunked and request.content_length is None and "wsgi.input_terminated" not in request.environ:
        # The server does not say where the body ends, so Werkzeug gives the view an empty one. Two bodies that
        # nobody can read must not pass for the same request.
        raise LengthRequired("This server can't read a chunked body. Send the request with a Content-Length.")
    touched = "stream" in request.__dict__
    if touched and _taken(request):
        return None
    body = _copy(_source(request))
    size = body.seek(0, io.SEEK_END)
    body.seek(0)
    # Of a chunked body the length is not known: one that is empty now, a hook may have read.
    missing = size < request.content_length if request.content_length is not None else chunked and touched and not size
    if missing:
        body.close()
        if touched:
            return None
        raise ClientDisconnected()
    # The view's own stream is made anew, over this one, so that limits hold in it as ever.
    request.__dict__.pop("stream", None)
    request.environ["wsgi.input"] = request.environ[_BODY] = body
    return body


def _taken(request: Request) -> bool:
    """Whether a hook has read the stream that it made, as far as the stream itself shows."""
    stream: Any = request.__dict__["stream"]
    if request.content_length == 0:
        return False
    try:
        return bool(stream.tell())
    except ValueError:  # it is closed
        return True
    except (AttributeError, OSError):
        # A server's own, which can only be read. Where there is a length it will tell; and form parsing touches the
        # streams of other types without reading them.
        return request.content_length is None and "form" not in request.__dict__


def _source(request: Request) -> IO[bytes]:
    """The body as it comes, up to MAX_CONTENT_LENGTH: reading is what enforces it, as in the view."""
    stream = request.stream
    limit = request.max_content_length
    if limit is not None and "wsgi.input_terminated" in request.environ:
        # Werkzeug's stream does not look whether a body of just the limit ends there: one byte more does.
        return cast(IO[bytes], LimitedStream(request.environ["wsgi.input"], limit + 1, is_max=True))
    return stream


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


class _Lent(io.RawIOBase):
    """A server's input that is taken in whole as soon as somebody reads of it, and can be read again then."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._input = request.environ["wsgi.input"]
        self._body: BinaryIO | None = None
        self._error: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._error is not None:
            raise self._error
        if self._body is None:
            self._body = self._taken_in()
        data = self._body.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _taken_in(self) -> BinaryIO:
        request = self._request
        reading = request.__dict__.pop("stream", None)  # that of the callable, which reads of this one
        request.environ["wsgi.input"] = self._input
        try:
            body = _rewindable(request)
            assert body is not None  # nobody has read of it
            return body
        except Exception as error:
            # A part of it is gone. Whoever reads again must not take the rest for all of it.
            request.environ["wsgi.input"], self._error = self, error
            raise
        finally:
            if reading is not None:
                request.__dict__["stream"] = reading

    def give_back(self) -> None:
        """Put the server's input back where nothing was read of it."""
        if self._body is None:
            self._request.__dict__.pop("stream", None)
        if self._body is None and self._error is None:
            self._request.environ["wsgi.input"] = self._input
