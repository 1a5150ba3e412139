"""Beside Flask-CORS: each retry gets the headers of its own origin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Blueprint, Flask, Response, abort, make_response, request
from flask_compress import Compress
from flask_cors import CORS, cross_origin

from tests.neighbours.five import Answer, Send, Work, by_tenant, case_of, sender, the_five
from tests.neighbours.views import add_view
from tests.support.apps import Shop, new_key

Beside = Callable[..., tuple[Shop, Work]]

ONE, OTHER, FOREIGN = "https://one.example", "https://other.example", "https://foreign.example"

OPTIONS = {
    "origins": [ONE, OTHER],
    "allow_headers": ["Content-Type", "Idempotency-Key", "X-Tenant"],
    "expose_headers": ["Idempotent-Replay", "Retry-After"],
}


def set_up(app: Flask) -> None:
    CORS(app, **OPTIONS)


def app_with(beside: Beside, order: str, **how: Any) -> tuple[Shop, Work]:
    shop, work = beside(**{order: [set_up]})
    by_tenant(shop)
    add_view(shop, work, **how)
    return shop, work


def from_origin(app: Flask, origin: str, tenant: str = "acme") -> Send:
    return sender(app, {"X-Tenant": tenant, "Origin": origin})


def allowed(answer: Answer) -> list[str]:
    return answer.header("Access-Control-Allow-Origin")


@pytest.mark.scenario(44)
def test_the_five(beside: Beside, order: str) -> None:
    """The five hold in either order, from one origin."""
    shop, work = app_with(beside, order)
    app = shop.app
    refused = [sender(app, {"Origin": ONE}), sender(app)]
    good, other = from_origin(app, ONE), from_origin(app, ONE, "emca")
    # Set up after the extension, they stand at another place among a replay's headers.
    fresh = frozenset({"access-control-allow-origin", "access-control-expose-headers"})
    the_five(case_of(shop, work, good=good, other=other, refused=refused, fresh=fresh))


def missing() -> Response:
    """A view whose answer goes through error handlers, around which Flask-CORS sets its headers, too."""
    abort(404)


@pytest.mark.parametrize("raised", [False, True], ids=["returned", "raised"])
def test_retries_from_elsewhere(beside: Beside, order: str, raised: bool) -> None:
    """A retry gets the headers of its own origin; from one that is not allowed, none; and it is told by the origin."""
    shop, _ = app_with(beside, order, **({"view": missing} if raised else {}))
    key = new_key()
    answers = [from_origin(shop.app, one)(key, 100) for one in (ONE, OTHER, FOREIGN, ONE)]
    assert [False, True, True, True] == [one.replayed for one in answers]
    assert [[ONE], [OTHER], [], [ONE]] == [allowed(one) for one in answers]
    exposed = [one.header("Access-Control-Expose-Headers") for one in answers]
    named = ["Idempotent-Replay, Retry-After"]
    assert [named, named, [], named] == exposed
    assert [["Origin"]] * 3 == [answers[at].header("Vary") for at in (0, 1, 3)]
    assert [[answers[0].status, answers[0].body]] * 3 == [[one.status, one.body] for one in answers[1:]]


@pytest.mark.parametrize("raised", [False, True], ids=["returned", "raised"])
def test_what_else_varies(beside: Beside, order: str, raised: bool) -> None:
    """That an answer varies by the origin is said once, whatever else it varies by, and in one line or several."""

    def set_up_two(app: Flask) -> None:
        set_up(app)
        Compress(app)

    shop, work = beside(**{order: [set_up_two]})
    by_tenant(shop)
    add_view(shop, work, **({"view": missing} if raised else {}))
    key = new_key()
    for origin in (ONE, OTHER, ONE):
        vary = ", ".join(from_origin(shop.app, origin)(key, 100).header("Vary")).split(", ")
        assert ["Accept-Encoding", "Origin"] == sorted(vary)


@pytest.mark.parametrize("first", ["no origin", "an origin"])
def test_a_server_beside_a_browser(beside: Beside, order: str, first: str) -> None:
    """Whether the first attempt came from a server or a browser, a browser's retry gets its own headers."""
    shop, _ = app_with(beside, order)
    key, server, page = new_key(), sender(shop.app, {"X-Tenant": "acme"}), from_origin(shop.app, OTHER)
    attempts = [server, page, server] if first == "no origin" else [page, server, page]
    answers = [send(key, 100) for send in attempts]
    assert [False, True, True] == [one.replayed for one in answers]
    assert [OTHER] == allowed(answers[1 if first == "no origin" else 2])


