"""Beside Flask-RESTful: its resources, marshalling above and below the guard, and its own error handling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import abort
from flask_restful import Api, Resource, fields, marshal_with, reqparse
from flask_restful import abort as restful_abort

from flask_idempotency.errors import StepError
from tests.neighbours.five import Work, by_tenant, case_of, the_five
from tests.neighbours.toolkits import (
    MODES,
    Nesting,
    amount_asked,
    post,
    problems_come_through,
    refused_before_the_guard,
)
from tests.support.apps import Shop, new_key

Beside = Callable[..., tuple[Shop, Work]]

MODEL = {"run": fields.Integer, "amount": fields.String}


def restful(beside: Beside, *, place: str = "below", **options: Any) -> tuple[Shop, Nesting]:
    """The app with Flask-RESTful on it, and its resource.

    :param place: where the guard stands: below marshalling, above it, or in one of the toolkit's decorators.
    """
    apis: list[Api] = []
    atomic, order = (options.pop(name, None) for name in ("atomic", "order"))
    shop, work = beside(**{order or "before": [lambda app: apis.append(Api(app))]}, **options)
    by_tenant(shop)
    guarded = shop.idempotency.required(atomic=bool(atomic))
    view = Nesting(work)
    parser = reqparse.RequestParser()
    parser.add_argument("amount", type=int, required=True, location="json")

    class Charges(Resource):  # type: ignore[misc]
        method_decorators: Any = {"by method": {"post": [guarded]}, "by list": [guarded]}.get(place, [])
        decorators = [guarded] if place == "decorators" else []

        def post(self) -> tuple[dict[str, int], int]:
            return view(amount_asked()), 201

    made = Charges.post
    made = guarded(made) if place == "below" else made
    made = marshal_with(MODEL, envelope="charge")(made)

    def parsed(self: Charges) -> Any:
        parser.parse_args()
        return made(self)

    Charges.post = guarded(parsed) if place == "above" else parsed  # type: ignore[method-assign]
    if place == "api":
        apis[0].decorators = [guarded]
    apis[0].add_resource(Charges, "/charges")
    return shop, view


@pytest.mark.scenario(51)
@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
@pytest.mark.parametrize("place", ["below", "above", "decorators", "by method", "by list", "api"])
def test_the_five(beside: Beside, place: str, atomic: bool) -> None:
    """The five hold wherever the guard stands, in both modes; a replay is what went over the wire, marshalled."""
    shop, view = restful(beside, place=place, atomic=atomic)
    the_five(case_of(shop, view.work, atomic=atomic))
    assert {"charge": {"run": view.work.runs + 1, "amount": "100"}} == post(shop, new_key()).json


@MODES
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("place", ["below", "by list"])
def test_problems_come_through(beside: Beside, place: str, order: str, mode: dict[str, bool]) -> None:
    """The toolkit keeps what the problem says, in any mode, whichever was set up first."""
    problems_come_through(*restful(beside, place=place, order=order, **mode), media_type="application/json")


@MODES
def test_arguments_are_refused_first(beside: Beside, mode: dict[str, bool]) -> None:
    """Arguments that the parser refuses above the guard touch no claim."""
    shop, view = restful(beside, **mode)
    refused_before_the_guard(shop, view.work, "much", 400)


def resource(shop: Shop, **methods: Any) -> None:
    """Add a resource at ``/x``, each of whose methods is a guarded function of its ``self``."""
    guarded = {name: shop.idempotency.required(method) for name, method in methods.items()}
    Api(shop.app).add_resource(type("X", (Resource,), guarded), "/x")


@MODES
@pytest.mark.parametrize("status", [202, 299, 410, 499])
def test_any_status_is_replayed(beside: Beside, status: int, mode: dict[str, bool]) -> None:
    """Whatever the status, a registered one or not, a replay is the first answer, with its headers."""
    shop, _ = beside(**mode)
    by_tenant(shop)
    resource(shop, post=lambda self: ({"status": status}, status, {"X-Made": "here"}))
    key = new_key()
    first, again = (post(shop, key, path="/x") for _ in range(2))
    assert (status, "here", None) == (
        first.status_code,
        first.headers["X-Made"],
        first.headers.get("Idempotent-Replay"),
    )
    assert (status, "here", "true") == (again.status_code, again.headers["X-Made"], again.headers["Idempotent-Replay"])
    assert first.data == again.data


@MODES
@pytest.mark.parametrize("abort", [abort, restful_abort])
def test_abort_is_recorded(beside: Beside, abort: Callable[[int], Any], mode: dict[str, bool]) -> None:
    """An abort() in the view is answered by the toolkit, recorded and replayed as it went over the wire."""
    shop, _ = beside(**mode)
    by_tenant(shop)
    runs: list[int] = []

    def post_(self: Resource) -> Any:
        runs.append(1)
        abort(410)

    resource(shop, post=post_)
    key = new_key()
    first, again = (post(shop, key, path="/x") for _ in range(2))
    assert (410, first.data, 1) == (again.status_code, again.data, len(runs))


@MODES
def test_the_apps_rule_for_answers_holds_for_an_abort(beside: Beside, mode: dict[str, bool]) -> None:
    """The option ``record`` is asked about a 503 that the view aborts with, as without the toolkit."""
    shop, _ = beside(IDEMPOTENCY_RECORD=lambda response: True, **mode)
    by_tenant(shop)
    runs: list[int] = []

    def post_(self: Resource) -> Any:
        runs.append(1)
        abort(503)

    resource(shop, post=post_)
    key = new_key()
    answers = [post(shop, key, path="/x") for _ in range(2)]
    assert ([503, 503], 1) == ([one.status_code for one in answers], len(runs))


@pytest.mark.scenario(56)
def test_a_swallowed_exception_is_released(beside: Beside) -> None:
    """An exception that the toolkit makes a 500 of is no answer of the view's."""
    shop, _ = beside()
    by_tenant(shop)
    runs: list[int] = []

    def post_(self: Resource) -> Any:
        runs.append(1)
        raise ZeroDivisionError

    resource(shop, post=post_)
    key = new_key()
    answers = [post(shop, key, path="/x") for _ in range(2)]
    assert ([500, 500], 2, []) == ([one.status_code for one in answers], len(runs), shop.rows())


