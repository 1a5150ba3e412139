"""Beside Flask-Login: who is logged in is the scope, and who is not gets no replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask, session
from flask.testing import FlaskClient
from flask_login import LoginManager, UserMixin, fresh_login_required, login_required, login_user, logout_user

from tests.neighbours.five import Work, case_of, sender, the_five
from tests.neighbours.views import STANDINGS, add_view, browser
from tests.support.apps import Shop, new_key

TOKENS = {"Token one": "acme", "Token two": "acme", "Token other": "emca"}

#: Flask-Login's own, in Python 3.12 and later.
pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")

Beside = Callable[..., tuple[Shop, Work]]


class User(UserMixin):  # type: ignore[misc]
    def __init__(self, id: str) -> None:
        self.id = id


def set_up(app: Flask) -> None:
    """A login manager with both loaders, and routes to log in and out."""
    manager = LoginManager(app)
    manager.user_loader(User)
    manager.request_loader(
        lambda asked: (
            User(TOKENS[asked.headers["Authorization"]]) if asked.headers.get("Authorization") in TOKENS else None
        )
    )

    @app.post("/login/<id>")
    def log_in(id: str) -> str:
        login_user(User(id), remember=True)
        return ""

    @app.post("/logout")
    def log_out() -> str:
        logout_user()
        return ""

    @app.post("/stale")
    def make_stale() -> str:
        session["_fresh"] = False  # as after a login by the remember-me cookie
        return ""


def logged_in(app: Flask, id: str = "acme") -> FlaskClient:
    """A browser in which somebody has logged in."""
    client = app.test_client()
    client.post(f"/login/{id}")
    return client


def logged_out(app: Flask) -> FlaskClient:
    """A browser in which nobody is logged in any more."""
    client = logged_in(app)
    client.post("/logout")
    return client


def app_with(beside: Beside, order: str, standing: str, decorator: Any = login_required) -> tuple[Shop, Work]:
    shop, work = beside(**{order: [set_up]})
    add_view(shop, work, **{standing: [decorator]})
    return shop, work


@pytest.mark.parametrize("standing", STANDINGS)
@pytest.mark.scenario(47)
def test_the_five_with_a_session(beside: Beside, order: str, standing: str) -> None:
    """The five hold with logins that a session remembers, in either order and wherever login_required stands."""
    shop, work = app_with(beside, order, standing)
    app = shop.app
    callers = {
        "good": browser(logged_in(app)),
        "other": browser(logged_in(app, "emca")),
        "refused": [browser(app.test_client()), browser(logged_out(app))],
    }
    the_five(case_of(shop, work, **callers))
    assert {"~user:acme", "~user:emca"} == {row["scope"] for row in shop.rows()}


@pytest.mark.parametrize("standing", STANDINGS)
def test_the_five_with_a_request_loader(beside: Beside, order: str, standing: str) -> None:
    """They hold with a request loader that looks at a header."""
    shop, work = app_with(beside, order, standing)
    good, other, wrong = (
        sender(shop.app, {"Authorization": token}) for token in ("Token one", "Token other", "Token none")
    )
    the_five(case_of(shop, work, good=good, other=other, refused=[wrong, sender(shop.app)]))


def test_another_token_of_the_same_user(beside: Beside, order: str) -> None:
    """The scope is the user, not the credential: a retry with another token of theirs gets the replay."""
    shop, _ = app_with(beside, order, "above")
    key = new_key()
    answers = [sender(shop.app, {"Authorization": token})(key, 100) for token in ("Token one", "Token two")]
    assert [(201, False), (201, True)] == [(one.status, one.replayed) for one in answers]
    assert answers[0].body == answers[1].body


@pytest.mark.parametrize("standing", STANDINGS)
@pytest.mark.scenario(48)
def test_logged_out_between_the_attempts(beside: Beside, order: str, standing: str) -> None:
    """Who logged out gets a 401; logged in again the replay; and somebody else in the same browser a first run."""
    shop, work = app_with(beside, order, standing)
    client, key = logged_in(shop.app), new_key()
    send = browser(client)
    first = send(key, 100)
    client.post("/logout")
    refused = send(key, 100)
    assert (401, False) == (refused.status, refused.replayed)
    client.post("/login/acme")
    again = send(key, 100)
    assert (201, True, first.body) == (again.status, again.replayed, again.body)
    client.post("/logout")
    client.post("/login/emca")
    others = send(key, 100)
    assert (201, False) == (others.status, others.replayed)
    assert 2 == work.runs


@pytest.mark.scenario(36)
def test_cookies_are_not_recorded(beside: Beside, order: str) -> None:
    """Session and remember-me cookies are in no record; a retry from another browser gets its own, or none."""
    shop, work = beside(**{order: [set_up]}, REMEMBER_COOKIE_REFRESH_EACH_REQUEST=True)

    def view() -> Any:
        session["visits"] = session.get("visits", 0) + 1
        return work.asked()

    add_view(shop, work, above=[login_required], view=view)
    key = new_key()
    clients = [logged_in(shop.app) for _ in range(2)]
    first, again = (browser(client)(key, 100) for client in clients)
    assert (True, False) == (again.replayed, first.replayed)
    (row,) = shop.rows()
    assert "cookie" not in str(row["response_headers"]).lower()
    named = {one.split("=")[0] for one in first.header("Set-Cookie")}
    assert {"session", "remember_token"} == named
    # The session cookie is written after all hooks. The remember-me cookie comes from a hook of Flask-Login's.
    fresh = {one.split("=")[0] for one in again.header("Set-Cookie")}
    assert ({"session", "remember_token"} if order == "before" else {"session"}) == fresh
    assert not set(first.header("Set-Cookie")) & {one for one in again.header("Set-Cookie") if "session=" in one}
    with clients[1].session_transaction() as left:
        assert "visits" not in left


@pytest.mark.parametrize(("standing", "expected"), [("above", (401, False)), ("below", (201, True))])
def test_a_session_that_is_no_longer_fresh(
    beside: Beside, order: str, standing: str, expected: tuple[int, bool]
) -> None:
    """fresh_login_required refuses a stale session's replay from above the guard; below, it runs too late for that."""
    shop, work = app_with(beside, order, standing, fresh_login_required)
    client, key, unused = logged_in(shop.app), new_key(), new_key()
    send = browser(client)
    assert 201 == send(key, 100).status
    client.post("/stale")
    answer = send(key, 100)
    assert expected == (answer.status, answer.replayed)
    assert 401 == send(unused, 100).status
    assert [key] == [row["key"] for row in shop.rows()]
    assert 1 == work.runs


