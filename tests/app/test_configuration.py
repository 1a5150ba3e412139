"""Initialisation and options: what an app can set up, what is refused and when, and what each option does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Blueprint, Flask, Response, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.exceptions import HTTPException
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency, errors, hooks
from flask_idempotency.errors import ConfigurationError, OptionError, UnknownOption
from flask_idempotency.state import get_state
from flask_idempotency.store import SQLAlchemyStore
from tests.support.apps import Shop, close, events, new_key, until
from tests.support.barrier import background, together


@pytest.fixture
def new_app(sqlite_url: str) -> Iterator[Callable[..., Flask]]:
    """A function that makes an app without any extension; takes config keys."""
    apps: list[Flask] = []

    def make(**config: Any) -> Flask:
        app = Flask("shop")
        app.config["SQLALCHEMY_DATABASE_URI"] = sqlite_url
        app.config.update(config)
        apps.append(app)
        return app

    yield make
    for app in apps:
        if {"idempotency", "sqlalchemy"} <= set(app.extensions):
            close(app)
        elif "idempotency" in app.extensions:
            store: Any = get_state(app).store
            store.close()


def guarded(app: Flask, idempotency: Idempotency, **options: Any) -> Callable[..., TestResponse]:
    """Give the app a guarded view ``/x`` that counts its runs, and return a function that sends requests to it."""
    runs: list[int] = []
    if idempotency.loader is None:
        idempotency.scope_loader(lambda: "acme")

    @app.post("/x")
    @idempotency.required(**options)
    def view() -> str:
        runs.append(1)
        return f"run {len(runs)}"

    def send(key: str, **extra: Any) -> TestResponse:
        headers = {"Idempotency-Key": key, **extra.pop("headers", {})}
        return app.test_client().post("/x", headers=headers, **extra)

    return send


def assert_works(send: Callable[..., TestResponse]) -> None:
    """Assert that a retry is the replay."""
    key = new_key()
    first, retry = send(key), send(key)
    assert (200, first.data, "true") == (retry.status_code, retry.data, retry.headers["Idempotent-Replay"])


# Initialisation


@contextmanager
def nothing_opened() -> Iterator[None]:
    """Fail if a connection is opened, a statement sent or a thread started meanwhile."""
    opened: list[Any] = []
    threads = set(threading.enumerate())

    def note(*args: Any, **_: Any) -> None:
        opened.append(args)

    watched = [(sa.pool.Pool, "connect"), (sa.pool.Pool, "checkout"), (sa.Engine, "before_cursor_execute")]
    for target, name in watched:
        sa.event.listen(target, name, note)
    try:
        yield
    finally:
        for target, name in watched:
            sa.event.remove(target, name, note)
    assert ([], set()) == (opened, set(threading.enumerate()) - threads)


@pytest.mark.parametrize("order", ["db first", "ours first", "found", "in the constructor"])
def test_init_app_opens_nothing(new_app: Callable[..., Flask], order: str) -> None:
    """Initialisation opens no connection, starts no thread and issues no DDL; nor do requests that are not guarded."""
    app, db, idempotency = new_app(), SQLAlchemy(), Idempotency()
    with nothing_opened():
        if order != "ours first":
            db.init_app(app)
        if order == "found":
            idempotency.init_app(app)
        elif order == "in the constructor":
            idempotency = Idempotency(app, db)
        else:
            idempotency.init_app(app, db)
        if order == "ours first":
            db.init_app(app)
        send = guarded(app, idempotency)
        app.get("/ping")(lambda: "pong")
        assert "pong" == app.test_client().get("/ping").text
        assert 400 == app.test_client().post("/x").status_code
    with app.app_context():
        db.create_all()
    assert_works(send)


def test_initialising_twice(new_app: Callable[..., Flask]) -> None:
    """A second initialisation of one app is an error, by whichever object."""
    app = new_app()
    db = SQLAlchemy(app)
    idempotency = Idempotency(app, db)
    for second in (lambda: idempotency.init_app(app, db), lambda: Idempotency(app, db)):
        with pytest.raises(RuntimeError, match="initialised on the app 'shop' already"):
            second()
    assert 1 == app.before_request_funcs[None].count(hooks._before_request)


def test_an_initialisation_that_failed_can_be_repeated(new_app: Callable[..., Flask]) -> None:
    """After an error nothing of the extension is on the app."""
    app = new_app(IDEMPOTENCY_RETENTION=0)
    db, idempotency = SQLAlchemy(app), Idempotency()
    with pytest.raises(OptionError):
        idempotency.init_app(app, db)
    app.config["IDEMPOTENCY_RETENTION"] = 60
    idempotency.init_app(app, db)
    with app.app_context():
        db.create_all()
    assert_works(guarded(app, idempotency))


def test_no_database(new_app: Callable[..., Flask]) -> None:
    """Without a database the error is a RuntimeError that names both remedies."""
    with pytest.raises(RuntimeError, match=r"db\.init_app\(app\) before Idempotency\(app\).*Idempotency\(app, db\)"):
        Idempotency(new_app())


def test_a_database_that_was_never_initialised(new_app: Callable[..., Flask]) -> None:
    """A database object that was passed and never initialised is an error before the first request is served."""
    app, runs = new_app(), []
    idempotency = Idempotency(app, SQLAlchemy())
    app.get("/ping")(lambda: runs.append("ping") or "pong")
    send = guarded(app, idempotency)
    assert [500, 500] == [app.test_client().get("/ping").status_code, send(new_key()).status_code]
    app.testing = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"not initialised on this app: call db\.init_app\(app\)"):
            app.test_client().get("/ping")
    assert [] == runs


def test_a_plain_engine(new_app: Callable[..., Flask], tmp_path: Any) -> None:
    """An engine serves as the database; the table is in metadata of its own."""
    app, engine = new_app(), sa.create_engine(f"sqlite:///{tmp_path / 'engine.sqlite'}")
    idempotency = Idempotency(app, engine)
    store: Any = get_state(app).store
    store.table.metadata.create_all(engine)
    assert ["idempotency_keys"] == sa.inspect(engine).get_table_names()
    assert_works(guarded(app, idempotency))
    engine.dispose()


def test_an_engine_has_no_binds(new_app: Callable[..., Flask]) -> None:
    """A bind key beside a plain engine is an error at once, rather than without effect."""
    with pytest.raises(ConfigurationError, match=r"^IDEMPOTENCY_BIND_KEY: "):
        Idempotency(new_app(IDEMPOTENCY_BIND_KEY="keys"), sa.create_engine("sqlite://"))


@pytest.mark.parametrize("bind_key", [None, "keys"])
def test_an_object_with_engines(new_app: Callable[..., Flask], tmp_path: Any, bind_key: str | None) -> None:
    """Any object that has engines by their names serves, as Flask-SQLAlchemy-Lite's does; its default has that name."""

    class Lite:
        def __init__(self) -> None:
            names = ("default", "keys")
            self.engines = {name: sa.create_engine(f"sqlite:///{tmp_path / name}.sqlite") for name in names}

    app, db = new_app(**({} if bind_key is None else {"IDEMPOTENCY_BIND_KEY": bind_key})), Lite()
    idempotency = Idempotency(app, db)
    store: Any = get_state(app).store
    engine = db.engines[bind_key or "default"]
    store.table.metadata.create_all(engine)
    assert_works(guarded(app, idempotency))
    with engine.connect() as connection:
        assert 1 == connection.scalar(sa.select(sa.func.count()).select_from(store.table))
    for one in db.engines.values():
        one.dispose()


