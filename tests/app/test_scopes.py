"""Who a key belongs to: where the scope comes from, and that scopes never see each other."""

from __future__ import annotations

import functools
import hashlib
import logging
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Blueprint, Flask, Response, g, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.datastructures import Headers
from werkzeug.exceptions import Unauthorized
from werkzeug.local import LocalProxy

from flask_idempotency import Idempotency
from flask_idempotency.errors import OptionError
from tests.support.apps import Shop, close, new_key

BEARER = {"Authorization": "Bearer s3cret-token"}


@pytest.fixture
def bare(make_light: Callable[..., Shop]) -> Callable[..., Shop]:
    """A function that makes a shop without a scope loader; takes ``IDEMPOTENCY_…`` keys."""

    def build(**config: Any) -> Shop:
        shop = make_light(**config)
        shop.idempotency.loader = None
        return shop

    return build


def scopes(shop: Shop) -> list[str]:
    """The stored scopes, oldest first."""
    return [row["scope"] for row in shop.rows()]


def hashed(text: str) -> str:
    """The stored form of a loader's value that can't be stored as it is."""
    return "~hash:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@pytest.mark.scenario(47)
def test_scopes_never_see_each_other(shop: Shop) -> None:
    """The same key and body of another caller is a first time, and neither can block or read the other."""
    key = new_key()
    answers = [shop.charge(key, tenant=tenant) for tenant in ("a", "b", "A", "a ", "á")]
    assert [201] * 4 == [one.status_code for one in answers[:3]] + [answers[4].status_code]
    retries = [shop.charge(key, tenant=tenant) for tenant in ("a", "b", "A")]
    assert [one.data for one in answers[:3]] == [one.data for one in retries]
    assert all("Idempotent-Replay" in one.headers for one in retries)
    assert 201 == shop.charge(key, tenant="c", amount=900).status_code
    assert shop.charges() == len(shop.rows())


@pytest.mark.scenario(58)
def test_scope_and_key_do_not_run_together(light: Shop) -> None:
    """Scope ``u1:x`` with key ``y…`` is not scope ``u1`` with key ``x:y…``."""
    pairs = [("u1:x", "yyyyyyyy"), ("u1", "x:yyyyyyyy"), ("u1:x:yyyy", "yyyyyyyy")]
    assert [201] * 3 == [light.charge(key, tenant=tenant).status_code for tenant, key in pairs]
    assert set(pairs) == {(row["scope"], row["key"]) for row in light.rows()}


STORED: list[tuple[Any, str]] = [
    ("acme", "acme"),
    (" Acme ", " Acme "),
    (7, "7"),
    (uuid.UUID(int=7), str(uuid.UUID(int=7))),
    ("租户\n7", "租户\n7"),
    ("a'b\"c\\d;--%", "a'b\"c\\d;--%"),
    ("s" * 255, "s" * 255),
    ("s" * 256, hashed("s" * 256)),
    ("s" * 1000, hashed("s" * 1000)),
    ("~fixed:stripe", hashed("~fixed:stripe")),
    ("~", hashed("~")),
    ("a\x00b", hashed("a\x00b")),
    ("\ud800", hashed("\ud800")),
]


@pytest.mark.scenario(57, 78)
def test_stored_forms_of_loaders_values(shop: Shop) -> None:
    """A loader's value is stored as it is, or as its hash where it begins with a tilde or does not fit."""
    key = new_key()
    for value, _ in STORED:
        shop.idempotency.loader = lambda value=value: value
        assert [201, 201] == [shop.charge(key).status_code for _ in range(2)]
    assert [stored for _, stored in STORED] == scopes(shop)
    assert len(STORED) == len(shop.runs)


@pytest.mark.scenario(57)
def test_long_scopes_that_begin_alike(light: Shop) -> None:
    """Scopes that are equal in their first 255 characters, and more, are different ones."""
    key = new_key()
    for last in "ab":
        light.idempotency.loader = lambda last=last: "s" * 999 + last
        assert 201 == light.charge(key).status_code
    assert 2 == light.charges() == len(set(scopes(light)))


def _function() -> str:
    return request.headers["X-Tenant"]


def _with_request(asked: Any) -> str:
    return str(asked.headers["X-Tenant"])


async def _coroutine() -> str:
    return request.headers["X-Tenant"]


def _from_g() -> str:
    return str(g.tenant)


