"""The request as the fingerprint needs it, read so that the view can still read all of it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any, BinaryIO, Final, cast
from urllib.parse import quote

from flask import Request, current_app
from werkzeug.datastructures import FileStorage
from werkzeug.exceptions import ClientDisconnected

from .errors import ConfigurationError
from .fingerprint import Form, Message, Value
from .intake import INPUT, Input, OwnStream, Reader, has_own_stream, is_sent, length_of
from .slot import slot_of

#: Where Werkzeug's request keeps what it has read.
_READ: Final = frozenset({"stream", "form", "files", "values", "data", "_cached_data", "_cached_json"})

_FORMS: Final = frozenset({"multipart/form-data", "application/x-www-form-urlencoded"})


def message(request: Request, instead: Value | None, leave_out: tuple[str, ...]) -> Message:
    """The parts of a request that give it its meaning.

    The body is taken in whatever counts in its place: an upload that has broken off is no request to claim a key for.

    :param instead: what counts in place of the body, where an app's callable gave it.
    :param leave_out: JSON members that do not count.
    :raises HTTPException: the body is too large, has no length that the server can tell, or broke off.
    :raises ConfigurationError: a function that runs before any hook of ours has read the body from ``request.stream``
        and kept nothing of it.
    """
    raw = _taken_in(request)
    return Message(
        method=request.method,
        path=_path(request),
        query=request.query_string,
        content_type=request.headers.get("Content-Type", ""),
        content_encoding=request.headers.get("Content-Encoding", ""),
        body=instead if instead is not None else _body(request, raw),
        leave_out=leave_out,
        max_form_memory_size=request.max_form_memory_size,
    )


def stand_in(request: Request) -> None:
    """Put an input in place of the server's that is taken in whole, and checked, as soon as anybody reads of it.

    To be called before any hook: what hooks, callables and decorators read, a second reader can read again then.
    """
    if not read_so_far(request) and _input(request) is None:
        Input(request)


def give_back(request: Request) -> None:
    """Put the server's input back, where nothing was read of it: the request turned out to run without a claim."""
    given = _input(request)
    if given is not None:
        given.give_way(request)


def _own_stream(request: Request) -> OwnStream | None:
    """What a hook has put in the place of the request's stream, one that decodes it say, taken in; ``None``: nothing.

    It is what the view reads, and so what counts.
    """
    if not has_own_stream(request):
        return None
    stream = vars(request)["stream"]
    if not isinstance(stream, OwnStream):
        stream = vars(request)["stream"] = OwnStream(stream)
        if not isinstance(stream.kept, io.BytesIO):
            slot_of(request.environ).keep(stream.kept)
    return stream


@contextmanager
def lent(request: Request) -> Iterator[None]:
    """While a callable of the app's looks at the request: it sees the body as it came, whoever has read it before.

    After that all is as it was. Nothing is read for a callable that does not look at the body.
    """
    kept = vars(request)
    stand_in(request)
    own = _own_stream(request)
    given = _input(request)
    server = request.environ["wsgi.input"]
    before: dict[str, Any] = {name: kept[name] for name in _READ if name in kept}
    files = [] if given is not None else [(one.stream, one.stream.tell()) for one in _files(before) if not one.closed]
    if given is not None:
        for name in before.keys() - {"_cached_data", "_cached_json"}:
            del kept[name]
        request.environ["wsgi.input"] = Reader(given.body)
    if own is not None:
        kept["stream"] = Reader(lambda: own.kept)
    if "_cached_json" in before:  # in which the hook may have put something
        kept["_cached_json"] = _copy_of(before["_cached_json"])
    try:
        yield
    finally:
        for file in _files(kept):
            if file not in _files(before):
                file.close()
        for name in _READ:
            kept.pop(name, None)
        kept.update(before)
        request.environ["wsgi.input"] = server
        for stream, position in files:
            with suppress(ValueError):  # the callable has closed it, and its bytes are nowhere else
                stream.seek(position)


def read_so_far(request: Request) -> frozenset[str]:
    """What the request keeps of its body, by having read it."""
    return _READ.intersection(request.__dict__)


def unread(request: Request, before: frozenset[str]) -> None:
    """Let a view, or another run of it, read the body as the first one could.

    :param before: what :func:`read_so_far` gave then.
    """
    for file in _files(vars(request)):
        with suppress(ValueError):  # the view has closed it
            file.seek(0) if "files" in before else file.close()
    own = _own_stream(request)
    if own is not None:
        own.rewind()
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


def _files(kept: Mapping[str, Any]) -> list[FileStorage]:
    """The uploaded files among what a request keeps."""
    files = kept.get("files")
    return [] if files is None else [file for _, file in files.items(multi=True)]


def _copy_of(parsed: Any) -> Any:
    """What JSON was parsed to, for somebody who may change it."""
    try:
        return deepcopy(parsed)
    except RecursionError:
        return (Ellipsis, Ellipsis)  # as nested as this it is parsed anew: so Werkzeug says that nothing is cached


def _body(request: Request, raw: BinaryIO | None) -> BinaryIO | Form:
    cached = getattr(request, "_cached_data", None)
    if cached:  # a hook called get_data() or get_json(); form parsing uses the same bytes
        return io.BytesIO(cached)
    if raw is not None:
        return raw
    parsed = "form" in request.__dict__ and request.mimetype in _FORMS
    if parsed and (request.form or request.files):  # then get_data() had nothing left to give
        return _parsed(request)
    if cached is not None:
        return io.BytesIO(cached)
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


def _input(request: Request) -> Input | None:
    """What stands in for the server's input, if it is still what this request reads."""
    given: Input | None = request.environ.get(INPUT)
    return given if given is not None and given.is_read_by(request) else None


def _taken_in(request: Request) -> BinaryIO | None:
    """All of the body; ``None`` where it was taken away before anything could stand in for the server's input."""
    own = _own_stream(request)
    if own is not None:
        return own.kept
    touched = bool(read_so_far(request))
    given = _input(request)
    if given is not None:
        body = given.body()
    elif touched and _gone(request):
        return None
    else:
        given = Input(request)
        try:
            body = given.body()
        except ClientDisconnected:
            if not touched:
                raise
            given.withdraw(request)
            return None
        if touched and length_of(request) is None and is_sent(request) and not body.seek(0, io.SEEK_END):
            given.withdraw(request)
            return None  # of a chunked body the length is not known: one that is empty now may have been read
    given.give_way(request)
    return body


def _gone(request: Request) -> bool:
    """Whether what was read before anything stood in for the server's input took the body away, as far as it shows.

    :raises ClientDisconnected: it did, and what was kept of it falls short of what was announced.
    """
    cached, length = getattr(request, "_cached_data", None), length_of(request)
    if cached and length is not None and len(cached) < length and "wsgi.input_terminated" in request.environ:
        raise ClientDisconnected()  # such a server's input ends without a word
    if cached or (request.mimetype in _FORMS and (request.__dict__.get("form") or request.__dict__.get("files"))):
        return True
    return "stream" in request.__dict__ and _taken(request)


def _taken(request: Request) -> bool:
    """Whether a hook has read the stream that it made, as far as the stream itself shows."""
    stream: Any = request.__dict__["stream"]
    if not is_sent(request):
        return False
    try:
        return bool(stream.tell())
    except ValueError:  # it is closed
        return True
    except (AttributeError, OSError):
        # A server's own, which can only be read. Where there is a length it will tell; and form parsing touches the
        # streams of other types without reading them.
        return length_of(request) is None and "form" not in request.__dict__