@pytest.mark.parametrize("db", ["sqlite://", 7, object(), sa.MetaData()])
def test_what_is_no_database(new_app: Callable[..., Flask], db: Any) -> None:
    """Something that has no engines is an error at once, which names its type and shows nothing of it."""
    with pytest.raises(ConfigurationError, match=rf"Flask-SQLAlchemy object or an engine, not {type(db).__name__}\.$"):
        Idempotency(new_app(), db)


def test_a_store_object(new_app: Callable[..., Flask], tmp_path: Any) -> None:
    """A store that is given needs no database on the app."""
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'store.sqlite'}")
    store = SQLAlchemyStore(engine, sa.MetaData(), table_name="elsewhere")
    store.table.metadata.create_all(engine)
    app = new_app(IDEMPOTENCY_STORE=store)
    idempotency = Idempotency(app)
    assert_works(guarded(app, idempotency))
    assert store is get_state(app).store
    with engine.connect() as connection:
        assert 1 == connection.scalar(sa.select(sa.func.count()).select_from(store.table))
    engine.dispose()


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_bind(new_app: Callable[..., Flask], tmp_path: Any, ours_first: bool) -> None:
    """With a bind key the table belongs to that bind's metadata, and its rows live in that database alone."""
    binds = {"keys": f"sqlite:///{tmp_path / 'keys.sqlite'}"}
    app = new_app(SQLALCHEMY_BINDS=binds, IDEMPOTENCY_BIND_KEY="keys")
    db, idempotency = SQLAlchemy(), Idempotency()
    if not ours_first:
        db.init_app(app)
    idempotency.init_app(app, db)
    if ours_first:
        db.init_app(app)
    with app.app_context():
        db.create_all()
        engines = db.engines
    assert (["idempotency_keys"], []) == (list(db.metadatas["keys"].tables), list(db.metadata.tables))
    assert_works(guarded(app, idempotency))
    tables = {name: sa.inspect(engine).get_table_names() for name, engine in engines.items()}
    assert {"keys": ["idempotency_keys"], None: []} == tables


def test_a_bind_that_is_not_there(new_app: Callable[..., Flask]) -> None:
    """A bind key that the database does not have is an error before the first request is served."""
    app = new_app(IDEMPOTENCY_BIND_KEY="nowhere")
    Idempotency(app, SQLAlchemy(app))
    app.get("/ping")(lambda: "pong")
    app.testing = True
    with pytest.raises(ConfigurationError, match=r"IDEMPOTENCY_BIND_KEY.*'nowhere'"):
        app.test_client().get("/ping")


def test_many_apps_of_one_factory(new_app: Callable[..., Flask]) -> None:
    """Many calls of a factory with one database object share one table, and each app works."""
    db, idempotency = SQLAlchemy(), Idempotency()
    idempotency.scope_loader(lambda: "acme")
    tables = set()
    for number in range(3):
        app = new_app()
        db.init_app(app)
        idempotency.init_app(app, db)
        with app.app_context():
            db.create_all()
        tables.add(id(db.metadata.tables["idempotency_keys"]))
        assert_works(guarded(app, idempotency))
        assert number + 1 == len(rows(app, db))
    assert 1 == len(tables)


