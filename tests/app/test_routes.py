"""What the app's routes look like to the extension, as ``flask idempotency routes --json`` tells it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import flask_restful
import flask_restx
import flask_smorest
import pytest
from flask import Blueprint, Flask
from flask.views import MethodView, View
from flask_admin import Admin
from flask_admin.contrib.sqla import ModelView
from flask_sqlalchemy import SQLAlchemy
from werkzeug.routing import BaseConverter, Rule

from flask_idempotency import Idempotency
from flask_idempotency.errors import ConfigurationError
from tests.app.test_authentication import REFUSED, SERVED, Tokens, refused_protect_of_a_plain_view
from tests.app.test_views import INERT, KINDS
from tests.support.apps import Shop, new_key

Routes = dict[tuple[str, str], dict[str, Any]]


def listing(app: Flask, *words: str) -> dict[str, Any]:
    """What the command prints as JSON."""
    result = app.test_cli_runner().invoke(args=["idempotency", "routes", "--json", *words])
    assert 0 == result.exit_code, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def routes(app: Flask) -> Routes:
    """The listing's routes, by method and rule."""
    return {(method, one["rule"]): one for one in listing(app)["routes"] for method in one["methods"]}


def states(app: Flask, rule: str = "/x") -> dict[str, str]:
    """The states of one rule, by method."""
    return {method: one["state"] for (method, path), one in routes(app).items() if path == rule}


def findings(app: Flask, *ignore: str) -> list[str]:
    """What the check finds."""
    found: list[str] = listing(app, *(word for one in ignore for word in ("--ignore", one)))["findings"]
    return found


def view_called(name: str) -> Callable[..., str]:
    """A view of its own, which can be marked without marking others."""
    return lambda **_: name


# States


@pytest.mark.parametrize("protected", [False, True])
@pytest.mark.parametrize("register", KINDS, ids=lambda kind: kind.__name__.strip("_"))
def test_kinds_of_views(light: Shop, register: Callable[[Shop, list[str]], None], protected: bool) -> None:
    """A guard is found on each kind of view, also under a protected path and after a request has been served."""
    register(light, [])
    if protected:
        light.idempotency.protect(light.app, paths="^/x")
    assert "required" == states(light.app)["POST"]
    assert [] == findings(light.app)
    assert 400 == light.client.post("/x", headers={"X-Tenant": "acme"}).status_code
    assert "required" == states(light.app)["POST"]


def test_the_states(light: Shop) -> None:
    """Each route has the state of what guards it, and only POST and PATCH that are forgotten are findings."""
    guards, add = light.idempotency, light.app.add_url_rule
    add("/optional", "optional", guards.optional(view_called("optional")), methods=["PATCH"])
    add("/exempt", "exempt", guards.exempt(view_called("exempt")), methods=["POST"])
    add("/bare", "bare", view_called("bare"), methods=["GET", "POST", "PUT"])
    add("/got", "got", view_called("got"))
    add("/asked", "asked", view_called("asked"), methods=["OPTIONS"], provide_automatic_options=False)
    add("/in/x", "in_x", view_called("in"), methods=["POST"])
    guards.protect(light.app, paths="^/in/")
    expected = {
        ("POST", "/charges"): "required",
        ("PATCH", "/optional"): "optional",
        ("POST", "/exempt"): "exempt",
        ("GET", "/bare"): "safe",
        ("POST", "/bare"): "unguarded",
        ("PUT", "/bare"): "unguarded",
        ("GET", "/got"): "safe",
        ("OPTIONS", "/asked"): "safe",
        ("POST", "/in/x"): "protected",
        ("GET", "/static/<path:filename>"): "safe",
    }
    assert expected == {where: one["state"] for where, one in routes(light.app).items()}
    assert ["POST /bare (bare) is not guarded."] == findings(light.app)
    (bare,) = [one for one in listing(light.app)["routes"] if one["rule"] == "/bare" and one["state"] == "unguarded"]
    assert ["POST", "PUT"] == bare["methods"]


def test_a_class_of_which_one_method_is_forgotten(light: Shop) -> None:
    """Where a class's POST is guarded and its PATCH is not, the check fails on the PATCH."""

    class Resource(MethodView):
        @light.idempotency.required
        def post(self) -> str:
            return "posted"

        def patch(self) -> str:
            return "patched"

        @light.idempotency.exempt
        def put(self) -> str:
            return "put"

    light.app.add_url_rule("/x", view_func=Resource.as_view("x"))
    assert {"PATCH": "unguarded", "POST": "required", "PUT": "exempt"} == states(light.app)
    assert ["PATCH /x (x) is not guarded."] == findings(light.app)