@pytest.mark.parametrize("loader", [_function, _with_request, _coroutine, _from_g])
def test_kinds_of_loaders(light: Shop, loader: Callable[..., str]) -> None:
    """A loader takes nothing or the request, may be a coroutine, and sees what hooks have left on ``g``."""

    @light.app.before_request
    def load() -> None:
        g.tenant = request.headers["X-Tenant"]

    assert loader is light.idempotency.scope_loader(loader)
    key = new_key()
    assert [201, 201] == [light.charge(key, tenant=tenant).status_code for tenant in "ab"]
    assert ["a", "b"] == scopes(light)


@pytest.mark.parametrize(
    "value", [b"acme", True, object(), _function, Response("no", 401), Unauthorized(), Headers([("a", "b")]), ("a", 1)]
)
def test_a_loaders_slip(light: Shop, value: Any) -> None:
    """A value without a stable text, a function that was not called say, is the app's 500; nothing is stored."""
    light.idempotency.loader = lambda: value
    assert 500 == light.charge(new_key()).status_code
    light.app.testing = True
    with pytest.raises(TypeError, match="stable id"):
        light.charge(new_key())
    assert [] == light.runs == light.rows()


@pytest.mark.parametrize("below", [True, False])
def test_a_loader_that_looks_at_what_a_decorator_below_finds_out(
    light: Shop, caplog: pytest.LogCaptureFixture, below: bool
) -> None:
    """Where the loader names nobody and decorators stand below the guard, the log says once that they run too late."""

    def authenticated(view: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(view)(lambda: view())

    light.idempotency.loader = lambda: g.get("account")
    view = light.idempotency.required(authenticated(lambda: "x") if below else lambda: "x")
    light.app.add_url_rule("/x", "x", view, methods=["POST"])
    for _ in range(2):
        assert 401 == light.client.post("/x", headers={"Idempotency-Key": new_key()}).status_code
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert ["that is too late" in one for one in warnings] == [True] * below


def test_a_loader_that_raises(light: Shop) -> None:
    """An exception of the loader is the app's own 500, with nothing stored and the view not run."""

    def broken() -> str:
        raise ZeroDivisionError

    light.idempotency.loader = broken
    assert 500 == light.charge(new_key()).status_code
    light.app.config["PROPAGATE_EXCEPTIONS"] = True
    with pytest.raises(ZeroDivisionError):
        light.charge(new_key())
    assert [] == light.runs == light.rows()


def test_the_loader_is_asked_for_requests_with_a_key_alone(light: Shop) -> None:
    """Without a key, with an invalid one, and on methods that are not guarded, nobody is asked for."""
    asked: list[str] = []
    light.idempotency.loader = lambda: asked.append("asked") or "acme"
    light.app.route("/x", methods=["GET", "POST"])(light.idempotency.optional(lambda: "x"))
    for method, key in (("GET", "k" * 20), ("POST", None), ("POST", "short")):
        light.client.open("/x", method=method, headers={"Idempotency-Key": key} if key else {})
    assert [] == asked
    light.client.post("/x", headers={"Idempotency-Key": "k" * 20})
    assert ["asked"] == asked


# The order of origins


def test_a_fixed_scope(bare: Callable[..., Shop]) -> None:
    """A webhook's source as the scope needs no caller, and is stored with its prefix."""
    shop = bare(scope="stripe")
    key = new_key()
    assert [201, 201] == [shop.charge(key, tenant=tenant).status_code for tenant in "ab"]
    assert ["~fixed:stripe"] == scopes(shop)
    assert 1 == len(shop.runs)


def test_the_order_of_origins(light: Shop) -> None:
    """The option beats the loader; the decorator's beats the protection's, and that the configuration's."""
    blueprint = Blueprint("hooks", __name__, url_prefix="/hooks")
    light.idempotency.protect(blueprint, scope="hooks")
    for name, options in {"far": {}, "near": {"scope": "near"}, "called": {"scope": lambda: "called"}}.items():
        decorated = light.idempotency.required(**options)(lambda: "x")
        blueprint.post(f"/{name}", endpoint=name)(decorated)
    blueprint.post("/bare", endpoint="bare")(lambda: "x")
    light.app.register_blueprint(blueprint)
    for path in ("/charges", "/hooks/bare", "/hooks/far", "/hooks/near", "/hooks/called"):
        headers = {"Idempotency-Key": new_key(), "X-Tenant": "acme", **BEARER}
        assert 300 > light.client.post(path, json={"amount": 1}, headers=headers).status_code
    assert ["acme", "~fixed:hooks", "~fixed:hooks", "~fixed:near", "called"] == scopes(light)


@pytest.mark.scenario(78)
def test_a_tenant_with_the_name_of_a_fixed_scope(light: Shop) -> None:
    """A fixed scope ``stripe``, a tenant ``stripe`` and a tenant who calls himself ``~fixed:stripe`` never meet."""
    light.app.post("/hook")(light.idempotency.required(scope="stripe")(lambda: "hook"))
    key = new_key()
    assert "hook" == light.client.post("/hook", headers={"Idempotency-Key": key}).text
    for tenant in ("stripe", "~fixed:stripe"):
        assert "Idempotent-Replay" not in light.charge(key, tenant=tenant).headers
    assert ["~fixed:stripe", "stripe", hashed("~fixed:stripe")] == scopes(light)


@pytest.mark.parametrize("scope", ["s" * 300, "a\x00b"])
@pytest.mark.scenario(78)
def test_fixed_scopes_that_do_not_fit(light: Shop, scope: str) -> None:
    """A fixed scope that the column can't hold is hashed, and meets no loader's value of any spelling."""
    light.app.post("/hook")(light.idempotency.required(scope=scope)(lambda: "hook"))
    key = new_key()
    light.client.post("/hook", headers={"Idempotency-Key": key})
    for value in (scope, f"~fixed:{scope}", scopes(light)[0]):
        light.idempotency.loader = lambda value=value: value
        assert 201 == light.charge(key).status_code
    assert 4 == len(set(scopes(light)))
    assert scopes(light)[0].startswith("~hash:")


# Credentials


@pytest.fixture
def capture(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """A function that returns all that was logged, messages, fields and traces."""
    with caplog.at_level(logging.DEBUG):
        yield lambda: "\n".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records) + caplog.text


def everything(shop: Shop) -> str:
    """All that is stored, as text."""
    return repr(shop.rows())


@pytest.mark.parametrize(
    ("header", "value", "secret"),
    [
        ("Authorization", "Bearer s3cret-token", "s3cret-token"),
        ("Authorization", "Bearer s3cret-token", "Bearer s3cret-token"),
        ("Authorization", "s3cret-token", "s3cret-token"),
        ("Authorization", "Basic dTpzM2NyZXQtdG9rZW4=", "s3cret-token"),
        ("Authorization", "Basic dTpzM2NyZXQtdG9rZW4=", "u:s3cret-token"),
        ("Authorization", "Basic dTpzM2NyZXQtdG9rZW4=", "dTpzM2NyZXQtdG9rZW4="),
        ("X-Api-Key", "s3cret-token", "s3cret-token"),
        ("X-Auth-Token", "s3cret-token", "s3cret-token"),
        ("Cookie", "session=s3cret-token-of-a-session", "s3cret-token-of-a-session"),
    ],
)
def test_a_loader_that_returns_the_credential(
    light: Shop, capture: Callable[[], str], header: str, value: str, secret: str
) -> None:
    """A scope that equals the request's credential is kept as its hash, in the table and in the log."""
    light.idempotency.loader = lambda: secret
    client, key = light.app.test_client(use_cookies=False), {"Idempotency-Key": new_key(), header: value}
    answers = [client.post("/charges", json={"amount": amount}, headers=key) for amount in (1, 1, 2)]
    assert ([201, 201, 422], True) == ([one.status_code for one in answers], "Idempotent-Replay" in answers[1].headers)
    assert [hashed(secret)] == scopes(light)
    assert "s3cret" not in everything(light) + capture()


@pytest.mark.parametrize(
    ("header", "loader"),
    [
        ("basic  dTpzM2NyZXQtdG9rZW4=", lambda: request.authorization),
        ("basic dTpzM2NyZXQtdG9rZW4=", lambda: request.authorization and request.authorization.to_header()),
        ("bearer  s3cret-token", lambda: str(request.authorization)),
        ("Bearer   s3cret-token", lambda: request.authorization and request.authorization.token),
        ('DIGEST username="u", response="s3cret-token"', lambda: request.authorization),
    ],
)
def test_a_loader_that_returns_what_werkzeug_makes_of_the_credential(
    light: Shop, header: str, loader: Callable[[], Any]
) -> None:
    """However the client spelled it, what a loader makes of Authorization is hashed."""
    light.idempotency.loader = loader
    key = new_key()
    for name in ("Authorization", "Proxy-Authorization"):
        assert 201 == light.charge(key, headers={"Authorization": header, name: header}).status_code
    assert ["~hash:"] == [one[:6] for one in scopes(light)]
    assert not any(secret in everything(light) for secret in ("s3cret", "dTpz"))


@pytest.mark.parametrize(
    ("header", "value", "loader"),
    [
        ("Authorization", "Bearer  s3cret-token", lambda text: text.removeprefix("Bearer ")),
        ("Authorization", "Bearer\ts3cret-token", lambda text: text.split()[1]),
        ("Authorization", "Basic dTpzM2NyZXQtdG9rZW4g", lambda text: "s3cret-token"),  # "u:s3cret-token "
        ("X-Api-Key", "Key\ts3cret-token", lambda text: text[4:]),
        ("X-Session", "Bearer s3cret-token-of-a-session", lambda text: text[6:]),
        ("X-Session", "Bearer s3cret-token-of-a-session", lambda text: text.split()[1]),
        ("Cookie", 'session=" s3cret-token-of-a-session "', lambda text: request.cookies["session"].strip()),
    ],
)
def test_a_loader_that_cuts_the_credential_out(
    light: Shop, header: str, value: str, loader: Callable[[str], str]
) -> None:
    """With or without the scheme before it, or blanks around it, a credential is hashed."""
    light.idempotency.loader = lambda: loader(request.headers[header])
    client = light.app.test_client(use_cookies=False)
    answer = client.post("/charges", json={"amount": 1}, headers={"Idempotency-Key": new_key(), header: value})
    assert 201 == answer.status_code
    assert ["~hash:"] == [one[:6] for one in scopes(light)]


@pytest.mark.parametrize("name", ["Authorization", "Proxy-Authorization"])
def test_credentials_that_werkzeug_can_not_read(light: Shop, name: str) -> None:
    """Where Werkzeug raises for what a client sent as Basic, the loader's id serves, and the text sent is hashed."""
    light.idempotency.loader = lambda: request.headers.get("X-Account") or request.headers[name].partition(" ")[2]
    header = {name: "Basic s3cr\xe9t"}
    assert 201 == light.charge(new_key(), headers={**header, "X-Account": "a1"}).status_code
    assert 201 == light.charge(new_key(), headers={"Authorization": "Basic dTpw", **header}).status_code
    assert {"a1", hashed("s3cr\xe9t")} == set(scopes(light))


@pytest.mark.parametrize("parsed", ["loader", "hook"])
@pytest.mark.parametrize("where", ["json", "nested", "form", "path"])
def test_a_credential_that_is_sent_elsewhere(light: Shop, where: str, parsed: str) -> None:
    """A member, field or part of the path that is called as a credential is hashed; an account's name is not."""
    bodies = {
        "json": {"json": {"api_key": "s3cret-token-0123456789", "account": "the-account-named-acme"}},
        "nested": {"json": {"by": [{"token": "s3cret-token-0123456789", "account": "the-account-named-acme"}]}},
        "form": {"data": {"api_key": "s3cret-token-0123456789", "account": "the-account-named-acme"}},
        "path": {},
    }

    def sent() -> dict[str, Any]:
        found = {**(request.view_args or {}), **request.form, **(request.get_json(silent=True) or {})}
        return found["by"][0] if "by" in found else found

    if parsed == "hook":
        light.app.before_request(lambda: sent() and None)
    guarded = light.idempotency.required(lambda **_: "done")
    light.app.add_url_rule("/x", "x", guarded, methods=["POST"])
    light.app.add_url_rule("/x/<api_key>/<account>", "y", guarded, methods=["POST"])
    path = "/x/s3cret-token-0123456789/the-account-named-acme" if where == "path" else "/x"
    for name in ("api_key", "account"):
        light.idempotency.loader = lambda name=name: sent().get(name) or sent()["token"]
        assert 200 == light.client.post(path, headers={"Idempotency-Key": new_key()}, **bodies[where]).status_code
    assert [hashed("s3cret-token-0123456789"), "the-account-named-acme"] == scopes(light)


def test_a_cookie_that_happens_to_be_the_tenants_name(light: Shop) -> None:
    """A cookie that the first answer set does not make the retry another caller's."""
    client, headers = light.client, {"Idempotency-Key": new_key(), "X-Tenant": "acme"}
    first = client.post("/charges", json={"amount": 1}, headers=headers)
    client.set_cookie("tenant", "acme")
    retry = client.post("/charges", json={"amount": 1}, headers=headers)
    assert (first.data, "true") == (retry.data, retry.headers.get("Idempotent-Replay"))
    assert ["acme"] == scopes(light)


@pytest.mark.parametrize("header", ["Bearer s3cret-token", "bearer  s3cret-token ", "Basic dTpzM2NyZXQtdG9rZW4="])
def test_the_last_resort(bare: Callable[..., Shop], capture: Callable[[], str], header: str) -> None:
    """Without a loader and a login the scope is a hash of Authorization; the credential is in no row and no log."""
    shop = bare()
    key = new_key()
    answers = [shop.charge(key, headers={"Authorization": header}) for _ in range(2)]
    assert ([201, 201], True) == ([one.status_code for one in answers], "Idempotent-Replay" in answers[1].headers)
    (scope,) = scopes(shop)
    assert (True, 6 + 64) == (scope.startswith("~auth:"), len(scope))
    for secret in ("s3cret", "dTpz", header):
        assert secret not in everything(shop) + capture()


def test_the_last_resort_tells_callers_apart(bare: Callable[..., Shop]) -> None:
    """The scheme's case and blanks around do not count; another token or another scheme is another scope."""
    shop, key = bare(), new_key()
    spelled = ["Bearer abc", "BEARER abc", "bearer   abc ", "Bearer ABC", "Basic abc", "Bearer abcd"]
    for header in spelled:
        assert 201 == shop.charge(key, headers={"Authorization": header}).status_code
    assert 4 == len(shop.runs) == len(set(scopes(shop)))


def test_the_last_resort_is_warned_of_once(
    bare: Callable[..., Shop], make_light: Callable[..., Shop], caplog: pytest.LogCaptureFixture
) -> None:
    """The first use for each app is a warning that names the remedy; with a loader there is none."""
    for shop, warnings in ((bare(), 1), (bare(table_name="idempotency_keys"), 1), (make_light(), 0)):
        caplog.clear()
        for _ in range(3):
            shop.charge(new_key(), headers=BEARER)
        messages = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
        assert warnings == len(messages)
        assert all("@idempotency.scope_loader" in one for one in messages)


@pytest.mark.parametrize(
    "header",
    [
        'Digest username="u", response="s3cret"',
        "AWS4-HMAC-SHA256 Credential=s3cret",
        "Signature s3cret",
        "Negotiate s3cret",
        "DPoP s3cret",
        "Hawk s3cret",
    ],
)
def test_schemes_that_change_with_each_attempt(
    bare: Callable[..., Shop], capture: Callable[[], str], header: str
) -> None:
    """Other schemes than Basic and Bearer name no caller: 401, which asks for a loader."""
    shop = bare()
    answer = shop.charge(new_key(), headers={"Authorization": header})
    assert (401, "urn:problem-type:idempotency:scope-missing") == (answer.status_code, answer.json["type"])
    assert "scope loader" in answer.json["detail"]
    assert "s3cret" not in answer.text + capture()
    assert [] == shop.runs == shop.rows()


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "s3cret-without-a-scheme"])
def test_no_caller_at_all(bare: Callable[..., Shop], header: str | None) -> None:
    """Without any credential there is no scope, never a shared one."""
    shop = bare()
    answer = shop.charge(new_key(), headers={} if header is None else {"Authorization": header})
    assert (401, "urn:problem-type:idempotency:scope-missing") == (answer.status_code, answer.json["type"])
    assert "WWW-Authenticate" in answer.headers
    assert "s3cret" not in answer.text
    assert [] == shop.runs == shop.rows()


