"""A guarded view reads, and answers, what the same view does without a guard, whatever the request and its limits."""

from __future__ import annotations

import contextlib
import gc
import gzip
import io
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask, Request, Response, request, stream_with_context
from werkzeug.exceptions import ClientDisconnected, UnsupportedMediaType
from werkzeug.test import EnvironBuilder, run_wsgi_app

from tests.support.apps import Shop, new_key

FORM = "application/x-www-form-urlencoded"
FIELDS = (
    b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
    b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xc3\xbc and more\r\n'
)
FILE = b'--b\r\nContent-Disposition: form-data; name="f"; filename="f.txt"\r\nContent-Type: text/plain\r\n\r\nfile\r\n'
PARTS = FIELDS + FILE + b"--b--\r\n"

#: Type and bytes of a request's body, and further headers.
BODIES: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "JSON": ("application/json", b'{"a": [1, "\xc3\xbc"], "b": 1e2}', {}),
    "JSON of another type": ("application/merge-patch+json", b'{"a": null, "b": 1, "c": 22222222}', {}),
    "broken JSON": ("application/json", b'{"a": [1, 2, 3, 4, 5, 6, 7', {}),
    "JSON in Latin-1": ("application/json; charset=latin-1", b'{"a": "\xfc", "b": "cccccccc"}', {}),
    "coded JSON": ("application/json", gzip.compress(b'{"a": 1}', mtime=0), {"Content-Encoding": "gzip"}),
    "form": (FORM, b"a=1&a=2&b=%FF&c&d=+&e=%C3%BC&f", {}),
    "form in Latin-1": (FORM + "; charset=latin-1", b"a=\xfc&a=2&b=%FF&c&d=++++", {}),
    "parts": ("multipart/form-data; boundary=b", PARTS, {}),
    "parts of another boundary": ("multipart/form-data; boundary=c", PARTS, {}),
    "parts without a boundary": ("multipart/form-data", PARTS, {}),
    "fields": ("multipart/form-data; boundary=b", FIELDS + b"--b--\r\n", {}),
    "fields without an end": ("multipart/form-data; boundary=b", FIELDS[:-8], {}),
    "bytes": ("application/octet-stream", bytes(range(256)), {}),
    "text": ("text/plain; charset=utf-8", b"line\nline\nline\nline\nline", {}),
    "untyped": ("", b"a=1, whatever it may be", {}),
    "empty JSON": ("application/json", b"", {}),
    "empty parts": ("multipart/form-data; boundary=b", b"", {}),
    "empty form": (FORM, b"", {}),
    "nothing": ("", b"", {}),
}

#: Those for which there are limits. Without a file: Werkzeug leaves one open where a limit ends the parsing.
LIMITED = ["JSON", "form", "fields", "fields without an end", "bytes"]


def files() -> list[Any]:
    """What was uploaded."""
    listed = request.files.items(multi=True)
    return [(name, one.filename, one.content_type, one.read().decode("latin-1")) for name, one in listed]


READERS: dict[str, Callable[[], Any]] = {
    "json": lambda: request.json,
    "get_json": lambda: request.get_json(force=True, silent=True),
    "form": lambda: list(request.form.items(multi=True)),
    "files": files,
    "values": lambda: list(request.values.items(multi=True)),
    "data": lambda: request.data.decode("latin-1"),
    "get_data": lambda: request.get_data(cache=False).decode("latin-1"),
    "parsed data": lambda: [request.get_data(parse_form_data=True).decode("latin-1"), request.form.to_dict()],
    "stream": lambda: request.stream.read().decode("latin-1"),
    "pieces": lambda: [one.decode("latin-1") for one in iter(lambda: request.stream.read(5), b"")],
    "lines": lambda: [one.decode("latin-1") for one in request.stream],
    "stream twice": lambda: [request.stream.read().decode("latin-1"), request.stream.read().decode("latin-1")],
    "form, then data": lambda: [list(request.form.items(multi=True)), files(), request.data.decode("latin-1")],
    "data, then form": lambda: [request.get_data().decode("latin-1"), list(request.form.items(multi=True)), files()],
    "nothing": lambda: None,
}