def test_methods_that_a_guard_does_not_look_at(make_light: Callable[..., Shop]) -> None:
    """A PATCH that IDEMPOTENCY_METHODS leaves out is forgotten, guard or not; a warning says where to name it."""
    shop = make_light(methods="POST")
    guard = shop.idempotency.required(view_called("x"))
    shop.app.add_url_rule("/x", "x", guard, methods=["POST", "PATCH", "DELETE"])
    assert {"DELETE": "unguarded", "PATCH": "unguarded", "POST": "required"} == states(shop.app)
    assert ["PATCH /x (x) is not guarded."] == findings(shop.app)
    (warning,) = routes(shop.app)["PATCH", "/x"]["warnings"]
    assert "looks at POST only. Name PATCH too" in warning
    assert [] == routes(shop.app)["DELETE", "/x"]["warnings"]


def test_methods_that_a_protection_does_not_look_at(light: Shop) -> None:
    """A POST under a protection of other methods is forgotten, and a warning says which methods it looks at."""
    light.app.post("/x", endpoint="x")(view_called("x"))
    light.idempotency.protect(light.app, paths="^/x", methods=["DELETE"])
    assert {"POST": "unguarded"} == states(light.app)
    assert ["looks at DELETE only" in one for one in routes(light.app)["POST", "/x"]["warnings"]] == [True]


def test_a_route_that_opts_in_for_delete(light: Shop) -> None:
    """A guard's own methods count, for a DELETE as for a POST that they leave out."""
    view = light.idempotency.required(methods=["DELETE"])(view_called("x"))
    light.app.add_url_rule("/x", "x", view, methods=["DELETE", "POST"])
    assert {"DELETE": "required", "POST": "unguarded"} == states(light.app)
    assert ["DELETE"] == routes(light.app)["DELETE", "/x"]["options"]["methods"]


def test_two_guards_of_which_the_inner_one_looks_at_the_method(light: Shop) -> None:
    """A method that the class's guard leaves to the method's own is guarded by that."""

    class Resource(MethodView):
        decorators = [light.idempotency.required(methods=["POST"])]  # noqa: RUF012

        def post(self) -> str:
            return "posted"

        @light.idempotency.optional
        def patch(self) -> str:
            return "patched"

    light.app.add_url_rule("/x", view_func=Resource.as_view("x"))
    assert {"PATCH": "optional", "POST": "required"} == states(light.app)


def test_nested_blueprints(light: Shop) -> None:
    """A route of a blueprint within a protected one is protected; a second registration elsewhere is not."""
    outer, inner = Blueprint("outer", __name__, url_prefix="/outer"), Blueprint("inner", __name__)
    inner.post("/x", endpoint="x")(view_called("x"))
    outer.register_blueprint(inner)
    light.idempotency.protect(outer, retention=60)
    light.app.register_blueprint(outer)
    light.app.register_blueprint(inner, name="again", url_prefix="/again")
    assert {"POST": "protected"} == states(light.app, "/outer/x")
    assert ["POST /again/x (again.x) is not guarded."] == findings(light.app)
    assert {"retention": 60} == routes(light.app)["POST", "/outer/x"]["options"]


def test_a_protection_that_takes_old_clients(light: Shop) -> None:
    """protect(required=False) guards, and is told apart."""
    light.app.post("/x", endpoint="x")(view_called("x"))
    light.idempotency.protect(light.app, required=False)
    assert {"POST": "protected"} == states(light.app)
    assert {"required": False} == routes(light.app)["POST", "/x"]["options"]


def test_hosts(sqlite_url: str) -> None:
    """Rules of one path on two hosts are two routes."""
    app = Flask("shop", host_matching=True, static_host="a.example")
    app.config["SQLALCHEMY_DATABASE_URI"] = sqlite_url
    idempotency = Idempotency(app, SQLAlchemy(app))
    app.add_url_rule("/x", "a", idempotency.required(view_called("a")), methods=["POST"], host="a.example")
    app.add_url_rule("/x", "b", view_called("b"), methods=["POST"], host="b.example")
    assert ["POST b.example/x (b) is not guarded."] == findings(app)