def test_the_login_page(beside: Beside, order: str) -> None:
    """Who is sent to the login page touches no claim; after the login the same key runs, and then replays."""
    shop, _ = app_with(beside, order, "above")
    shop.app.login_manager.login_view = "login_page"  # type: ignore[attr-defined]
    shop.app.add_url_rule("/login", "login_page", lambda: "", methods=["GET"])
    client, key = shop.app.test_client(), new_key()
    send = browser(client)
    assert 302 == send(key, 100).status
    assert [] == shop.rows()
    client.post("/login/acme")
    assert [False, True] == [send(key, 100).replayed for _ in range(2)]


@pytest.mark.scenario(74)
def test_protected_from_outside(beside: Beside, order: str) -> None:
    """Under protect, which stands above login_required, nobody gets a replay but the user; not by a header either."""
    shop, work = beside(**{order: [set_up]})
    shop.idempotency.protect(shop.app, paths="/charges")
    shop.app.post("/charges")(login_required(work.asked))
    key = new_key()
    good = browser(logged_in(shop.app))
    assert [False, True] == [good(key, 100).replayed for _ in range(2)]
    basic = {"Authorization": "Basic YWNtZTpwYXNzd29yZA=="}
    for client in (shop.app.test_client(), logged_out(shop.app)):
        for headers in ({}, basic):
            answer = browser(client, headers)(key, 100)
            assert (401, "scope-missing", False) == (answer.status, answer.problem, answer.replayed)
    assert 1 == work.runs
