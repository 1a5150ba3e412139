"""What a view answers, and what a retry gets: status, headers and body, byte for byte."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, Response, after_this_request, jsonify, redirect, request, send_file, session
from werkzeug.datastructures import Headers
from werkzeug.test import TestResponse
from werkzeug.wrappers import Response as WerkzeugResponse

from flask_idempotency import Idempotency
from tests.support.apps import Shop, new_key

MARKER = "Idempotent-Replay"
UNAVAILABLE = "urn:problem-type:idempotency:record-unavailable"


def answer_with(shop: Shop, view: Callable[[], Any], **options: Any) -> list[str]:
    """Guard ``view`` at /answer; the list that is returned grows with each run."""
    runs: list[str] = []

    @shop.app.post("/answer")
    @shop.idempotency.required(**options)
    def answer() -> Any:
        runs.append(request.path)
        return view()

    return runs


def post(shop: Shop, key: str, **options: Any) -> TestResponse:
    """Ask for the answer as a client that reads all of it."""
    headers = {"X-Tenant": "acme", "Idempotency-Key": key, **options.pop("headers", {})}
    return options.pop("client", shop.client).post("/answer", headers=headers, buffered=True, **options)


def wire(response: TestResponse) -> tuple[str, list[tuple[str, str]], bytes]:
    """All that a client sees of an answer, apart from the marker."""
    return response.status, [header for header in response.headers if header[0] != MARKER], response.data


class Teapot(Response):
    default_status = 418
    default_mimetype = "application/vnd.teapot+json"


def plain_wsgi(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    start_response("203 From Elsewhere", [("Content-Type", "text/x-wsgi"), ("X-Part", "1"), ("X-Part", "2")])
    return [b"from ", b"elsewhere"]


def writing_wsgi(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    write = start_response("200 OK", [("Content-Type", "text/plain")])
    write(b"written, ")
    return [b"returned"]


def without_content_type() -> Response:
    response = Response(b"bare")
    del response.headers["Content-Type"]
    return response


def in_pieces() -> Response:
    return Response([b"one ", b"two ", "drei"])


def with_own_length() -> Response:
    response = Response([b"abc"])
    response.automatically_set_content_length = False
    return response


RETURNS: dict[str, Callable[[], Any]] = {
    "string": lambda: "text",
    "empty string": lambda: "",
    "umlauts": lambda: "Grüße ✓",
    "bytes": lambda: b"\x00\xff",
    "dict": lambda: {"id": 1, "name": "ü"},
    "list": lambda: [1, None, {"a": []}],
    "status": lambda: ("made", 201),
    "headers": lambda: ("made", {"X-Made": "yes"}),
    "status and headers": lambda: ({"id": 1}, 201, [("X-A", "1"), ("X-B", ""), ("X-A", "2")]),
    "status text": lambda: ("made", "201 Made It Myself"),
    "status text in another case": lambda: ("made", "201 Created"),
    "unknown status": lambda: ("what", 299),
    "unknown status with text": lambda: ("what", "299 Strange"),
    "Response": lambda: Response("x", 202, content_type="text/csv; charset=latin-1"),
    "Response subclass": lambda: Teapot(b"{}"),
    "Werkzeug's Response": lambda: WerkzeugResponse("w", 200, mimetype="text/x-w"),
    "response and status": lambda: (Response("x", 200), 206),
    "redirect": lambda: redirect("/elsewhere?ä=1", 303),
    "WSGI callable": lambda: plain_wsgi,
    "WSGI callable that writes": lambda: writing_wsgi,
    "pieces": in_pieces,
    "no Content-Type": without_content_type,
    "no Content-Length": with_own_length,
    "iterator": lambda: iter(["a", "ü"]),
    **{f"JSON {value!r}": lambda value=value: jsonify(value) for value in (0, False, None, [], {}, "")},  # type: ignore[misc]
}


@pytest.mark.scenario(34)
@pytest.mark.parametrize("name", RETURNS)
def test_every_form_of_an_answer(light: Shop, name: str) -> None:
    """Whatever a view returns, the retry gets the same status line, header list and bytes, and the marker."""
    runs = answer_with(light, RETURNS[name])
    key = new_key()
    first, retry = post(light, key), post(light, key)
    assert wire(first) == wire(retry)
    assert (None, "true") == (first.headers.get(MARKER), retry.headers.get(MARKER))
    assert 1 == len(runs)


@pytest.mark.scenario(34)
def test_the_first_answer_is_untouched(light: Shop) -> None:
    """The first answer is the one that the view gives without the extension."""
    for number, view in enumerate(RETURNS.values()):
        light.app.add_url_rule(f"/bare/{number}", f"bare-{number}", view, methods=["POST"])
        guarded = light.idempotency.required(lambda view=view: view())  # type: ignore[misc]
        light.app.add_url_rule(f"/guarded/{number}", f"guarded-{number}", guarded, methods=["POST"])
    headers = {"X-Tenant": "acme"}
    for number, name in enumerate(RETURNS):
        bare = light.client.post(f"/bare/{number}", headers=headers, buffered=True)
        headers["Idempotency-Key"] = new_key()
        guarded_answer = light.client.post(f"/guarded/{number}", headers=headers, buffered=True)
        assert (name, *wire(bare)) == (name, *wire(guarded_answer))


@pytest.mark.scenario(34)
@pytest.mark.parametrize("value", [0, False, None, [], {}, ""])
def test_json_that_is_false(light: Shop, value: object) -> None:
    """A JSON value that Python takes for false is an answer as any other."""
    answer_with(light, lambda: jsonify(value))
    key = new_key()
    assert [value, value] == [json.loads(post(light, key).data), json.loads(post(light, key).data)]


@pytest.mark.scenario(34)
def test_an_app_within_the_view(light: Shop) -> None:
    """A view that hands the request on to another app of this extension is recorded as any other."""
    other = Flask("other")
    with light.app.app_context():
        Idempotency(other, light.db.engine)
    other.add_url_rule("/answer", view_func=lambda: ({"from": "the other"}, 201), methods=["POST"])
    runs = answer_with(light, lambda: other.wsgi_app)
    key = new_key()
    first, retry = post(light, key), post(light, key)
    assert (201, {"from": "the other"}) == (first.status_code, first.json)
    assert wire(first) == wire(retry)
    assert 1 == len(runs)


@pytest.mark.scenario(35)
def test_header_order_and_repetition(shop: Shop) -> None:
    """Headers keep their order and repetition on every database."""
    headers = [
        ("Link", '</a>; rel="first"'),
        ("ETag", '"v1"'),
        ("Location", "/things/1"),
        ("Warning", '199 - "one"'),
        ("Link", '</b>; rel="last"'),
        ("Warning", '199 - "two, with é"'),
        ("X-Empty", ""),
        ("x-lower", "1"),
    ]
    answer_with(shop, lambda: (b"", 201, Headers(headers)))
    key = new_key()
    first, retry = post(shop, key), post(shop, key)
    assert wire(first) == wire(retry)
    assert headers == [one for one in retry.headers if one[0] not in ("Content-Type", "Content-Length", MARKER)]


@pytest.mark.scenario(36)
def test_cookies_and_sessions_stay_with_their_client(light: Shop) -> None:
    """A replay sets none of the first client's cookies, and leaves the second's session as it is."""

    @light.app.get("/session")
    def show() -> dict[str, Any]:
        return dict(session)

    @light.app.post("/login")
    def login() -> str:
        session["name"] = "second"
        return "in"

    def buy() -> Response:
        session["name"] = "first"
        response = Response("bought")
        response.set_cookie("basket", "of the first")
        response.set_cookie("seen", "yes")
        return response

    runs = answer_with(light, buy)
    first, second = light.client, light.client
    second.post("/login")
    key = new_key()
    bought = post(light, key, client=first)
    assert {"basket", "seen", "session"} == {one.partition("=")[0] for one in bought.headers.getlist("Set-Cookie")}
    replayed = post(light, key, client=second)
    assert ("bought", []) == (replayed.text, replayed.headers.getlist("Set-Cookie"))
    assert [{"name": "first"}, {"name": "second"}] == [one.get("/session").json for one in (first, second)]
    assert second.get_cookie("basket") is None
    assert 1 == len(runs)


BODIES: dict[str, tuple[bytes, int, str]] = {
    "every byte": (bytes(range(256)), 200, "application/octet-stream"),
    "latin-1": ("Stra\xdfe".encode("latin-1"), 200, "text/plain; charset=iso-8859-1"),
    "csv": ("a;b\r\n1;ü\r\n".encode("utf-16"), 200, "text/csv; charset=utf-16"),
    "vendor JSON": (b'{"b":1,\n "a": 1.0}', 201, "application/vnd.x+json"),
    "accepted": (b"", 202, "text/html; charset=utf-8"),
    "no content": (b"", 204, "application/json"),
    "NULs": (b"\0" * 3000, 200, "application/octet-stream"),
}


@pytest.mark.scenario(37)
@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_any_kind(shop: Shop, name: str) -> None:
    """Bytes of any kind come back as they were, with their type and their length."""
    body, status, content_type = BODIES[name]
    answer_with(shop, lambda: Response(body, status, content_type=content_type))
    key = new_key()
    first, retry = post(shop, key), post(shop, key)
    assert wire(first) == wire(retry)
    assert (body, status, content_type) == (retry.data, retry.status_code, retry.headers["Content-Type"])
    length = None if status == 204 else str(len(body))
    assert length == first.headers.get("Content-Length")


@pytest.mark.scenario(37)
def test_a_body_that_the_view_compressed(light: Shop) -> None:
    """Bytes that the view itself coded come back coded, to a client that takes them."""
    coded = gzip.compress(b"text" * 100)
    answer_with(light, lambda: Response(coded, headers={"Content-Encoding": "gzip"}))
    key = new_key()
    first, retry = (post(light, key, headers={"Accept-Encoding": "gzip"}) for _ in range(2))
    assert wire(first) == wire(retry)
    assert coded == retry.data


def files(folder: Path) -> dict[str, Callable[[], Any]]:
    """Views that send files, and streams."""
    path = folder / "report.bin"
    path.write_bytes(bytes(range(256)) * 1000)

    def generate() -> Iterator[str]:
        yield "first, "
        yield "second"

    return {
        "path": lambda: send_file(path, as_attachment=True),
        "memory": lambda: send_file(io.BytesIO(b"in memory"), mimetype="image/png", download_name="a.png"),
        "open file": lambda: send_file(path.open("rb"), mimetype="text/plain"),
        "generator": generate,
        "generator with status": lambda: (generate(), 202, {"X-Stream": "yes"}),
        "generator with length": lambda: Response(generate(), headers={"Content-Length": "13"}),
    }


@pytest.mark.scenario(38)
@pytest.mark.parametrize(
    "name", ["path", "memory", "open file", "generator", "generator with status", "generator with length"]
)
def test_files_and_streams(light: Shop, tmp_path: Path, name: str) -> None:
    """A file or a stream reaches the first client whole, and the retry as if it were the first."""
    view = files(tmp_path)[name]
    light.app.add_url_rule("/bare", view_func=lambda: view(), methods=["POST"])
    runs = answer_with(light, view)
    key = new_key()
    bare = light.client.post("/bare", buffered=True)
    first, retry = post(light, key), post(light, key)
    assert wire(bare) == wire(first) == wire(retry)
    assert 1 == len(runs)


def test_files_are_closed(light: Shop, tmp_path: Path) -> None:
    """A file that the view opened is closed once it has been sent, and once the client has gone."""
    path = tmp_path / "sent"
    path.write_bytes(b"x" * 50_000)
    opened = []

    def view() -> Response:
        opened.append(path.open("rb"))
        return send_file(opened[-1], mimetype="text/plain")

    answer_with(light, view)
    post(light, new_key())
    light.client.post("/answer", headers={"X-Tenant": "acme", "Idempotency-Key": new_key()}).close()
    assert [True, True] == [one.closed for one in opened]


@pytest.mark.scenario(35)
def test_headers_that_are_never_recorded(light: Shop) -> None:
    """Cookies, credentials, challenges, and what describes one connection or moment, stay with the first answer."""
    gone = [
        "Set-Cookie",
        "Authorization",
        "Proxy-Authorization",
        "WWW-Authenticate",
        "Proxy-Authenticate",
        "Date",
        "Server",
        "Keep-Alive",
        "Proxy-Connection",
        "TE",
        "Trailer",
        "Transfer-Encoding",
        "Upgrade",
        "X-Hop",
        "X-Other-Hop",
    ]
    headers = [("X-Before", "1"), *((name, "v") for name in gone)]
    headers += [("Connection", "close, X-Hop"), ("Connection", "x-other-hop"), ("X-After", "1")]
    answer_with(light, lambda: ("text", 200, headers))
    key = new_key()
    first, retry = post(light, key), post(light, key)
    assert {"Connection", *gone} <= set(first.headers.keys())
    assert {"X-Before", "X-After", "Content-Type", "Content-Length", MARKER} == set(retry.headers.keys())


@pytest.mark.parametrize("where", ["config", "keyword"])
def test_further_headers_that_are_not_recorded(make_light: Callable[..., Shop], where: str) -> None:
    """An app names further headers to leave out; case does not count, and the fixed ones stay out."""
    names = "x-request-id, X-RateLimit-Remaining"
    shop = make_light(**({"excluded_headers": names} if where == "config" else {}))
    headers = {"X-Request-Id": "1", "X-RateLimit-Remaining": "9", "X-Kept": "yes", "Date": "today"}
    answer_with(shop, lambda: ("text", 200, headers), **({} if where == "config" else {"excluded_headers": names}))
    key = new_key()
    assert set(headers) <= set(post(shop, key).headers.keys())
    assert {"X-Kept"} == set(headers) & set(post(shop, key).headers.keys())


@pytest.mark.parametrize(
    ("config", "marked"),
    [({}, {MARKER: "true"}), ({"replay_header": "X-Replayed"}, {"X-Replayed": "true"}), ({"replay_header": None}, {})],
)
def test_the_marker(make_light: Callable[..., Shop], config: dict[str, Any], marked: dict[str, str]) -> None:
    """The marker of a replay can be renamed and turned off; the first answer never has it."""
    shop = make_light(**config)
    answer_with(shop, lambda: "text")
    key = new_key()
    for expected in ({}, marked, marked):
        headers = post(shop, key).headers
        assert expected == {name: headers[name] for name in (MARKER, "X-Replayed") if name in headers}


@pytest.mark.scenario(39)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("size", "kept"), [(1023, True), (1024, True), (1025, False)])
def test_the_largest_body(make_light: Callable[..., Shop], size: int, kept: bool, streamed: bool) -> None:
    """A body of just the limit is kept; one byte more, and the client has it but the retry gets 409, never a run."""
    shop = make_light(max_body=1024)
    body = b"x" * size
    runs = answer_with(shop, lambda: (iter([body[:1000], body[1000:]]) if streamed else body, 201))
    key = new_key()
    first, retry = post(shop, key), post(shop, key)
    assert (201, body) == (first.status_code, first.data)
    if kept:
        assert wire(first) == wire(retry)
    else:
        assert (409, UNAVAILABLE, 201) == (retry.status_code, retry.json["type"], retry.json["original_status"])
    assert 1 == len(runs)


@pytest.mark.scenario(39)
def test_a_limit_of_zero(make_light: Callable[..., Shop]) -> None:
    """With a limit of zero only empty bodies are kept."""
    shop = make_light(max_body=0)
    bodies = [b"", b"x"]
    answer_with(shop, lambda: Response(bodies[int(request.args["n"])]))
    keys = [new_key(), new_key()]
    for _ in range(2):
        statuses = [post(shop, key, query_string={"n": number}).status_code for number, key in enumerate(keys)]
    assert [200, 409] == statuses


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("status", ["Created", 0, 99])
def test_a_status_that_is_none(light: Shop, status: Any, streamed: bool) -> None:
    """An answer whose status is no status can't be kept: the key is completed without it, and never runs again."""
    runs = answer_with(light, lambda: Response(iter(["text"]) if streamed else "text", status))
    key = new_key()
    assert "text" == post(light, key).text
    retry = post(light, key)
    assert (409, UNAVAILABLE, 500) == (retry.status_code, retry.json["type"], retry.json["original_status"])
    assert 1 == len(runs)


