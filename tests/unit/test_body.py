"""The request's body: read for the fingerprint, and still there for the view."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask, Request
from werkzeug.exceptions import ClientDisconnected, HTTPException, LengthRequired, RequestEntityTooLarge
from werkzeug.test import create_environ

from flask_idempotency.body import lent, message, stand_in
from flask_idempotency.errors import ConfigurationError
from flask_idempotency.fingerprint import Form, Value, fingerprint
from flask_idempotency.intake import IN_MEMORY

FORM = "application/x-www-form-urlencoded"
BOUNDARY = "multipart/form-data; boundary=xyz"
PARTS = (
    b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
    b'--xyz\r\nContent-Disposition: form-data; name="f"; filename="f.txt"\r\nContent-Type: text/plain\r\n\r\nfile\r\n'
    b"--xyz--\r\n"
)

Ask = Callable[..., Request]


class ServerInput:
    """A server's input as gunicorn's is: it can be read, and nothing else."""

    def __init__(self, data: bytes) -> None:
        self._stream = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        # Never more than a little at once, as from a socket.
        return self._stream.read(min(size, 70_000) if size >= 0 else -1)


@pytest.fixture
def app() -> Flask:
    return Flask(__name__)


@pytest.fixture
def ask(app: Flask) -> Iterator[Ask]:
    """Makes requests: from a server that ends the input itself or one that does not, with or without a length."""
    requests = []

    def make(
        body: bytes = b"",
        content_type: str = "text/plain",
        *,
        terminated: bool | None = None,
        length: int | None = -1,
        raw: bool = False,
    ) -> Request:
        environ = create_environ("/things", method="POST")
        environ["CONTENT_TYPE"] = content_type
        environ["wsgi.input"] = ServerInput(body) if raw else io.BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body) if length == -1 else length or "")
        if terminated is not None:
            environ["wsgi.input_terminated"] = terminated
        if length is None:
            environ["HTTP_TRANSFER_ENCODING"] = "chunked"
        requests.append(app.request_class(environ))
        return requests[-1]

    yield make
    for request in requests:
        request.close()


def digest(request: Request, **options: Any) -> str:
    """The request's fingerprint."""
    return fingerprint(message(request, options.get("instead"), options.get("leave_out", ())))


SERVERS = [
    pytest.param({}, id="by its length"),
    pytest.param({"raw": True}, id="by its length, raw"),
    pytest.param({"terminated": True}, id="terminated"),
    pytest.param({"terminated": True, "raw": True}, id="terminated, raw"),
    pytest.param({"terminated": True, "raw": True, "length": None}, id="chunked"),
]