#: Whether there is a length, and what the server says of the input's end. Werkzeug looks whether it says anything.
SERVERS: dict[str, tuple[bool, bool | None]] = {
    "length": (True, None),
    "length, terminated": (True, True),
    "length, not terminated": (True, False),
    "chunked": (False, True),
}

#: What a body may be, given its size: just allowed, and, with a blank behind the name, too much.
LIMITS: dict[str, Callable[[int], int]] = {
    "max_content_length": lambda size: size,
    "max_content_length ": lambda size: size - 1,
    "max_form_memory_size": lambda size: size,
    "max_form_memory_size ": lambda size: 10,
    "max_form_parts": lambda size: 2,
    "max_form_parts ": lambda size: 1,
}


class ServerInput:
    """A server's input as gunicorn's is: it can be read, and nothing else."""

    def __init__(self, data: bytes) -> None:
        self._stream = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._stream.read(size)

    def readline(self, size: int = -1) -> bytes:
        return self._stream.readline(size)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._stream)


def ask(shop: Shop, path: str, body: str, server: str, how: str, limits: dict[str, int]) -> tuple[str, bytes]:
    """Send a request as a server would; the status and body of the answer."""
    content_type, data, headers = BODIES[body]
    headers = {**headers, "X-Tenant": "acme", "Idempotency-Key": new_key(), "X-Limits": json.dumps(limits)}
    path, _, query = path.partition("?")
    asked = f"{query}&how={how}" if query else {"how": how}
    environ = EnvironBuilder(path, method="POST", query_string=asked, headers=headers).get_environ()
    with_length, terminated = SERVERS[server]
    environ |= {"CONTENT_TYPE": content_type, "wsgi.input": ServerInput(data)}
    environ |= {"CONTENT_LENGTH": str(len(data))} if with_length else {"HTTP_TRANSFER_ENCODING": "chunked"}
    if terminated is not None:
        environ["wsgi.input_terminated"] = terminated
    chunks, status, _ = run_wsgi_app(shop.app, environ, buffered=True)
    return status, b"".join(chunks)


@pytest.fixture
def twins(light: Shop) -> Shop:
    """A shop with a guarded and an unguarded view that read the request as the argument says."""

    @light.app.before_request
    def limit() -> None:
        for name, value in json.loads(request.headers["X-Limits"]).items():
            setattr(request, name, value)

    def read() -> dict[str, Any]:
        return {"read": READERS[request.args["how"]]()}

    light.app.add_url_rule("/bare", "bare", read, methods=["POST"])
    light.app.add_url_rule("/guarded", "guarded", light.idempotency.required(read), methods=["POST"])
    return light


@pytest.mark.scenario(29)
@pytest.mark.parametrize("server", ["length", "chunked"])
def test_what_is_read(twins: Shop, server: str) -> None:
    """Whatever the body, its guarded view reads the same, in each way of reading, and fails in the same way."""
    for body, how in itertools.product(BODIES, READERS):
        bare, guarded = (ask(twins, path, body, server, how, {}) for path in ("/bare", "/guarded"))
        assert (body, how, bare) == (body, how, guarded)


