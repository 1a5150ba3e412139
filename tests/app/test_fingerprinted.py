"""Which requests are the same, as a client meets it; and that guarded views read all that unguarded ones do."""

from __future__ import annotations

import gc
import gzip
import io
import itertools
import json
import logging
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask, Response, request, stream_with_context
from flask_sqlalchemy import SQLAlchemy
from werkzeug.test import EnvironBuilder, TestResponse, run_wsgi_app

from flask_idempotency import Idempotency, fingerprint
from tests.support.apps import Shop, assert_replayed, close, new_key

REUSED = "urn:problem-type:idempotency:key-reused"
FORM = "application/x-www-form-urlencoded"
#: Above this, a body is kept in a temporary file.
LARGE = 600 * 1024


class ServerInput(io.RawIOBase):
    """A server's input that is made while it is read: so many bytes between a head and a tail."""

    def __init__(self, size: int, head: bytes = b"", tail: bytes = b"") -> None:
        self._parts = iter([head, *[b"x" * 65_536] * (size // 65_536), tail])
        self._left = b""
        self.length = len(head) + size // 65_536 * 65_536 + len(tail)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._left = part
        taken, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


@pytest.fixture
def things(light: Shop) -> Shop:
    """A shop with guarded views that count their runs: POST and PATCH /things, cancelling orders, refunds."""

    @light.app.route("/things", methods=["POST", "PATCH"])
    @light.app.post("/refunds", endpoint="refunds")
    @light.app.post("/orders/<int:order>/cancel", endpoint="cancel")
    @light.idempotency.required
    def things(order: int = 0) -> tuple[dict[str, Any], int]:
        light.runs.append(request.path)
        return {"run": len(light.runs), "path": request.path}, 201

    return light


def send(shop: Shop, key: str | None, path: str = "/things", **options: Any) -> TestResponse:
    """A request to the shop; POST unless said otherwise."""
    headers = {"X-Tenant": "acme", **options.pop("headers", {})}
    if key is not None:
        headers["Idempotency-Key"] = key
    return shop.client.open(path, **{"method": "POST", "buffered": True, "headers": headers, **options})


def text(body: bytes | str, content_type: str = "application/json", **headers: str) -> dict[str, Any]:
    """A request's body of a type."""
    return {"data": body, "content_type": content_type, "headers": headers}


def multipart(
    boundary: str = "b1", content: bytes = b"1,2,3", name: str = "a.csv", kind: str = "text/csv"
) -> dict[str, Any]:
    """An upload."""
    body = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="note"\r\n\r\nhello\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        f"Content-Type: {kind}\r\n\r\n"
    ).encode()
    return text(body + content + f"\r\n--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}")


def chunked(body: bytes, terminated: bool = True) -> dict[str, Any]:
    """A body that is sent in chunks, without a length."""
    environ = {"wsgi.input": io.BytesIO(body), "HTTP_TRANSFER_ENCODING": "chunked"}
    if terminated:
        environ["wsgi.input_terminated"] = True
    return {"environ_overrides": environ, "content_type": "application/json"}


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "JSON members and spacing": (text('{"a":1,"b":[1,2]}'), text(' {"b": [1, 2],\n"a": 1}')),
    "JSON numbers": (text('{"a": 1}'), text('{"a": 1.0e0}')),
    "multipart boundary": (multipart(), multipart("another-boundary")),
    "query order of names": ({"query_string": "a=1&b=2"}, {"query_string": "b=2&a=1"}),
    "form spelling": (text("a=%41&b=+", FORM), text("b=%20&a=A", FORM)),
    "chunks": (text('{"a":1}'), chunked(b'{"a":1}')),
    "chunks again": (chunked(b'{"a":1}'), chunked(b'{ "a": 1}')),
    "rotating headers": (
        text("{}", Authorization="Bearer one", Traceparent="00-1", **{"User-Agent": "a", "X-Request-Id": "1"}),
        text("{}", Authorization="Bearer two", Traceparent="00-2", **{"User-Agent": "b", "X-Request-Id": "2"}),
    ),
    "host": ({"base_url": "http://one.example"}, {"base_url": "https://two.example"}),
}

OTHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "query": ({}, {"query_string": "dry=1"}),
    "query order within a name": ({"query_string": "a=1&a=2"}, {"query_string": "a=2&a=1"}),
    "list order": (text("[1,2]"), text("[2,1]")),
    "large numbers": (text("9007199254740993"), text("9007199254740992")),
    "repeated member": (text('{"a":1,"a":2}'), text('{"a":2}')),
    "file byte": (multipart(), multipart(content=b"1,2,4")),
    "file name": (multipart(), multipart(name="b.csv")),
    "file type": (multipart(), multipart(kind="text/plain")),
    "form bytes": (text("a=%FF", FORM), text("a=%FE", FORM)),
    "repeated fields": (text("a=1&a=2", FORM), text("a=2&a=1", FORM)),
    "chunks": (chunked(b"1"), chunked(b"2")),
    "chunks and nothing": (chunked(b""), chunked(b"1")),
    "method": ({"method": "POST"}, {"method": "PATCH"}),
    "media type": (text(b"1", "text/plain"), text(b"1", "text/csv")),
    "coding": (text("{}"), text("{}", **{"Content-Encoding": "gzip"})),
    "mount point": ({}, {"environ_overrides": {"SCRIPT_NAME": "/v2"}}),
    "bytes": (text(b"\xff\x00", "application/octet-stream"), text(b"\xff\x01", "application/octet-stream")),
}