def rows(app: Flask, db: SQLAlchemy, name: str = "idempotency_keys") -> list[Any]:
    """All rows of the table of keys."""
    with app.app_context():
        return list(db.session.execute(db.select(db.metadata.tables[name])))


def test_a_table_of_another_name(new_app: Callable[..., Flask]) -> None:
    """The table's name is the app's; it has its rows."""
    app = new_app(IDEMPOTENCY_TABLE_NAME="api_keys")
    db = SQLAlchemy(app)
    idempotency = Idempotency(app, db)
    with app.app_context():
        db.create_all()
    assert_works(guarded(app, idempotency))
    assert 1 == len(rows(app, db, "api_keys"))


def test_a_table_that_is_somebody_elses(new_app: Callable[..., Flask]) -> None:
    """A table of that name that lacks columns is an error at once, which names the remedy."""
    app = new_app()
    db = SQLAlchemy(app)
    sa.Table("idempotency_keys", db.metadata, sa.Column("id", sa.Integer, primary_key=True))
    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_TABLE_NAME"):
        Idempotency(app, db)


@pytest.mark.parametrize("value", [False, "false", "0"])
def test_switched_off(new_app: Callable[..., Flask], caplog: pytest.LogCaptureFixture, value: Any) -> None:
    """Switched off nothing is guarded, which is a warning at start; the table stays known to migrations."""
    app = new_app(IDEMPOTENCY_ENABLED=value)
    db, idempotency = SQLAlchemy(app), Idempotency()
    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        idempotency.init_app(app, db)
    assert [(logging.WARNING, True)] == [(one.levelno, "IDEMPOTENCY_ENABLED" in one.message) for one in caplog.records]
    idempotency.protect(app)
    app.post("/y")(lambda: str(idempotency.current))
    send, key = guarded(app, idempotency), new_key()
    assert ["run 1", "run 2", "run 3"] == [send(key).text, send("short").text, app.test_client().post("/x").text]
    assert "None" == app.test_client().post("/y").text
    with app.app_context():
        db.create_all()
    assert [] == rows(app, db)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("LOCK_TIMEOUT", 0, OptionError),
        ("METHODS", "GET", OptionError),
        ("STALE", "never", OptionError),
        ("ON_ERROR", "retry", OptionError),
        ("ATOMIC", "maybe", OptionError),
        ("REDACT", "repr", OptionError),
        ("STORE", "redis://localhost", OptionError),
        ("RETENTON", 60, UnknownOption),
    ],
)
@pytest.mark.scenario(9)
def test_wrong_configuration(new_app: Callable[..., Flask], key: str, value: Any, error: type[Exception]) -> None:
    """A wrong, unknown or unavailable config key is an error of ``init_app``, a RuntimeError that names it."""
    app = new_app(**{f"IDEMPOTENCY_{key}": value})
    with pytest.raises(error, match=f"^IDEMPOTENCY_{key}: ") as caught:
        Idempotency(app, SQLAlchemy(app))
    assert isinstance(caught.value, RuntimeError)
    assert "idempotency" not in app.extensions


@pytest.mark.parametrize("where", ["required", "optional", "protect"])
@pytest.mark.parametrize(
    "options", [{"retention": 0}, {"lock_timeout": None}, {"stale": "never"}, {"redact": "repr"}, {"store": object()}]
)
@pytest.mark.scenario(9)
def test_wrong_keywords(light: Shop, where: str, options: dict[str, Any]) -> None:
    """A wrong keyword is an error where it stands, before there is a view or a request."""
    arguments = (light.app,) if where == "protect" else ()
    with pytest.raises(OptionError, match=rf"^{where}\({next(iter(options))}=…\): "):
        getattr(light.idempotency, where)(*arguments, **options)
    assert 201 == light.charge(new_key()).status_code


# Which option holds


def marker(answer: TestResponse) -> str | None:
    """Whose replay header the answer has: the last part of its name."""
    return next((name.rpartition("-")[2] for name in answer.headers.keys() if name.startswith("X-Of-")), None)  # noqa: SIM118


@pytest.mark.parametrize("outer_first", [True, False])
def test_the_nearer_option_wins(make_light: Callable[..., Shop], outer_first: bool) -> None:
    """The configuration, the app's protection, its paths', an outer and an inner blueprint's, and the decorator's."""
    shop = make_light(replay_header="X-Of-Config")
    outer, inner = (Blueprint(name, __name__, url_prefix=f"/{name}") for name in ("outer", "inner"))
    for target in (shop.app, outer, inner):
        target.post("/x", endpoint="x")(lambda: "x")
        target.post("/paths", endpoint="paths")(lambda: "x")
        target.post("/own", endpoint="own")(shop.idempotency.required(replay_header="X-Of-Own")(lambda: "x"))
        target.post("/bare", endpoint="bare")(shop.idempotency.required(lambda: "x"))
    protections: list[tuple[Any, dict[str, Any]]] = [
        (shop.app, {"replay_header": "X-Of-App", "paths": "x$|bare$"}),
        (shop.app, {"replay_header": "X-Of-Paths", "paths": "^/paths$"}),
        (outer, {"replay_header": "X-Of-Outer"}),
        (outer, {"replay_header": "X-Of-Within", "paths": "^/outer/paths"}),
        (inner, {"replay_header": "X-Of-Inner"}),
    ]
    for target, options in protections if outer_first else reversed(protections):
        shop.idempotency.protect(target, **options)
    outer.register_blueprint(inner)
    shop.app.register_blueprint(outer)
    expected = {
        "/charges": "Config",
        "/x": "App",
        "/bare": "App",
        "/paths": "Paths",
        "/own": "Own",
        "/outer/x": "Outer",
        "/outer/bare": "Outer",
        "/outer/paths": "Within",
        "/outer/own": "Own",
        "/outer/inner/x": "Inner",
        "/outer/inner/bare": "Inner",
        "/outer/inner/paths": "Inner",
        "/outer/inner/own": "Own",
    }
    found = {}
    for path in expected:
        headers = {"Idempotency-Key": new_key(), "X-Tenant": "acme"}
        answers = [shop.client.post(path, headers=headers, json={"amount": 1}) for _ in range(2)]
        found[path] = marker(answers[1])
    assert expected == found


