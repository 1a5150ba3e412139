"""Beside flask-smorest: its blueprints, its arguments and responses, and its own error handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask
from flask.views import MethodView
from flask_smorest import Api, Blueprint, abort
from marshmallow import Schema, fields
from werkzeug.exceptions import HTTPException

from flask_idempotency.errors import IdempotencyError, KeyReused
from tests.neighbours.five import Work, by_tenant, case_of, the_five
from tests.neighbours.toolkits import MODES, Nesting, post, problems_come_through, refused_before_the_guard
from tests.support.apps import Shop, new_key

Beside = Callable[..., tuple[Shop, Work]]

CONFIG = {"API_TITLE": "Charges", "API_VERSION": "1", "OPENAPI_VERSION": "3.0.3"}


class Amount(Schema):
    """What a client sends."""

    amount = fields.Integer(required=True)


class Charge(Schema):
    """What a client gets: marshalled, so that it differs from what the view returns."""

    run = fields.Integer()
    amount = fields.String()


def smorest(beside: Beside, *, place: str = "below", **options: Any) -> tuple[Shop, Nesting]:
    """The app with flask-smorest on it, and its view.

    :param place: where the guard stands: below the toolkit's decorators, above them, or in ``decorators``.
    """
    apis: list[Api] = []
    atomic = options.pop("atomic", False)
    order = options.pop("order", "before")
    shop, work = beside(**{order: [lambda app: apis.append(Api(app))]}, **CONFIG, **options)
    by_tenant(shop)
    guarded = shop.idempotency.required(atomic=atomic)
    view = Nesting(work)
    blueprint = Blueprint("charges", __name__)

    class Charges(MethodView):
        decorators = (guarded,) if place == "decorators" else ()

        def post(self, body: dict[str, int]) -> dict[str, int]:
            return view(body["amount"])

    if place == "below":
        Charges.post = guarded(Charges.post)  # type: ignore[method-assign]
    Charges.post = blueprint.arguments(Amount)(blueprint.response(201, Charge)(Charges.post))  # type: ignore[method-assign]
    if place == "above":
        Charges.post = guarded(Charges.post)  # type: ignore[method-assign]
    blueprint.route("/charges")(Charges)
    apis[0].register_blueprint(blueprint)
    return shop, view


@pytest.mark.scenario(51)
@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
@pytest.mark.parametrize("place", ["below", "above", "decorators"])
def test_the_five(beside: Beside, place: str, atomic: bool) -> None:
    """The five hold wherever the guard stands, in both modes; a replay is what went over the wire, marshalled."""
    shop, view = smorest(beside, place=place, atomic=atomic)
    the_five(case_of(shop, view.work, atomic=atomic))
    assert {"run": view.work.runs + 1, "amount": "100"} == post(shop, new_key()).json


@MODES
@pytest.mark.parametrize("order", ["before", "after"])
def test_problems_come_through(beside: Beside, order: str, mode: dict[str, bool]) -> None:
    """The toolkit's handler for every HTTP exception leaves the extension's alone, whichever was set up first."""
    problems_come_through(*smorest(beside, order=order, **mode))


def test_others_are_the_toolkits_own(beside: Beside) -> None:
    """What the extension did not raise is answered as flask-smorest answers it."""
    shop, _ = smorest(beside)
    assert 400 == post(shop, None).status_code
    assert {"code": 404, "status": "Not Found"} == shop.client.get("/elsewhere").json


def test_arguments_are_refused_first(beside: Beside) -> None:
    """Arguments that flask-smorest refuses touch no claim."""
    shop, view = smorest(beside)
    refused_before_the_guard(shop, view.work, "much", 422)


def test_abort_is_recorded(beside: Beside) -> None:
    """An abort() in the view is answered by the toolkit, recorded and replayed as it went over the wire."""
    shop, view = smorest(beside)
    key = new_key()
    view.asks = lambda: abort(410, message="Gone for good.")
    answers = [post(shop, key) for _ in range(2)]
    assert [{"code": 410, "status": "Gone", "message": "Gone for good."}] * 2 == [one.json for one in answers]
    assert [None, "true"] == [one.headers.get("Idempotent-Replay") for one in answers]


def _on_the_error(app: Flask) -> None:
    app.register_error_handler(IdempotencyError, lambda error: ({"mine": error.slug}, 418))


def _on_its_class(app: Flask) -> None:
    app.register_error_handler(KeyReused, lambda error: ({"mine": error.slug}, 418))


def _on_all(app: Flask) -> None:
    app.register_error_handler(HTTPException, lambda error: ({"mine": error.slug}, 418))


def _on_the_blueprint(app: Flask) -> None:
    # As a blueprint's own errorhandler() does, when the blueprint is registered.
    app.error_handler_spec["charges"][None][HTTPException] = lambda error: ({"mine": error.slug}, 418)


@pytest.mark.parametrize("handle", [_on_the_error, _on_its_class, _on_all, _on_the_blueprint])
def test_handlers_of_the_app_stay(beside: Beside, handle: Callable[[Flask], None]) -> None:
    """A handler that the app has for the error, its class, its status or every HTTP exception is not displaced."""
    shop, _ = smorest(beside)
    handle(shop.app)
    key = new_key()
    assert 201 == post(shop, key).status_code
    answer = post(shop, key, 900)
    assert (418, {"mine": "key-reused"}) == (answer.status_code, answer.json)


def test_a_handler_in_a_subclass_stays(beside: Beside) -> None:
    """An Api of the app's own that handles HTTP exceptions in another way is not displaced either."""

    class Own(Api):
        def handle_http_exception(self, error: Any) -> Any:
            return {"mine": error.slug}, 418

    shop, work = beside(before=[Own], **CONFIG)
    by_tenant(shop)
    shop.app.post("/charges")(shop.idempotency.required(work.asked))
    answer = post(shop, None)
    assert (418, {"mine": "key-missing"}) == (answer.status_code, answer.json)
