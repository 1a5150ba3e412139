"""View classes that choose themselves what a request runs, and guards that stand on a part of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import flask_restx
import pytest
from flask import abort, request
from flask.views import MethodView, View

from flask_idempotency.errors import ConfigurationError
from tests.app.test_routes import findings, routes, states
from tests.support.apps import Shop, assert_replayed, new_key, send


class Actions(MethodView):
    """Has handlers that are no HTTP method's."""

    def dispatch_request(self, action: str | None = None) -> Any:
        return getattr(self, action)() if action else super().dispatch_request()


def assert_kept(shop: Shop, path: str) -> None:
    """Assert that a retry is the replay of the first request."""
    key = new_key()
    first = send(shop, key, path)
    assert 200 == first.status_code
    assert_replayed(send(shop, key, path), first)


def orders(shop: Shop) -> None:
    """A class of which only the POST has a guard, with an action that has none."""

    class Orders(Actions):
        @shop.idempotency.required(retention=60)
        def post(self) -> str:
            return "created"

        def refund(self) -> str:
            shop.runs.append("refund")
            return f"refunded {len(shop.runs)}"

    shop.app.add_url_rule("/x", view_func=Orders.as_view("x"))
    shop.app.add_url_rule("/x/<any(refund):action>", view_func=Orders.as_view("action"), methods=["POST"])


def test_an_action_beside_the_guarded_handler(light: Shop) -> None:
    """``protect`` guards what a class calls in place of its guarded handler, with that one's options."""
    orders(light)
    light.idempotency.protect(light.app)
    assert 400 == light.client.post("/x/refund", headers={"X-Tenant": "acme"}).status_code
    assert_kept(light, "/x/refund")
    assert_kept(light, "/x")
    assert ["refund"] == light.runs
    assert {"retention": 60} == routes(light.app)["POST", "/x"]["options"]
    assert not [one for one in routes(light.app)["POST", "/x"]["warnings"] if "chooses what" in one]


def test_an_action_that_nothing_protects_is_named(light: Shop) -> None:
    """Without ``protect`` the list says that the class may go by the guard on its handler."""
    orders(light)
    assert ["Actions.dispatch_request chooses what a request runs" in one for one in warnings_of(light)] == [True]


def warnings_of(shop: Shop) -> list[str]:
    """The warnings of the POST of ``/x``."""
    found: list[str] = routes(shop.app)["POST", "/x"]["warnings"]
    return found


def ignored_list(shop: Shop) -> None:
    """A class with ``method_decorators``, and a ``dispatch_request`` that knows nothing of them."""

    class Ignoring(Actions):
        method_decorators = [shop.idempotency.required]  # noqa: RUF012

        def post(self) -> str:
            shop.runs.append("x")
            return f"x {len(shop.runs)}"

    shop.app.add_url_rule("/x", view_func=Ignoring.as_view("x"))


@pytest.mark.parametrize("protected", [False, True])
def test_method_decorators_that_nothing_applies(light: Shop, protected: bool) -> None:
    """A list that the class's own ``dispatch_request`` does not read is no guard, for ``protect`` neither."""
    ignored_list(light)
    if protected:
        light.idempotency.protect(light.app)
    assert {"POST": "protected" if protected else "unguarded"} == states(light.app)
    assert [] == findings(light.app) if protected else ["POST /x (x) is not guarded."] == findings(light.app)
    key = new_key()
    answers = [send(light, key) for _ in range(2)]
    assert (1 if protected else 2) == len({one.text for one in answers})


def test_a_resource_that_dispatches_itself(light: Shop) -> None:
    """A toolkit's resource is known to call its handlers; one that overrides its ``dispatch_request`` is not."""
    api = flask_restx.Api(light.app)

    class Plain(flask_restx.Resource):
        @light.idempotency.required
        def post(self) -> Any:
            return {}, 201

    class Own(Plain):
        def dispatch_request(self, *args: Any, **kwargs: Any) -> Any:
            return super().dispatch_request(*args, **kwargs)

    api.add_resource(Plain, "/plain")
    api.add_resource(Own, "/x")
    assert [] == routes(light.app)["POST", "/plain"]["warnings"]
    assert ["Own.dispatch_request chooses what a request runs" in one for one in warnings_of(light)] == [True]


def one_view(decorate: Callable[[Any], Any], shop: Shop) -> type[View]:
    """A plain view class whose only method is decorated."""

    class One(View):
        methods = ["POST"]  # noqa: RUF012

        @decorate
        def dispatch_request(self) -> str:
            shop.runs.append("x")
            return f"x {len(shop.runs)}"

    return One


@pytest.mark.parametrize("protected", [False, True])
def test_a_guard_on_dispatch_request(light: Shop, protected: bool) -> None:
    """A guard on the method that every request of a class passes is one as any other: listed, and its options win."""
    light.app.add_url_rule("/x", view_func=one_view(light.idempotency.optional(wait=3), light).as_view("x"))
    if protected:
        light.idempotency.protect(light.app)
    assert ({"POST": "optional"}, []) == (states(light.app), findings(light.app))
    assert {"wait": 3} == routes(light.app)["POST", "/x"]["options"]
    assert 200 == light.client.post("/x").status_code
    assert_kept(light, "/x")