def test_of_two_protections_the_later_one_wins(light: Shop) -> None:
    """Of two protections that are as near, the later one's options hold; what it does not name is the other's."""
    light.idempotency.protect(light.app, replay_header="X-Of-First", mismatch_status=409)
    light.idempotency.protect(light.app, replay_header="X-Of-Second")
    key = new_key()
    light.charge(key)
    assert "Second" == marker(light.charge(key))
    assert 409 == light.charge(key, amount=900).status_code


def test_options_of_decorators_that_are_made_at_each_request(light: Shop) -> None:
    """Options of guards that come and go are never taken for those of others."""

    @light.app.post("/x/<name>")
    def view(name: str) -> Any:
        options = {} if name == "none" else {"replay_header": f"X-Of-{name}"}
        return light.idempotency.required(**options)(lambda: name)()

    for number in range(50):
        for name in (f"n{number}", "none"):
            headers = {"Idempotency-Key": new_key(), "X-Tenant": "acme"}
            answers = [light.client.post(f"/x/{name}", headers=headers) for _ in range(2)]
            assert (None if name == "none" else name) == marker(answers[1])
            assert (name == "none") == ("Idempotent-Replay" in answers[1].headers)


# What each option does


def test_another_header(make_light: Callable[..., Shop]) -> None:
    """The key may come in another header, which the error about a missing one names; the usual one is nothing then."""
    shop = make_light(header="X-Request-Key")
    missing = shop.charge(new_key())
    assert (400, True) == (missing.status_code, "header X-Request-Key" in missing.json["detail"])
    key = {"X-Request-Key": new_key()}
    assert ["true"] == shop_replays(shop, headers=key)


def shop_replays(shop: Shop, **options: Any) -> list[str]:
    """Two charges; the markers of the second."""
    return [shop.charge(**options) for _ in range(2)][1].headers.getlist("Idempotent-Replay")


def test_a_key_from_elsewhere(make_light: Callable[..., Shop]) -> None:
    """A callable may find the key in the body; what it finds has no shortest length, and nothing is no key."""
    shop = make_light(key=lambda: request.get_json().get("amount"))
    assert ["true"] == shop_replays(shop, amount=7)
    assert ["7"] == [row["key"] for row in shop.rows()]
    answer = shop.client.post("/charges", json={}, headers={"X-Tenant": "acme", "Idempotency-Key": new_key()})
    assert (400, "key-missing") == (answer.status_code, answer.json["type"].rpartition(":")[2])
    assert "header" not in answer.json["detail"]


@pytest.mark.parametrize("option", ["key", "fingerprint", "scope"])
def test_callables_that_raise_before_the_claim(make_light: Callable[..., Shop], option: str) -> None:
    """An exception of an app's callable before the claim is its own 500; nothing is stored, the view is not run."""

    def broken() -> str:
        raise ZeroDivisionError

    shop = make_light(**{option: broken})
    assert 500 == shop.charge(new_key()).status_code
    assert [] == shop.runs == shop.rows()


def test_the_shortest_key(make_light: Callable[..., Shop]) -> None:
    """The shortest key that a header may carry can be configured, by app and by view."""
    shop = make_light(key_min_length=20)
    shop.app.post("/x")(shop.idempotency.required(key_min_length=1)(lambda: "x"))
    assert [400, 201] == [shop.charge("k" * length).status_code for length in (19, 20)]
    assert 200 == shop.client.post("/x", headers={"Idempotency-Key": "k", "X-Tenant": "acme"}).status_code


@pytest.mark.parametrize(
    ("fingerprint", "same"),
    [
        (["sent_at"], {"amount": 100, "sent_at": 2}),
        ("sent_at, nonce", {"amount": 100, "sent_at": 2, "nonce": 3}),
        (lambda: request.get_json()["amount"], {"amount": 100, "anything": "else"}),
        (lambda asked: asked.get_json()["amount"], {"amount": 100}),
    ],
)
def test_what_is_fingerprinted(make_light: Callable[..., Shop], fingerprint: Any, same: dict[str, Any]) -> None:
    """JSON members can be left out of the fingerprint, or a callable's value taken in the body's place."""
    shop = make_light(fingerprint=fingerprint)
    headers = {"Idempotency-Key": new_key(), "X-Tenant": "acme"}
    bodies = [{"amount": 100, "sent_at": 1}, same, {"amount": 900, "sent_at": 1}]
    statuses = [shop.client.post("/charges", json=body, headers=headers).status_code for body in bodies]
    assert [201, 201, 422] == statuses
    assert 1 == len(shop.runs)


