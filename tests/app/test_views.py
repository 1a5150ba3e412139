"""Which views are guarded: kinds of views, the three decorators, and whole blueprints and paths."""

from __future__ import annotations

import functools
import gc
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from flask import Blueprint, Flask, Response, current_app, request
from flask.views import MethodView, View
from flask_sqlalchemy import SQLAlchemy
from werkzeug.local import LocalProxy
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency
from flask_idempotency.errors import ConfigurationError, OptionError
from flask_idempotency.signals import executed, mismatched, replayed
from tests.support.apps import Shop, new_key

Runs = list[str]


def send(shop: Shop, path: str, key: str | None = None, *, method: str = "POST", **options: Any) -> TestResponse:
    """A request of the tenant ``acme``."""
    headers = {"X-Tenant": "acme", **options.pop("headers", {})}
    if key is not None:
        headers["Idempotency-Key"] = key
    return shop.client.open(path, method=method, headers=headers, json=options.pop("json", {"amount": 1}), **options)


def assert_guarded(shop: Shop, path: str, method: str = "POST") -> None:
    """Assert that a request without a key is refused, and that a retry is the replay of the first one."""
    before = len(shop.rows())
    assert 400 == send(shop, path, method=method).status_code
    key = new_key()
    first, retry = send(shop, path, key, method=method), send(shop, path, key, method=method)
    assert first.status_code < 300
    assert "Idempotent-Replay" not in first.headers
    assert (first.status_code, first.data) == (retry.status_code, retry.data)
    assert "true" == retry.headers["Idempotent-Replay"]
    assert before + 1 == len(shop.rows())


def assert_unguarded(shop: Shop, path: str, method: str = "POST") -> None:
    """Assert that requests with and without a key all run, and that nothing is stored."""
    before = shop.rows()
    key = new_key()
    answers = [send(shop, path, sent, method=method) for sent in (None, key, key, "short", "")]
    assert {200} == {one.status_code for one in answers}
    assert not any("Idempotent-Replay" in one.headers for one in answers)
    assert 5 == len({one.data for one in answers})
    assert before == shop.rows()


def counting(runs: Runs, name: str = "view") -> Callable[..., str]:
    """A view whose answers are all different."""

    def view(**_: Any) -> str:
        runs.append(name)
        return f"{name} {len(runs)}"

    return view


# Kinds of views


def _function(shop: Shop, runs: Runs) -> None:
    @shop.app.post("/x")
    @shop.idempotency.required
    def view() -> str:
        runs.append("x")
        return f"x {len(runs)}"


def _called_decorator(shop: Shop, runs: Runs) -> None:
    shop.app.post("/x")(shop.idempotency.required()(counting(runs)))


def _coroutine(shop: Shop, runs: Runs) -> None:
    @shop.app.post("/x")
    @shop.idempotency.required
    async def view() -> str:
        runs.append("x")
        return f"x {len(runs)}"


def _coroutine_with_decorators(shop: Shop, runs: Runs) -> None:
    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(view)
        async def decorated(*args: Any, **kwargs: Any) -> Any:
            return await view(*args, **kwargs)

        return decorated

    @shop.app.post("/x")
    @decorate
    @shop.idempotency.required
    @decorate
    async def view() -> str:
        runs.append("x")
        return f"x {len(runs)}"


def _blueprint(shop: Shop, runs: Runs) -> None:
    blueprint = Blueprint("api", __name__)
    blueprint.post("/x")(shop.idempotency.required(counting(runs)))
    shop.app.register_blueprint(blueprint)


def _method_of_a_class(shop: Shop, runs: Runs) -> None:
    class Resource(MethodView):
        @shop.idempotency.required
        def post(self) -> str:
            runs.append("x")
            return f"x {len(runs)}"

        def get(self) -> str:
            return "got"

    shop.app.add_url_rule("/x", view_func=Resource.as_view("x"))


def _coroutine_method(shop: Shop, runs: Runs) -> None:
    class Resource(MethodView):
        @shop.idempotency.required
        async def post(self) -> str:
            runs.append("x")
            return f"x {len(runs)}"

    shop.app.add_url_rule("/x", view_func=Resource.as_view("x"))


def _decorators_of_a_class(shop: Shop, runs: Runs) -> None:
    class Resource(MethodView):
        decorators = [shop.idempotency.required(retention=60)]  # noqa: RUF012

        def post(self) -> str:
            runs.append("x")
            return f"x {len(runs)}"

        def get(self) -> str:
            return "got"

    shop.app.add_url_rule("/x", view_func=Resource.as_view("x"))


def _decorators_of_a_coroutine_class(shop: Shop, runs: Runs) -> None:
    class Resource(MethodView):
        init_every_request = False
        decorators = [shop.idempotency.required]  # noqa: RUF012

        async def post(self) -> str:
            runs.append("x")
            return f"x {len(runs)}"

    shop.app.add_url_rule("/x", view_func=Resource.as_view("x"))