def test_rules_that_run_no_view(light: Shop) -> None:
    """Rules that only redirect or build, and an endpoint without a view, are no routes; one without methods is any."""
    add = light.app.url_map.add
    light.app.add_url_rule("/x", "x", view_called("x"), methods=["POST"])
    add(Rule("/old", endpoint="x", methods=["POST"], redirect_to="/x"))
    add(Rule("/built", endpoint="x", methods=["POST"], build_only=True))
    add(Rule("/nothing", endpoint="nothing", methods=["POST"]))
    add(Rule("/any", endpoint="x"))
    expected = ["PATCH /any (x) is not guarded.", "POST /any (x) is not guarded.", "POST /x (x) is not guarded."]
    assert expected == findings(light.app)


# Protected paths


class Slug(BaseConverter):
    """An app's own converter, which must not be asked: it may look into the database."""

    regex = "[a-z]+"

    def to_python(self, value: str) -> Any:
        raise AssertionError


class Code(Slug):
    """One for which no example is known."""

    regex = "[A-Z]{3}-[0-9]{4}"


PATHS = [
    ("/api/x", "^/api/", "protected"),
    ("/api/x", "^/v2/", "unguarded"),
    ("/api/x", "^/api/x$", "protected"),
    ("/apix", "^/api/", "unguarded"),
    ("/api/<int:number>", "^/api/", "protected"),
    ("/api/<int:number>/close", r"^/api/\d+/close$", "in part"),
    ("/api/<name>/close", r"^/api/\d+/close$", "in part"),
    ("/api/<name>/close", r"^/api/[^/]+/close$", "in part"),
    ("/api/<path:name>/close", r"^/api/[^/]+/close$", "in part"),
    ("/api/<name>/close", r"^/api/.*/(open|close)$", "in part"),
    ("/<version>/x", "^/v2/", "in part"),
    ("/<version>/<thing>", "^/v2/charges", "in part"),
    ("/<any(v1, v2):version>/x", "^/v2/", "in part"),
    ("/<any(v1, v2):version>/x", "^/v[12]/", "protected"),
    ("/<any(v1, v3):version>/x", "^/v2/", "unguarded"),
    ("/api/<int:number>", "^/api/(?!admin)", "in part"),
    ("/api/<name>", "^/api/(?!admin)", "in part"),
    ("/api/<path:name>", "^/api/(?!admin/)", "in part"),
    ("/api/<int(fixed_digits=4):number>", r"^/api/\d{4}$", "in part"),
    ("/api/<int(min=1000, max=1003):number>", r"^/api/100[0-3]$", "in part"),
    ("/api/<int:number>", r"^/api/\d{4}$", "in part"),
    ("/api/<string(length=2):language>/x", "^/api/../x", "in part"),
    ("/api/<string(length=2):language>/x", "^/api/de/x", "in part"),
    ("/api/<float:amount>", r"^/api/[\d.]+$", "in part"),
    ("/api/<uuid:id>", "^/api/[0-9a-f-]{36}$", "in part"),  # a UUID may be in capital letters
    ("/api/<uuid:id>", "^/api/[0-9a-fA-F-]{36}$", "in part"),
    ('/<any("de-at", "de-ch"):place>/x', "^/de-", "protected"),
    ("/api/<name>", "^/api/[^%]+$", "in part"),
    ("/api/<slug:name>", "^/api/[^%]+$", "in part"),
    ("/api/<slug:name>", "^/api/[a-z]+$", "in part"),
    ("/api/<code:code>", "^/api/", "protected"),
    ("/api/<code:code>/x", "^/admin/", "unguarded"),
    ("/api/<name>", "(?i)^/API/", "protected"),
    ("/x", "", "protected"),
    # All examples are covered; "demo-1" and "a%0A" would not be.
    ("/<name>/x", "^/(?!demo-)[^/]+/x", "in part"),
    ("/api/<name>", "^/api/.*$", "in part"),
    ("/api/<name>", r"^/api/\b", "in part"),
    ("/api/<name>", "^/ap(?=i/$)?", "in part"),
    ("/api/<name>", "^/api/.*", "protected"),
    ("/api/<name>", "(?P<base>/api)/(?:x|y)?", "protected"),
    ("/api/v1.0/<name>", r"^/api/v\d+\.\d+/", "protected"),
    ("/<any(v1, v2):version>/<any(x, y):thing>", "^/v[12]/[xy]$", "protected"),
    ("/<any(v1, v2):version>/<any(x, y):thing>", "^/v[12]/[x]$", "in part"),
    ("/<any(v1, v2):version>/<name>", "^/v[12]/", "in part"),
]