def test_retention(make: Callable[..., Shop]) -> None:
    """Past its retention a key is new, pruned or not; it counts from the recording."""
    shop = make(retention=100)
    key = new_key()
    first = shop.charge(key)
    shop.shift(90)
    assert first.data == shop.charge(key).data
    shop.shift(20)
    again = shop.charge(key, amount=900)
    assert (201, False) == (again.status_code, "Idempotent-Replay" in again.headers)
    assert 2 == shop.charges()
    assert 1 == len(shop.rows())


def test_the_replays_marker(make_light: Callable[..., Shop]) -> None:
    """The marker's name can be another, and there can be none."""
    shop = make_light(replay_header="X-Replayed")
    shop.app.post("/x")(shop.idempotency.required(replay_header=None)(lambda: "x"))
    key = new_key()
    shop.charge(key)
    assert "true" == shop.charge(key).headers["X-Replayed"]
    answers = [shop.client.post("/x", headers={"Idempotency-Key": key * 2, "X-Tenant": "acme"}) for _ in range(2)]
    assert dict(answers[0].headers) == dict(answers[1].headers)
    assert 2 == len(shop.rows())


def test_headers_that_are_not_recorded(make_light: Callable[..., Shop]) -> None:
    """Further headers can be kept out of the record, whatever their case."""
    shop = make_light(excluded_headers="X-Trace, x-span")

    @shop.app.post("/x")
    @shop.idempotency.required
    def view() -> Response:
        return Response("x", headers={"x-TRACE": "1", "X-Span": "2", "X-Kept": "3"})

    headers = {"Idempotency-Key": new_key(), "X-Tenant": "acme"}
    first, retry = (shop.client.post("/x", headers=headers) for _ in range(2))
    assert {"X-TRACE", "X-SPAN", "X-KEPT"} <= {name.upper() for name in first.headers.keys()}  # noqa: SIM118
    assert ("3", None, None) == tuple(retry.headers.get(name) for name in ("X-Kept", "X-Trace", "X-Span"))


# Another request under a used key


@pytest.mark.parametrize("status", [422, 409])
@pytest.mark.scenario(69)
def test_the_status_of_a_mismatch(make_light: Callable[..., Shop], status: int) -> None:
    """A used key with another request is refused with the configured status and always the same type."""
    shop = make_light(mismatch_status=status)
    key = new_key()
    first = shop.charge(key)
    answer = shop.charge(key, amount=900)
    assert (status, status) == (answer.status_code, answer.json["status"])
    assert "urn:problem-type:idempotency:key-reused" == answer.json["type"]
    assert "Retry-After" not in answer.headers
    retry = shop.charge(key)
    assert (first.data, "true") == (retry.data, retry.headers["Idempotent-Replay"])


def add_slow(shop: Shop) -> None:
    """Give the app a guarded view ``/slow`` that waits until it is told to go on."""

    @shop.app.post("/slow")
    @shop.idempotency.required
    def slow() -> tuple[dict[str, Any], int]:
        entered, go = shop.app.config["SLOW"]
        entered.set()
        assert go.wait(30)
        shop.runs.append("slow")
        return {"slow": True}, 201


@contextmanager
def in_flight(shop: Shop, key: str) -> Iterator[tuple[threading.Event, Future[TestResponse]]]:
    """A request that is in its view meanwhile; yields the event that lets it end, and its future."""
    if "slow" not in shop.app.view_functions:
        add_slow(shop)
    entered, go = shop.app.config["SLOW"] = threading.Event(), threading.Event()
    first = background(ask_slow, shop, key)
    assert entered.wait(10)
    try:
        yield go, first
    finally:
        go.set()
        first.result(10)


def slow_headers(key: str) -> dict[str, str]:
    """The headers of a request with a key."""
    return {"Idempotency-Key": key, "X-Tenant": "acme"}


def ask_slow(shop: Shop, key: str, amount: int = 100) -> TestResponse:
    """A duplicate of the request that is in its view, or with another amount another one."""
    return shop.client.post("/slow", json={"amount": amount}, headers=slow_headers(key))


def problem(answer: TestResponse) -> tuple[int, str]:
    """An answer's status and the last part of its type."""
    return answer.status_code, answer.json["type"].rpartition(":")[2]


def test_in_flight(make: Callable[..., Shop]) -> None:
    """A duplicate of a request in flight is told to come back, another request that the key is used."""
    shop, key = make(retry_after=7.2), new_key()
    with in_flight(shop, key):
        answer = ask_slow(shop, key)
        assert ((409, "in-flight"), "8") == (problem(answer), answer.headers["Retry-After"])
        assert (422, "key-reused") == problem(ask_slow(shop, key, 900))
        assert (422, "key-reused") == problem(shop.charge(key))
        assert 201 == shop.charge(new_key()).status_code
    assert {"slow": True} == ask_slow(shop, key).json
    assert 1 == shop.runs.count("slow")


