"""What else a Flask view can return or raise: the first answer is the unguarded one, and the retry's is the first."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import io
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from flask import (
    Response,
    abort,
    current_app,
    g,
    jsonify,
    make_response,
    redirect,
    render_template_string,
    request,
    send_file,
    send_from_directory,
    stream_template_string,
    stream_with_context,
)
from markupsafe import Markup
from werkzeug.datastructures import Headers
from werkzeug.exceptions import Gone, HTTPException, MethodNotAllowed, NotFound, RequestedRangeNotSatisfiable
from werkzeug.routing import RequestRedirect
from werkzeug.test import EnvironBuilder, create_environ, run_wsgi_app
from werkzeug.wrappers import Response as WerkzeugResponse
from werkzeug.wsgi import ClosingIterator

from tests.support.apps import Shop, new_key

MARKER = "Idempotent-Replay"
HERE = Path(__file__)
TEXT = b"0123456789" * 30
View = Callable[[], Any]

#: Status line, headers without the marker, body, and the marker.
Wire = tuple[str, list[tuple[str, str]], bytes, "str | None"]


@dataclasses.dataclass
class Money:
    amount: decimal.Decimal
    at: datetime.datetime


class Doubled(Response):
    """Makes its bytes while it goes out, and not the same ones when that is done twice."""

    def iter_encoded(self) -> Iterator[bytes]:
        for chunk in super().iter_encoded():
            yield chunk + chunk


class Early(Response):
    """As ``Doubled``, looking for the body at once, as Werkzeug does."""

    def iter_encoded(self) -> Iterator[bytes]:
        return (chunk + chunk for chunk in super().iter_encoded())


class Framed(Response):
    """Adds a header when it is sent."""

    def get_wsgi_headers(self, environ: Any) -> Headers:
        headers = super().get_wsgi_headers(environ)
        headers.add("X-Frame", f"{self.status_code} {environ['REQUEST_METHOD']}")
        return headers


class Wrapped(Response):
    """Puts something around its body when it is sent."""

    def get_app_iter(self, environ: Any) -> Any:
        if self.status_code == 204:
            return super().get_app_iter(environ)
        return ClosingIterator(itertools.chain([b"<"], super().get_app_iter(environ), [b">"]), self.close)


class Located(Response):
    """Makes its ``Location`` a whole URL, as Werkzeug did once."""

    autocorrect_location_header = True


class Measured(Response):
    """Says how long its streams are when it is sent."""

    def get_wsgi_headers(self, environ: Any) -> Headers:
        headers = super().get_wsgi_headers(environ)
        if self.status_code != 204:
            headers.setdefault("Content-Length", "2")
        return headers


class Teapot(HTTPException):
    """Brings its own response."""

    code = 418

    def get_response(self, *args: Any, **kwargs: Any) -> Any:
        return Response("short and stout", 418, {"X-Own": "yes"})


class Worded(HTTPException):
    """Brings its own headers and body."""

    code = 410

    def get_headers(self, *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
        return [("Content-Type", "text/x-own"), ("X-A", "1"), ("X-A", "2")]

    def get_body(self, *args: Any, **kwargs: Any) -> str:
        return "worded"


class Domain(Exception):
    """For which the app has an error handler."""


def raising(error: Callable[[], BaseException]) -> View:
    """A view that raises."""

    def view() -> Any:
        raise error()

    return view


def json_of_everything() -> Response:
    money = Money(decimal.Decimal("1.10"), datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc))
    return current_app.json.response(money=money, id=uuid.UUID(int=1), on=datetime.date(2020, 1, 1), html=Markup("<b>"))


def with_metadata() -> Response:
    response = make_response("x", 201)
    response.cache_control.max_age = 5
    response.vary.update(["Origin", "Accept"])
    response.allow.add("GET")
    response.content_language.add("de")
    response.content_security_policy.default_src = "'self'"
    response.access_control_allow_origin = "*"
    response.expires = datetime.datetime(2030, 1, 1)
    response.retry_after = 3
    response.content_location = "/ä"
    return response


def with_etag(*, weak: bool = False) -> Response:
    response = make_response(TEXT)
    response.set_etag("v1", weak=weak)
    response.last_modified = datetime.datetime(2020, 1, 1)
    return response


def made_conditional() -> Response:
    response = make_response(TEXT)
    response.add_etag()
    return response.make_conditional(request, accept_ranges=True, complete_length=len(TEXT))


def frozen() -> Response:
    response = Response(iter([b"a", b"b"]))
    response.freeze()
    return response


def written() -> Response:
    response = Response()
    response.stream.write(b"one")
    response.stream.write("two")
    return response


def streamed_with_context() -> Response:
    g.name = "of the view"

    @stream_with_context
    def generate() -> Iterator[str]:
        yield g.name
        yield request.path[:1]

    return Response(generate(), mimetype="text/x-g")


def sent(**options: Any) -> View:
    """A view that sends this file."""
    return lambda: send_from_directory(HERE.parent, HERE.name, **options)


RETURNS: dict[str, View] = {
    "a dataclass": lambda: jsonify(Money(decimal.Decimal("1.10"), datetime.datetime(2020, 1, 1))),
    "JSON of everything": json_of_everything,
    "NaN": lambda: {"a": float("nan")},
    "HTML": lambda: Markup("<b>ü</b>"),
    "a template": lambda: render_template_string("{{ x }}", x="<ü>"),
    "a streamed template": lambda: stream_template_string("{% for one in 'abc' %}{{ one }}{% endfor %}"),
    "nothing in a Response": lambda: Response(None),
    "nothing, made": lambda: (Response(None, 201), {"X-A": "1"}),
    "a bytearray": lambda: bytearray(b"x"),
    "a bytearray in a Response": lambda: Response(bytearray(b"abc")),
    "a status of an enumeration": lambda: ("x", HTTPStatus.CREATED),
    "a status that is text": lambda: ("x", "201"),
    "a status that is None": lambda: ("x", None),
    "headers with lists": lambda: ("x", {"X-L": ["1", "2"], "X-N": 5}),
    "Headers": lambda: ("x", Headers([("A", "1"), ("B", "x"), ("A", "2")])),
    "Latin-1 in a header": lambda: ("x", {"X-L": "Grüße"}),
    "Latin-1 in a status text": lambda: ("x", "200 Grüße"),
    "blanks in a status text": lambda: Response("x", status="201  two  blanks "),
    "no status text": lambda: Response("x", status="200 "),
    "a response in a tuple": lambda: (make_response("x"), 202, {"A": "b"}),
    "an error as a value": lambda: NotFound("returned"),
    "Werkzeug's": lambda: WerkzeugResponse(json.dumps({"a": 1}), content_type="application/json"),
    "metadata": with_metadata,
    "no Content-Type": lambda: Response("x", content_type=""),
    "two types": lambda: Response("abc", headers=[("Content-Type", "a/b"), ("Content-Type", "c/d")]),
    "a length that is too long": lambda: Response("abc", headers={"Content-Length": "99"}),
    "100": lambda: ("", 100),
    "103": lambda: Response("", 103, {"Link": "</a>"}),
    "204": lambda: ("", 204),
    "204 with a body": lambda: ("body", 204),
    "204 with a stream": lambda: Response(iter(["body"]), 204),
    "205": lambda: ("", 205),
    "304": lambda: Response("body", 304, {"ETag": '"a"', "Content-Type": "text/x"}),
    "206": lambda: Response("abc", 206, {"Content-Range": "bytes 0-2/9"}),
    "a generator of str": lambda: (one for one in "abü"),
    "a generator of both": lambda: (one for one in ["a", b"\xff"]),
    "a generator of nothing": lambda: iter([]),
    "a generator of empty strings": lambda: iter(["", "a", ""]),
    "a map": lambda: map(str, [1, 2]),
    "stream_with_context": streamed_with_context,
    "a frozen stream": frozen,
    "a stream that was written": written,
    "303": lambda: redirect("/ä?b=ü", 303),
    "307 to elsewhere": lambda: redirect("http://other.example/?a=b", 307),
    "a relative redirect": lambda: redirect("../x"),
    "a Location to be completed": lambda: Response("x", 201, {"Location": "things/ä"}),
    "an ETag": with_etag,
    "a weak ETag": lambda: with_etag(weak=True),
    "made conditional": made_conditional,
    "a file": sent(),
    "a file that is not conditional": sent(conditional=False, etag=False, max_age=5),
    "an attachment": sent(as_attachment=True, download_name="ü.txt"),
    "a file in memory": lambda: send_file(io.BytesIO(TEXT), mimetype="text/x", download_name="a.txt"),
    "no file": lambda: send_from_directory(HERE.parent, "nothing"),
    "bytes that are doubled": lambda: Doubled("aü"),
    "pieces that are doubled": lambda: Doubled(["a", "ü"]),
    "a stream that is doubled": lambda: Doubled(iter(["a", "ü"])),
    "a stream that is doubled early": lambda: Early(iter(["a", "ü"])),
    "a header at the end": lambda: Framed("text", 201),
    "a header at the end of a stream": lambda: Framed(iter(["te", "xt"])),
}

RAISES: dict[str, View] = {
    "abort": lambda: abort(404),
    "abort with a text": lambda: abort(400, "because"),
    "abort with a response": lambda: abort(Response("pay", 402, {"X-A": "b"})),
    "abort with a made response": lambda: abort(make_response("x", 451)),
    "abort with a redirect": lambda: abort(redirect("/x", 303)),
    "an error with a response": raising(lambda: Gone(response=Response("gone", 299))),
    "an HTTPException without a code": raising(lambda: HTTPException(response=Response("r", 222))),
    "an error with its own get_response": raising(Teapot),
    "an error with its own words": raising(Worded),
    "RequestRedirect": raising(lambda: RequestRedirect("http://localhost/new")),
    "405": raising(lambda: MethodNotAllowed(["GET"])),
    "416": raising(lambda: RequestedRangeNotSatisfiable(10)),
    "a form without the field": lambda: request.form["nothing"],
    "what an error handler answers": raising(Domain),
}

#: What the extension leaves to Flask: its own errors, which are released.
REFUSED: dict[str, View] = {
    "None": lambda: None,
    "a number": lambda: 5,
    "a tuple of four": lambda: ("a", 1, 2, 3),
    "a set": lambda: {1},
    "an async generator": lambda: asynchronous(),
    "a wrong status": lambda: abort(402),
    "StopIteration": raising(StopIteration),
}

#: Those that a client asks for parts of, or for a newer version of: Werkzeug minds such headers on GET alone.
CONDITIONS: dict[str, dict[str, str]] = {
    "a range": {"Range": "bytes=2-5"},
    "a range beyond the end": {"Range": "bytes=99999999-"},
    "another version": {"If-None-Match": "*"},
    "a newer version": {"If-Modified-Since": "Wed, 01 Jan 2031 00:00:00 GMT"},
    "the same version": {"If-Match": '"x"'},
}


async def asynchronous() -> AsyncIterator[str]:
    yield "a"


def ask(shop: Shop, path: str, key: str, **headers: str) -> Wire:
    """All that a client sees of an answer."""
    headers = {"X-Tenant": "acme", "Idempotency-Key": key, **headers}
    environ = EnvironBuilder(path, method="POST", headers=headers).get_environ()
    chunks, status, found = run_wsgi_app(shop.app, environ, buffered=True)
    close = getattr(chunks, "close", None)
    body = b"".join(chunks)
    if close is not None:
        close()
    return status, [one for one in found if one[0] != MARKER], body, found.get(MARKER)


def twins(shop: Shop, views: dict[str, View], **options: Any) -> Iterator[tuple[str, str, str]]:
    """Each view's name, and its paths without a guard and with one."""
    for number, view in enumerate(views.values()):
        bare, guarded = f"/bare/{number}", f"/guarded/{number}"
        shop.app.add_url_rule(bare, bare, view, methods=["POST"])
        # A function of its own: the extension marks what it guards.
        shop.app.add_url_rule(
            guarded,
            guarded,
            shop.idempotency.required(**options)(lambda view=view: view()),  # type: ignore[misc]
            methods=["POST"],
        )
    for number, name in enumerate(views):
        yield name, f"/bare/{number}", f"/guarded/{number}"


