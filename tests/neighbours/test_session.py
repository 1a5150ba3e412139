"""Beside Flask-Session: the session is saved after all hooks, and its id is in no record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cachelib import FileSystemCache
from flask import Flask, request, session
from flask.testing import FlaskClient
from flask_session import Session

from tests.neighbours.five import (
    Broken,
    Work,
    case_of,
    first_run,
    mismatch,
    refused_credentials,
    replay,
    the_five,
)
from tests.neighbours.views import add_view, browser
from tests.support.apps import Shop, new_key

Beside = Callable[..., tuple[Shop, Work]]
Make = Callable[..., tuple[Shop, Work]]

#: Flask-Session's own, in Python 3.12 and later.
utcnow = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")


def account() -> str | None:
    return session.get("account")


def routes(shop: Shop, work: Work, **options: Any) -> None:
    """A login, a guarded view that writes into the session, and a way to look at it."""
    app = shop.app

    @app.post("/login/<account>")
    def log_in(account: str) -> str:
        session["account"] = account
        return ""

    @app.post("/logout")
    def log_out() -> str:
        session.clear()
        return ""

    @app.get("/session")
    def look() -> dict[str, Any]:
        return {"account": session.get("account"), "amounts": session.get("amounts", [])}

    def view() -> Any:
        session["amounts"] = [*session.get("amounts", []), request.get_json()["amount"]]
        return work.asked()

    shop.idempotency.scope_loader(account)
    add_view(shop, work, view=view, **options)


@pytest.fixture
def make(beside: Beside, order: str, tmp_path: Path) -> Make:
    """A function that makes the app with sessions in files, set up before the extension or after it."""

    def set_up(app: Flask) -> None:
        Session(app)

    def build() -> tuple[Shop, Work]:
        cache = FileSystemCache(str(tmp_path / "sessions"))
        shop, work = beside(**{order: [set_up]}, SESSION_TYPE="cachelib", SESSION_CACHELIB=cache)
        routes(shop, work)
        return shop, work

    return build


def logged_in(app: Flask, account: str = "acme") -> FlaskClient:
    client = app.test_client()
    client.post(f"/login/{account}")
    return client


def session_id(client: FlaskClient) -> str:
    cookie = client.get_cookie("session")
    assert cookie is not None
    return cookie.value


@pytest.mark.scenario(36)
def test_the_five(make: Make) -> None:
    """The five hold in either order; refused are a browser without a session, and one that has logged out."""
    shop, work = make()
    app = shop.app
    left = logged_in(app)
    left.post("/logout")
    good, other = browser(logged_in(app)), browser(logged_in(app, "emca"))
    the_five(case_of(shop, work, good=good, other=other, refused=[browser(app.test_client()), browser(left)]))


@pytest.mark.scenario(36)
def test_another_browser_of_the_account(make: Make) -> None:
    """A retry from another browser replays with that browser's session: the first one's id is neither kept nor sent."""
    shop, work = make()
    one, two = logged_in(shop.app), logged_in(shop.app)
    ids, key = [session_id(client) for client in (one, two)], new_key()
    first, again = browser(one)(key, 100), browser(two)(key, 100)
    assert (True, first.body, 1) == (again.replayed, again.body, work.runs)
    (row,) = shop.rows()
    assert [False, False] == [one in str(row) for one in ids]
    assert [False, True] == [one in str(again.headers) for one in ids]
    assert ids == [session_id(client) for client in (one, two)]
    # The view wrote into the first one's session, once; the retry's is what it was.
    assert [[100], []] == [client.get("/session").get_json()["amounts"] for client in (one, two)]


def in_the_database(shop: Shop) -> None:
    """Keep the sessions in the app's own database, through its db.session."""
    shop.app.config.update(SESSION_TYPE="sqlalchemy", SESSION_SQLALCHEMY=shop.db)
    Session(shop.app)


@utcnow
def test_the_five_with_sessions_in_the_database(beside: Beside) -> None:
    """In atomic mode they hold with sessions in the app's database, whose saving is a part of the request's work."""
    shop, work = beside()
    in_the_database(shop)
    routes(shop, work, atomic=True)
    app = shop.app
    good, other = browser(logged_in(app)), browser(logged_in(app, "emca"))
    the_five(case_of(shop, work, good=good, other=other, refused=[browser(app.test_client())], atomic=True))


@utcnow
@pytest.mark.scenario(42)
def test_a_failure_with_sessions_in_the_database(beside: Beside, caplog: pytest.LogCaptureFixture) -> None:
    """In the default mode Flask-Session's commit after a failing view is a commit, of what the view left in db.session
    as well: the key is held. The other four hold."""
    shop, work = beside()
    in_the_database(shop)
    routes(shop, work)

    def leaves_work_behind() -> Any:
        shop.db.session.add(shop.Charge(amount=1))
        raise Broken

    add_view(shop, work, view=leaves_work_behind, path="/failing")

    app = shop.app
    good, other = browser(logged_in(app)), browser(logged_in(app, "emca"))
    case = case_of(shop, work, good=good, other=other, refused=[browser(app.test_client())])
    for thing in (first_run, replay, mismatch, refused_credentials):
        thing(case)
    before = shop.charges()
    send, key = browser(logged_in(app), path="/failing"), new_key()
    answers = [send(key, 100) for _ in range(2)]
    assert [(500, ""), (409, "outcome-unknown")] == [(one.status, one.problem) for one in answers]
    assert before + 1 == shop.charges()
    assert 'seen="INSERT INTO charge' in caplog.text