def test_any_origin(beside: Beside, order: str) -> None:
    """With a wildcard sent as such, all get it, and nothing varies."""
    shop, work = beside(**{order: [lambda app: CORS(app, send_wildcard=True)]})
    by_tenant(shop)
    add_view(shop, work)
    key = new_key()
    answers = [from_origin(shop.app, one)(key, 100) for one in (ONE, FOREIGN)]
    assert [(["*"], [], False), (["*"], [], True)] == [
        (allowed(one), one.header("Vary"), one.replayed) for one in answers
    ]


@pytest.mark.parametrize("varies", [[], ["Accept"], ["Accept", "Cookie"]], ids=["alone", "beside one", "beside two"])
def test_an_origin_after_a_wildcard(beside: Beside, order: str, varies: list[str]) -> None:
    """What names an origin says that it varies by it, also where the first answer named none."""
    shop, work = beside(**{order: [CORS]})
    by_tenant(shop)
    add_view(shop, work, view=lambda: ({}, 201, {"Vary": varies}))
    key = new_key()
    first, again = sender(shop.app, {"X-Tenant": "acme"})(key, 100), from_origin(shop.app, ONE)(key, 100)
    assert (["*"], varies, False) == (allowed(first), first.header("Vary"), first.replayed)
    named = ", ".join(again.header("Vary")).split(", ")
    assert ([ONE], [*varies, "Origin"], True) == (allowed(again), named, again.replayed)


def test_the_problems(beside: Beside, order: str) -> None:
    """A script can read why it is refused: the extension's own answers have the headers, too."""
    shop, _ = app_with(beside, order)
    send, key = from_origin(shop.app, OTHER), new_key()
    send(key, 100)
    for answer, problem in ((send(key, 900), "key-reused"), (send("short", 1), "key-invalid")):
        assert (problem, [OTHER]) == (answer.problem, allowed(answer))
        assert ["Idempotent-Replay, Retry-After"] == answer.header("Access-Control-Expose-Headers")
    nobody = sender(shop.app, {"Origin": OTHER})(key, 100)
    assert ("scope-missing", [OTHER]) == (nobody.problem, allowed(nobody))


@pytest.mark.scenario(52)
def test_the_preflight(beside: Beside, order: str) -> None:
    """The browser's question passes without a key and a claim, and allows the header; also under protect."""
    shop, work = beside(**{order: [set_up]})
    by_tenant(shop)
    api = Blueprint("api", __name__)
    shop.idempotency.protect(api)
    api.post("/charges")(work.asked)
    shop.app.register_blueprint(api)
    asked = {
        "Origin": ONE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type, idempotency-key, x-tenant",
    }
    answer = shop.client.options("/charges", headers=asked)
    assert (200, ONE) == (answer.status_code, answer.headers["Access-Control-Allow-Origin"])
    assert "content-type, idempotency-key, x-tenant" == answer.headers["Access-Control-Allow-Headers"]
    assert (0, []) == (work.runs, shop.rows())


@pytest.mark.parametrize("standing", ["above", "below"])
def test_the_decorator(beside: Beside, standing: str) -> None:
    """A replay passes cross_origin by: it has the recorded headers where they fit its origin, else none."""
    shop, work = beside()
    by_tenant(shop)
    add_view(shop, work, view=lambda: work.asked(), **{standing: [cross_origin(**OPTIONS)]})
    key = new_key()
    answers = [from_origin(shop.app, one)(key, 100) for one in (ONE, OTHER, FOREIGN, ONE)]
    assert [[ONE], [], [], [ONE]] == [allowed(one) for one in answers]
    assert [False, True, True, True] == [one.replayed for one in answers]
    assert answers[0].headers == [header for header in answers[3].headers if header[0] != "Idempotent-Replay"]
    question = {"Origin": ONE, "Access-Control-Request-Method": "POST"}
    preflight = shop.client.options("/charges", headers=question)
    assert (200, ONE) == (preflight.status_code, preflight.headers["Access-Control-Allow-Origin"])