@pytest.mark.scenario(29)
@pytest.mark.parametrize("where", ["config", "hook"])
@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_refused(twins: Shop, limit: str, where: str) -> None:
    """Limits of the app, and those that a hook sets for one request, act as without a guard.

    A body over the largest is refused for good, also where the view would not have looked at it, or would have been
    given the beginning of a chunked one as if it were all.
    """
    if where == "hook" and getattr(Request.max_content_length, "fset", None) is None:
        pytest.skip("this version of Flask has no limits per request")
    name = limit.strip()
    if where == "config" and name.upper() not in Flask.default_config and name != "max_content_length":
        pytest.skip("this version of Flask has no such key")
    over = limit == "max_content_length "
    statuses = set()
    for body, server in itertools.product(LIMITED, SERVERS):
        value = LIMITS[limit](len(BODIES[body][1]))
        limits = {name: value} if where == "hook" else {}
        twins.app.config.update({name.upper(): value} if where == "config" else {})
        for how in ("json", "form", "get_data", "stream", "data, then form", "nothing"):
            bare, guarded = (ask(twins, path, body, server, how, limits) for path in ("/bare", "/guarded"))
            if over and bare[0] != guarded[0]:
                assert (body, server, how, 413) == (body, server, how, int(guarded[0][:3]))
            else:
                assert (body, server, how, bare) == (body, server, how, guarded)
            statuses.add(guarded[0][:3])
    assert limit == name or "413" in statuses
    assert not over or ({"413"}, []) == (statuses, twins.rows())


@pytest.mark.parametrize(
    ("option", "looks"),
    [
        *(("key", looks) for looks in ("json", "form", "files", "data", "get_data", "pieces")),
        *(("scope", looks) for looks in ("json", "stream")),
        *(("fingerprint", looks) for looks in ("files", "stream", "nothing")),
    ],
)
def test_a_callable_that_looks_first(twins: Shop, option: str, looks: str) -> None:
    """What a callable of the app's reads of a body, the view can read too, as if nobody had looked before."""

    def look(asked: Request) -> str:
        if asked.is_json or looks != "json":
            READERS[looks]()
        return asked.headers["Idempotency-Key"]

    def read() -> dict[str, Any]:
        return {"read": READERS[request.args["how"]]()}

    view = twins.idempotency.required(**{option: look})(read)
    twins.app.add_url_rule("/looked", "looked", view, methods=["POST"])
    for body, server in itertools.product(["JSON", "form", "parts", "bytes", "nothing"], ["length", "chunked"]):
        if (body, looks) == ("nothing", "json"):
            continue
        for how in ("json", "files", "data", "stream", "data, then form"):
            bare, looked = (ask(twins, path, body, server, how, {}) for path in ("/bare", "/looked"))
            assert (body, server, how, bare) == (body, server, how, looked)


@pytest.mark.parametrize("looks", ["json", "get_data", "stream", "nothing"])
def test_a_callable_that_swallows(twins: Shop, looks: str) -> None:
    """A body that is too large, and whose beginning a careless callable has read, does not pass for a shorter one."""
    # What is left of a chunked body, when it has turned out too large, would not be.
    twins.app.config["MAX_CONTENT_LENGTH"] = len(BODIES["JSON"][1]) - 3

    def look() -> str:
        with contextlib.suppress(Exception):
            READERS[looks]()
        return request.headers["Idempotency-Key"]

    view = twins.idempotency.required(key=look)(lambda: "ran")
    twins.app.add_url_rule("/looked", "looked", view, methods=["POST"])
    for server in SERVERS:
        assert "413" == ask(twins, "/looked", "JSON", server, "nothing", {})[0][:3]
    assert [] == twins.rows()


HOOKS = ["form", "stream of it", "json", "get_data", "pieces"]