@pytest.fixture
def handled(light: Shop) -> Shop:
    """The light shop, with an error handler."""
    light.app.register_error_handler(Domain, lambda error: ({"domain": 1}, 400, {"X-D": "1"}))
    return light


def length(answer: Wire) -> list[tuple[str, str]]:
    """The header that tells the body's length, if there is one."""
    return [one for one in answer[1] if one[0] == "Content-Length"]


def assert_equal(shop: Shop, views: dict[str, View], headers: dict[str, str], **options: Any) -> None:
    """Assert that each view answers as without a guard, and then again so, marked."""
    for name, bare, guarded in twins(shop, views, **options):
        key = new_key()
        unguarded, first, retry = (ask(shop, path, key, **headers) for path in (bare, guarded, guarded))
        if options.get("atomic") and not length(unguarded):  # a stream is made whole there, and has a length
            unguarded[1].extend(length(first))
        assert (name, *unguarded) == (name, *first)
        assert (name, *first[:3], "true") == (name, *retry)


@pytest.mark.scenario(34)
@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
def test_what_is_returned(handled: Shop, atomic: bool) -> None:
    """Whatever a view returns, its guard changes nothing, and the retry gets the same status, headers and bytes."""
    assert_equal(handled, RETURNS, {}, atomic=atomic)