def test_a_blueprint(beside: Beside) -> None:
    """The hook of a blueprint runs within the extension's, on a replay as well: the retry gets its own headers."""
    shop, work = beside()
    by_tenant(shop)
    api = Blueprint("api", __name__)
    CORS(api, **OPTIONS)
    api.post("/charges")(shop.idempotency.required(work.asked))
    shop.app.register_blueprint(api)
    key = new_key()
    answers = [from_origin(shop.app, one)(key, 100) for one in (ONE, OTHER, FOREIGN)]
    assert [([ONE], False), ([OTHER], True), ([], True)] == [(allowed(one), one.replayed) for one in answers]


def test_trapped_exceptions(beside: Beside, order: str) -> None:
    """So does one in an app that traps HTTP exceptions, where a replay is returned and not raised."""
    shop, work = beside(**{order: [set_up]}, TRAP_HTTP_EXCEPTIONS=True)
    by_tenant(shop)
    add_view(shop, work)
    key = new_key()
    answers = [from_origin(shop.app, one)(key, 100) for one in (ONE, OTHER)]
    assert [([ONE], False), ([OTHER], True)] == [(allowed(one), one.replayed) for one in answers]


def test_what_is_for_one_origin_alone(beside: Beside) -> None:
    """Leave to send credentials, given to one origin, does not come back for another; what the view exposes does."""

    def by_hand(app: Flask) -> None:
        @app.after_request
        def trust(response: Response) -> Response:
            if request.headers["Origin"] == ONE:
                response.headers["Access-Control-Allow-Credentials"] = "true"
            if not response.headers.get("Idempotent-Replay"):
                response.headers["Access-Control-Expose-Headers"] = "X-Left"
            return response

    shop, work = beside(before=[lambda app: CORS(app, origins=[ONE, OTHER])], after=[by_hand])
    by_tenant(shop)
    add_view(shop, work)
    key = new_key()
    answers = [from_origin(shop.app, one)(key, 100) for one in (ONE, OTHER, ONE)]
    assert [[ONE], [OTHER], [ONE]] == [allowed(one) for one in answers]
    assert [["true"], [], ["true"]] == [one.header("Access-Control-Allow-Credentials") for one in answers]
    assert [["X-Left"]] * 3 == [one.header("Access-Control-Expose-Headers") for one in answers]


def test_a_hook_that_tells_origins_apart(beside: Beside, order: str) -> None:
    """Where the record allows one origin, nothing of what that one was given comes back for another."""

    def by_hand(app: Flask) -> None:
        @app.after_request
        def allow(response: Response) -> Response:
            origin = request.headers["Origin"]
            if origin != FOREIGN:
                response.headers["Access-Control-Allow-Origin"] = origin
            if origin == ONE:
                response.headers["Access-Control-Allow-Credentials"] = "true"
                response.headers["Access-Control-Expose-Headers"] = "X-Left"
            response.vary.add("Origin")
            return response

    shop, work = beside(**{order: [by_hand]})
    by_tenant(shop)
    add_view(shop, work)
    key = new_key()
    answers = [from_origin(shop.app, one)(key, 100) for one in (ONE, OTHER, FOREIGN, ONE)]
    given = [
        ("Access-Control-Allow-Credentials", "true"),
        ("Access-Control-Allow-Origin", ONE),
        ("Access-Control-Expose-Headers", "X-Left"),
    ]
    assert [given, [("Access-Control-Allow-Origin", OTHER)], [], given] == [
        sorted(header for header in one.headers if header[0].startswith("Access-Control-")) for one in answers
    ]
    assert [["Origin"]] * 4 == [one.header("Vary") for one in answers]


@pytest.mark.scenario(35)
def test_headers_by_hand(beside: Beside) -> None:
    """What a view sets itself comes back at its place, for the origin it was set for, for all, and for a server."""
    shop, work = beside()
    by_tenant(shop)

    def view() -> Response:
        work.runs += 1
        answer = make_response("done")
        answer.headers.extend([("Access-Control-Allow-Origin", "*" if work.runs == 2 else ONE), ("X-Last", "1")])
        return answer

    add_view(shop, work, view=view)
    for origins in ((ONE, ONE), (ONE, FOREIGN), (ONE, None)):
        key = new_key()
        first, again = (
            from_origin(shop.app, one)(key, 1) if one else sender(shop.app, {"X-Tenant": "acme"})(key, 1)
            for one in origins
        )
        assert again.replayed
        assert first.headers == [header for header in again.headers if header[0] != "Idempotent-Replay"]