@pytest.mark.parametrize("option", ["key", "scope", "fingerprint"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_callable_after_a_hook(twins: Shop, hook: str, option: str) -> None:
    """Whatever a hook has touched before, what a callable reads, takes out or closes is there for the view as ever."""

    def look(asked: Request) -> str:
        CALLABLES[asked.args["looks"]](asked)
        return asked.headers["Idempotency-Key"]

    @twins.app.before_request
    def touch() -> None:
        with contextlib.suppress(UnsupportedMediaType):
            {**READERS, "stream of it": lambda: request.stream}[hook]()

    view = twins.idempotency.required(**{option: look})(lambda: {"read": READERS[request.args["how"]]()})
    twins.app.add_url_rule("/looked", "looked", view, methods=["POST"])
    for body in ("JSON", "form", "parts"):
        for how in ("json", "stream", "form, then data"):
            bare = ask(twins, "/bare", body, "length, terminated", how, {})
            for looks in CALLABLES:
                looked = ask(twins, f"/looked?looks={looks}", body, "length, terminated", how, {})
                assert (body, how, looks, bare) == (body, how, looks, looked)


CALLABLES: dict[str, Callable[[Request], Any]] = {
    "nothing": lambda asked: None,
    "stream": lambda asked: asked.stream.read(5),
    "input": lambda asked: asked.environ["wsgi.input"].read(),
    "get_data": lambda asked: asked.get_data(),
    "data": lambda asked: asked.data,
    "pop": lambda asked: (asked.get_json(silent=True) or {}).pop("a", None),
    "files": lambda asked: [one.read() for one in asked.files.values()],
    "close": lambda asked: [one.close() for one in asked.files.values()],
}


def test_what_a_hook_put_into_json(light: Shop) -> None:
    """A callable sees what a hook has put into the parsed JSON, and the view sees that, and nothing of the callable."""

    @light.app.before_request
    def put() -> None:
        request.get_json()["tenant"] = "acme"

    def take(asked: Request) -> Any:
        return asked.get_json().pop("tenant"), asked.get_json().pop("a")

    light.app.post("/x")(light.idempotency.required(fingerprint=lambda asked: list(take(asked)))(request_json))
    sent = light.client.post("/x", json={"a": 1}, headers={"X-Tenant": "acme", "Idempotency-Key": new_key()})
    assert {"a": 1, "tenant": "acme"} == sent.json


def test_json_too_deep_to_be_copied(light: Shop) -> None:
    """JSON that a hook has parsed, and that is too deep to be copied for a callable, is parsed anew for it."""
    light.app.before_request(lambda: (request.get_json(), None)[1])
    seen = []
    own = lambda asked: seen.append(asked.get_json()) or "1"  # noqa: E731 - it takes the request
    light.app.post("/x")(light.idempotency.required(fingerprint=own)(lambda: str(len(request.get_json()))))
    data = "[" * 500 + "]" * 500
    headers = {"X-Tenant": "acme", "Idempotency-Key": new_key()}
    sent = light.client.post("/x", data=data, content_type="application/json", headers=headers)
    assert ("1", 1) == (sent.text, len(seen[0]))


def request_json() -> Any:
    """A view that gives back what it got."""
    return request.get_json()


def test_an_input_of_a_hooks_own(light: Shop) -> None:
    """A body that a hook puts in the sent one's place, decoded say, is the one that counts and that the view reads."""

    @light.app.before_request
    def decode() -> None:
        plain = gzip.decompress(request.stream.read())
        request.__dict__.pop("stream")
        request.environ |= {"wsgi.input": io.BytesIO(plain), "CONTENT_LENGTH": str(len(plain))}

    light.app.post("/x")(light.idempotency.required(lambda: request.get_data()))
    headers = {"X-Tenant": "acme", "Idempotency-Key": new_key()}
    bodies = [gzip.compress(text, mtime=time) for text, time in ((b"one", 0), (b"one", 1), (b"two", 0))]
    answers = [light.client.post("/x", data=body, headers=headers) for body in bodies]
    assert [(200, b"one"), (200, b"one")] == [(one.status_code, one.data) for one in answers[:2]]
    assert 422 == answers[2].status_code


@pytest.mark.parametrize("terminated", [None, True])
@pytest.mark.parametrize("options", [{}, {"fingerprint": lambda: "1"}, {"fingerprint": lambda: "1", "atomic": True}])
@pytest.mark.parametrize("hook", ["nothing", "get_data", "get_json", "form", "pieces", "swallows"])
def test_an_upload_that_breaks_off(light: Shop, hook: str, options: dict[str, Any], terminated: bool | None) -> None:
    """A body shorter than announced is no request, whoever reads it first: 400, nothing kept, the retry runs."""

    @light.app.before_request
    def read() -> None:
        with contextlib.suppress(*([ClientDisconnected] if hook == "swallows" else [])):
            READERS["get_data" if hook == "swallows" else hook]()

    @light.app.post("/x")
    @light.idempotency.required(**options)
    def run() -> tuple[str, int]:
        light.runs.append("run")
        return "", 201

    content_type, data, _ = BODIES["parts" if hook == "form" else "JSON"]
    key = new_key()

    def send(sent: bytes) -> str:
        headers = {"X-Tenant": "acme", "Idempotency-Key": key}
        environ = EnvironBuilder("/x", method="POST", headers=headers, content_type=content_type).get_environ()
        environ |= {"wsgi.input": ServerInput(sent), "CONTENT_LENGTH": str(len(data))}
        environ |= {"wsgi.input_terminated": True} if terminated else {}
        return run_wsgi_app(light.app, environ, buffered=True)[1]

    assert ("400 BAD REQUEST", [], []) == (send(data[:-5]), light.runs, light.rows())
    assert ("201 CREATED", ["run"]) == (send(data), light.runs)


def test_a_chunked_body_without_an_end(light: Shop) -> None:
    """Where the server can't tell a chunked body's end, it is refused also where a callable stands for the body."""
    light.app.post("/x")(light.idempotency.required(fingerprint=lambda: "1")(lambda: ""))
    headers = {"X-Tenant": "acme", "Idempotency-Key": new_key(), "Transfer-Encoding": "chunked"}
    environ = {"wsgi.input": ServerInput(b"abc"), "CONTENT_LENGTH": ""}
    assert 411 == light.client.post("/x", headers=headers, environ_overrides=environ).status_code
    assert [] == light.rows()


@pytest.mark.parametrize("kind", ["unguarded", "no key", "other method", "disabled"])
def test_the_servers_own_input(make_light: Callable[..., Shop], kind: str) -> None:
    """A view that runs without a guard, or with none of its claims, reads what the server gives: nothing is copied."""
    given = ServerInput(b"x" * 1_000_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        light = make_light(enabled=kind != "disabled")

    def view() -> str:
        return str(request.environ["wsgi.input"] is given) + request.stream.read(3).decode()

    light.app.before_request(lambda: (request.stream, None)[1])
    guarded = view if kind == "unguarded" else light.idempotency.optional(view)
    light.app.add_url_rule("/x", "x", guarded, methods=["POST", "PUT"])
    environ = {"wsgi.input": given, "CONTENT_LENGTH": "1000000"}
    headers = {"X-Tenant": "acme"} | ({} if kind == "no key" else {"Idempotency-Key": new_key()})
    method = "PUT" if kind == "other method" else "POST"
    assert "Truexxx" == light.client.open("/x", method=method, headers=headers, environ_overrides=environ).text


def test_large_bodies_of_callables(light: Shop) -> None:
    """Of a large body that a callable has read, the file is closed when the answer, a stream that reads on, is over."""
    bodies = []

    @light.app.post("/x")
    @light.idempotency.optional(key=lambda: (request.get_data(cache=False), request.headers.get("Idempotency-Key"))[1])
    def echo() -> Response:
        bodies.append(request.environ["wsgi.input"])
        return Response(stream_with_context(iter(lambda: request.stream.read(100_000), b"")))

    data = b"0123456789" * 100_000
    headers = {"X-Tenant": "acme"}
    for key in ({}, {"Idempotency-Key": new_key()}):
        assert data == light.client.post("/x", data=data, headers={**headers, **key}).data
    refused = light.client.post("/x", data=data, headers={"Idempotency-Key": new_key()})
    assert (401, [True, True]) == (refused.status_code, [one.closed for one in bodies])
    gc.collect()  # a file left open would be a ResourceWarning