@pytest.mark.scenario(43)
@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
def test_what_is_raised(handled: Shop, atomic: bool) -> None:
    """Whatever a view raises that is an answer, its guard changes nothing, and the retry gets the same."""
    assert_equal(handled, RAISES, {}, atomic=atomic)


@pytest.mark.scenario(38)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_conditions(light: Shop, condition: str) -> None:
    """A retry gets the recorded answer, not a part of it or a 304, with the headers that ask for those."""
    views = {name: RETURNS[name] for name in ("an ETag", "made conditional", "a file", "a file in memory")}
    assert_equal(light, views, CONDITIONS[condition])
    for number in range(len(views)):
        key = new_key()
        first = ask(light, f"/guarded/{number}", key)
        assert ("200 OK", *first[1:3], "true") == ask(light, f"/guarded/{number}", key, **CONDITIONS[condition])


@pytest.mark.scenario(38)
def test_a_file_that_the_web_server_sends(light: Shop) -> None:
    """With ``USE_X_SENDFILE`` the retry gets the file's path and length, as the first client's server did."""
    light.app.config["USE_X_SENDFILE"] = True
    assert_equal(light, {"a file": sent(), "an attachment": sent(as_attachment=True)}, {})
    assert ("X-Sendfile", str(HERE)) in ask(light, "/guarded/0", new_key())[1]