@pytest.mark.scenario(26, 27, 28, 32)
@pytest.mark.parametrize("name", SAME)
def test_the_same_request_in_other_words(things: Shop, name: str) -> None:
    """A request that means the same gets the replay, in whatever way it is spelled."""
    key = new_key()
    first, retry = (send(things, key, **one) for one in SAME[name])
    assert (201, first.json) == (first.status_code, retry.json)
    assert ("true", 1) == (retry.headers["Idempotent-Replay"], len(things.runs))


@pytest.mark.scenario(25, 26, 27, 28, 33)
@pytest.mark.parametrize("name", OTHER)
def test_another_request_under_a_used_key(things: Shop, name: str) -> None:
    """A request that means something else gets 422, and the first one's record is unharmed."""
    key = new_key()
    first, other, retry = (send(things, key, **one) for one in (*OTHER[name], OTHER[name][0] | {}))
    assert (201, 422, REUSED) == (first.status_code, other.status_code, other.json["type"])
    if "environ_overrides" not in OTHER[name][0]:  # whose stream can be read once
        assert first.json == retry.json
    assert 1 == len(things.runs)


@pytest.mark.scenario(24)
def test_one_key_on_several_routes(things: Shop) -> None:
    """A key used for one order cancels no other, and gets no other route's answer."""
    key = new_key()
    answers = [send(things, key, path) for path in ("/orders/1/cancel", "/orders/2/cancel", "/refunds", "/things")]
    assert [201, 422, 422, 422] == [one.status_code for one in answers]
    assert {REUSED} == {one.json["type"] for one in answers[1:]}
    assert answers[0].json == send(things, key, "/orders/1/cancel").json
    assert ["/orders/1/cancel"] == things.runs


@pytest.mark.parametrize("by", ["host", "subdomain"])
def test_hosts_that_choose_the_view(sqlite_url: str, by: str) -> None:
    """Where a rule takes a part of the host, another one is another request; its case does not count."""
    matching = {"host_matching": True, "static_host": "static"} if by == "host" else {"subdomain_matching": True}
    app = Flask("shop", **matching)  # type: ignore[arg-type]
    app.config.update(SQLALCHEMY_DATABASE_URI=sqlite_url, SERVER_NAME=None if by == "host" else "shop.test")
    db = SQLAlchemy(app)
    idempotency = Idempotency(app, db)
    end = ".shop.test" if by == "host" else ""
    for name in ("<tenant>", "admin"):

        @app.post("/export", endpoint=name, **{by: name + end})
        @idempotency.required(scope="one")
        def export(tenant: str = "") -> str:
            return f"{request.endpoint} {tenant}"

    with app.app_context():
        db.create_all()
    for first in ("admin", "acme"):
        headers, texts = {"Idempotency-Key": new_key()}, {"admin": "admin ", "acme": "<tenant> acme"}
        hosts = [first, first.upper(), *{"admin", "acme", "bolt"} - {first}]
        answers = [
            app.test_client().post("/export", headers=headers, base_url=f"http://{one}.shop.test") for one in hosts
        ]
        assert [200, 200, 422, 422] == [one.status_code for one in answers]
        assert [texts[first]] * 2 == [one.text for one in answers[:2]]
    close(app)


