"""Beside Flask-JWT-Extended: the account in the token is the scope, and a token that is revoked opens no record."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from flask import Flask, Response, jsonify
from flask.testing import FlaskClient
from flask_jwt_extended import (
    JWTManager,
    create_access_token,
    create_refresh_token,
    get_jti,
    get_jwt_identity,
    jwt_required,
    set_access_cookies,
    verify_jwt_in_request,
)

from tests.neighbours.five import Answer, Send, Work, case_of, sender, the_five
from tests.neighbours.views import STANDINGS, add_view, browser
from tests.support.apps import Shop, new_key

Beside = Callable[..., tuple[Shop, Work]]


def set_up(app: Flask) -> None:
    """The manager with a blocklist, and a route that gives a new access token for a refresh token."""
    app.config["BLOCKED"] = set()
    manager = JWTManager(app)
    manager.token_in_blocklist_loader(lambda header, claims: claims["jti"] in app.config["BLOCKED"])

    @app.post("/refresh")
    @jwt_required(refresh=True)
    def refresh() -> dict[str, str]:
        return {"token": create_access_token(get_jwt_identity())}


def account_of_the_token() -> str | None:
    """The scope where jwt_required stands above the guard, and has looked at the token."""
    return get_jwt_identity()


def account_of_a_verified_token() -> str | None:
    """The scope where it stands below: the token is looked at here."""
    verify_jwt_in_request()
    return get_jwt_identity()


LOADERS = {"above": account_of_the_token, "below": account_of_a_verified_token}


def app_with(beside: Beside, order: str, standing: str, **config: Any) -> tuple[Shop, Work]:
    shop, work = beside(**{order: [set_up]}, **config)
    shop.idempotency.scope_loader(LOADERS[standing])
    add_view(shop, work, **{standing: [jwt_required()]})
    return shop, work


def token(app: Flask, account: str = "acme", **how: Any) -> str:
    with app.app_context():
        return create_access_token(account, **how)


def revoke(app: Flask, token: str) -> None:
    with app.app_context():
        app.config["BLOCKED"].add(get_jti(token))


def bearer(app: Flask, token: str, path: str = "/charges") -> Send:
    return sender(app, {"Authorization": f"Bearer {token}"}, path)


@pytest.mark.parametrize("standing", STANDINGS)
@pytest.mark.scenario(48)
def test_the_five(beside: Beside, order: str, standing: str) -> None:
    """The five hold in either order, wherever jwt_required stands; refused are revoked, expired, forged and none."""
    shop, work = app_with(beside, order, standing)
    app = shop.app
    revoked = token(app)
    revoke(app, revoked)
    expired = token(app, expires_delta=timedelta(seconds=-10))
    callers = {
        "good": bearer(app, token(app)),
        "other": bearer(app, token(app, "emca")),
        "refused": [sender(app), *(bearer(app, one) for one in (revoked, expired, "no.jwt.here"))],
        "refusals": frozenset({401, 422}),  # 422 is what Flask-JWT-Extended answers a token that is none
    }
    the_five(case_of(shop, work, **callers))


@pytest.mark.parametrize("standing", STANDINGS)
@pytest.mark.scenario(32, 48)
def test_a_token_that_is_refreshed_and_one_that_is_revoked(beside: Beside, order: str, standing: str) -> None:
    """A fresh token of the same account gets the replay; the old one, revoked, the package's own 401."""
    shop, work = app_with(beside, order, standing)
    app = shop.app
    with app.app_context():
        refresh = create_refresh_token("acme")
    old, key = token(app), new_key()
    first = bearer(app, old)(key, 100)
    answer = app.test_client().post("/refresh", headers={"Authorization": f"Bearer {refresh}"})
    retry = bearer(app, answer.get_json()["token"])(key, 100)
    assert (201, True, first.body) == (retry.status, retry.replayed, retry.body)
    revoke(app, old)
    refused = bearer(app, old)(key, 100)
    assert (401, False, b"revoked" in refused.body) == (refused.status, refused.replayed, True)
    assert 1 == work.runs