def test_what_flask_refuses(light: Shop) -> None:
    """What is no answer is Flask's own 500, as without a guard, and is not recorded: the next retry runs."""
    runs: list[str] = []
    for name, bare, guarded in twins(light, {name: counted(view, runs) for name, view in REFUSED.items()}):
        key = new_key()
        before = len(runs)
        answers = [ask(light, path, key) for path in (bare, guarded, guarded)]
        assert (name, ["500 INTERNAL SERVER ERROR"] * 3) == (name, [one[0] for one in answers])
        assert before + 3 == len(runs)
    assert [] == light.rows()


def counted(view: View, runs: list[str]) -> View:
    """The view, which is counted."""

    def count() -> Any:
        runs.append("run")
        return view()

    return count


@pytest.mark.parametrize("kind", [Doubled, Early, Framed, Wrapped, Located, Measured])
@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
def test_a_response_class_of_the_apps_own(handled: Shop, kind: type[Response], atomic: bool) -> None:
    """A response class that makes something of each answer as it goes out makes it of a replay once, too."""
    handled.app.response_class = kind
    views = {
        "text": lambda: "text",
        "JSON": lambda: {"a": 1},
        "stream": lambda: iter(["a", "b"]),
        "file": sent(),
        "nothing": lambda: ("", 204),
        "redirect": lambda: redirect("/x", 303),
        "another class": lambda: WerkzeugResponse("x"),
        "relative": lambda: kind(iter(["a", "b"]), 201, {"Location": "/charges/1"}),
        **RAISES,
    }
    assert_equal(handled, views, {}, atomic=atomic)


@pytest.mark.parametrize("read", [1, None])
def test_a_stream_of_a_class_of_its_own_is_closed(light: Shop, read: int | None) -> None:
    """What such a class makes its bytes of is closed when they are sent, and when the client goes away."""
    bodies: list[io.BytesIO] = []

    @light.app.post("/x")
    @light.idempotency.required
    def view() -> Response:
        bodies.append(io.BytesIO(b"a\nb\nc\n"))
        return Doubled(bodies[-1])

    key = new_key()
    headers = {"X-Tenant": "acme", "Idempotency-Key": key}
    answer = light.client.post("/x", headers=headers)
    assert [b"a\na\n", b"b\nb\n", b"c\nc\n"][:read] == list(itertools.islice(answer.iter_encoded(), read))
    answer.close()
    assert [True] == [one.closed for one in bodies]
    assert b"a\na\nb\nb\nc\nc\n" == light.client.post("/x", headers=headers).data


@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
def test_a_class_that_is_not_the_apps(handled: Shop, atomic: bool) -> None:
    """What a response of another class than the app's is made into is replayed, and made by that class alone."""
    views = {
        kind.__name__ + name: view
        for kind in (Doubled, Early, Framed, Wrapped, Located, Measured)
        for name, view in {
            "stream": lambda kind=kind: kind(iter(["a", "b"]), 201, {"Location": "/charges/1"}),
            "nothing": lambda kind=kind: kind(iter(["never"]), 204),
        }.items()
    }
    assert_equal(handled, views, {}, atomic=atomic)