def _class_of_one_method(shop: Shop, runs: Runs) -> None:
    class Resource(View):
        methods = ["POST"]  # noqa: RUF012
        decorators = [shop.idempotency.required]  # noqa: RUF012

        def dispatch_request(self) -> str:
            runs.append("x")
            return f"x {len(runs)}"

    shop.app.add_url_rule("/x", view_func=Resource.as_view("x"))


def _class_decorated_outside(shop: Shop, runs: Runs) -> None:
    class Resource(MethodView):
        def post(self) -> str:
            runs.append("x")
            return f"x {len(runs)}"

    shop.app.add_url_rule("/x", view_func=shop.idempotency.required(Resource.as_view("x")))


class Views:
    """Views that are methods of an object."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def create(self) -> str:
        """A view."""
        self.runs.append("x")
        return f"x {len(self.runs)}"

    __call__ = create


def _bound_method(shop: Shop, runs: Runs) -> None:
    shop.app.post("/x")(shop.idempotency.required(Views(runs).create))


def _callable_object(shop: Shop, runs: Runs) -> None:
    shop.app.add_url_rule("/x", "x", shop.idempotency.required(Views(runs)), methods=["POST"])


def _partial(shop: Shop, runs: Runs) -> None:
    view = functools.partial(counting(runs), name="x")
    shop.app.add_url_rule("/x", "x", shop.idempotency.required(view), methods=["POST"])


def _toolkit_that_decorates_at_each_request(shop: Shop, runs: Runs) -> None:
    class Resource(MethodView):
        """As Flask-RESTful's: its method_decorators are put on the bound method, for each request anew."""

        method_decorators = [shop.idempotency.required]  # noqa: RUF012

        def post(self) -> str:
            runs.append("x")
            return f"x {len(runs)}"

        def dispatch_request(self, **kwargs: Any) -> Any:
            method = getattr(self, request.method.lower())
            for decorator in self.method_decorators:
                method = decorator(method)
            return method(**kwargs)

    shop.app.add_url_rule("/x", view_func=Resource.as_view("x"))


KINDS = [
    _function,
    _called_decorator,
    _coroutine,
    _coroutine_with_decorators,
    _blueprint,
    _method_of_a_class,
    _coroutine_method,
    _decorators_of_a_class,
    _decorators_of_a_coroutine_class,
    _class_of_one_method,
    _class_decorated_outside,
    _bound_method,
    _callable_object,
    _partial,
    _toolkit_that_decorates_at_each_request,
]


@pytest.mark.parametrize("register", KINDS, ids=lambda kind: kind.__name__.strip("_"))
@pytest.mark.scenario(51)
def test_kinds_of_views(light: Shop, register: Callable[[Shop, Runs], None]) -> None:
    """A guarded view of any kind runs once, and its retry is the replay."""
    runs: Runs = []
    register(light, runs)
    assert_guarded(light, "/x")
    assert 1 == len(runs)


@pytest.mark.parametrize("register", KINDS, ids=lambda kind: kind.__name__.strip("_"))
@pytest.mark.scenario(51)
def test_kinds_of_views_under_a_protected_path(light: Shop, register: Callable[[Shop, Runs], None]) -> None:
    """A guarded view that a protected path covers too has one guard's effect."""
    runs: Runs = []
    register(light, runs)
    light.idempotency.protect(light.app, paths="^/x")
    assert_guarded(light, "/x")
    assert 1 == len(runs)


@pytest.mark.scenario(51)
def test_two_guards_on_one_view(light: Shop) -> None:
    """Guards of which one stands above the other take one claim, and replay once."""
    runs: Runs = []
    light.app.post("/x")(light.idempotency.required(wait=1)(light.idempotency.required(counting(runs))))
    assert_guarded(light, "/x")
    assert 1 == len(runs)


def test_a_view_that_calls_another_guarded_view(light: Shop) -> None:
    """A guarded view called as a function by another runs under the caller's claim."""
    runs: Runs = []
    inner = light.idempotency.required(counting(runs, "inner"))
    light.app.post("/inner")(inner)
    light.app.add_url_rule("/x", "x", light.idempotency.required(lambda: f"outer of {inner()}"), methods=["POST"])
    assert_guarded(light, "/x")
    assert ["inner"] == runs


def test_decorated_views_keep_their_names(light: Shop) -> None:
    """What the decorators return looks like the view: name, module, documentation and annotations."""

    def create_charge(amount: int) -> str:
        """Charge somebody."""
        return str(amount)

    for decorated in (light.idempotency.required(create_charge), light.idempotency.optional(wait=1)(create_charge)):
        assert "create_charge" == decorated.__name__
        assert "Charge somebody." == decorated.__doc__
        assert (__name__, create_charge) == (decorated.__module__, decorated.__wrapped__)  # type: ignore[attr-defined]