@pytest.mark.parametrize("value", [None, "", LocalProxy(lambda: None), LocalProxy(lambda: "")])
@pytest.mark.parametrize("origin", ["loader", "option"])
def test_a_loader_without_a_caller(light: Shop, origin: str, value: Any) -> None:
    """``None`` and the empty string are 401 with a challenge, also where a credential would serve as a last resort."""
    options = {"scope": lambda: value} if origin == "option" else {}
    light.app.post("/x")(light.idempotency.required(**options)(lambda: "x"))
    if origin == "loader":
        light.idempotency.loader = lambda: value
    headers = {"Idempotency-Key": new_key(), "X-Tenant": "acme", **BEARER}
    answer = light.client.post("/x", headers=headers)
    assert (401, "application/problem+json") == (answer.status_code, answer.content_type)
    assert "urn:problem-type:idempotency:scope-missing" == answer.json["type"]
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert [] == light.rows()


@pytest.mark.scenario(32)
def test_a_refreshed_token(light: Shop) -> None:
    """A retry with a new token of the same account is the replay, with a loader that names the account."""
    accounts = {"Bearer one": 7, "Bearer two": 7}
    light.idempotency.loader = lambda: accounts[request.headers["Authorization"]]
    key = new_key()
    first, retry = (light.charge(key, headers={"Authorization": token}) for token in accounts)
    assert (first.data, "true") == (retry.data, retry.headers["Idempotent-Replay"])
    assert (1, ["7"]) == (len(light.runs), scopes(light))


