"""Beside Flask-WTF: its CSRF token is another on each page, and no part of what is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask, Request, session
from flask.testing import FlaskClient
from flask_wtf import CSRFProtect, FlaskForm
from flask_wtf.csrf import generate_csrf
from wtforms import IntegerField
from wtforms.validators import NumberRange

from tests.neighbours.five import Answer, Send, Work, answer_of, case_of, the_five
from tests.neighbours.views import STANDINGS, add_view, browser
from tests.support.apps import Shop, new_key

Beside = Callable[..., tuple[Shop, Work]]

#: Flask-WTF answers 400 where the token is missing or wrong, whoever asks.
REFUSALS = frozenset({400, 401})


class Charging(FlaskForm):  # type: ignore[misc]
    amount = IntegerField(validators=[NumberRange(min=1)])


def set_up(app: Flask) -> None:
    """Protection for all views, and routes for a login and for a page with a token, another for each page."""
    csrf = CSRFProtect(app)

    @app.post("/login/<account>")
    @csrf.exempt
    def log_in(account: str) -> str:
        session["account"] = account
        return ""

    @app.get("/page")
    def page() -> str:
        session.pop("csrf_token", None)
        return generate_csrf()


def app_with(beside: Beside, order: str, **how: Any) -> tuple[Shop, Work]:
    shop, work = beside(**{order: [set_up]})
    shop.idempotency.scope_loader(lambda: session.get("account"))
    add_view(shop, work, **how)
    return shop, work


def by_form(shop: Shop, work: Work) -> Callable[[], Any]:
    """A view that reads a form of Flask-WTF's; what is wrong with it is no answer to keep."""

    def view() -> Any:
        form = Charging()
        if form.validate_on_submit():
            return work(form.amount.data), 201
        shop.idempotency.current.release()
        return {"errors": form.errors}, 422

    return view


def app_with_form(beside: Beside, order: str, **options: Any) -> tuple[Shop, Work]:
    shop, work = beside(**{order: [set_up]})
    shop.idempotency.scope_loader(lambda: session.get("account"))
    add_view(shop, work, view=by_form(shop, work), **options)
    return shop, work


def logged_in(app: Flask, account: str = "acme") -> FlaskClient:
    client = app.test_client()
    client.post(f"/login/{account}")
    return client


def script(client: FlaskClient) -> Send:
    """A script that takes the token from a new page, and sends it in the header."""
    return lambda key, amount: browser(client, {"X-CSRFToken": client.get("/page").text})(key, amount)


def form(client: FlaskClient, field: str | None = None) -> Send:
    """A form of a new page, with the token in it; the key in a header or in a field."""

    def send(key: str, amount: int) -> Answer:
        data = {"amount": str(amount), "csrf_token": client.get("/page").text}
        if field is not None:
            return answer_of(client.post("/charges", data={**data, field: key}))
        return answer_of(client.post("/charges", data=data, headers={"Idempotency-Key": key}))

    return send


def without_the_token(request: Request) -> dict[str, list[str]]:
    """What the form asks for; the documentation's recipe."""
    return {name: values for name, values in request.form.lists() if name != "csrf_token"}


def test_the_five_with_a_header(beside: Beside, order: str) -> None:
    """The five hold in either order with a token in the header, another on each attempt: headers do not count."""
    shop, work = app_with(beside, order)
    app = shop.app
    refused = [browser(logged_in(app)), browser(logged_in(app), {"X-CSRFToken": "wrong"}), script(app.test_client())]
    good, other = script(logged_in(app)), script(logged_in(app, "emca"))
    the_five(case_of(shop, work, good=good, other=other, refused=refused, refusals=REFUSALS))


@pytest.mark.parametrize("field", [None, "idempotency_key"], ids=["key in a header", "key in a field"])
def test_the_five_with_a_form(beside: Beside, order: str, field: str | None) -> None:
    """They hold with a token in the form, given the recipe; a form can't send a header, so the key may be a field."""
    options = {"key": lambda request: request.form.get(field)} if field else {}
    shop, work = app_with_form(beside, order, fingerprint=without_the_token, **options)
    app = shop.app
    refused = [form(app.test_client(), field), browser(logged_in(app))]
    good, other = form(logged_in(app), field), form(logged_in(app, "emca"), field)
    the_five(case_of(shop, work, good=good, other=other, refused=refused, refusals=REFUSALS))


@pytest.mark.parametrize("recipe", [False, True], ids=["by itself", "with the recipe"])
def test_the_form_of_a_new_page(beside: Beside, order: str, recipe: bool) -> None:
    """The token of a new page is a part of the form, so that the retry is refused, unless it is left out."""
    shop, work = app_with_form(beside, order, **({"fingerprint": without_the_token} if recipe else {}))
    client, key = logged_in(shop.app), new_key()
    first, again = (form(client)(key, 100) for _ in range(2))
    expected = (201, "", True) if recipe else (422, "key-reused", False)
    assert expected == (again.status, again.problem, again.replayed)
    assert (201, 1) == (first.status, work.runs)
    # The same page, sent twice, is the same request in any case.
    data, key = {"amount": "5", "csrf_token": client.get("/page").text}, new_key()
    twice = [answer_of(client.post("/charges", data=data, headers={"Idempotency-Key": key})) for _ in range(2)]
    assert [(201, False), (201, True)] == [(one.status, one.replayed) for one in twice]


@pytest.mark.scenario(50)
def test_a_token_that_is_refused(beside: Beside, order: str) -> None:
    """A request that the check refuses touches no claim, and its key runs when the token is right."""
    shop, work = app_with(beside, order)
    client, key = logged_in(shop.app), new_key()
    assert 400 == browser(client, {"X-CSRFToken": "wrong"})(key, 100).status
    assert (0, []) == (work.runs, shop.rows())
    assert [False, True] == [script(client)(key, 100).replayed for _ in range(2)]


@pytest.mark.parametrize("standing", STANDINGS)
def test_an_exempt_view(beside: Beside, order: str, standing: str) -> None:
    """A view that is exempt from the check is so on either side of the guard."""
    shop, work = beside(**{order: [set_up]})
    shop.idempotency.scope_loader(lambda: session.get("account"))
    exempt = shop.app.extensions["csrf"].exempt
    add_view(shop, work, view=by_form(shop, work), **{standing: [exempt]})
    assert 422 == browser(logged_in(shop.app))(new_key(), 100).status


def test_a_form_that_is_put_right(beside: Beside, order: str) -> None:
    """What was wrong with a form is released, so that the same key takes it once it is right."""
    shop, work = app_with_form(beside, order, fingerprint=without_the_token)
    send, key = form(logged_in(shop.app)), new_key()
    assert [422, 201, 201] == [send(key, amount).status for amount in (0, 100, 100)]
    assert 1 == work.runs