def test_mismatches_that_are_replayed(make: Callable[..., Shop]) -> None:
    """With ON_MISMATCH=replay another request gets the record; 409 while the claim lives, and never a takeover."""
    shop, key = make(on_mismatch="replay"), new_key()
    with in_flight(shop, key):
        assert (409, "in-flight") == problem(ask_slow(shop, key, 900))
    for path in ("/slow", "/charges"):
        answer = shop.client.post(path, json={"amount": 900}, headers=slow_headers(key))
        assert (201, {"slow": True}, "true") == (answer.status_code, answer.json, answer.headers["Idempotent-Replay"])
    crashed = new_key()
    crash(shop, crashed)
    assert (409, "in-flight") == problem(shop.charge(crashed, amount=900))
    shop.shift(60)
    assert (422, "key-reused") == problem(shop.charge(crashed, amount=900))
    taken = shop.charge(crashed)
    assert (201, False) == (taken.status_code, "Idempotent-Replay" in taken.headers)


def crash(shop: Shop, key: str) -> None:
    """A charge whose worker dies in the view, before it has done anything."""

    def die() -> None:
        raise SystemExit

    guard = shop.app.view_functions["create_charge"]
    dying = shop.idempotency.required(die)
    shop.app.view_functions["create_charge"] = dying
    try:
        with pytest.raises(SystemExit):
            shop.charge(key)
    finally:
        shop.app.view_functions["create_charge"] = guard


@pytest.mark.scenario(4)
def test_another_request_after_a_crash(shop: Shop) -> None:
    """What a crash left behind is never taken over by another request, by the same one once its lease is over."""
    key = new_key()
    crash(shop, key)
    assert (409, "in-flight") == problem(shop.charge(key))
    shop.shift(60)
    assert (422, "key-reused") == problem(shop.charge(key, amount=900))
    assert [] == shop.runs
    with events(shop.app) as seen:
        assert 201 == shop.charge(key).status_code
    assert "taken_over" in [name for name, _ in seen]
    assert 1 == shop.charges()


# Waiting


@pytest.mark.scenario(5)
def test_a_waiter_gets_the_replay(make: Callable[..., Shop]) -> None:
    """A duplicate that may wait gets the replay once the first is done, and never runs."""
    shop, key = make(wait=20), new_key()
    with in_flight(shop, key) as (go, first):
        waiter = background(ask_slow, shop, key)
        until(lambda: waiting(shop) == 1)
        assert not waiter.done()
        go.set()
        assert first.result(10).data == waiter.result(10).data
    assert "true" == waiter.result().headers["Idempotent-Replay"]
    assert 1 == shop.runs.count("slow")
    assert 0 == waiting(shop)


def waiting(shop: Shop) -> int:
    """How many requests wait."""
    return 2 - get_state(shop.app).lifecycle.places._value


@pytest.mark.scenario(5)
def test_another_request_does_not_wait(make_light: Callable[..., Shop]) -> None:
    """A request with another fingerprint is refused at once, though it may wait."""
    shop, key = make_light(wait=20), new_key()
    with in_flight(shop, key) as (_, first):
        assert (422, "key-reused") == problem(ask_slow(shop, key, 900))
        assert not first.done()


@pytest.mark.scenario(6)
def test_a_waiter_that_gives_up(make: Callable[..., Shop]) -> None:
    """A waiter that gives up gets 409 with what it waited told, and leaves the claim to its owner."""
    shop, key = make(wait=0.2), new_key()
    with in_flight(shop, key) as (_, first), events(shop.app) as seen:
        before = [(row["fencing_token"], row["status"]) for row in shop.rows()]
        assert (409, "in-flight") == problem(ask_slow(shop, key))
        assert before == [(row["fencing_token"], row["status"]) for row in shop.rows()]
        assert not first.done()
    ((name, fields),) = [one for one in seen if one[0] == "conflicted"]
    assert ("conflicted", True) == (name, 0.15 < fields["waited"] < 10)
    assert "true" == ask_slow(shop, key).headers["Idempotent-Replay"]
    assert 1 == shop.runs.count("slow")


@pytest.mark.scenario(8)
def test_only_a_few_may_wait(make_light: Callable[..., Shop]) -> None:
    """Of ten duplicates two wait, the others get 409 at once, and an unrelated request is answered meanwhile."""
    shop, key = make_light(wait=20), new_key()
    shop.app.get("/ping")(lambda: "pong")
    with in_flight(shop, key) as (go, _):
        duplicates = [background(ask_slow, shop, key) for _ in range(10)]
        until(lambda: sum(one.done() for one in duplicates) == 8 and waiting(shop) == 2)
        assert "pong" == shop.client.get("/ping").text
        assert {(409, "in-flight")} == {problem(one.result()) for one in duplicates if one.done()}
        go.set()
        answers = [one.result(10) for one in duplicates]
    assert [201, 201] == [one.status_code for one in answers if one.status_code != 409]
    assert 1 == shop.runs.count("slow")


def test_a_waiter_whose_owner_releases(make_light: Callable[..., Shop]) -> None:
    """A waiter whose owner released its claim runs the view itself, under a claim of its own."""
    shop, key = make_light(wait=20), new_key()
    entered, go, runs = threading.Event(), threading.Event(), []

    @shop.app.post("/x")
    @shop.idempotency.required
    def view() -> tuple[str, int]:
        runs.append("x")
        if len(runs) == 1:
            entered.set()
            assert go.wait(20)
            return "busy", 503
        return "done", 201

    first = background(shop.client.post, "/x", headers=slow_headers(key))
    assert entered.wait(10)
    waiters = [background(shop.client.post, "/x", headers=slow_headers(key)) for _ in range(2)]
    until(lambda: waiting(shop) == 2)
    go.set()
    assert 503 == first.result(10).status_code
    assert [(201, b"done")] * 2 == [(one.result(10).status_code, one.result().data) for one in waiters]
    assert 2 == len(runs)