def test_exempt_on_dispatch_request(light: Shop) -> None:
    """``exempt`` there takes the class out of ``protect``."""
    light.app.add_url_rule("/x", view_func=one_view(light.idempotency.exempt, light).as_view("x"))
    light.idempotency.protect(light.app)
    assert {"POST": "exempt"} == states(light.app)
    assert 200 == light.client.post("/x").status_code


# Guards that can't all hold


def nested(shop: Shop) -> None:
    """An ``optional`` within a ``required``."""
    view = shop.idempotency.required(shop.idempotency.optional(lambda: "x"))
    shop.app.add_url_rule("/x", "x", view, methods=["POST"])


def on_class_and_method(shop: Shop) -> None:
    """The method's own guard asks for atomic mode, and the class's does not."""

    class Both(MethodView):
        decorators = [shop.idempotency.required]  # noqa: RUF012

        @shop.idempotency.required(atomic=True)
        def post(self) -> str:
            return "x"

    shop.app.add_url_rule("/x", view_func=Both.as_view("x"))


def in_list_and_on_method(shop: Shop) -> None:
    """A toolkit's list has a guard, and so has the method."""

    class Both(flask_restx.Resource):
        method_decorators = [shop.idempotency.required(wait=1)]  # noqa: RUF012

        @shop.idempotency.required(wait=2)
        def post(self) -> Any:
            return {}

    flask_restx.Api(shop.app).add_resource(Both, "/x", endpoint="x")


def exempt_in_class(shop: Shop) -> None:
    """A method is exempt of a class that is guarded."""

    class Mixed(MethodView):
        decorators = [shop.idempotency.required]  # noqa: RUF012

        def post(self) -> str:
            return "x"

        @shop.idempotency.exempt
        def patch(self) -> str:
            return "x"

    shop.app.add_url_rule("/x", view_func=Mixed.as_view("x"))


def exempt_in_list(shop: Shop) -> None:
    """A method is exempt of a resource whose list has a guard."""

    class Mixed(flask_restx.Resource):
        method_decorators = [shop.idempotency.required]  # noqa: RUF012

        def post(self) -> Any:
            return {}

        @shop.idempotency.exempt
        def patch(self) -> Any:
            return {}

    flask_restx.Api(shop.app).add_resource(Mixed, "/x", endpoint="x")


@pytest.mark.parametrize("protected", [False, True])
@pytest.mark.parametrize(
    ("register", "says"),
    [
        (nested, "several guards for POST"),
        (on_class_and_method, "several guards for POST"),
        (in_list_and_on_method, "several guards for POST"),
        (exempt_in_class, "exempt on its patch()"),
        (exempt_in_list, "exempt on its patch()"),
    ],
)
def test_what_can_not_all_hold(light: Shop, register: Callable[[Shop], None], says: str, protected: bool) -> None:
    """Guards of which the inner one would be dropped, and ``exempt`` below a guard, are errors before any request."""
    register(light)
    if protected:
        light.idempotency.protect(light.app)
    assert [says in one for one in findings(light.app)] == [True]
    light.app.testing = True
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        light.charge(new_key())
    assert [] == light.runs


# What a class does before its handler


def in_init(shop: Shop) -> type[View]:
    """Credentials are checked when the class is instantiated."""

    class Checked(MethodView):
        decorators = [shop.idempotency.required]  # noqa: RUF012

        def __init__(self) -> None:
            if request.headers["Authorization"] == "Bearer revoked":
                abort(401)

        def post(self) -> str:
            return "secret"

    return Checked


def in_a_base(shop: Shop) -> type[View]:
    """A base class checks credentials, and calls a method of the class's own."""

    class Base(View):
        methods = ["POST"]  # noqa: RUF012

        def dispatch_request(self) -> Any:
            return ("no", 401) if request.headers["Authorization"] == "Bearer revoked" else self.run()

        def run(self) -> str:
            raise NotImplementedError

    class Checked(Base):
        decorators = [shop.idempotency.required]  # noqa: RUF012

        def run(self) -> str:
            return "secret"

    return Checked


@pytest.mark.parametrize("make", [in_init, in_a_base])
@pytest.mark.scenario(74)
def test_credentials_that_a_class_checks_itself(light: Shop, make: Callable[[Shop], type[View]]) -> None:
    """Above what a class runs before its handler Authorization is no scope, and the list names it."""
    light.app.add_url_rule("/x", view_func=make(light).as_view("x"))
    assert ["A replay does not pass" in one and make.__name__ in one for one in warnings_of(light)] == [True]
    light.idempotency.loader = None
    key = new_key()
    assert [401, 401] == [
        send(light, key, headers={"Authorization": f"Bearer {one}"}).status_code for one in ("a", "revoked")
    ]
    assert ["Every request to 'x'" in one for one in findings(light.app)] == [True]


def test_authorization_on_a_class_that_checks_nothing(light: Shop) -> None:
    """A plain class around which the guard stands alone may go by Authorization, wherever the guard is."""
    light.idempotency.loader = None
    light.app.add_url_rule("/x", view_func=one_view(light.idempotency.required, light).as_view("x"))
    light.app.add_url_rule("/y", view_func=light.idempotency.required(one_view(lambda view: view, light).as_view("y")))
    for path in ("/x", "/y"):
        assert 200 == send(light, new_key(), path, headers={"Authorization": "Bearer a"}).status_code
