"""Behind proxies and under mounts: what the client asked for counts, the way it came does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask, request, url_for
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.middleware.proxy_fix import ProxyFix
from werkzeug.test import Client

from tests.neighbours.five import (
    AFTER_COMMIT,
    BEFORE_COMMIT,
    Send,
    Work,
    answer_of,
    by_tenant,
    case_of,
    sender,
    the_five,
)
from tests.support.apps import Shop, new_key

Beside = Callable[..., tuple[Shop, Work]]

#: What a proxy adds that serves the app as https://api.example/v1.
PROXIED = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "api.example", "X-Forwarded-Prefix": "/v1"}
ACME = {"X-Tenant": "acme"}


def behind_a_proxy(app: Flask) -> None:
    """As Flask's documentation has it."""
    app.wsgi_app = ProxyFix(app.wsgi_app, x_for=1, x_proto=1, x_host=1, x_prefix=1)  # type: ignore[method-assign]


@pytest.fixture
def proxied(beside: Beside, order: str) -> tuple[Shop, Work]:
    """A guarded view behind a proxy, ``ProxyFix`` within the extension's wrapper or around it."""
    shop, work = beside(**{order: [behind_a_proxy]})
    by_tenant(shop)
    shop.app.post("/charges", endpoint="charges")(shop.idempotency.required(work.asked))
    return shop, work


# ProxyFix


def test_the_five_behind_a_proxy(proxied: tuple[Shop, Work]) -> None:
    """The five hold, with a prefix that the proxy takes off the path."""
    shop, work = proxied
    good, other = (sender(shop.app, {**PROXIED, "X-Tenant": tenant}) for tenant in ("acme", "emca"))
    the_five(case_of(shop, work, good=good, other=other, refused=[sender(shop.app, PROXIED)]))
    assert {"/v1/charges"} == {row["request_path"] for row in shop.rows()}


@pytest.mark.parametrize(
    "way",
    [
        {"X-Forwarded-Proto": "http"},
        {"X-Forwarded-Host": "other.example"},
        {"X-Forwarded-For": "192.0.2.7"},
        {"X-Forwarded-Port": "8443"},
        {"X-Request-Id": "2"},
    ],
    ids=lambda way: next(iter(way)),
)
def test_a_retry_that_comes_another_way(proxied: tuple[Shop, Work], way: dict[str, str]) -> None:
    """A retry through another host, scheme or proxy is the same request."""
    shop, work = proxied
    key = new_key()
    first, again = (sender(shop.app, {**ACME, **PROXIED, **headers})(key, 100) for headers in ({}, way))
    assert (201, first.body, True) == (again.status, again.body, again.replayed)
    assert 1 == work.runs


@pytest.mark.scenario(24)
def test_another_prefix_is_another_request(proxied: tuple[Shop, Work]) -> None:
    """Under another prefix the same path is something else: it is refused, and not run."""
    shop, work = proxied
    key = new_key()
    answers = [
        sender(shop.app, {**ACME, **PROXIED, "X-Forwarded-Prefix": prefix})(key, 100) for prefix in ("/v1", "/v2", "")
    ]
    assert [(201, ""), (422, "key-reused"), (422, "key-reused")] == [(one.status, one.problem) for one in answers]
    assert 1 == work.runs


def test_links_in_a_record(proxied: tuple[Shop, Work]) -> None:
    """A replay has the links of the first answer, though the retry came by another host."""
    shop, _ = proxied

    @shop.app.post("/links")
    @shop.idempotency.required
    def links() -> tuple[str, int, dict[str, str]]:
        return "", 201, {"Location": url_for("links", _external=True)}

    key = new_key()
    answers = [
        sender(shop.app, {**ACME, **PROXIED, "X-Forwarded-Host": host}, "/links")(key, 1)
        for host in ("a.example", "b.example")
    ]
    assert [["https://a.example/v1/links"]] * 2 == [one.header("Location") for one in answers]
    assert answers[1].replayed


# DispatcherMiddleware


def mounted(dispatcher: Any, mount: str, tenant: str | None = "acme") -> Send:
    """A caller of what is mounted there."""

    def send(key: str, amount: int) -> Any:
        headers = {"Idempotency-Key": key, **({"X-Tenant": tenant} if tenant else {})}
        return answer_of(Client(dispatcher).post(f"{mount}/charges", json={"amount": amount}, headers=headers))

    return send