@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
def test_a_list_that_passes_as_it_is(handled: Shop, atomic: bool) -> None:
    """Pieces that are all there, and are to pass as they are, are no stream: they have a length."""
    kinds = (Response, Located)
    views = {kind.__name__: lambda kind=kind: kind([b"ab", b"cd"], direct_passthrough=True) for kind in kinds}
    assert_equal(handled, views, {}, atomic=atomic)


@pytest.mark.parametrize("read", [0, 1, None])
def test_a_wrapped_stream_is_closed_once(light: Shop, read: int | None) -> None:
    """What a class wraps is closed once, and so is what is to be done when the answer is closed."""
    closed: list[str] = []

    class Source(io.BytesIO):
        def close(self) -> None:
            closed.append("source")

    @light.app.post("/x")
    @light.idempotency.required
    def view() -> Response:
        response = Wrapped(Source(b"a\nb\n"))
        response.call_on_close(lambda: closed.append("answer"))
        return response

    headers = {"X-Tenant": "acme", "Idempotency-Key": new_key()}
    environ = create_environ("/x", method="POST", headers=headers)
    answer = light.app.wsgi_app(environ, lambda *_: lambda data: None)
    list(itertools.islice(answer, read))
    answer.close()  # type: ignore[attr-defined]
    assert ["answer", "source"] == sorted(closed)
    assert b"<a\nb\n>" == light.client.post("/x", headers=headers).data


def test_the_location_that_the_first_client_got(light: Shop) -> None:
    """A ``Location`` that is made of the request's own address is the first client's, whichever host the retry asks."""
    light.app.response_class = Located

    @light.app.post("/x")
    @light.idempotency.required
    def view() -> Any:
        return "made", 201, {"Location": "/charges/1"}

    headers = {"X-Tenant": "acme", "Idempotency-Key": new_key()}
    answers = [
        light.client.post("/x", headers=headers, base_url=f"http://{host}") for host in ("api.example.com", "10.0.0.7")
    ]
    assert ["http://api.example.com/charges/1"] * 2 == [one.headers["Location"] for one in answers]


@pytest.mark.parametrize("inside", [True, False])
def test_settling_with_a_class_of_its_own(light: Shop, inside: bool) -> None:
    """Within a request or not, an answer that a person settles has what its class adds; never a host of its own."""
    key, headers = new_key(), {"X-Tenant": "acme"}

    @light.app.post("/x")
    @light.idempotency.required(on_error="hold")
    def view() -> Any:
        raise Domain

    light.client.post("/x", headers={**headers, "Idempotency-Key": key})
    context = light.app.test_request_context(method="POST") if inside else light.app.app_context()
    with context:
        light.idempotency.settle(
            "acme", key, type("Both", (Framed, Wrapped, Located), {})("made", 201, {"Location": "/1"})
        )
    retry = light.client.post("/x", headers={**headers, "Idempotency-Key": key})
    assert (201, b"<made>", "/1") == (retry.status_code, retry.data, retry.headers["Location"])
    assert f"201 {'POST' if inside else 'GET'}" == retry.headers["X-Frame"]


def test_a_hook_around_a_class_of_its_own(light: Shop) -> None:
    """A hook around the extension has the last word on the length and the headers of such an answer."""

    @light.app.post("/x")
    @light.idempotency.required
    def view() -> Response:
        return Framed(["te", "xt"])

    @light.app.after_request
    def longer(response: Response) -> Response:
        response.headers["X-Frame"] = "of the hook"
        if MARKER not in response.headers:
            response.response = [*response.response, b" and more"]
        return response

    hooks = light.app.after_request_funcs[None]
    hooks.insert(0, hooks.pop())  # as if it had been registered before the extension
    headers = {"X-Tenant": "acme", "Idempotency-Key": new_key()}
    first, retry = (light.client.post("/x", headers=headers) for _ in range(2))
    assert (b"text and more", "13") == (first.data, first.headers["Content-Length"])
    assert (b"text", "4") == (retry.data, retry.headers["Content-Length"])
    assert [["of the hook"]] * 2 == [one.headers.getlist("X-Frame") for one in (first, retry)]


@pytest.mark.parametrize("kind", [Response, Doubled])
def test_an_aborted_answer_is_no_stream(light: Shop, kind: type[Response]) -> None:
    """The answer of an abort is settled though nobody reads it, whatever the app's response class."""
    light.app.response_class = kind
    light.app.post("/x")(light.idempotency.required(lambda: abort(404)))
    headers = {"X-Tenant": "acme", "Idempotency-Key": new_key()}
    unread, retry = (light.client.post("/x", headers=headers) for _ in range(2))
    assert (404, 404, "true") == (unread.status_code, retry.status_code, retry.headers.get(MARKER))
