"""On APIFlask: its app in the place of Flask's, its input and output, and its own error handler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from apiflask import APIFlask, HTTPTokenAuth, Schema, abort
from apiflask.fields import Integer, Raw, String
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency
from tests.neighbours.five import Case, Work, by_tenant, case_of, sender, the_five
from tests.neighbours.toolkits import MODES, Nesting, post, problems_come_through, refused_before_the_guard
from tests.support.apps import Shop, close, new_key


class Amount(Schema):
    """What a client sends."""

    amount = Integer(required=True)


class Charge(Schema):
    """What a client gets: marshalled, so that it differs from what the view returns."""

    run = Integer()
    amount = String()


Make = Callable[..., tuple[Shop, Nesting]]


@pytest.fixture
def make(sqlite_url: str) -> Iterator[Make]:
    """A function that makes an APIFlask app with the extension, without routes."""
    shops: list[Shop] = []

    def build(*, json_errors: bool = True, **config: Any) -> tuple[Shop, Nesting]:
        app = APIFlask("neighbours", json_errors=json_errors)
        app.config.update(SQLALCHEMY_DATABASE_URI=sqlite_url, SECRET_KEY="a secret of tests", **config)
        db = SQLAlchemy(app)

        class ChargeModel(db.Model):  # type: ignore[name-defined]
            id = sa.Column(sa.Integer, primary_key=True)
            amount = sa.Column(sa.Integer, nullable=False)

        shops.append(Shop(app, Idempotency(app, db), db, ChargeModel))
        by_tenant(shops[-1])
        with app.app_context():
            db.create_all()
        return shops[-1], Nesting(Work(db, ChargeModel))

    yield build
    for shop in shops:
        close(shop.app)


def charges(shop: Shop, view: Nesting, *, place: str = "below", atomic: bool = False) -> None:
    """Add the route, with the guard below the toolkit's decorators or between its route and them."""

    def create_charge(json_data: dict[str, int]) -> dict[str, int]:
        return view(json_data["amount"])

    app, guarded = shop.app, shop.idempotency.required(atomic=atomic)
    assert isinstance(app, APIFlask)
    inner = guarded(create_charge) if place == "below" else create_charge
    marshalled = app.input(Amount)(app.output(Charge, status_code=201)(inner))
    app.post("/charges")(guarded(marshalled) if place == "above" else marshalled)


@pytest.mark.scenario(51)
@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
@pytest.mark.parametrize("place", ["below", "above"])
def test_the_five(make: Make, place: str, atomic: bool) -> None:
    """The five hold wherever the guard stands, in both modes; a replay is what went over the wire, marshalled."""
    shop, view = make()
    charges(shop, view, place=place, atomic=atomic)
    the_five(case_of(shop, view.work, atomic=atomic))
    assert {"run": view.work.runs + 1, "amount": "100"} == post(shop, new_key()).json


def test_the_five_behind_its_authentication(make: Make) -> None:
    """A credential that ``auth_required`` refuses touches no claim, and the caller it names is the scope."""
    shop, view = make()
    app, auth = shop.app, HTTPTokenAuth()
    assert isinstance(app, APIFlask)
    auth.verify_token(lambda token: {"one": "acme", "two": "emca"}.get(token))
    shop.idempotency.scope_loader(lambda: auth.current_user)

    @app.post("/charges")
    @app.auth_required(auth)
    @app.input(Amount)
    @app.output(Charge, status_code=201)
    @shop.idempotency.required
    def create_charge(json_data: dict[str, int]) -> dict[str, int]:
        return view(json_data["amount"])

    callers = {token: sender(app, {"Authorization": f"Bearer {token}"}) for token in ("one", "two", "three")}
    the_five(
        Case(
            runs=lambda: view.work.runs,
            fail=view.work.fail,
            rows=shop.rows,
            good=callers["one"],
            other=callers["two"],
            refused=[callers["three"], sender(app)],
        )
    )


@pytest.mark.scenario(51)
def test_the_five_on_a_view_class(make: Make) -> None:
    """The five hold for a method of a view class, with the toolkit's decorators on the method."""
    from apiflask.views import MethodView

    shop, view = make()
    app = shop.app
    assert isinstance(app, APIFlask)

    class Charges(MethodView):
        @app.input(Amount)
        @app.output(Charge, status_code=201)
        @shop.idempotency.required
        def post(self, json_data: dict[str, int]) -> dict[str, int]:
            return view(json_data["amount"])

    app.add_url_rule("/charges", view_func=Charges.as_view("charges"))
    the_five(case_of(shop, view.work))


@pytest.mark.scenario(51)
def test_the_five_in_an_envelope(make: Make) -> None:
    """A replay has the envelope, a base response schema, that the first answer had, once."""

    class Envelope(Schema):
        data = Raw()
        message = String()

    shop, view = make(BASE_RESPONSE_SCHEMA=Envelope)
    app = shop.app
    assert isinstance(app, APIFlask)

    @app.post("/charges")
    @app.input(Amount)
    @app.output(Charge, status_code=201)
    @shop.idempotency.required
    def create_charge(json_data: dict[str, int]) -> dict[str, Any]:
        return {"data": view(json_data["amount"]), "message": "made"}

    the_five(case_of(shop, view.work))
    made = {"run": view.work.runs + 1, "amount": "100"}
    assert {"data": made, "message": "made"} == post(shop, new_key()).json


@MODES
@pytest.mark.parametrize("json_errors", [True, False])
def test_problems_come_through(make: Make, json_errors: bool, mode: dict[str, bool]) -> None:
    """The toolkit's handler for every HTTP exception leaves the extension's alone."""
    shop, view = make(json_errors=json_errors, **mode)
    charges(shop, view)
    problems_come_through(shop, view)


def test_others_are_the_toolkits_own(make: Make) -> None:
    """What the extension did not raise is answered as APIFlask answers it."""
    shop, view = make()
    charges(shop, view)
    assert 400 == post(shop, None).status_code
    assert {"message": "Not Found", "detail": {}} == shop.client.get("/elsewhere").json


def test_input_is_refused_first(make: Make) -> None:
    """Input that APIFlask refuses touches no claim."""
    shop, view = make()
    charges(shop, view)
    refused_before_the_guard(shop, view.work, "much", 422)


def test_abort_is_recorded(make: Make) -> None:
    """APIFlask's abort() in the view is answered by the toolkit, recorded and replayed as it went over the wire."""
    shop, view = make()
    charges(shop, view)
    key = new_key()
    view.asks = lambda: abort(410, message="Gone for good.", headers={"X-Why": "sold"})
    answers = [post(shop, key) for _ in range(2)]
    assert ["Gone for good."] * 2 == [one.json["message"] for one in answers]
    assert [(410, "sold", None), (410, "sold", "true")] == [
        (one.status_code, one.headers["X-Why"], one.headers.get("Idempotent-Replay")) for one in answers
    ]


def test_an_error_processor_of_the_app_stays(make: Make) -> None:
    """A function of the app's that makes the bodies of errors is not displaced; status and ``Retry-After`` stay."""
    shop, view = make()
    charges(shop, view)
    app = shop.app
    assert isinstance(app, APIFlask)
    app.error_processor(lambda error: ({"mine": error.message}, error.status_code, error.headers))
    key = new_key()
    view.asks = lambda: post(shop, key)
    assert 201 == post(shop, key).status_code
    assert view.inner is not None
    assert (409, {"mine": "Conflict"}, "2") == (
        view.inner.status_code,
        view.inner.json,
        view.inner.headers["Retry-After"],
    )