@pytest.fixture
def two(beside: Beside) -> list[tuple[Shop, Work]]:
    """Two apps with guarded views over one database, and so over one table of keys."""
    made = [beside() for _ in range(2)]
    for shop, work in made:
        by_tenant(shop)
        shop.app.post("/charges")(shop.idempotency.required(work.asked))
    return made


def unguarded() -> Flask:
    """An app without the extension."""
    app = Flask("unguarded")
    app.add_url_rule("/charges", "charges", lambda: {"key": request.headers["Idempotency-Key"]}, methods=["POST"])
    return app


def test_the_five_under_mounts(two: list[tuple[Shop, Work]]) -> None:
    """The five hold of each of two mounted apps, beside an app without the extension."""
    (first, _), (second, _) = two
    dispatcher = DispatcherMiddleware(unguarded(), {"/v1": first.app, "/v2": second.app})
    for mount, (shop, work) in zip(("/v1", "/v2"), two, strict=True):
        callers = {"good": mounted(dispatcher, mount), "other": mounted(dispatcher, mount, "emca")}
        the_five(case_of(shop, work, **callers, refused=[mounted(dispatcher, mount, None)]))
    answers = [mounted(dispatcher, "")("order-1001", 1) for _ in range(2)]
    assert [(200, False)] * 2 == [(one.status, one.replayed) for one in answers]


@pytest.mark.scenario(24, 55)
def test_one_key_under_two_mounts(two: list[tuple[Shop, Work]]) -> None:
    """Over one table, the same path under another mount is another request; it is refused, and not run."""
    (first, ran), (second, refused) = two
    dispatcher = DispatcherMiddleware(unguarded(), {"/v1": first.app, "/v2": second.app})
    key = new_key()
    answers = [mounted(dispatcher, mount)(key, 100) for mount in ("/v1", "/v2", "/v1")]
    assert [(201, ""), (422, "key-reused"), (201, "")] == [(one.status, one.problem) for one in answers]
    assert (True, 1, 0) == (answers[2].replayed, ran.runs, refused.runs)


def test_one_app_under_two_mounts(two: list[tuple[Shop, Work]]) -> None:
    """One app that is mounted twice answers the same path under its other mount as another request."""
    shop, work = two[0]
    dispatcher = DispatcherMiddleware(unguarded(), {"/v1": shop.app, "/v2": shop.app})
    key = new_key()
    assert [201, 422] == [mounted(dispatcher, mount)(key, 100).status for mount in ("/v1", "/v2")]
    assert [201, 201] == [mounted(dispatcher, mount)(new_key(), 100).status for mount in ("/v1", "/v2")]
    assert 3 == work.runs


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_an_app_mounted_in_a_guarded_one(two: list[tuple[Shop, Work]], inside: bool) -> None:
    """An app is mounted in another's ``wsgi_app``: what fails in it is its own, and a claim of it is, too."""
    (outer, above), (inner, below) = two
    if inside:  # within the outer app's wrapper, which then sees both apps' requests
        outer.app.wsgi_app.wsgi_app = DispatcherMiddleware(  # type: ignore[attr-defined]
            outer.app.wsgi_app.wsgi_app,  # type: ignore[attr-defined]
            {"/inner": inner.app},
        )
    else:
        outer.app.wsgi_app = DispatcherMiddleware(outer.app.wsgi_app, {"/inner": inner.app})  # type: ignore[method-assign]
    callers = {"good": mounted(outer.app, "/inner"), "other": mounted(outer.app, "/inner", "emca")}
    the_five(case_of(inner, below, **callers, refused=[mounted(outer.app, "/inner", None)]))
    assert 0 == above.runs
    the_five(case_of(outer, above))
    key = new_key()
    for where, status in ((BEFORE_COMMIT, 500), (AFTER_COMMIT, 500)):
        below.fail(where)
        assert status == callers["good"](key, 100).status
    assert 409 == callers["good"](key, 100).status
    with outer.app.app_context():
        held = sa.select(outer.table.c.status).where(outer.table.c.key == key)
        assert ["held"] == list(outer.db.session.scalars(held))