# The store


def break_store(shop: Shop) -> None:
    """Take the table away."""
    shop.execute(sa.text("DROP TABLE idempotency_keys"))


@pytest.mark.scenario(59, 68)
def test_a_store_that_can_not_answer(make: Callable[..., Shop], caplog: pytest.LogCaptureFixture) -> None:
    """Without the store the view is not run: 503 with Retry-After, and the log says what to do."""
    shop = make(retry_after=9)
    break_store(shop)
    answer = shop.charge(new_key())
    assert ((503, "store-unavailable"), "9") == (problem(answer), answer.headers["Retry-After"])
    assert ([], 0) == (shop.runs, shop.charges())
    errors = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert ["flask_idempotency"] == [one.name for one in errors]
    assert "flask db upgrade" in errors[0].getMessage()
    assert "idempotency_keys" not in answer.text


@pytest.mark.scenario(72)
def test_a_view_that_runs_without_the_store(make: Callable[..., Shop]) -> None:
    """With ON_STORE_ERROR=execute the view runs each time, unguarded, which is signalled as that and as a failure."""
    shop = make(on_store_error="execute")
    break_store(shop)
    key = new_key()
    with events(shop.app) as seen:
        answers = [shop.charge(key) for _ in range(2)]
    assert [201, 201] == [one.status_code for one in answers]
    assert 2 == shop.charges() == len(shop.runs)
    assert ["record_failed", "unguarded"] * 2 == [name for name, _ in seen]
    assert all("running unguarded" in fields["exception"] for _, fields in seen[::2])
    assert all((key, "acme", "store-unavailable") == (one["key"], one["scope"], one["reason"]) for _, one in seen[1::2])


def test_a_view_without_the_store_still_knows_its_key(make_light: Callable[..., Shop]) -> None:
    """A view that runs without the store can use ``current``: its key and scope, and what then steers nothing."""
    shop = make_light(on_store_error="execute")

    @shop.app.post("/x")
    @shop.idempotency.required
    def view() -> dict[str, Any]:
        current = shop.idempotency.current
        assert current is not None
        current.release()
        current.retention = 5
        return {"key": current.key, "scope": current.scope, "replay": current.replay, "attempts": current.attempts}

    break_store(shop)
    key = new_key()
    answer = shop.client.post("/x", headers=slow_headers(key))
    assert {"key": key, "scope": "acme", "replay": False, "attempts": 0} == answer.json


def test_a_stream_that_reads_the_body_without_the_store(make_light: Callable[..., Shop]) -> None:
    """A streamed answer of a view that runs without the store can still read the request."""
    shop = make_light(on_store_error="execute")

    @shop.app.post("/x")
    @shop.idempotency.required
    def view() -> Response:
        stream = request.stream
        return Response(iter(lambda: stream.read(3), b""))

    break_store(shop)
    answer = shop.client.post("/x", data=b"abcdefgh", headers=slow_headers(new_key()))
    assert b"abcdefgh" == answer.data


