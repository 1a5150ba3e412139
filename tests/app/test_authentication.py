"""Authentication has the last word: whatever turns a request away turns its replay away too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Blueprint, Flask, abort, g, request
from flask.views import MethodView
from flask_sqlalchemy import SQLAlchemy
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency
from tests.support.apps import Shop, close, new_key

TOKENS = {"Bearer one": "acme", "Bearer two": "acme", "Bearer other": "emca"}


class Tokens(dict[str, str]):
    """Valid credentials and their accounts; looked at by every kind of authentication below."""

    def check(self) -> None:
        """Answer 401 unless the request has a valid one."""
        account = self.get(request.headers.get("Authorization", ""))
        if account is None:
            abort(401)
        g.account = account


@pytest.fixture
def tokens() -> Tokens:
    """All tokens are valid."""
    return Tokens(TOKENS)


@pytest.fixture
def build(sqlite_url: str) -> Iterator[Callable[..., Flask]]:
    """A function that makes an app whose parts a test registers in its own order; gives back its connections."""
    apps: list[Flask] = []

    def make() -> Flask:
        app = Flask("shop")
        app.config["SQLALCHEMY_DATABASE_URI"] = sqlite_url
        apps.append(app)
        return app

    yield make
    for app in apps:
        close(app)


def by_hook_before(app: Flask, db: SQLAlchemy, idempotency: Idempotency, tokens: Tokens, view: Any) -> None:
    """A before_request that is registered before the extension."""
    app.before_request(tokens.check)
    idempotency.init_app(app, db)
    app.post("/x")(idempotency.required(view))


def by_hook_after(app: Flask, db: SQLAlchemy, idempotency: Idempotency, tokens: Tokens, view: Any) -> None:
    """A before_request that is registered after the extension."""
    idempotency.init_app(app, db)
    app.before_request(tokens.check)
    app.post("/x")(idempotency.required(view))


def by_blueprint(app: Flask, db: SQLAlchemy, idempotency: Idempotency, tokens: Tokens, view: Any) -> None:
    """A before_request of the blueprint."""
    idempotency.init_app(app, db)
    blueprint = Blueprint("api", __name__)
    blueprint.before_request(tokens.check)
    blueprint.post("/x", endpoint="x")(idempotency.required(view))
    app.register_blueprint(blueprint)


def by_protected_blueprint(app: Flask, db: SQLAlchemy, idempotency: Idempotency, tokens: Tokens, view: Any) -> None:
    """A before_request of a protected blueprint."""
    idempotency.init_app(app, db)
    blueprint = Blueprint("api", __name__)
    blueprint.post("/x", endpoint="x")(view)
    idempotency.protect(blueprint)
    blueprint.before_request(tokens.check)
    app.register_blueprint(blueprint)


def decorate(tokens: Tokens, view: Callable[..., Any]) -> Callable[..., Any]:
    """As ``login_required`` or ``jwt_required()``."""

    @functools.wraps(view)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        tokens.check()
        return view(*args, **kwargs)

    return decorated


def by_decorator_above(app: Flask, db: SQLAlchemy, idempotency: Idempotency, tokens: Tokens, view: Any) -> None:
    """A decorator above ours."""
    idempotency.init_app(app, db)
    app.post("/x")(decorate(tokens, idempotency.required(view)))


def by_loader(app: Flask, db: SQLAlchemy, idempotency: Idempotency, tokens: Tokens, view: Any) -> None:
    """The scope loader itself, with the decorator below ours."""
    idempotency.init_app(app, db)
    idempotency.scope_loader(lambda: tokens.get(request.headers.get("Authorization", "")))
    app.post("/x")(idempotency.required(decorate(tokens, view)))


WAYS = [by_hook_before, by_hook_after, by_blueprint, by_protected_blueprint, by_decorator_above, by_loader]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.scenario(48)
def test_a_revoked_token(build: Callable[..., Flask], tokens: Tokens, way: Callable[..., None]) -> None:
    """Once the token is revoked the retry gets the app's 401, not the replay; and no claim or record is touched."""
    app, db, idempotency, runs = build(), SQLAlchemy(), Idempotency(), []

    def view() -> str:
        runs.append(g.get("account"))
        return f"run {len(runs)}"

    db.init_app(app)
    if way is not by_loader:
        idempotency.scope_loader(lambda: g.account)
    way(app, db, idempotency, tokens, view)
    with app.app_context():
        db.create_all()

    def send(token: str, key: str) -> TestResponse:
        return app.test_client().post("/x", headers={"Authorization": token, "Idempotency-Key": key})

    def rows() -> list[Any]:
        with app.app_context():
            return list(db.session.execute(db.select(db.metadata.tables["idempotency_keys"])))

    key, unused = new_key(), new_key()
    assert ["run 1"] * 3 == [send(token, key).text for token in ("Bearer one", "Bearer one", "Bearer two")]
    before = rows()
    del tokens["Bearer one"]
    for sent in (key, unused):
        answer = send("Bearer one", sent)
        assert (401, False) == (answer.status_code, "Idempotent-Replay" in answer.headers)
        assert "run 1" not in answer.text
    assert before == rows()
    assert "run 1" == send("Bearer two", key).text
    assert "run 2" == send("Bearer two", unused).text
    assert "run 3" == send("Bearer other", key).text