@pytest.mark.parametrize(("rule", "paths", "state"), PATHS)
def test_protected_paths(light: Shop, rule: str, paths: str, state: str) -> None:
    """A rule of which a protected path covers a part only is told from one that it covers, and fails the check."""
    light.app.url_map.converters.update(slug=Slug, code=Code)
    light.app.post(rule, endpoint="x")(view_called("x"))
    light.idempotency.protect(light.app, paths=paths)
    assert {"POST": state} == states(light.app, rule)
    found = findings(light.app)
    assert (state == "protected") == (not found)
    assert (state == "unguarded") == (found == [f"POST {rule} (x) is not guarded."])
    if state == "in part":
        begin = re.escape(rule.partition("<")[0])
        assert [True] == [
            one.startswith(f"POST {rule} (x) is guarded for some") and f" ^{begin} " in one for one in found
        ]
        # What the finding says to do helps.
        light.idempotency.protect(light.app, paths=f"^{begin}")
        assert [] == findings(light.app)
    assert (state == "unguarded") == bool(listing(light.app)["warnings"])


def test_two_patterns_that_cover_a_rule_together(light: Shop) -> None:
    """What one pattern leaves another may cover; that it covers all of it nothing proves."""
    light.app.post("/api/<name>", endpoint="x")(view_called("x"))
    light.idempotency.protect(light.app, paths="^/api/[a-z]")
    light.idempotency.protect(light.app, paths="^/api/[^a-z]")
    assert {"POST": "in part"} == states(light.app, "/api/<name>")


@pytest.mark.parametrize("strict", [True, False])
def test_slashes_at_the_end(light: Shop, strict: bool) -> None:
    """A rule that takes its path without the slash too is covered in part by a pattern that asks for the slash."""
    light.app.add_url_rule("/api/", "x", view_called("x"), methods=["POST"], strict_slashes=strict)
    light.idempotency.protect(light.app, paths="^/api/")
    assert {"POST": "protected" if strict else "in part"} == states(light.app, "/api/")
    for path in ("/api/", "/api"):
        answer = light.client.post(path, headers={"X-Tenant": "acme"})
        assert (308 if strict and path == "/api" else 400 if path == "/api/" else 200) == answer.status_code


def test_a_guard_that_a_path_gives_its_method(light: Shop) -> None:
    """A DELETE whose guard looks at it on some paths only is guarded in part."""
    view = light.idempotency.required(view_called("x"))
    light.app.add_url_rule("/<version>/x", "x", view, methods=["DELETE", "POST"])
    light.idempotency.protect(light.app, paths="^/v2/", methods=["DELETE", "POST"])
    assert {"DELETE": "in part", "POST": "required"} == states(light.app, "/<version>/x")


# Options


def record(response: Any) -> bool:
    """An app's own rule."""
    return True


def test_options(make_light: Callable[..., Shop]) -> None:
    """A route shows what differs from the package's defaults or from the app's, by the options' names, as JSON."""
    shop = make_light(retention=3600, wait=1.5)
    own = shop.idempotency.required(
        retention=86_400, record=record, fingerprint=["/sent_at", "/at"], key=functools.partial(str), atomic=True
    )
    shop.app.post("/x", endpoint="x")(own(view_called("x")))
    shop.app.post("/y", endpoint="y")(view_called("y"))
    shop.idempotency.protect(shop.app, on_store_error="execute", replay_header=None)
    protected = {"on_store_error": "execute", "replay_header": None}
    found = routes(shop.app)
    assert {"retention": 3600, "wait": 1.5} == listing(shop.app)["options"]
    assert {"retention": 3600, "wait": 1.5, **protected} == found["POST", "/y"]["options"]
    assert {
        "retention": 86_400,
        "wait": 1.5,
        "record": f"{__name__}.record",
        "fingerprint": ["/sent_at", "/at"],
        "key": "functools.partial",
        "atomic": True,
        **protected,
    } == found["POST", "/x"]["options"]


# Problems


@pytest.mark.parametrize("register", INERT, ids=lambda kind: kind.__name__.strip("_"))
@pytest.mark.scenario(54)
def test_decorators_above_the_route(light: Shop, register: Callable[[Shop, list[str]], Any]) -> None:
    """A guard above the route's decorator is found without a request, with every other problem of the app."""
    register(light, [])
    light.idempotency.required(light.app.post("/y", endpoint="y")(view_called("y")))
    light.app.add_url_rule("/z", "z", light.idempotency.required(view_called("z")), methods=["GET"])
    light.app.post("/w", endpoint="w")(Idempotency().required(view_called("w")))
    found = findings(light.app)
    (inert,) = {rule.endpoint for rule in light.app.url_map.iter_rules() if rule.rule == "/x"}
    problems = {name: [one for one in found if f"'{name}'" in one] for name in (inert, "y", "z", "w")}
    assert ["stands above the route's decorator" in one for one in problems[inert]] == [True]
    assert ["stands above" in one for one in problems["y"]] == [True]
    assert ["guards nothing: its methods are GET" in one for one in problems["z"]] == [True]
    assert ["not the one initialised" in one for one in problems["w"]] == [True]
    light.app.testing = True
    with pytest.raises(ConfigurationError):
        light.charge(new_key())