def test_view_arguments_are_passed_on(light: Shop) -> None:
    """Arguments of the route reach the view, and belong to the fingerprint through the path."""

    @light.app.post("/orders/<int:number>/cancel")
    @light.idempotency.required
    def cancel(number: int) -> str:
        return f"cancelled {number}"

    key = new_key()
    assert "cancelled 1" == send(light, "/orders/1/cancel", key).text
    assert 422 == send(light, "/orders/2/cancel", key).status_code


# Methods


@pytest.mark.parametrize("decorator", ["required", "optional"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.scenario(52)
def test_methods_that_are_not_guarded(light: Shop, decorator: str, method: str) -> None:
    """A method that is not among the guarded ones is untouched, with a key or without."""
    runs: Runs = []
    view = getattr(light.idempotency, decorator)(counting(runs))
    methods = ["GET", "POST", "PUT", "DELETE", "OPTIONS"]
    light.app.add_url_rule("/x", "x", view, methods=methods, provide_automatic_options=False)
    for key in (None, "k" * 20, "k" * 20, "short", ""):
        answer = send(light, "/x", key, method=method)
        assert 200 == answer.status_code
        assert "Idempotent-Replay" not in answer.headers
    assert 5 == len(runs)
    assert [] == light.rows()


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_methods_that_are_guarded(light: Shop, method: str) -> None:
    """POST and PATCH are guarded, and are different requests under one key."""
    runs: Runs = []
    light.app.add_url_rule("/x", "x", light.idempotency.required(counting(runs)), methods=["POST", "PATCH"])
    assert_guarded(light, "/x", method)
    key = light.rows()[0]["key"]
    assert 422 == send(light, "/x", key, method={"POST": "PATCH", "PATCH": "POST"}[method]).status_code


@pytest.mark.scenario(52)
def test_a_preflight_is_answered_by_flask(light: Shop) -> None:
    """An OPTIONS request to a guarded route gets Flask's own answer, without a key or a scope."""
    light.idempotency.protect(light.app)
    answer = light.client.options("/charges", headers={"Origin": "https://example.com"})
    assert (200, {"POST", "OPTIONS"}) == (answer.status_code, set(answer.headers["Allow"].split(", ")))
    assert [] == light.rows()


@pytest.mark.parametrize("methods", [["DELETE"], "delete", "POST,DELETE"])
@pytest.mark.scenario(53)
def test_a_route_that_opts_in_for_delete(light: Shop, methods: Any) -> None:
    """DELETE on a route that opts in replays its first 204, though the thing is gone by then."""
    things = {7}

    @light.app.delete("/things/<int:number>")
    @light.idempotency.required(methods=methods)
    def delete(number: int) -> tuple[str, int]:
        if number not in things:
            return "no such thing", 404
        things.remove(number)
        return "", 204

    key = new_key()
    first, retry = (send(light, "/things/7", key, method="DELETE") for _ in range(2))
    assert (204, 204) == (first.status_code, retry.status_code)
    assert "true" == retry.headers["Idempotent-Replay"]
    assert 404 == send(light, "/things/7", new_key(), method="DELETE").status_code
    assert 400 == send(light, "/things/7", method="DELETE").status_code


def test_methods_of_the_app(sqlite_url: str) -> None:
    """The methods that the app's configuration names are guarded, and no others."""
    app, idempotency, runs = Flask("shop"), Idempotency(), []
    app.config.update(SQLALCHEMY_DATABASE_URI=sqlite_url, IDEMPOTENCY_METHODS="PUT")
    db = SQLAlchemy(app)
    idempotency.init_app(app, db)
    idempotency.scope_loader(lambda: "acme")
    app.add_url_rule("/x", "x", idempotency.required(counting(runs)), methods=["PUT", "POST"])
    with app.app_context():
        db.create_all()
    headers = {"Idempotency-Key": new_key()}
    assert ["view 1", "view 1"] == [app.test_client().put("/x", headers=headers).text for _ in range(2)]
    assert ["view 2", "view 3"] == [app.test_client().post("/x", headers=headers).text for _ in range(2)]
    assert 400 == app.test_client().put("/x").status_code


# Required and optional


def test_a_required_key_that_is_missing(light: Shop) -> None:
    """A request without a key is refused with a problem document that says where the key goes; nothing is stored."""
    answer = light.charge()
    assert (400, "application/problem+json") == (answer.status_code, answer.content_type)
    assert "urn:problem-type:idempotency:key-missing" == answer.json["type"]
    assert "header Idempotency-Key" in answer.json["detail"]
    assert [] == light.runs == light.rows()


@pytest.mark.scenario(31)
def test_an_optional_key_that_is_missing(light: Shop) -> None:
    """On an optional route requests without a key all run and nothing is stored; those with a key are guarded."""
    runs: Runs = []
    light.app.post("/x")(light.idempotency.optional(counting(runs)))
    assert ["view 1", "view 2"] == [send(light, "/x").text for _ in range(2)]
    assert [] == light.rows()
    key = new_key()
    assert ["view 3", "view 3"] == [send(light, "/x", key).text for _ in range(2)]
    assert 422 == send(light, "/x", key, json={"amount": 2}).status_code
    assert 1 == len(light.rows())


@pytest.mark.parametrize("value", ["", " ", '""', "short", "order-00001,order-00002", "é" * 10])
@pytest.mark.parametrize("decorator", ["required", "optional"])
@pytest.mark.scenario(31, 58)
def test_an_invalid_key(light: Shop, decorator: str, value: str) -> None:
    """A key that is there but not valid, an empty one too, is refused, also where it is optional."""
    runs: Runs = []
    light.app.post("/x")(getattr(light.idempotency, decorator)(counting(runs)))
    answer = light.client.post(
        "/x", headers={"X-Tenant": "acme"}, environ_overrides={"HTTP_IDEMPOTENCY_KEY": value.encode().decode("latin-1")}
    )
    assert (400, "urn:problem-type:idempotency:key-invalid") == (answer.status_code, answer.json["type"])
    assert [] == runs == light.rows()


@pytest.mark.parametrize("decorator", ["required", "optional"])
def test_two_headers(light: Shop, decorator: str) -> None:
    """A request with the header twice, whose values a server joins with a comma, is refused."""
    light.app.post("/x")(getattr(light.idempotency, decorator)(counting([])))
    headers = [("Idempotency-Key", "order-00001"), ("Idempotency-Key", "order-00001"), ("X-Tenant", "acme")]
    answer = light.client.post("/x", headers=headers)
    assert (400, "urn:problem-type:idempotency:key-invalid") == (answer.status_code, answer.json["type"])


@pytest.mark.parametrize("length", [7, 8, 255, 256, 4096])
@pytest.mark.scenario(57)
def test_lengths_of_keys(light: Shop, length: int) -> None:
    """Keys of 8 to 255 characters are stored whole, longer and shorter ones refused, never cut."""
    valid = 8 <= length <= 255
    assert (201 if valid else 400) == light.charge("k" * length).status_code
    assert (["k" * length] if valid else []) == [row["key"] for row in light.rows()]
    other = light.charge("k" * (length - 1) + "l")
    assert ("Idempotent-Replay" in other.headers, 2 * valid) == (False, len(light.rows()))


def test_bare_and_quoted_keys_are_one(light: Shop) -> None:
    """A retry may spell its key as a quoted string, with parameters and blanks."""
    key = new_key()
    first = light.charge(key)
    for spelled in (f'"{key}"', f' "{key}";v=1', f"{key}  "):
        retry = light.charge(spelled)
        assert (201, first.data, "true") == (retry.status_code, retry.data, retry.headers["Idempotent-Replay"])
    assert 201 == light.charge(key.upper()).status_code
    assert 2 == light.charges()


# Protected blueprints and paths


@pytest.fixture
def api(light: Shop) -> Blueprint:
    """A blueprint with a view ``/api/x``; not registered yet."""
    blueprint = Blueprint("api", __name__, url_prefix="/api")
    blueprint.add_url_rule("/x", "x", counting([]), methods=["GET", "POST", "PATCH", "PUT"])
    return blueprint


def test_a_protected_blueprint(light: Shop, api: Blueprint) -> None:
    """Every POST and PATCH of a protected blueprint is guarded, its other methods and other routes are not."""
    light.idempotency.protect(api)
    light.app.register_blueprint(api)
    light.app.post("/other")(counting([]))
    for method in ("POST", "PATCH"):
        assert_guarded(light, "/api/x", method)
    for method in ("GET", "PUT"):
        assert_unguarded(light, "/api/x", method)
    assert_unguarded(light, "/other")


def test_blueprints_within_a_protected_one(light: Shop, api: Blueprint) -> None:
    """A blueprint nested in a protected one is protected; the outer one of a protected blueprint is not."""
    outer, inner = (Blueprint(name, __name__, url_prefix=f"/{name}") for name in ("outer", "inner"))
    outer.post("/y", endpoint="y")(counting([]))
    inner.post("/z", endpoint="z")(counting([]))
    api.register_blueprint(inner)
    outer.register_blueprint(api)
    light.app.register_blueprint(outer)
    light.idempotency.protect(api)
    assert_guarded(light, "/outer/api/x")
    assert_guarded(light, "/outer/api/inner/z")
    assert_unguarded(light, "/outer/y")


def test_a_protected_blueprint_that_is_registered_twice(light: Shop, api: Blueprint) -> None:
    """Under each name and prefix a protected blueprint is protected."""
    light.idempotency.protect(api)
    light.app.register_blueprint(api)
    light.app.register_blueprint(api, name="again", url_prefix="/again")
    assert_guarded(light, "/api/x")
    assert_guarded(light, "/again/x")


def test_another_blueprint_of_the_same_name_is_not_protected(light: Shop, api: Blueprint) -> None:
    """What is protected is the blueprint, not its name."""
    light.idempotency.protect(Blueprint("api", __name__))
    light.app.register_blueprint(api)
    assert_unguarded(light, "/api/x")


@pytest.mark.parametrize("paths", ["^/(x|y)", re.compile("x$"), None])
def test_protected_paths_of_an_app(light: Shop, paths: Any) -> None:
    """The paths of an app that match are protected, all of them if none are named."""
    light.idempotency.protect(light.app, paths=paths)
    for path in ("/x", "/z"):
        light.app.post(path, endpoint=path)(counting([]))
    assert_guarded(light, "/x")
    (assert_guarded if paths is None else assert_unguarded)(light, "/z")


def test_protected_paths_with_one_view(light: Shop) -> None:
    """Of a view with several paths those that match are protected, whichever is asked for first."""
    light.idempotency.protect(light.app, paths="^/safe/")
    view = counting([])
    for path in ("/safe/x", "/x"):
        light.app.add_url_rule(path, "x", view, methods=["POST"])
    assert_unguarded(light, "/x")
    assert_guarded(light, "/safe/x")
    assert_unguarded(light, "/x")


def test_protecting_the_current_app(light: Shop, api: Blueprint) -> None:
    """Flask's ``current_app`` serves as the app to protect."""
    with light.app.app_context():
        light.idempotency.protect(current_app)  # type: ignore[arg-type]
    light.app.register_blueprint(api)
    assert_guarded(light, "/api/x")


@pytest.mark.parametrize("order", ["ipvr", "vrpi", "pvri", "vpir", "virp", "rvip"])
def test_registration_order_does_not_matter(sqlite_url: str, order: str) -> None:
    """Init, protection, views and blueprint may come in any order, Flask's own permitting."""
    app, idempotency, blueprint = Flask("shop"), Idempotency(), Blueprint("api", __name__, url_prefix="/api")
    app.config["SQLALCHEMY_DATABASE_URI"] = sqlite_url
    db = SQLAlchemy()
    idempotency.scope_loader(lambda: "acme")
    runs: Runs = []
    steps = {
        "i": lambda: (idempotency.init_app(app, db), db.init_app(app)),
        "p": lambda: idempotency.protect(blueprint),
        "v": lambda: [target.post("/x", endpoint="x")(counting(runs)) for target in (app, blueprint)],
        "r": lambda: app.register_blueprint(blueprint),
    }
    for step in order.replace("rv", "vr"):
        steps[step]()
    with app.app_context():
        db.create_all()
    client = app.test_client()
    key = {"Idempotency-Key": new_key()}
    assert 400 == client.post("/api/x").status_code
    assert ["view 1", "view 1"] == [client.post("/api/x", headers=key).text for _ in range(2)]
    assert ["view 2", "view 3"] == [client.post("/x", headers=key).text for _ in range(2)]


def test_exempt_views(light: Shop) -> None:
    """A view, a view class, a method of one, and a view that is a bound method can all be left out."""
    exempt, runs = light.idempotency.exempt, []

    class Whole(MethodView):
        def post(self) -> str:
            runs.append("x")
            return f"{len(runs)}"

        patch = post

    class Half(MethodView):
        @exempt
        def post(self) -> str:
            runs.append("x")
            return f"{len(runs)}"

        def patch(self) -> str:
            runs.append("x")
            return f"{len(runs)}"

    light.idempotency.protect(light.app)
    light.app.post("/function")(exempt(counting(runs)))
    light.app.add_url_rule("/whole", view_func=exempt(Whole).as_view("whole"))
    light.app.add_url_rule("/half", view_func=Half.as_view("half"))
    light.app.add_url_rule("/bound", view_func=exempt(Views(runs).create), methods=["POST"])
    for path, method in [
        ("/function", "POST"),
        ("/whole", "POST"),
        ("/whole", "PATCH"),
        ("/half", "POST"),
        ("/bound", "POST"),
    ]:
        assert_unguarded(light, path, method)
    assert_guarded(light, "/half", "PATCH")


def test_an_exempt_method_leaves_others_of_its_object_protected(light: Shop) -> None:
    """To exempt a bound method exempts it alone, not the same method of another object."""
    light.idempotency.protect(light.app)
    light.app.add_url_rule("/a", "a", light.idempotency.exempt(Views([]).create), methods=["POST"])
    light.app.add_url_rule("/b", "b", Views([]).create, methods=["POST"])
    assert_unguarded(light, "/a")
    assert_guarded(light, "/b")


@pytest.mark.parametrize("first", ["exempt", "route"])
def test_exempt_stands_above_or_below_the_route(light: Shop, first: str) -> None:
    """``exempt`` marks the view itself, so that its place among the decorators does not matter."""
    light.idempotency.protect(light.app)
    view = counting([])
    if first == "exempt":
        light.app.post("/x")(light.idempotency.exempt(view))
    else:
        light.idempotency.exempt(light.app.post("/x")(view))
    assert_unguarded(light, "/x")


def test_a_views_own_decorator_beats_protect(light: Shop, api: Blueprint) -> None:
    """Within a protected blueprint a view may have its own guard: optional there means optional."""
    runs: Runs = []
    api.post("/y", endpoint="y")(light.idempotency.optional(counting(runs)))
    light.idempotency.protect(api)
    light.app.register_blueprint(api)
    assert ["view 1", "view 2"] == [send(light, "/api/y").text for _ in range(2)]
    key = new_key()
    assert ["view 3", "view 3"] == [send(light, "/api/y", key).text for _ in range(2)]
    assert_guarded(light, "/api/x")


def test_protected_views_keep_their_names(light: Shop, api: Blueprint) -> None:
    """A protected view is known by its name and module, as extensions that exempt views by name need it."""
    light.idempotency.protect(api)
    light.app.register_blueprint(api)
    before = light.app.view_functions["api.x"]
    assert_guarded(light, "/api/x")
    after = light.app.view_functions["api.x"]
    assert (before.__module__, before.__name__, before.__doc__) == (after.__module__, after.__name__, after.__doc__)


def test_a_protected_view_that_is_replaced(light: Shop, api: Blueprint) -> None:
    """A view function that is put into the place of a protected one, or around it, is protected too."""
    light.idempotency.protect(api)
    light.app.register_blueprint(api)
    assert_guarded(light, "/api/x")
    light.app.view_functions["api.x"] = counting([], "another")
    assert_guarded(light, "/api/x")
    protected = light.app.view_functions["api.x"]
    light.app.view_functions["api.x"] = lambda **kwargs: protected(**kwargs)
    assert_guarded(light, "/api/x")


def test_an_endpoint_that_only_looks_like_a_blueprints(light: Shop, api: Blueprint) -> None:
    """An endpoint with a dot in it need not belong to a blueprint."""
    light.idempotency.protect(api)
    light.app.add_url_rule("/x", "api.y", counting([]), methods=["POST"])
    light.app.add_url_rule("/z", "z.z", light.idempotency.required(counting([])), methods=["POST"])
    assert_unguarded(light, "/x")
    assert_guarded(light, "/z")


def test_what_a_protected_app_answers_itself_is_untouched(light: Shop) -> None:
    """A path without a route, and a method that the route does not have, get 404 and 405, and nothing is stored."""
    light.idempotency.protect(light.app)
    assert [404, 405] == [send(light, path, new_key(), method="PATCH").status_code for path in ("/none", "/charges")]
    assert [] == light.rows()


@pytest.mark.parametrize("target", [None, "api", object(), Idempotency])
def test_only_blueprints_and_apps_are_protected(light: Shop, target: Any) -> None:
    """Anything else than a blueprint or an app is an error at once."""
    with pytest.raises(TypeError, match="blueprint or an app"):
        light.idempotency.protect(target)


@pytest.mark.parametrize("paths", ["(", ["^/x"], b"^/x", re.compile(b"^/x"), 7])
def test_paths_that_are_no_regular_expression(light: Shop, paths: Any) -> None:
    """Paths that can't be searched for are an error at once, not at a request."""
    with pytest.raises(OptionError, match=r"^protect\(paths=…\): .*regular expression"):
        light.idempotency.protect(light.app, paths=paths)


# Mistakes


def _inert_on_app(shop: Shop, runs: Runs) -> Any:
    return shop.idempotency.required(shop.app.post("/x")(counting(runs)))


def _inert_with_options(shop: Shop, runs: Runs) -> Any:
    return shop.idempotency.optional(wait=1)(shop.app.route("/x", methods=["POST"])(counting(runs)))


def _inert_on_blueprint(shop: Shop, runs: Runs) -> Any:
    blueprint = Blueprint("api", __name__)
    view = shop.idempotency.required(blueprint.post("/x", endpoint="x")(counting(runs)))
    shop.app.register_blueprint(blueprint)
    return view


def _inert_above_others(shop: Shop, runs: Runs) -> Any:
    view = counting(runs)
    wrapped = functools.wraps(view)(lambda: view())
    return shop.idempotency.required(shop.app.post("/x")(wrapped))


def _inert_class(shop: Shop, runs: Runs) -> Any:
    class Resource(MethodView):
        def post(self) -> str:
            return "x"

    view = Resource.as_view("x")
    shop.app.add_url_rule("/x", view_func=view)
    return shop.idempotency.required(view)


def _inert_bound_method(shop: Shop, runs: Runs) -> Any:
    views = Views(runs)
    return shop.idempotency.required(shop.app.post("/x")(views.create))


INERT = [
    _inert_on_app,
    _inert_with_options,
    _inert_on_blueprint,
    _inert_above_others,
    _inert_class,
    _inert_bound_method,
]


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("register", INERT, ids=lambda kind: kind.__name__.strip("_"))
@pytest.mark.scenario(54)
def test_a_decorator_above_the_route(light: Shop, register: Callable[[Shop, Runs], Any], kept: bool) -> None:
    """A guard above the route's decorator guards nothing: no request at all is served, and the error says why."""
    runs: Runs = []
    light.app.get("/ping", endpoint="ping")(lambda: "pong")
    guarded = register(light, runs) if kept else None
    if not kept:
        register(light, runs)
        gc.collect()
    for path, method in (("/ping", "GET"), ("/x", "POST"), ("/none", "GET"), ("/charges", "POST")):
        assert 500 == send(light, path, new_key(), method=method).status_code
    light.app.testing = True
    with pytest.raises(ConfigurationError, match="stands above the route's decorator, where it guards nothing"):
        send(light, "/ping", method="GET")
    assert [] == runs == light.runs == light.rows()
    del guarded


@pytest.mark.scenario(54)
def test_mistakes_are_told_before_any_hook_answers(sqlite_url: str) -> None:
    """A hook that was registered before the extension, and answers requests itself, does not hide a mistake."""
    app, idempotency = Flask("shop"), Idempotency()
    app.before_request(lambda: "answered by a hook")
    app.config["SQLALCHEMY_DATABASE_URI"] = sqlite_url
    idempotency.init_app(app, SQLAlchemy(app))
    idempotency.required(app.post("/x")(counting([])))
    assert 500 == app.test_client().get("/").status_code


def test_one_function_guarded_here_and_not_there(light: Shop) -> None:
    """A function may stand on one route with a guard, and be exempt or unguarded on another, on purpose."""
    view = counting([])
    light.app.add_url_rule("/x", "x", light.idempotency.required(view), methods=["POST"])
    light.app.add_url_rule("/y", "y", view, methods=["POST"])
    assert_guarded(light, "/x")
    assert_unguarded(light, "/y")


def test_an_exempt_view_is_no_mistake(light: Shop) -> None:
    """A function that was decorated for another app can be registered bare on this one if it is exempt."""
    view = counting([])
    light.idempotency.required(view)
    light.app.add_url_rule("/x", "x", light.idempotency.exempt(view), methods=["POST"])
    assert_unguarded(light, "/x")


@pytest.mark.parametrize("decorator", ["required", "optional"])
@pytest.mark.parametrize("methods", [["GET"], ["PUT", "DELETE"], None])
def test_a_guard_on_a_view_without_a_guarded_method(light: Shop, decorator: str, methods: list[str] | None) -> None:
    """A guard on a view none of whose methods is guarded is an error before the first request, naming methods=[…]."""
    light.app.add_url_rule("/x", "x", getattr(light.idempotency, decorator)(counting([])), methods=methods)
    light.app.testing = True
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"'x' guards nothing.*methods=\[…\]") as caught:
            light.charge(new_key())
    assert all(one in str(caught.value) for one in methods or ["GET"])
    assert [] == light.rows()


def test_a_guarded_get_method_of_a_class(light: Shop) -> None:
    """A guard on the GET of a view class is an error even if the class has a POST."""

    class Resource(MethodView):
        @light.idempotency.required
        def get(self) -> str:
            return "got"

        def post(self) -> str:
            return "posted"

    light.app.add_url_rule("/x", view_func=Resource.as_view("x"))
    light.app.testing = True
    with pytest.raises(ConfigurationError, match=r"its methods are GET"):
        light.charge(new_key())


@pytest.mark.parametrize("by", ["decorator", "blueprint", "app"])
def test_methods_named_anywhere_make_a_guard_useful(light: Shop, by: str) -> None:
    """A DELETE view is guarded if its decorator, its blueprint's protection or its path's protection names DELETE."""
    blueprint = Blueprint("api", __name__)
    decorator = light.idempotency.required(methods=["DELETE"]) if by == "decorator" else light.idempotency.required
    blueprint.add_url_rule("/x", "x", decorator(counting([])), methods=["DELETE"])
    if by != "decorator":
        target = blueprint if by == "blueprint" else light.app
        light.idempotency.protect(target, paths="^/x", methods=["DELETE"])
    light.app.register_blueprint(blueprint)
    assert_guarded(light, "/x", "DELETE")


@pytest.mark.parametrize("decorator", ["required", "optional"])
def test_a_decorator_on_a_class(light: Shop, decorator: str) -> None:
    """A decorator that stands on a class is an error at once, which says where it belongs."""
    with pytest.raises(TypeError, match=rf"@idempotency\.{decorator} stands on a class.*methods.*decorators"):

        @getattr(light.idempotency, decorator)
        class Resource(MethodView):
            pass


@pytest.mark.parametrize("decorator", ["required", "optional", "exempt", "scope_loader"])
@pytest.mark.parametrize("value", ["retention", 7, ["POST"]])
def test_a_decorator_on_something_else(light: Shop, decorator: str, value: Any) -> None:
    """What can't be called can't be decorated."""
    with pytest.raises(TypeError):
        getattr(light.idempotency, decorator)(value)


def test_a_guard_of_another_object(light: Shop) -> None:
    """A view guarded by an Idempotency object that the app was not initialised with is an error, not unguarded."""
    light.app.post("/x")(Idempotency().required(counting([])))
    light.app.testing = True
    with pytest.raises(ConfigurationError, match="not the one initialised on the app 'shop'"):
        light.charge(new_key())


def test_an_app_without_the_extension() -> None:
    """A guarded view of an app that was never initialised is an error, not unguarded."""
    app, runs = Flask("bare"), []
    app.post("/x")(Idempotency().required(counting(runs)))
    app.testing = True
    with pytest.raises(ConfigurationError, match=r"not initialised on the app 'bare'.*init_app"):
        app.test_client().post("/x")
    assert [] == runs


def test_initialising_the_current_app(sqlite_url: str) -> None:
    """Flask's ``current_app`` serves as the app to initialise."""
    app, idempotency = Flask("shop"), Idempotency()
    app.config["SQLALCHEMY_DATABASE_URI"] = sqlite_url
    db = SQLAlchemy(app)
    with app.app_context():
        assert isinstance(current_app, LocalProxy)
        idempotency.init_app(current_app)  # type: ignore[arg-type]
        db.create_all()
    idempotency.scope_loader(lambda: "acme")
    app.post("/x")(idempotency.required(counting([])))
    headers = {"Idempotency-Key": new_key()}
    assert ["view 1", "view 1"] == [app.test_client().post("/x", headers=headers).text for _ in range(2)]


def test_what_decorators_above_make_of_an_answer(light: Shop) -> None:
    """A decorator above the guard shapes the first answer, and neither runs the view on a retry nor shapes it twice."""
    runs: Runs = []

    def envelope(view: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(view)
        def enveloped() -> dict[str, Any]:
            value = view()
            return {"data": value if isinstance(value, str) else repr(value)}

        return enveloped

    light.app.post("/x")(envelope(light.idempotency.required(counting(runs))))
    key = new_key()
    first, retry = send(light, "/x", key), send(light, "/x", key)
    assert {"data": "view 1"} == first.json == retry.json
    assert isinstance(retry, Response)
    assert 1 == len(runs)


# Coroutines


@pytest.mark.parametrize("kind", ["function", "coroutine"])
@pytest.mark.parametrize("protected", [False, True])
@pytest.mark.scenario(51)
def test_callables_that_are_coroutines(light: Shop, kind: str, protected: bool) -> None:
    """Loader, key, fingerprint, record and receivers may be coroutines, whether the view is one or not."""
    heard: list[str] = []

    async def loader() -> str:
        return request.headers["X-Tenant"]

    async def key(asked: Any) -> str | None:
        return str(asked.headers["Idempotency-Key"])

    async def fingerprint() -> Any:
        return request.get_json()["amount"]

    async def record(response: Response) -> bool:
        return response.status_code == 200

    async def receive(sender: Any, **_: Any) -> None:
        heard.append("heard")

    async def coroutine() -> str:
        return "x"

    options = {"key": key, "fingerprint": fingerprint, "record": record}
    view: Callable[..., Any] = coroutine if kind == "coroutine" else (lambda: "x")
    light.idempotency.scope_loader(loader)
    if protected:
        light.idempotency.protect(light.app, paths="^/x", **options)
        light.app.post("/x", endpoint="x")(view)
    else:
        light.app.post("/x", endpoint="x")(light.idempotency.required(**options)(view))
    light.app.testing = True
    sent = new_key()
    with ExitStack() as stack:
        for signal in (executed, replayed, mismatched):
            stack.enter_context(signal.connected_to(receive, sender=light.app))
        answers = [send(light, "/x", sent, json={"amount": amount}) for amount in (1, 1, 2)]
    assert [200, 200, 422] == [one.status_code for one in answers]
    assert "true" == answers[1].headers["Idempotent-Replay"]
    assert ["heard"] * 3 == heard


def test_a_coroutine_view_does_not_hold_up_its_loop(light: Shop) -> None:
    """The guard of a coroutine view works in the request's own thread, as the app's synchronous code does."""
    threads: list[str] = []

    def loader() -> str:
        threads.append(threading.current_thread().name)
        return "acme"

    light.idempotency.scope_loader(loader)

    @light.app.post("/x")
    @light.idempotency.required
    async def view() -> str:
        threads.append(threading.current_thread().name)
        return "x"

    assert "x" == send(light, "/x", new_key()).text
    assert threading.current_thread().name == threads[0] != threads[1]