def test_a_host_that_chooses_nothing(things: Shop) -> None:
    """Without such a rule the host does not count: a service that moves to another host keeps its keys."""
    key = new_key()
    first, retry = (send(things, key, base_url=f"http://{host}.test") for host in ("old", "new"))
    assert (201, first.json, "true") == (first.status_code, retry.json, retry.headers.get("Idempotent-Replay"))


@pytest.mark.scenario(28)
def test_chunks_that_the_server_can_not_end(things: Shop) -> None:
    """Where the server does not say where a chunked body ends, it is refused: the view could read nothing of it."""
    answers = [send(things, new_key(), **chunked(body, terminated=False)) for body in (b"1", b"2")]
    assert ([411, 411], [], []) == ([one.status_code for one in answers], things.runs, things.rows())


@pytest.mark.scenario(31)
def test_an_optional_key(light: Shop) -> None:
    """Without a key both requests run and nothing is stored; an empty one is refused; with one, the retry replays."""

    @light.app.post("/optional")
    @light.idempotency.optional
    def optional() -> str:
        light.runs.append("run")
        return str(len(light.runs))

    assert ["1", "2"] == [send(light, None, "/optional").text for _ in range(2)]
    for empty in ("", " ", '""'):
        refused = send(light, empty, "/optional")
        assert (400, "urn:problem-type:idempotency:key-invalid") == (refused.status_code, refused.json["type"])
    assert [] == light.rows()
    key = new_key()
    assert ["3", "3"] == [send(light, key, "/optional").text for _ in range(2)]


READERS: dict[str, Callable[[], Any]] = {
    "json": lambda: request.get_json(silent=True),
    "form": lambda: list(request.form.items(multi=True)),
    "files": lambda: [(one.name, one.filename, one.read().decode()) for one in request.files.values()],
    "values": lambda: list(request.values.items(multi=True)),
    "data": lambda: request.data.decode("latin-1"),
    "get_data": lambda: request.get_data().decode("latin-1"),
    "stream": lambda: request.stream.read().decode("latin-1"),
    "chunks of the stream": lambda: [one.decode("latin-1") for one in iter(lambda: request.stream.read(3), b"")],
    "lines of the stream": lambda: [one.decode("latin-1") for one in request.stream],
    "form, then data": lambda: [request.form.to_dict(), request.data.decode("latin-1")],
    "data, then json": lambda: [request.data.decode("latin-1"), request.get_json(silent=True)],
    "get_data, then form": lambda: [request.get_data().decode("latin-1"), request.form.to_dict()],
}