@pytest.mark.scenario(29)
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("size", [0, 1, IN_MEMORY, IN_MEMORY + 1, 3 * IN_MEMORY])
def test_the_view_reads_the_same_bytes(app: Flask, ask: Ask, server: dict[str, Any], size: int) -> None:
    """After the fingerprint the body is there, whole, by each way of reading it, whatever its size and the server."""
    body = (b"0123456789" * (size // 10 + 1))[:size]
    ways: list[Callable[[Request], bytes]] = [
        lambda request: request.get_data(),
        lambda request: request.data,
        lambda request: request.stream.read(),
        lambda request: b"".join(iter(lambda: request.stream.read(1000), b"")),
        lambda request: b"".join(request.stream),
        lambda request: request.input_stream.read(),
    ]
    with app.app_context():
        for way in ways:
            request = ask(body, **server)
            found = message(request, None, ())
            assert isinstance(found.body, io.IOBase)
            assert body == found.body.read() == (found.body.seek(0), way(request))[1]
            found.body.close()


@pytest.mark.scenario(29)
@pytest.mark.parametrize("server", SERVERS)
def test_forms_are_parsed_as_ever(app: Flask, ask: Ask, server: dict[str, Any]) -> None:
    """Forms and files are what they are without the extension."""
    with app.app_context():
        request = ask(b"a=1&a=2&b=%FF", FORM, **server)
        message(request, None, ())
        assert [("a", "1"), ("a", "2"), ("b", "%FF")] == list(request.form.items(multi=True))
        request = ask(PARTS, BOUNDARY, **server)
        message(request, None, ())
        assert ("1", "f.txt", b"file") == (request.form["a"], request.files["f"].filename, request.files["f"].read())


@pytest.mark.scenario(28)
def test_a_chunked_body_that_the_server_can_not_end(app: Flask, ask: Ask) -> None:
    """Where the view could read nothing of a chunked body, the request is refused: two of them would be equal."""
    with app.app_context(), pytest.raises(LengthRequired):
        message(ask(b"abc", length=None), None, ())


@pytest.mark.scenario(28)
def test_chunked_bodies_differ(app: Flask, ask: Ask) -> None:
    """Chunked bodies count as any others do."""
    with app.app_context():
        chunked = [digest(ask(body, terminated=True, length=None, raw=True)) for body in (b"a", b"b", b"")]
        plain = [digest(ask(body)) for body in (b"a", b"b", b"")]
    assert plain == chunked
    assert 3 == len(set(plain))


def test_no_length_at_all(app: Flask, ask: Ask) -> None:
    """A request with neither length nor chunks has an empty body (RFC 9112, section 6.3)."""
    with app.app_context():
        request = ask(b"never sent", length=None)
        del request.environ["HTTP_TRANSFER_ENCODING"]
        assert digest(ask(b"")) == digest(app.request_class(request.environ))


@pytest.mark.parametrize("server", SERVERS[:4])
@pytest.mark.parametrize("sent", [0, 1, IN_MEMORY + 1])
def test_a_body_that_breaks_off(app: Flask, ask: Ask, server: dict[str, Any], sent: int) -> None:
    """A body shorter than was announced is a client that went away, not a request."""
    with app.app_context(), pytest.raises(ClientDisconnected):
        message(ask(b"x" * sent, length=2 * IN_MEMORY, **server), None, ())


READERS: dict[str, Callable[[Request], object]] = {
    "get_data": lambda request: request.get_data(),
    "get_json": lambda request: request.get_json(silent=True),
    "data": lambda request: request.data,
    "form": lambda request: request.form,
    "files": lambda request: request.files,
    "values": lambda request: request.values,
    "form, then get_data": lambda request: (request.form, request.get_data()),
    "form, then data": lambda request: (request.form, request.data),
    "get_data, then form": lambda request: (request.get_data(), request.form),
    "stream, unread": lambda request: request.stream,
}
BODIES: dict[str, list[bytes]] = {
    "application/json": [b'{"a": 1}', b'{"a": 2}', b"{broken", b""],
    "text/plain": [b"abc", b"abd", b""],
    FORM: [b"a=1", b"a=2", b"b=1", b"a=1&a=1", b""],
    BOUNDARY: [PARTS, PARTS.replace(b"file", b"fike"), PARTS.replace(b"f.txt", b"g.txt"), PARTS.replace(b"1", b"2")],
}


@pytest.mark.scenario(29)
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("content_type", BODIES)
@pytest.mark.parametrize("reader", READERS)
def test_a_hook_that_read_before(app: Flask, ask: Ask, server: dict[str, Any], content_type: str, reader: str) -> None:
    """What a hook has read through Flask's own ways makes no difference to the fingerprint, nor to the view."""
    chunked = server.get("length", -1) is None
    with app.app_context():
        fresh = [digest(ask(body, content_type)) for body in BODIES[content_type]]
        assert len(fresh) == len(set(fresh))
        for expected, body in zip(fresh, BODIES[content_type], strict=True):
            if chunked and (reader == "stream, unread" or (not body and reader in ("form", "files", "values"))):
                continue  # whether it was read can't be told: see the next tests
            request, alone = ask(body, content_type, **server), ask(body, content_type, **server)
            READERS[reader](request)
            READERS[reader](alone)
            assert expected == digest(request)
            assert alone.get_data() in (b"", request.get_data())
            assert list(alone.form.items(multi=True)) == list(request.form.items(multi=True))
            files = [[(one.name, one.filename, one.read()) for one in each.files.values()] for each in (alone, request)]
            assert files[0] == files[1]


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("amount", [1, -1])
@pytest.mark.parametrize("how", ["stream", "get_data"])
def test_a_hook_that_took_the_body_away(app: Flask, ask: Ask, server: dict[str, Any], amount: int, how: str) -> None:
    """A body that a hook has read and not kept can't be fingerprinted: an error says what the hook should do."""
    with app.app_context():
        request = ask(b"abc", **server)
        request.stream.read(amount) if how == "stream" else request.get_data(cache=False)
        with pytest.raises(ConfigurationError, match=r"get_data\(\)"):
            message(request, None, ())


def test_a_hook_that_closed_the_body(app: Flask, ask: Ask) -> None:
    """A stream that a hook has closed is one that it took away."""
    with app.app_context():
        request = ask(b"abc", terminated=True)
        request.stream.close()
        with pytest.raises(ConfigurationError):
            message(request, None, ())


@pytest.mark.scenario(28)
@pytest.mark.parametrize(("touch", "body"), [("stream", b"abc"), ("stream", b""), ("form", b"")])
def test_a_chunked_stream_that_was_touched(app: Flask, ask: Ask, touch: str, body: bytes) -> None:
    """Where it can't be told whether a hook has taken a chunked body away, it is refused: two might be "both empty"."""
    with app.app_context():
        request = ask(body, terminated=True, raw=True, length=None)
        getattr(request, touch)
        with pytest.raises(ConfigurationError):
            message(request, None, ())


@pytest.mark.parametrize("body", [b"\xff=1", b"&"])
@pytest.mark.parametrize("server", SERVERS)
def test_a_form_that_was_parsed_to_nothing(app: Flask, ask: Ask, server: dict[str, Any], body: bytes) -> None:
    """A broken form that a hook has parsed counts as the view sees it: without fields."""
    with app.app_context():
        requests = [ask(body, FORM, **server), ask(b"", FORM)]
        assert [{}, {}] == [request.form.to_dict() for request in requests]
        if server.get("length", -1) is not None:
            assert digest(requests[0]) == digest(requests[1])
        else:
            digest(requests[0])


def test_a_form_without_a_boundary(app: Flask, ask: Ask) -> None:
    """A form that can't be parsed goes by its bytes, also after a hook has tried: the view can read them."""
    with app.app_context():
        requests = [ask(body, "multipart/form-data") for body in (b"abc", b"abd", b"abc")]
        assert {} == requests[0].form.to_dict() == requests[1].form.to_dict()
        digests = [digest(request) for request in requests]
        assert digests[0] == digests[2] != digests[1]
        assert b"abc" == requests[0].get_data()


def test_an_empty_body_can_not_be_taken_away(app: Flask, ask: Ask) -> None:
    """Reading an empty body takes nothing from the view."""
    with app.app_context():
        request = ask(b"", raw=True, terminated=True)
        request.stream.read()
        assert digest(ask(b"")) == digest(request)


# Without a file: Werkzeug leaves one open where a limit ends the parsing.
FIELDS = b"".join(b'--xyz\r\nContent-Disposition: form-data; name="%b"\r\n\r\n1\r\n' % name for name in (b"a", b"b"))
FIELDS += b"--xyz--\r\n"

LIMITS: list[dict[str, Any]] = [
    {"MAX_CONTENT_LENGTH": 10},
    {"MAX_CONTENT_LENGTH": len(FIELDS)},
    {"MAX_CONTENT_LENGTH": len(FIELDS) - 1},
    {"MAX_FORM_MEMORY_SIZE": 0},
    {"MAX_FORM_PARTS": 1},
    {},
]


def outcome(function: Callable[[], object]) -> object:
    """What it returns, or the class of the error that it answers with."""
    try:
        return function()
    except HTTPException as error:
        return type(error)


@pytest.mark.scenario(29)
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("way", ["get_data", "form", "stream"])
def test_limits_are_as_without_the_extension(
    app: Flask, ask: Ask, server: dict[str, Any], limits: dict[str, Any], way: str
) -> None:
    """Flask's limits give the same answer as without the extension; a body over the largest is never let through."""

    def read(request: Request) -> object:
        if way == "form":
            return request.form.to_dict()
        return request.get_data() if way == "get_data" else b"".join(iter(lambda: request.stream.read(7), b""))

    def guarded() -> object:
        request = ask(FIELDS, BOUNDARY, **server)
        message(request, None, ())
        return read(request)

    app.config.update(limits)
    with app.app_context():
        alone = outcome(lambda: read(ask(FIELDS, BOUNDARY, **server)))
        over = limits.get("MAX_CONTENT_LENGTH", len(FIELDS)) < len(FIELDS)
        assert (RequestEntityTooLarge if over else alone) == outcome(guarded)


def test_a_limit_that_the_view_sets(app: Flask, ask: Ask) -> None:
    """A view that lowers a limit for itself still gets 413 when it reads."""
    if getattr(Request.max_content_length, "fset", None) is None:
        pytest.skip("this version of Flask has no limits per request")
    with app.app_context():
        request = ask(b"0123456789")
        message(request, None, ())
        request.max_content_length = 5
        with pytest.raises(RequestEntityTooLarge):
            request.get_data()


@pytest.mark.parametrize("size", [IN_MEMORY + 100_000, 3 * IN_MEMORY])
def test_a_refused_body_is_let_go_of(app: Flask, ask: Ask, size: int) -> None:
    """The temporary file of a body that turns out too large is closed."""
    app.config["MAX_CONTENT_LENGTH"] = IN_MEMORY + 90_000
    with app.app_context(), pytest.raises(RequestEntityTooLarge):
        message(ask(b"x" * size, terminated=True, length=None, raw=True), None, ())


def test_a_second_reading(app: Flask, ask: Ask) -> None:
    """The body can be read for a fingerprint once more, as when a decorator calls a refused view again."""
    for data in (b"abc", b"x" * (IN_MEMORY + 1)):
        with app.app_context():
            request = ask(data, raw=True)
            first = digest(request)
            request.get_data(cache=False)
            assert first == digest(request)
            assert data == request.get_data()
            request.environ["wsgi.input"].close()


def test_all_parts_that_have_a_meaning(app: Flask, ask: Ask) -> None:
    """Method, mount point, path, query, type and coding are taken from the request as it came."""
    with app.test_request_context(
        "/caf%C3%A9/x?b=1&a=%20", base_url="http://host/mount", method="PATCH", headers={"Content-Encoding": "gzip"}
    ):
        from flask import request

        found = message(request._get_current_object(), None, ("ts",))  # type: ignore[attr-defined]
    assert ("PATCH", "/mount/café/x", b"b=1&a=%20") == (found.method, found.path, found.query)
    assert ("", "gzip", ("ts",)) == (found.content_type, found.content_encoding, found.leave_out)


def test_a_value_in_place_of_the_body(app: Flask, ask: Ask) -> None:
    """Where an app's callable gave a value, the body is taken in all the same, and there for the view."""
    with app.app_context():
        request = ask(b"abc", raw=True)
        found = message(request, Value(7), ())
        assert (Value(7), b"abc") == (found.body, request.get_data())
        with pytest.raises(ClientDisconnected):
            message(ask(b"abc", raw=True, length=4, terminated=True), Value(7), ())


def test_what_was_kept_of_a_body_that_broke_off(app: Flask, ask: Ask) -> None:
    """What was read before anything of ours, and falls short of what was announced, is no request's body."""
    with app.app_context():
        request = ask(b"abc", length=4, terminated=True, raw=True)
        assert b"abc" == request.get_data()
        with pytest.raises(ClientDisconnected):
            message(request, None, ())


def test_a_callable_where_the_bytes_are_gone(app: Flask, ask: Ask) -> None:
    """Where a form was parsed before anything of ours, its files are where they were when a callable has read them."""
    with app.app_context():
        request = ask(PARTS, BOUNDARY)
        request.files["f"].seek(1)
        with lent(request):
            assert b"ile" == request.files["f"].read()
        assert b"ile" == request.files["f"].read()
        json = ask(b'{"a": 1}', "application/json")
        json.get_json()
        with lent(json):
            json.get_json().pop("a")
        assert {"a": 1} == json.get_json()


def test_a_time_out_while_a_hook_reads(app: Flask, ask: Ask) -> None:
    """Where a time-out that is no Exception broke a hook's reading off, what is left does not pass for the body."""

    class Slow(ServerInput):
        def read(self, size: int = -1) -> bytes:
            data = super().read(size)
            if not data.endswith(b"c"):
                return data
            raise KeyboardInterrupt

    with app.app_context():
        request = ask(b"", length=None, terminated=True)
        request.environ["wsgi.input"] = Slow(b"abc")
        stand_in(request)
        with pytest.raises(KeyboardInterrupt):
            request.get_data()
        with pytest.raises(ClientDisconnected):
            message(request, None, ())


def test_a_stream_that_outlives_its_request(app: Flask, ask: Ask) -> None:
    """An answer that a hook gave, made of the request's stream, is read from the server when the request is over."""
    with app.app_context():
        request = app.request_class(ask(b"abc").environ)
        stand_in(request)
        stream = request.stream
        del request
        gc.collect()
        assert b"abc" == stream.read()


def test_a_form_that_was_parsed(app: Flask, ask: Ask) -> None:
    """A form that a hook has parsed is taken as parsed, and its files stay readable from their start."""
    with app.app_context():
        request = ask(PARTS, BOUNDARY)
        assert request.files["f"]
        found = message(request, None, ())
        fingerprint(found)
    assert isinstance(found.body, Form)
    assert ([("a", "1")], b"file") == (list(found.body.fields), request.files["f"].read())