# Flask-Login


@pytest.fixture
def login(sqlite_url: str) -> Iterator[Callable[..., Any]]:
    """A function that makes an app with Flask-Login, and a client who has logged in under an id."""
    from flask_login import LoginManager, UserMixin, login_user

    class User(UserMixin):
        def __init__(self, id: str) -> None:
            self.id = id

    apps: list[Flask] = []

    def build(loader: Callable[..., Any] | None = None) -> tuple[Flask, Callable[[], list[str]]]:
        app = Flask("shop")
        app.config.update(SQLALCHEMY_DATABASE_URI=sqlite_url, SECRET_KEY="a secret of tests")
        db, manager = SQLAlchemy(app), LoginManager(app)
        idempotency = Idempotency(app, db)
        if loader is not None:
            idempotency.scope_loader(loader)
        manager.user_loader(User)

        @app.post("/login/<id>")
        def log_in(id: str) -> str:
            login_user(User(id))
            return "in"

        @app.post("/x")
        @idempotency.required
        def view() -> str:
            return "x"

        with app.app_context():
            db.create_all()
        apps.append(app)

        def stored() -> list[str]:
            table = db.metadata.tables["idempotency_keys"]
            with app.app_context():
                return list(db.session.scalars(db.select(table.c.scope).order_by(table.c.id)))

        return app, stored

    yield build
    for app in apps:
        close(app)