@pytest.mark.parametrize("policy", ["reject", "execute"])
@pytest.mark.parametrize(
    "damage",
    [
        {"status": "dancing"},
        {"response_status": None},
        {"response_status": 7},
        {"response_headers": {"a": 1}},
        {"request_fingerprint": ""},
        {"fencing_token": ""},
        {"stale_policy": "perhaps"},
        {"attempts": 0},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_a_row_that_can_not_be_read(
    make_light: Callable[..., Shop], caplog: pytest.LogCaptureFixture, policy: str, damage: dict[str, Any]
) -> None:
    """A row that can't be read back is 503 and logged, never as if it were absent, whatever the store's policy."""
    shop, key = make_light(on_store_error=policy), new_key()
    shop.charge(key)
    shop.execute(sa.update(shop.table).values(damage))
    before = shop.rows()
    assert (503, "store-unavailable") == problem(shop.charge(key))
    assert 1 == shop.charges() == len(shop.runs)
    assert before == shop.rows()
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert f"row with id {before[0]['id']} can't be read" in record.getMessage()
    assert key not in record.getMessage()


def test_a_version_that_is_not_known(make_light: Callable[..., Shop]) -> None:
    """A row whose fingerprint's version this release does not know is 503, not run."""
    shop, key = make_light(), new_key()
    shop.charge(key)
    shop.execute(sa.update(shop.table).values(fingerprint_version=99))
    assert (503, "store-unavailable") == problem(shop.charge(key))
    assert 1 == shop.charges()


# Errors, and what an app makes of them


def provoke(shop: Shop) -> dict[type[errors.IdempotencyError], TestResponse]:
    """An answer of each class that this release can give, by its class."""
    add_slow(shop)
    key = new_key()
    found: dict[type[errors.IdempotencyError], TestResponse] = {}
    found[errors.KeyMissing] = shop.charge()
    found[errors.KeyInvalid] = shop.charge("short")
    found[errors.ScopeMissing] = shop.client.post("/charges", json={}, headers={"Idempotency-Key": key})
    shop.charge(key)
    found[errors.KeyReused] = shop.charge(key, amount=900)
    shop.execute(sa.update(shop.table).values(response_body=None, response_headers=sa.null()))
    found[errors.RecordUnavailable] = shop.charge(key)
    shop.execute(sa.update(shop.table).values(status="held"))
    found[errors.OutcomeUnknown] = shop.charge(key)
    other = new_key()
    with in_flight(shop, other):
        found[errors.InFlight] = ask_slow(shop, other)
    break_store(shop)
    found[errors.StoreUnavailable] = shop.charge(key)
    return found


PROVOKED = {
    errors.KeyMissing: 400,
    errors.KeyInvalid: 400,
    errors.ScopeMissing: 401,
    errors.KeyReused: 422,
    errors.InFlight: 409,
    errors.OutcomeUnknown: 409,
    errors.RecordUnavailable: 409,
    errors.StoreUnavailable: 503,
}


@pytest.mark.scenario(69)
def test_problem_documents(make_light: Callable[..., Shop]) -> None:
    """Every answer of the extension is a problem document under the app's own base, told apart by its type."""
    shop = make_light(problem_base="https://example.com/errors#")
    answers = provoke(shop)
    assert PROVOKED == {kind: answer.status_code for kind, answer in answers.items()}
    for kind, answer in answers.items():
        document = answer.json
        assert ("application/problem+json", f"https://example.com/errors#{kind.slug}") == (
            (answer.content_type, document["type"])
        )
        assert (answer.status_code, kind.title) == (document["status"], document["title"])
        assert document["detail"] == document["error"]
        extra = set(document) - {"type", "title", "status", "detail", "error"}
        assert ({"original_status"} if kind is errors.RecordUnavailable else set()) == extra
        assert (kind in (errors.InFlight, errors.StoreUnavailable)) == ("Retry-After" in answer.headers)
        assert (kind is errors.ScopeMissing) == ("WWW-Authenticate" in answer.headers)
    assert 201 == answers[errors.RecordUnavailable].json["original_status"]


@pytest.mark.parametrize("by", ["class", "base", "HTTPException", "Exception"])
def test_handlers_of_the_app(make_light: Callable[..., Shop], by: str) -> None:
    """An app reshapes the answers with a handler for each class, for their base, or for all HTTP exceptions."""
    shop = make_light()

    def reshape(error: Any) -> tuple[dict[str, Any], int, dict[str, str]]:
        return {"ours": error.type, "sentence": error.detail}, error.code, {"X-Reshaped": type(error).__name__}

    registered = {"class": PROVOKED, "base": [errors.IdempotencyError], "HTTPException": [HTTPException]}
    for kind in registered.get(by, [Exception]):
        shop.app.register_error_handler(kind, reshape)
    for kind, answer in provoke(shop).items():
        assert (PROVOKED[kind], kind.__name__) == (answer.status_code, answer.headers["X-Reshaped"])
        assert f"urn:problem-type:idempotency:{kind.slug}" == answer.json["ours"]


def test_handlers_of_a_blueprint(light: Shop) -> None:
    """A blueprint's handler for the base reshapes the answers to its own routes alone."""
    blueprint = Blueprint("api", __name__)
    blueprint.post("/x", endpoint="x")(light.idempotency.required(lambda: "x"))
    blueprint.register_error_handler(errors.IdempotencyError, lambda error: ({"blueprint": error.code}, error.code))
    light.app.register_blueprint(blueprint)
    answer = light.client.post("/x")
    assert (400, {"blueprint": 400}) == (answer.status_code, answer.json)
    assert "type" in light.charge().json


def test_a_handler_sees_the_attempt(light: Shop) -> None:
    """In an error handler ``current`` is the attempt that was refused, once its key and scope are known."""
    seen = []

    @light.app.errorhandler(errors.IdempotencyError)
    def reshape(error: errors.IdempotencyError) -> Any:
        seen.append(light.idempotency.current)
        return error

    key = new_key()
    light.charge(key)
    light.charge(key, amount=900)
    light.charge()
    assert seen[0] is not None
    assert (key, "acme", False) == (seen[0].key, seen[0].scope, seen[0].replay)
    assert seen[1] is None


def test_a_replay_is_no_error(light: Shop) -> None:
    """Handlers for exceptions of all kinds leave a replay alone."""
    for kind in (Exception, HTTPException):
        light.app.register_error_handler(kind, lambda error: ("handled", 418))
    key = new_key()
    first, retry = light.charge(key), light.charge(key)
    assert (201, first.data, "true") == (retry.status_code, retry.data, retry.headers["Idempotent-Replay"])


@pytest.mark.parametrize("config", [{"TESTING": True}, {"DEBUG": True}, {"PROPAGATE_EXCEPTIONS": True}])
@pytest.mark.parametrize("trap", [False, True])
def test_replays_whatever_flask_is_told(light: Shop, config: dict[str, bool], trap: bool) -> None:
    """A replay is an answer in testing, in debug mode, and where exceptions are propagated or trapped."""
    light.app.config.update(config, TRAP_HTTP_EXCEPTIONS=trap)
    key = new_key()
    first, retry = light.charge(key), light.charge(key)
    assert (201, first.data, "true") == (retry.status_code, retry.data, retry.headers["Idempotent-Replay"])


def test_many_keys_at_once(make: Callable[..., Shop]) -> None:
    """More distinct keys at once than the extension has connections all succeed."""
    shop = make(pool_size=1)
    assert {201} == {one.status_code for one in together(8, lambda _: shop.charge(new_key()))}
    assert 8 == shop.charges() == len(shop.rows())