@pytest.mark.parametrize("options", [None, {"retention": 60}], ids=["bare", "with options"])
def test_method_decorators_are_nearer_than_protect(beside: Beside, options: dict[str, Any] | None) -> None:
    """A guard in ``method_decorators`` is the view's own: within a protected app it is what holds."""
    shop, work = beside()
    by_tenant(shop)
    optional = shop.idempotency.optional if options is None else shop.idempotency.optional(**options)

    class Charges(Resource):  # type: ignore[misc]
        method_decorators = (optional,)

        def post(self) -> tuple[dict[str, int], int]:
            return work(amount_asked()), 201

    Api(shop.app).add_resource(Charges, "/charges")
    shop.idempotency.protect(shop.app)
    assert 201 == post(shop, None).status_code
    key = new_key()
    answers = [post(shop, key) for _ in range(2)]
    assert [(201, None), (201, "true")] == [(one.status_code, one.headers.get("Idempotent-Replay")) for one in answers]


def test_method_decorators_are_known_in_hooks(beside: Beside) -> None:
    """A step in a hook before a guard of ``method_decorators`` is refused, as before any guard."""
    shop, work = beside(TESTING=True)
    by_tenant(shop)

    class Charges(Resource):  # type: ignore[misc]
        method_decorators = (shop.idempotency.required,)

        def post(self) -> tuple[dict[str, int], int]:
            return work(amount_asked()), 201

    Api(shop.app).add_resource(Charges, "/charges")
    shop.app.before_request(lambda: shop.idempotency.step("too early", dict))
    with pytest.raises(StepError):
        post(shop, new_key())
    assert 0 == work.runs