# Where a decorator below the guard has not looked at the credential yet


@pytest.fixture
def bare(light: Shop) -> Shop:
    """A shop without a scope loader."""
    light.idempotency.loader = None
    return light


def refused_protect(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """A protected path."""
    shop.app.post("/x", endpoint="x")(decorate(tokens, view))
    shop.idempotency.protect(shop.app, paths="^/x")


def refused_protect_of_a_plain_view(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """A protected path whose view has no decorator that can be seen."""
    shop.app.post("/x", endpoint="x")(lambda: (tokens.check(), view())[1])
    shop.idempotency.protect(shop.app, paths="^/x")


def refused_above(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """Ours above the other decorator."""
    shop.app.post("/x", endpoint="x")(shop.idempotency.required(decorate(tokens, view)))


def refused_optional(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """The same with ``optional``."""
    shop.app.post("/x", endpoint="x")(shop.idempotency.optional(decorate(tokens, view)))


def refused_class_decorators(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """Both in the class's decorators, ours last and so outside."""

    class Resource(MethodView):
        decorators = [functools.partial(decorate, tokens), shop.idempotency.required]  # noqa: RUF012

        def post(self) -> Any:
            return view()

    shop.app.add_url_rule("/x", view_func=Resource.as_view("x"))


def refused_method_decorator(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """Ours in the class's decorators, the other on the method."""

    class Resource(MethodView):
        decorators = [shop.idempotency.required]  # noqa: RUF012

        @functools.partial(decorate, tokens)
        def post(self) -> Any:
            return view()

    shop.app.add_url_rule("/x", view_func=Resource.as_view("x"))


def refused_dispatch(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """Ours around the class's view, the other on its dispatch_request."""

    class Resource(MethodView):
        def post(self) -> Any:
            return view()

        @functools.partial(decorate, tokens)
        def dispatch_request(self, **kwargs: Any) -> Any:
            return super().dispatch_request(**kwargs)

    shop.app.add_url_rule("/x", view_func=shop.idempotency.required(Resource.as_view("x")))


class ToolkitResource(MethodView):
    """As a resource of Flask-RESTful: method_decorators are put on the method when it is called."""

    method_decorators: list[Any] = []  # noqa: RUF012

    def dispatch_request(self, **kwargs: Any) -> Any:
        method = getattr(self, request.method.lower())
        for decorator in self.method_decorators:
            method = decorator(method)
        return method(**kwargs)


def refused_toolkit(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """Ours in the class's decorators, the other in a toolkit's method_decorators."""

    class Resource(ToolkitResource):
        decorators = [shop.idempotency.required]  # noqa: RUF012
        method_decorators = [functools.partial(decorate, tokens)]  # noqa: RUF012

        def post(self) -> Any:
            return view()

    shop.app.add_url_rule("/x", view_func=Resource.as_view("x"))


def refused_toolkits_own_order(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """Both in a toolkit's method_decorators, ours last and so outside."""

    class Resource(ToolkitResource):
        method_decorators = [functools.partial(decorate, tokens), shop.idempotency.required]  # noqa: RUF012

        def post(self) -> Any:
            return view()

    shop.app.add_url_rule("/x", view_func=Resource.as_view("x"))


REFUSED = [
    refused_protect,
    refused_protect_of_a_plain_view,
    refused_above,
    refused_optional,
    refused_class_decorators,
    refused_method_decorator,
    refused_dispatch,
    refused_toolkit,
    refused_toolkits_own_order,
]


@pytest.mark.parametrize("register", REFUSED, ids=lambda one: one.__name__)
@pytest.mark.scenario(74)
def test_a_guard_outside_of_authentication(bare: Shop, tokens: Tokens, register: Callable[..., None]) -> None:
    """Where authentication stands below the guard, Authorization is no scope: 401 that says so, valid token or not."""
    runs: list[str] = []
    register(bare, tokens, lambda: runs.append("x") or "x")
    key = new_key()
    for token in ("Bearer one", "Bearer one", "Bearer revoked"):
        headers = {"Authorization": token, "Idempotency-Key": key}
        answer = bare.client.post("/x", headers=headers)
        assert (401, "urn:problem-type:idempotency:scope-missing") == (answer.status_code, answer.json["type"])
        assert "scope loader" in answer.json["detail"]
    assert [] == runs == bare.rows()


def served_below(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """Ours below the other decorator."""
    shop.app.post("/x", endpoint="x")(decorate(tokens, shop.idempotency.required(view)))


def served_class_decorators(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """Both in the class's decorators, the other last and so outside."""

    class Resource(MethodView):
        decorators = [shop.idempotency.required, functools.partial(decorate, tokens)]  # noqa: RUF012

        def post(self) -> Any:
            return view()

    shop.app.add_url_rule("/x", view_func=Resource.as_view("x"))


def served_method(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """Ours on the method, the other in the class's decorators."""

    class Resource(MethodView):
        decorators = [functools.partial(decorate, tokens)]  # noqa: RUF012

        @shop.idempotency.required
        def post(self) -> Any:
            return view()

    shop.app.add_url_rule("/x", view_func=Resource.as_view("x"))


def served_both_on_the_method(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """Both on the method, ours below."""

    class Resource(MethodView):
        @functools.partial(decorate, tokens)
        @shop.idempotency.required
        def post(self) -> Any:
            return view()

    shop.app.add_url_rule("/x", view_func=Resource.as_view("x"))


def served_toolkit(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """Both in a toolkit's method_decorators, ours first and so inside."""

    class Resource(ToolkitResource):
        method_decorators = [shop.idempotency.required, functools.partial(decorate, tokens)]  # noqa: RUF012

        def post(self) -> Any:
            return view()

    shop.app.add_url_rule("/x", view_func=Resource.as_view("x"))


def served_own_guard_in_protected(shop: Shop, tokens: Tokens, view: Callable[..., Any]) -> None:
    """A protected path with a guard of the view's own, below the other decorator."""
    served_below(shop, tokens, view)
    shop.idempotency.protect(shop.app, paths="^/x")


SERVED = [
    served_below,
    served_class_decorators,
    served_method,
    served_both_on_the_method,
    served_toolkit,
    served_own_guard_in_protected,
]


@pytest.mark.parametrize("register", SERVED, ids=lambda one: one.__name__)
@pytest.mark.scenario(48)
def test_a_guard_inside_of_authentication(bare: Shop, tokens: Tokens, register: Callable[..., None]) -> None:
    """Where authentication stands above the guard, Authorization serves; a revoked token gets 401, not the replay."""
    runs: list[str] = []
    register(bare, tokens, lambda: runs.append("x") or f"run {len(runs)}")
    headers = {"Authorization": "Bearer one", "Idempotency-Key": new_key()}
    answers = [bare.client.post("/x", headers=headers) for _ in range(2)]
    assert ["run 1", "run 1"] == [one.text for one in answers]
    assert "Idempotent-Replay" in answers[1].headers
    del tokens["Bearer one"]
    assert 401 == bare.client.post("/x", headers=headers).status_code
    assert ["x"] == runs


@pytest.mark.scenario(74)
def test_a_loader_makes_a_protected_path_safe(bare: Shop, tokens: Tokens) -> None:
    """With a loader that checks, a protected path serves valid tokens, and a revoked one never gets the replay."""
    refused_protect(bare, tokens, lambda: "x")
    bare.idempotency.scope_loader(lambda: tokens.get(request.headers.get("Authorization", "")))
    headers = {"Authorization": "Bearer one", "Idempotency-Key": new_key()}
    answers = [bare.client.post("/x", headers=headers) for _ in range(2)]
    assert (["x", "x"], True) == ([one.text for one in answers], "Idempotent-Replay" in answers[1].headers)
    del tokens["Bearer one"]
    answer = bare.client.post("/x", headers=headers)
    assert (401, "scope-missing") == (answer.status_code, answer.json["type"].rpartition(":")[2])


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_loader_that_aborts(light: Shop, status: int) -> None:
    """A loader may turn a request away itself, as the app's own answer; nothing is stored."""
    key = new_key()
    light.charge(key)
    before = light.rows()
    light.idempotency.loader = lambda: abort(status)
    answer = light.charge(key)
    assert (status, "text/html; charset=utf-8") == (answer.status_code, answer.content_type)
    assert before == light.rows()


@pytest.mark.scenario(47)
def test_one_caller_can_not_probe_anothers_key(light: Shop) -> None:
    """Whether a key is used, in flight or free for somebody else can't be told from the answer."""
    key = new_key()

    @light.app.post("/x")
    @light.idempotency.required
    def view() -> dict[str, Any]:
        if request.headers["X-Tenant"] == "acme":
            inner = light.client.post("/x", headers={"X-Tenant": "emca", "Idempotency-Key": key})
            return {"mine": True, "others": inner.status_code}
        return {"mine": False}

    first = light.client.post("/x", headers={"X-Tenant": "acme", "Idempotency-Key": key})
    assert {"mine": True, "others": 200} == first.json
    assert {"mine": False} == light.client.post("/x", headers={"X-Tenant": "emca", "Idempotency-Key": key}).json
    third = light.client.post("/x", headers={"X-Tenant": "third", "Idempotency-Key": key}, json={"other": 1})
    assert (200, {"mine": False}) == (third.status_code, third.json)
    assert "Idempotent-Replay" not in third.headers