def test_without_a_loader(beside: Beside, order: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without a loader the token's hash is the scope: a refreshed one runs again, and the log has said so."""
    shop, work = beside(**{order: [set_up]})
    add_view(shop, work, above=[jwt_required()])
    key = new_key()
    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        answers = [bearer(shop.app, token(shop.app))(key, 100) for _ in range(2)]
    assert [(201, False)] * 2 == [(one.status, one.replayed) for one in answers]
    assert 2 == work.runs
    assert "a refreshed token is a new scope" in caplog.text


@pytest.mark.scenario(74)
def test_without_a_loader_above_the_decorator(beside: Beside, order: str) -> None:
    """A guard above jwt_required refuses the token's hash: were it a scope, a revoked token would open the record."""
    shop, work = beside(**{order: [set_up]})
    add_view(shop, work, below=[jwt_required()])
    answer = bearer(shop.app, token(shop.app))(new_key(), 100)
    assert (401, "scope-missing") == (answer.status, answer.problem)
    assert (0, []) == (work.runs, shop.rows())


def test_an_optional_token(beside: Beside, order: str) -> None:
    """With jwt_required(optional=True) nobody's request has no scope, while a bad token stays the package's own 401."""
    shop, work = beside(**{order: [set_up]})
    shop.idempotency.scope_loader(account_of_the_token)
    add_view(shop, work, above=[jwt_required(optional=True)])
    app = shop.app
    old, key = token(app), new_key()
    assert [False, True] == [bearer(app, old)(key, 100).replayed for _ in range(2)]
    nobody = sender(app)(key, 100)
    assert (401, "scope-missing") == (nobody.status, nobody.problem)
    revoke(app, old)
    assert (401, "") == (bearer(app, old)(key, 100).status, bearer(app, old)(key, 100).problem)
    assert 1 == work.runs


def with_cookies(app: Flask) -> None:
    """The manager with tokens in cookies, each access giving a new one, as its documentation has it."""
    set_up(app)

    @app.post("/login/<account>")
    def log_in(account: str) -> Any:
        answer = jsonify()
        set_access_cookies(answer, create_access_token(account))
        return answer

    @app.after_request
    def refresh_the_cookie(response: Response) -> Response:
        with suppress(RuntimeError):  # nobody has looked at a token in this request
            set_access_cookies(response, create_access_token(get_jwt_identity()))
        return response


def logged_in(app: Flask, account: str = "acme") -> FlaskClient:
    """A browser with a token in its cookies."""
    client = app.test_client()
    client.post(f"/login/{account}")
    return client


def scripted(client: FlaskClient) -> Send:
    """A script in that browser: it sends the value against CSRF that the newest cookie has."""

    def send(key: str, amount: int) -> Answer:
        cookie = client.get_cookie("csrf_access_token")
        return browser(client, {"X-CSRF-TOKEN": cookie.value} if cookie else {})(key, amount)

    return send


def app_with_cookies(beside: Beside, order: str) -> tuple[Shop, Work]:
    shop, work = beside(**{order: [with_cookies]}, JWT_TOKEN_LOCATION=["cookies"])
    shop.idempotency.scope_loader(account_of_the_token)
    add_view(shop, work, above=[jwt_required()])
    return shop, work


@pytest.mark.scenario(36)
def test_the_five_with_cookies(beside: Beside, order: str) -> None:
    """The five hold with tokens in cookies that change with each answer; refused are no cookie and no CSRF header."""
    shop, work = app_with_cookies(beside, order)
    app = shop.app
    callers = {
        "good": scripted(logged_in(app)),
        "other": scripted(logged_in(app, "emca")),
        "refused": [scripted(app.test_client()), browser(logged_in(app))],
    }
    the_five(case_of(shop, work, **callers))
    assert "cookie" not in str([row["response_headers"] for row in shop.rows()]).lower()


@pytest.mark.scenario(32, 36)
def test_the_cookie_of_a_retry(beside: Beside, order: str) -> None:
    """A retry from another browser of the account replays; a new token is its own, or none is sent."""
    shop, work = app_with_cookies(beside, order)
    key = new_key()
    first, again = (scripted(logged_in(shop.app))(key, 100) for _ in range(2))
    assert (True, 1) == (again.replayed, work.runs)
    assert not set(first.header("Set-Cookie")) & set(again.header("Set-Cookie"))
    assert (order == "before") == bool(again.header("Set-Cookie"))