@pytest.mark.scenario(78)
def test_a_logged_in_user(login: Callable[..., Any]) -> None:
    """The user of Flask-Login is the scope where no loader is, and ids are stored with their prefix."""
    app, stored = login()
    key = {"Idempotency-Key": new_key()}
    for id in ("7", "8"):
        client = app.test_client()
        client.post(f"/login/{id}")
        answers = [client.post("/x", headers={**key, **BEARER}) for _ in range(2)]
        assert [False, True] == ["Idempotent-Replay" in one.headers for one in answers]
    assert ["~user:7", "~user:8"] == stored()


@pytest.mark.scenario(78)
def test_a_loader_beats_the_logged_in_user(login: Callable[..., Any]) -> None:
    """A loader's 7 and the logged-in user 7 never meet, and the loader decides."""
    app, stored = login(lambda: request.headers.get("X-Id"))
    client = app.test_client()
    client.post("/login/7")
    key = {"Idempotency-Key": new_key()}
    assert 200 == client.post("/x", headers={**key, "X-Id": "7"}).status_code
    assert "Idempotent-Replay" not in client.post("/x", headers={**key, "X-Id": "~user:7"}).headers
    assert 401 == client.post("/x", headers=key).status_code
    assert ["7", hashed("~user:7")] == stored()


def test_nobody_is_logged_in(login: Callable[..., Any]) -> None:
    """Where Flask-Login is active and nobody logged in, Authorization is the last resort, and nothing is 401."""
    app, stored = login()
    key = {"Idempotency-Key": new_key()}
    assert 401 == app.test_client().post("/x", headers=key).status_code
    assert 200 == app.test_client().post("/x", headers={**key, **BEARER}).status_code
    (scope,) = stored()
    assert scope.startswith("~auth:")


@pytest.mark.parametrize("value", ["", 7, True, ["stripe"]])
def test_scopes_that_are_none(light: Shop, value: Any) -> None:
    """A fixed scope that is empty or no text is an error at the decorator, the protection and in the configuration."""
    with pytest.raises(OptionError, match=r"^required\(scope=…\)"):
        light.idempotency.required(scope=value)
    with pytest.raises(OptionError, match=r"^protect\(scope=…\)"):
        light.idempotency.protect(light.app, scope=value)
    app = Flask("other")
    app.config.update(IDEMPOTENCY_SCOPE=value, SQLALCHEMY_DATABASE_URI="sqlite://")
    with pytest.raises(OptionError, match=r"^IDEMPOTENCY_SCOPE: "):
        Idempotency(app, SQLAlchemy(app))