REQUESTS: dict[str, dict[str, Any]] = {
    "JSON": text('{"a": [1, "ü"]}'),
    "form": text("a=1&a=2&b=%FF", FORM),
    "upload": multipart(),
    "bytes": text(bytes(range(256)), "application/octet-stream"),
    "large": text(b"line\n" * (LARGE // 5), "text/plain"),
    "large JSON": text(json.dumps(["x" * LARGE])),
    "large upload": multipart(content=b"x" * LARGE),
    "nothing": {},
}


@pytest.fixture
def twins(light: Shop) -> Shop:
    """A shop with a guarded and an unguarded view that read the request as the argument says."""

    def read() -> dict[str, Any]:
        return {"read": READERS[request.args["how"]]()}

    light.app.add_url_rule("/bare", "bare", read, methods=["POST"])
    light.app.add_url_rule("/guarded", "guarded", light.idempotency.required(read), methods=["POST"])
    light.app.config["MAX_FORM_MEMORY_SIZE"] = 10**7
    return light


@pytest.mark.scenario(29)
@pytest.mark.parametrize("name", REQUESTS)
def test_views_read_everything(twins: Shop, name: str) -> None:
    """A guarded view reads JSON, forms, files, data and streams as an unguarded one does."""
    for how in READERS:
        options = {"query_string": {"how": how}, **REQUESTS[name]}
        bare, guarded = send(twins, None, "/bare", **options), send(twins, new_key(), "/guarded", **options)
        assert (how, 200, bare.data) == (how, guarded.status_code, guarded.data)


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("content_type", [None, "application/json", FORM])
def test_hooks_that_look_for_a_body_where_none_is(things: Shop, content_type: str | None, terminated: bool) -> None:
    """A request without a body is served, whatever hooks have looked for in it, and in whichever order."""
    reading: dict[str, Callable[[], Any]] = {
        "form": lambda: request.form,
        "values": lambda: request.values,
        "stream": lambda: request.stream.read(),
        "get_json": lambda: request.get_json(silent=True),
        "get_data": lambda: request.get_data(),
    }
    looked: list[str] = []

    @things.app.before_request
    def look() -> None:
        for name in looked:
            reading[name]()

    without = {"CONTENT_LENGTH": "", **({"wsgi.input_terminated": True} if terminated else {})}
    for order in itertools.permutations(reading, 2):
        looked[:] = order
        key = new_key()
        answers = [send(things, key, content_type=content_type, environ_overrides=one) for one in (without, {})]
        assert (order, [201, 201]) == (order, [one.status_code for one in answers])
        assert_replayed(answers[1], answers[0])


class Summed(io.RawIOBase):
    """A stream of a hook's own, that sums up what is read of it."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.sum = stream, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read(len(buffer))
        buffer[: len(data)] = data
        self.sum += sum(data)
        return len(data)


@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"fingerprint": lambda asked: asked.stream.read().hex()}])
@pytest.mark.parametrize("size", [2, LARGE])
def test_a_stream_of_a_hooks_own(twins: Shop, options: dict[str, Any], size: int) -> None:
    """A stream that a hook put in the place of the request's is what the view reads, and what counts."""
    wrapping: list[Callable[[], Any]] = []

    @twins.app.before_request
    def wrap() -> None:
        request.stream = wrapping[0]()  # type: ignore[misc]

    def view() -> dict[str, Any]:
        return {"read": len(request.stream.read()), "sum": getattr(request.stream, "sum", None)}

    guards = [lambda view: view, twins.idempotency.required(**options), twins.idempotency.optional(**options)]
    for name, guarded in zip(("plain", "required", "optional"), guards, strict=True):
        twins.app.add_url_rule(f"/own/{name}", name, guarded(view), methods=["POST"])
    for wrapping[:] in (
        [lambda: gzip.GzipFile(fileobj=request.stream)],
        [lambda: Summed(request.stream)],
        [lambda: io.BytesIO(b"another")],
    ):
        key, sent = new_key(), gzip.compress(b"x" * size)
        plain = send(twins, None, "/own/plain", data=sent)
        asked = [(key, "/own/required"), (key, "/own/required"), (None, "/own/optional")]
        answers = [send(twins, key, path, data=sent) for key, path in asked]
        assert [plain.data] * 3 == [one.data for one in answers]
        assert_replayed(answers[1], answers[0])


def test_a_middleware_that_reads_on(twins: Shop) -> None:
    """Who reads the server's input when the request is over finds it as the server left it, whatever its size."""
    inner, left = twins.app.wsgi_app, []

    def drain(environ: dict[str, Any], start_response: Any) -> Any:
        answer = inner(environ, start_response)
        left.append(environ["wsgi.input"].read())
        return answer

    twins.app.wsgi_app = drain  # type: ignore[method-assign]
    for size in (2, LARGE):
        assert 200 == send(twins, new_key(), "/guarded", data=b"x" * size, query_string={"how": "data"}).status_code
    assert b"" == b"".join(left)


def test_a_hook_that_answers_with_the_body(twins: Shop) -> None:
    """A hook may send back what it reads of a large body while its answer is sent."""

    @twins.app.before_request
    def echo() -> Response:
        head = request.stream.read(4)
        return Response(stream_with_context(itertools.chain([head], iter(lambda: request.stream.read(65_536), b""))))

    sent = b"head" + b"x" * LARGE
    assert sent == send(twins, new_key(), "/guarded", data=sent).data


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("get_data", lambda: request.get_data()),
        ("data", lambda: request.data),
        ("form", lambda: request.form),
        ("values", lambda: request.values),
        ("form, then get_data", lambda: (request.form, request.get_data())),
        ("get_json", lambda: request.get_json(silent=True)),
    ],
)
def test_a_hook_that_has_read_the_body(things: Shop, name: str, hook: Callable[[], Any]) -> None:
    """Whatever a hook has read before, other bodies are other requests and the same ones are the same."""

    @things.app.before_request
    def read() -> None:
        hook()

    pairs = [
        (text('{"amount":100}'), text('{"amount":900}'), text('{"amount": 100}')),
        (text("amount=100", FORM), text("amount=900", FORM), text("amount=%3100", FORM)),
        (multipart(content=b"100"), multipart(content=b"900"), multipart("b2", content=b"100")),
    ]
    for requests in pairs:
        key = new_key()
        answers = [send(things, key, **one) for one in requests]
        assert [201, 422, 201] == [one.status_code for one in answers]
        assert answers[0].json == answers[2].json
    assert len(pairs) == len(things.runs)