@pytest.mark.scenario(45)
def test_after_this_request(light: Shop) -> None:
    """What the view adds with after_this_request is part of the record."""

    def view() -> str:
        @after_this_request
        def add(response: Response) -> Response:
            response.headers["X-Later"] = "yes"
            response.set_data(response.get_data() + b", and more")
            return response

        return "text"

    answer_with(light, view)
    key = new_key()
    first, retry = post(light, key), post(light, key)
    assert ("text, and more", "yes") == (retry.text, retry.headers["X-Later"])
    assert wire(first) == wire(retry)


def test_a_header_that_the_database_refuses(shop: Shop) -> None:
    """A NUL in a header, which PostgreSQL can't hold, completes the key without the answer: never run again."""
    runs = answer_with(shop, lambda: ("text", 201, {"X-Nul": "a\x00b"}))
    key = new_key()
    first, retry = post(shop, key), post(shop, key)
    assert (201, "text", "a\x00b") == (first.status_code, first.text, first.headers["X-Nul"])
    with shop.app.app_context():
        kept = shop.db.engine.dialect.name == "sqlite"
    assert (201 if kept else 409) == retry.status_code
    if not kept:
        assert 201 == retry.json["original_status"]
    assert ([1], ["completed"]) == ([len(runs)], [row["status"] for row in shop.rows()])


def test_replays_go_on_being_the_same(light: Shop) -> None:
    """A replay of a replay is the first answer still, and a mutation of one leaves the next alone."""

    @light.app.after_request
    def stamp(response: Response) -> Response:
        response.headers["X-Stamp"] = "of this request"
        return response

    answer_with(light, lambda: ("text", 201, {"X-Made": "yes"}))
    key = new_key()
    first = post(light, key)
    assert [wire(first)] * 3 == [wire(post(light, key)) for _ in range(3)]