def deco(view: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of somebody else's."""
    return functools.wraps(view)(lambda *a, **k: view(*a, **k))


@pytest.mark.scenario(54)
def test_a_decorator_above_a_route_above_another_decorator(light: Shop) -> None:
    """A guard that was put on what the registered view wraps is named, if the view is unguarded."""
    view = view_called("x")
    light.app.post("/x", endpoint="x")(deco(view))
    light.idempotency.required(view)
    assert ["POST /x (x) is not guarded."] == findings(light.app)
    assert ["on a function that the view wraps" in one for one in routes(light.app)["POST", "/x"]["warnings"]] == [True]


def test_a_function_that_views_of_two_apps_share(light: Shop) -> None:
    """Where several views wrap one function, of which one is guarded on another app, the app is served all the same."""
    shared = view_called("x")
    here, elsewhere = deco(shared), deco(shared)
    light.idempotency.required(elsewhere)
    light.app.post("/x", endpoint="x")(here)
    light.idempotency.protect(light.app, required=False)
    assert [] == findings(light.app)
    assert 200 == light.client.post("/x").status_code


@pytest.mark.scenario(54)
@pytest.mark.parametrize(
    ("rule", "options", "served"),
    [
        ("/x", {}, True),
        ("/x", {"paths": "^/x$"}, True),
        ("/x", {"paths": "^/y"}, False),
        ("/x", {"methods": ["DELETE"]}, False),
        ("/x/<name>", {"paths": "^/x/"}, True),
        ("/x/<name>", {"paths": "^/x/(?!a)"}, False),
    ],
)
def test_a_function_that_is_guarded_elsewhere_and_protected_here(
    light: Shop, rule: str, options: dict[str, Any], served: bool
) -> None:
    """A bare view whose guard is another app's is no mistake where a protection covers it."""
    shared = view_called("x")
    light.idempotency.required(wait=5)(shared)
    light.idempotency.protect(light.app, **options)
    light.app.post(rule, endpoint="x")(shared)
    assert (200 if served else 500) == light.client.post(
        rule.replace("<name>", "b"), headers={"X-Tenant": "acme", "Idempotency-Key": new_key()}
    ).status_code
    assert ([] == findings(light.app)) == served
    if served:
        assert ["guards nothing there" in one for one in routes(light.app)["POST", rule]["warnings"]] == [True]


def test_a_decorator_that_a_class_never_gets(light: Shop) -> None:
    """A guard that was put on a class's method, and not into the class, is found."""

    class Resource(MethodView):
        def post(self) -> str:
            return "posted"

    light.app.add_url_rule("/x", view_func=Resource.as_view("x"))
    light.idempotency.required(Resource.post)
    assert ["POST /x (x) is not guarded.", True] == [findings(light.app)[0], "stands above" in findings(light.app)[1]]


def test_options_that_contradict_each_other(light: Shop) -> None:
    """Options that can't hold together are a problem of their routes, and the other routes are listed all the same."""
    light.app.post("/x", endpoint="x")(light.idempotency.required(atomic=True)(view_called("x")))
    light.app.post("/y", endpoint="y")(view_called("y"))
    light.idempotency.protect(light.app, paths="^/x", on_error="hold")
    found = findings(light.app)
    assert any("atomic and on_error='hold' contradict each other" in one for one in found)
    assert "POST /y (y) is not guarded." in found
    light.app.testing = True
    with pytest.raises(ConfigurationError, match="contradict"):
        light.charge(new_key())


@pytest.mark.parametrize("by_method", [True, False])
def test_a_guard_in_method_decorators_that_guards_nothing(light: Shop, by_method: bool) -> None:
    """A guard that a toolkit puts on methods none of which is guarded is an error, as on a view."""
    api = flask_restful.Api(light.app)
    required = light.idempotency.required(wait=1)

    class Resource(flask_restful.Resource):
        method_decorators = {"get": [required]} if by_method else [required]

        def get(self) -> str:
            return "got"

        def put(self) -> str:
            return "put"

    if by_method:
        Resource.post = Resource.put  # not what the guard is on
        Resource.methods = {"GET", "PUT", "POST"}
        light.idempotency.exempt(Resource)
    api.add_resource(Resource, "/x", endpoint="x")
    assert ["'x' guards nothing" in one for one in findings(light.app)] == [True]
    assert 1 == len(routes(light.app)["GET", "/x"]["problems"])
    light.app.testing = True
    with pytest.raises(ConfigurationError, match="guards nothing"):
        light.charge(new_key())


def test_guards_in_method_decorators(light: Shop) -> None:
    """Of two guards in the list the last is the outermost; that a GET passes them too is no mistake."""

    class Resource(flask_restful.Resource):
        method_decorators = [light.idempotency.required, light.idempotency.required(wait=1)]  # noqa: RUF012

        def get(self) -> str:
            return "got"

        def post(self) -> str:
            return "posted"

    flask_restful.Api(light.app).add_resource(Resource, "/x", endpoint="x")
    assert {"GET": "safe", "POST": "required"} == states(light.app)
    assert {"wait": 1} == routes(light.app)["POST", "/x"]["options"]
    assert [] == findings(light.app)
    asked = [light.client.open("/x", method=one, headers={"X-Tenant": "acme"}) for one in ("GET", "POST")]
    assert [200, 400] == [one.status_code for one in asked]


def test_a_list_that_flasks_own_classes_do_not_read(light: Shop) -> None:
    """A list of method_decorators on a class that does not put them anywhere guards nothing."""

    class Resource(MethodView):
        method_decorators = [light.idempotency.required]  # noqa: RUF012

        def post(self) -> str:
            return "posted"

    light.app.add_url_rule("/x", view_func=Resource.as_view("x"))
    assert {"POST": "unguarded"} == states(light.app)


def test_a_protect_that_protects_nothing(light: Shop) -> None:
    """A protected blueprint that is not on the app, and a pattern that no route has, are named; they are no failure."""
    never, empty = Blueprint("never", __name__), Blueprint("empty", __name__)
    light.app.register_blueprint(empty)
    for target in (never, empty, Flask("other")):
        light.idempotency.protect(target)
    light.idempotency.protect(light.app, paths="^/v9/")
    expected = [
        "protect() stands on the blueprint 'never', which is not registered on this app.",
        "protect() stands on the blueprint 'empty' and covers no route.",
        "protect(paths='^/v9/') on the app covers no route.",
    ]
    assert expected == listing(light.app)["warnings"]
    assert [] == findings(light.app)


# Authentication


@pytest.fixture
def bare(light: Shop) -> Shop:
    """A shop without a scope loader, whose own view has a scope."""
    light.idempotency.loader = None
    return light


def registered(shop: Shop, register: Callable[..., None]) -> tuple[list[str], list[str]]:
    """The problems and warnings of a route ``/x`` whose guard and authentication are in some order."""
    register(shop, Tokens(), view_called("x"))
    route = routes(shop.app)["POST", "/x"]
    # The tests' toolkit is none that is known, so that its dispatch_request is named.
    return route["problems"], [one for one in route["warnings"] if "chooses what a request runs" not in one]


@pytest.mark.parametrize("register", REFUSED, ids=lambda one: one.__name__)
@pytest.mark.scenario(74)
def test_guards_outside_of_authentication(bare: Shop, register: Callable[..., None]) -> None:
    """Where Authorization is refused as the scope and there is no other, nobody is served: the check fails."""
    problems, _ = registered(bare, register)
    assert ["Every request to 'x' that has a key gets 401" in one for one in problems] == [True]
    assert problems[0] in findings(bare.app)


@pytest.mark.parametrize("register", REFUSED, ids=lambda one: one.__name__)
@pytest.mark.scenario(74)
def test_guards_outside_of_authentication_with_a_loader(light: Shop, register: Callable[..., None]) -> None:
    """With a loader such views are served: the decorators that a replay does not pass are named, and nothing fails."""
    problems, warnings = registered(light, register)
    assert [] == problems == findings(light.app)
    if register is refused_protect_of_a_plain_view:
        assert [] == warnings
    else:
        assert ["tests.app.test_authentication.decorate" in one or "functools.partial" in one for one in warnings] == [
            True
        ]
        assert "flask_idempotency" not in warnings[0]
    light.client.post("/x", headers={"X-Tenant": "acme"})
    assert set(warnings) <= set(routes(light.app)["POST", "/x"]["warnings"])


@pytest.mark.parametrize("register", SERVED, ids=lambda one: one.__name__)
@pytest.mark.scenario(48)
def test_guards_inside_of_authentication(bare: Shop, register: Callable[..., None]) -> None:
    """Where the guard stands below authentication there is nothing to say, loader or not."""
    assert ([], []) == registered(bare, register)


def test_a_guard_in_method_decorators_outside_of_authentication(bare: Shop) -> None:
    """A guard that a toolkit puts on a method with decorators of its own stands outside of those."""

    class Resource(flask_restful.Resource):
        method_decorators = [bare.idempotency.required]  # noqa: RUF012

        @deco
        def post(self) -> str:
            return "posted"

    flask_restful.Api(bare.app).add_resource(Resource, "/x", endpoint="x")
    route = routes(bare.app)["POST", "/x"]
    assert (1, 1) == (len(route["problems"]), len(route["warnings"]))
    assert f"below the guard: {__name__}.deco" in route["warnings"][0]
    headers = {"Authorization": "Bearer one", "Idempotency-Key": new_key()}
    assert 401 == bare.client.post("/x", headers=headers).status_code


@pytest.mark.parametrize("known", ["scope", "login"])
def test_a_scope_from_elsewhere(bare: Shop, known: str) -> None:
    """A scope of the view's own, and Flask-Login, tell who it is: decorators below are named, and nothing fails."""
    options = {"scope": "partner"} if known == "scope" else {}
    if known == "login":
        bare.app.login_manager = object()  # type: ignore[attr-defined]
    bare.app.post("/x", endpoint="x")(bare.idempotency.required(**options)(deco(view_called("x"))))
    route = routes(bare.app)["POST", "/x"]
    assert ([], 1) == (route["problems"], len(route["warnings"]))


# Toolkits


def restx(shop: Shop, guard: Callable[[Any], Any]) -> None:
    """A resource of Flask-RESTX."""
    api = flask_restx.Api(shop.app, doc=False, add_specs=False)

    @api.route("/x", endpoint="x")
    class Resource(flask_restx.Resource):  # type: ignore[misc]
        @api.marshal_with(api.model("X", {}))
        @guard
        def post(self) -> str:
            return "posted"

        @api.doc(False)
        def patch(self) -> str:
            return "patched"


def restful(shop: Shop, guard: Callable[[Any], Any]) -> None:
    """A resource of Flask-RESTful."""

    class Resource(flask_restful.Resource):
        @flask_restful.marshal_with({})
        @guard
        def post(self) -> str:
            return "posted"

        def patch(self) -> str:
            return "patched"

    flask_restful.Api(shop.app).add_resource(Resource, "/x", endpoint="x")


def restful_by_method(shop: Shop, guard: Callable[[Any], Any]) -> None:
    """A resource of Flask-RESTful, with decorators by method."""

    class Resource(flask_restful.Resource):
        method_decorators = {"post": [guard]}  # noqa: RUF012

        def post(self) -> str:
            return "posted"

        def patch(self) -> str:
            return "patched"

    flask_restful.Api(shop.app).add_resource(Resource, "/x", endpoint="x")


def smorest(shop: Shop, guard: Callable[[Any], Any]) -> None:
    """A blueprint of flask-smorest."""
    shop.app.config.update(API_TITLE="Shop", API_VERSION="1", OPENAPI_VERSION="3.0.3")
    blueprint = flask_smorest.Blueprint("x", __name__)

    @blueprint.route("/x")
    class Resource(MethodView):
        @blueprint.response(201)
        @guard
        def post(self) -> str:
            return "posted"

        @blueprint.response(200)
        def patch(self) -> str:
            return "patched"

    flask_smorest.Api(shop.app).register_blueprint(blueprint)


@pytest.mark.parametrize("toolkit", [restx, restful, restful_by_method, smorest], ids=lambda one: one.__name__)
@pytest.mark.scenario(51)
def test_toolkits(light: Shop, toolkit: Callable[..., None]) -> None:
    """A toolkit's resource of which one method is guarded fails on the other one, which a request then bears out."""
    toolkit(light, light.idempotency.required)
    assert {"PATCH": "unguarded", "POST": "required"} == states(light.app)
    assert ["PATCH /x"] == [one.partition(" (")[0] for one in findings(light.app)]
    asked = [light.client.open("/x", method=one, headers={"X-Tenant": "acme"}) for one in ("POST", "PATCH")]
    assert [400, 200] == [one.status_code for one in asked]


@pytest.mark.scenario(54)
def test_a_decorator_above_a_toolkits_route(light: Shop) -> None:
    """A guard above flask-smorest's route decorator, with another one of its decorators below, is found."""
    light.app.config.update(API_TITLE="Shop", API_VERSION="1", OPENAPI_VERSION="3.0.3")
    blueprint = flask_smorest.Blueprint("x", __name__)

    @light.idempotency.required
    @blueprint.route("/x", methods=["POST"])
    @blueprint.response(201)
    def create() -> str:
        return "posted"

    flask_smorest.Api(light.app).register_blueprint(blueprint)
    assert ["POST /x (x.create) is not guarded."] == findings(light.app)[:1]
    assert "stands above the route's decorator" in findings(light.app)[1]


def test_a_toolkits_guards_under_protect(light: Shop) -> None:
    """An optional guard among a resource's method_decorators beats the protection, as one on a view does."""

    class Resource(flask_restful.Resource):
        method_decorators = [light.idempotency.optional]  # noqa: RUF012

        def post(self) -> str:
            return "posted"

    flask_restful.Api(light.app).add_resource(Resource, "/x", endpoint="x")
    light.idempotency.protect(light.app)
    assert {"POST": "optional"} == states(light.app)
    assert 200 == light.client.post("/x", headers={"X-Tenant": "acme"}).status_code


def administered(shop: Shop) -> None:
    """Flask-Admin beside the API."""
    Admin(shop.app).add_view(ModelView(shop.Charge, shop.db))


def test_flask_admin_is_forgotten(light: Shop) -> None:
    """The views of Flask-Admin are named one by one, unless their endpoints are to be ignored."""
    administered(light)
    found = findings(light.app)
    assert "POST /admin/charge/new/ (charge.create_view) is not guarded." in found
    assert len(found) >= 4
    assert all("(charge." in one for one in found)
    assert [] == findings(light.app, "charge.*")


def test_flask_admin_is_exempt(light: Shop) -> None:
    """Views that an app does not own can be exempt by their endpoints, also where the whole app is protected."""
    administered(light)
    light.idempotency.protect(light.app)
    assert "protected" == routes(light.app)["POST", "/admin/charge/new/"]["state"]
    for endpoint, view in light.app.view_functions.items():
        if endpoint.startswith("charge."):
            light.idempotency.exempt(view)
    assert "exempt" == routes(light.app)["POST", "/admin/charge/new/"]["state"]
    assert [] == findings(light.app)
    assert 302 == light.client.post("/admin/charge/new/", data={"amount": "5"}).status_code


# Apps


def test_one_object_on_several_apps(sqlite_url: str) -> None:
    """Each app's own routes are listed, under its own configuration; the protected blueprint of another is named."""
    idempotency, blueprint = Idempotency(), Blueprint("api", __name__)
    blueprint.post("/x", endpoint="x")(view_called("x"))
    idempotency.protect(blueprint)
    apps = []
    for number in range(2):
        app = Flask(f"shop{number}")
        app.config.update(SQLALCHEMY_DATABASE_URI=sqlite_url, IDEMPOTENCY_WAIT=number)
        idempotency.init_app(app, SQLAlchemy(app))
        apps.append(app)
    idempotency.scope_loader(lambda: "acme")
    apps[1].register_blueprint(blueprint)
    first, second = map(listing, apps)
    assert ({}, {"wait": 1}) == (first["options"], second["options"])
    assert (1, 0) == (len(first["warnings"]), len(second["warnings"]))
    assert [{"GET"}, {"GET", "POST"}] == [
        {method for one in found["routes"] for method in one["methods"]} for found in (first, second)
    ]


class Plain(View):
    """A view class without methods of its own."""

    methods = ["POST"]  # noqa: RUF012

    def dispatch_request(self) -> str:
        return "posted"


def test_an_exempt_class(light: Shop) -> None:
    """A view class that is exempt passes, its routes in a protected blueprint included."""
    light.app.add_url_rule("/x", view_func=light.idempotency.exempt(Plain).as_view("x"))
    light.idempotency.protect(light.app)
    assert {"POST": "exempt"} == states(light.app)


def test_a_guard_in_an_exempt_class(light: Shop) -> None:
    """A guard on a method of an exempt class guards it, and so it is shown, and served."""

    @light.idempotency.exempt
    class Resource(MethodView):
        @light.idempotency.required
        def post(self) -> str:
            return "posted"

        def patch(self) -> str:
            return "patched"

    light.app.add_url_rule("/x", view_func=Resource.as_view("x"))
    light.idempotency.protect(light.app)
    assert {"PATCH": "exempt", "POST": "required"} == states(light.app)
    asked = [light.client.open("/x", method=one, headers={"X-Tenant": "acme"}) for one in ("PATCH", "POST")]
    assert [200, 400] == [one.status_code for one in asked]