TAKING: list[Callable[[], Any]] = [
    lambda: request.stream.read(),
    lambda: request.stream.read(1),
    lambda: request.get_data(cache=False),
]


@pytest.mark.parametrize("hook", TAKING)
def test_a_hook_that_reads_the_stream(things: Shop, hook: Callable[[], Any]) -> None:
    """What a hook has read and not kept counts all the same; the view sees as little of it as without a guard."""
    things.app.before_request(lambda: (hook(), None)[1])
    things.app.post("/bare", endpoint="bare")(lambda: request.get_data())
    things.app.post("/left", endpoint="left")(things.idempotency.required(lambda: request.get_data()))
    key = new_key()
    bare, left = (send(things, key, path, **text('{"a": 1}')) for path in ("/bare", "/left"))
    assert (bare.data, 200) == (left.data, left.status_code)
    assert [200, 422] == [send(things, key, "/left", **text(body)).status_code for body in ('{"a":1}', '{"a":2}')]


@pytest.mark.parametrize("early", TAKING)
def test_a_body_that_is_gone_before_any_hook(
    things: Shop, early: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A request whose body is gone before the first hook is not run: the app's own 500 says what to call instead."""
    things.app.url_value_preprocessor(lambda endpoint, values: (early(), None)[1])
    assert 500 == send(things, new_key(), **text("{}")).status_code
    assert "request.get_data()" in caplog.text
    assert ([], []) == (things.runs, things.rows())


@pytest.mark.parametrize("content_type", [FORM, "multipart/form-data; boundary=b"])
def test_broken_forms(things: Shop, content_type: str) -> None:
    """Broken forms that a hook has parsed, to the same or to nothing, count by their bytes."""
    things.app.before_request(lambda: (request.form, None)[1])
    for one, other in ((b"a=\xff", b"a=\xfe"), (b"\xff=1", b"\xff=2"), (b"--b\r\nx", b"--b\r\ny"), (b"&", b"")):
        key = new_key()
        bodies = [{"data": data, "content_type": content_type} for data in (one, other, one)]
        if content_type == FORM and one == b"&":
            continue  # no field is no field
        assert [201, 422, 201] == [send(things, key, **body).status_code for body in bodies]


def test_a_body_that_breaks_off(things: Shop) -> None:
    """A body shorter than announced is a client that went away: 400, nothing stored, and the key stays free."""
    key = new_key()
    cut = send(things, key, data=b'{"a"', content_type="application/json", environ_overrides={"CONTENT_LENGTH": "9"})
    assert (400, [], []) == (cut.status_code, things.runs, things.rows())
    assert 201 == send(things, key, **text('{"a": 1}')).status_code


@pytest.mark.scenario(30)
def test_an_older_fingerprint(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row written under an older version is compared by that version: replay for the same, 422 for another."""
    monkeypatch.setitem(fingerprint.VERSIONS, 0, lambda message: message.body.read().hex().rjust(64, "0")[-64:])
    key = new_key()
    first = shop.charge(key, amount=100)
    old = {"fingerprint_version": 0, "request_fingerprint": b'{"amount": 100}'.hex().rjust(64, "0")}
    shop.execute(shop.table.update().values(**old))
    retry, other = shop.charge(key, amount=100), shop.charge(key, amount=900)
    assert (first.data, "true") == (retry.data, retry.headers["Idempotent-Replay"])
    assert (422, REUSED, 1) == (other.status_code, other.json["type"], len(shop.runs))


@pytest.mark.scenario(30)
def test_a_fingerprint_of_the_future(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """A row of a version that this release does not know is no answer and no licence to run: 503, and a log record."""
    key = new_key()
    shop.charge(key)
    shop.execute(shop.table.update().values(fingerprint_version=99))
    retry = shop.charge(key)
    assert (503, "urn:problem-type:idempotency:store-unavailable") == (retry.status_code, retry.json["type"])
    assert "99" in caplog.text
    assert 1 == len(shop.runs) == len(shop.rows())


class TestOption:
    """``IDEMPOTENCY_FINGERPRINT``."""

    @pytest.mark.parametrize("names", [["sent_at", "/meta/nonce"], "sent_at,/meta/nonce"])
    def test_members_to_leave_out(self, make_light: Callable[..., Shop], names: Any) -> None:
        """JSON members that are named do not count; all others do."""
        shop = make_light(fingerprint=names)
        key = new_key()

        def body(amount: int, moment: int) -> dict[str, Any]:
            return {"amount": amount, "sent_at": moment, "meta": {"nonce": moment, "kept": 1}}

        first, retry, other = (send(shop, key, "/charges", json=one) for one in (body(1, 1), body(1, 2), body(2, 1)))
        assert (first.data, 201, 422) == (retry.data, retry.status_code, other.status_code)

    @pytest.mark.parametrize(
        "own",
        [
            lambda: request.get_json()["amount"],
            lambda asked: {"amount": asked.get_json()["amount"]},
            lambda asked: [asked.headers["X-Tenant"], asked.get_json()["amount"]],
        ],
    )
    def test_a_callable(self, make_light: Callable[..., Shop], own: Callable[..., Any]) -> None:
        """What the callable gives counts in place of the body, beside method, path and query."""
        shop = make_light(fingerprint=own)
        key = new_key()
        bodies = ({"amount": 1, "other": 1}, {"other": 2, "amount": 1.0}, {"amount": 2, "other": 1})
        first, retry, other = (send(shop, key, "/charges", json=one) for one in bodies)
        assert (first.data, 201, 422) == (retry.data, retry.status_code, other.status_code)
        assert 422 == send(shop, key, "/charges?dry=1", json=bodies[0]).status_code

    def test_a_callable_for_one_view(self, light: Shop) -> None:
        """A view's own option wins over the app's."""

        @light.app.post("/one")
        @light.idempotency.required(fingerprint=lambda: None)
        def one() -> str:
            light.runs.append("run")
            return "one"

        key = new_key()
        assert ["one", "one"] == [send(light, key, "/one", data=body).text for body in (b"1", b"2")]
        assert 1 == len(light.runs)


def upload(shop: Shop, key: str, size: int, form: bool) -> tuple[int, bytes]:
    """Send a body that is made while it is read, and take in the answer."""
    head = b'--b\r\nContent-Disposition: form-data; name="f"; filename="big"\r\n\r\n' if form else b""
    body = ServerInput(size, head, b"\r\n--b--\r\n" if form else b"")
    builder = EnvironBuilder("/upload", method="POST", headers={"X-Tenant": "acme", "Idempotency-Key": key})
    environ = builder.get_environ()
    environ["wsgi.input"], environ["CONTENT_LENGTH"] = body, str(body.length)
    environ["CONTENT_TYPE"] = "multipart/form-data; boundary=b" if form else "application/octet-stream"
    chunks, status, _ = run_wsgi_app(shop.app, environ, buffered=True)
    return int(status.split()[0]), b"".join(chunks)


@pytest.fixture
def uploads(light: Shop) -> Shop:
    """A shop whose guarded view at /upload counts the bytes of a file or a body; ``runs`` has the streams it read."""

    @light.app.post("/upload")
    @light.idempotency.required
    def take() -> dict[str, int]:
        light.runs.append(request.environ["wsgi.input"])
        source = request.files["f"].stream if request.files else request.stream
        return {"bytes": sum(len(one) for one in iter(lambda: source.read(65_536), b""))}

    return light


@pytest.mark.scenario(29)
@pytest.mark.parametrize("form", [False, True])
def test_a_large_upload(uploads: Shop, form: bool) -> None:
    """Memory stays flat for an upload of 64 MiB, first and retried, and nothing of it is left open."""
    size, key = 64 * 1024 * 1024, new_key()
    assert 200 == upload(uploads, new_key(), LARGE, form)[0]  # so that imports and caches don't count
    gc.collect()
    tracemalloc.start()
    try:
        answers = [upload(uploads, key, size, form) for _ in range(2)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(200, size), (200, size)] == [(status, json.loads(body)["bytes"]) for status, body in answers]
    assert peak < 8 * 1024 * 1024
    assert [True, True] == [stream.closed for stream in uploads.runs]
    assert 422 == upload(uploads, key, size // 2, form)[0]
    gc.collect()  # a file left open would be a ResourceWarning


@pytest.mark.parametrize("ending", ["answer", "replay", "mismatch", "invalid", "error", "abort"])
def test_the_temporary_file_is_closed(uploads: Shop, ending: str) -> None:
    """However a request with a large body ends, its file is closed, though the client never closes the answer."""
    seen = []

    @uploads.app.teardown_request
    def see(error: BaseException | None) -> None:
        seen.append(request.environ["wsgi.input"])

    @uploads.app.post("/ending")
    @uploads.idempotency.required
    def end() -> Any:
        if ending == "error":
            raise ZeroDivisionError
        return ("", 410) if ending == "abort" else "text"

    key = new_key()
    bodies = {"replay": [b"x", b"x"], "mismatch": [b"x", b"y"]}.get(ending, [b"x"])
    for body in bodies:
        send(uploads, "short" if ending == "invalid" else key, "/ending", data=body * LARGE, buffered=False)
    assert len(bodies) == len(seen)
    assert ending == "invalid" or all(one.closed for one in seen)


def test_the_body_after_the_request(things: Shop) -> None:
    """A test that keeps the client's request can look at its body afterwards, though the view did not read it."""
    with things.client as client:
        headers = {"X-Tenant": "acme", "Idempotency-Key": new_key()}
        assert 201 == client.post("/things", json={"a": 1}, headers=headers).status_code
        assert {"a": 1} == request.get_json()


@pytest.mark.parametrize("status", [200, 503])
def test_a_stream_that_reads_the_request(light: Shop, status: int) -> None:
    """An answer made while it goes out can still read the body, whose file is closed when it has passed."""
    seen = []

    @light.app.post("/echo")
    @light.idempotency.required(max_body=LARGE)
    def echo() -> Response:
        def generate() -> Iterator[bytes]:
            seen.append(request.environ["wsgi.input"])
            yield from iter(lambda: request.stream.read(65_536), b"")

        return Response(stream_with_context(generate()), status)

    key = new_key()
    body = b"0123456789" * (LARGE // 10)
    first = send(light, key, "/echo", data=body, buffered=False)
    assert [False] == [one.closed for one in seen]
    assert body == first.data
    first.close()
    assert [True] == [one.closed for one in seen]
    assert body == send(light, key, "/echo", data=body).data
    assert (1 if status == 200 else 2) == len(seen)


def test_a_decorator_that_calls_again(light: Shop) -> None:
    """A decorator that calls a refused view once more finds the body as it was, however large."""
    key = new_key()

    def insist(view: Callable[[], Any]) -> Callable[[], Any]:
        def again() -> Any:
            try:
                return view()
            except Exception:
                light.execute(light.table.delete())  # what was in the way is gone
                return view()

        return again

    @light.app.post("/twice")
    @insist
    @light.idempotency.required
    def twice() -> bytes:
        light.runs.append("run")
        return request.get_data()[:3]

    for body in (b"abc", b"def" * LARGE, b"ghi"):
        assert body[:3] == send(light, key, "/twice", data=body).data
    assert 3 == len(light.runs)


@pytest.mark.scenario(32)
def test_a_refreshed_token_of_the_same_account(light: Shop) -> None:
    """With a scope loader that names the account, a retry with a new token is the same request of the same caller."""
    key = new_key()
    first, retry = (
        light.charge(key, headers={"Authorization": f"Bearer {token}"}) for token in ("token-one", "token-two")
    )
    assert (first.data, "true", 1) == (retry.data, retry.headers["Idempotent-Replay"], len(light.runs))
    logging.getLogger("flask_idempotency").debug("nothing of a token is stored: %s", light.rows())
    assert "token" not in str([row["scope"] for row in light.rows()])
