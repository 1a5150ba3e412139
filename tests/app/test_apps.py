"""Several apps in one process, with one ``Idempotency`` object or several: nothing crosses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Blueprint, Flask, current_app, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.middleware.proxy_fix import ProxyFix
from werkzeug.test import Client, TestResponse

from flask_idempotency import Idempotency
from flask_idempotency.state import get_state
from tests.support.apps import close, events, new_key
from tests.support.barrier import background, together


class Apps:
    """Apps as a factory makes them: one ``Idempotency``, one ``db``, views in a module that was imported before."""

    def __init__(self) -> None:
        self.db = SQLAlchemy()
        self.idempotency = Idempotency()
        self.blueprint = Blueprint("api", __name__)
        self.runs: list[str] = []
        self.made: list[Flask] = []
        self.idempotency.scope_loader(lambda: "acme")

        @self.blueprint.post("/x")
        @self.idempotency.required
        def view() -> str:
            self.runs.append(current_app.name)
            return f"{current_app.name} {len(self.runs)}"

    def create(self, name: str, url: str, db: SQLAlchemy | None = None, **config: Any) -> Flask:
        """An app of that name."""
        app, db = Flask(name), db or self.db
        app.config.update(SQLALCHEMY_DATABASE_URI=url, **config)
        db.init_app(app)
        self.idempotency.init_app(app, db)
        app.register_blueprint(self.blueprint)
        with app.app_context():
            db.create_all()
        self.made.append(app)
        return app

    def rows(self, app: Flask) -> list[Any]:
        """All rows in an app's table of keys."""
        with app.app_context():
            database = app.extensions["sqlalchemy"]
            return list(database.session.execute(sa.select(database.metadata.tables["idempotency_keys"])))


@pytest.fixture
def apps() -> Iterator[Apps]:
    """An object that makes them; gives back their connections."""
    made = Apps()
    yield made
    for app in made.made:
        close(app)


def send(app: Flask, key: str, path: str = "/x", **options: Any) -> TestResponse:
    """A request with a key."""
    return app.test_client().post(path, headers={"Idempotency-Key": key}, **options)


@pytest.mark.scenario(55)
def test_one_object_on_two_engines(apps: Apps, tmp_path: Path, postgres_url: str) -> None:
    """One object on an app on SQLite and one on PostgreSQL: the same keys in threads at once, and nothing crosses."""
    on_sqlite = apps.create("sqlite", f"sqlite:///{tmp_path / 'a.sqlite'}")
    on_postgresql = apps.create("postgresql", postgres_url)
    keys = [new_key() for _ in range(4)]

    def work(number: int) -> list[str]:
        app = (on_sqlite, on_postgresql)[number % 2]
        return [send(app, key).text for key in keys for _ in range(2)]

    found = together(4, work)
    for number, app in enumerate((on_sqlite, on_postgresql)):
        texts = {text for one in found[number::2] for text in one if not text.startswith("{")}
        assert 4 == len(texts)
        assert {app.name} == {text.partition(" ")[0] for text in texts}
        assert set(keys) == {row.key for row in apps.rows(app)}
    assert 8 == len(apps.runs)


def test_two_configurations(apps: Apps, tmp_path: Path) -> None:
    """Two apps of one object have each their configuration, store, table and state."""
    first = apps.create("first", f"sqlite:///{tmp_path / 'a.sqlite'}", IDEMPOTENCY_MISMATCH_STATUS=409)
    second = apps.create("second", f"sqlite:///{tmp_path / 'b.sqlite'}", IDEMPOTENCY_HEADER="X-Key")
    key = new_key()
    assert ["first 1", "first 1"] == [send(first, key).text for _ in range(2)]
    assert 409 == send(first, key, json={"a": 1}).status_code
    assert 400 == send(second, key).status_code
    answers = [second.test_client().post("/x", headers={"X-Key": key}) for _ in range(2)]
    assert ["second 2", "second 2"] == [one.text for one in answers]
    states = [get_state(app) for app in (first, second)]
    assert states[0].store is not states[1].store
    assert [first, second] == [state.app for state in states]


def test_apps_that_share_a_database(apps: Apps, sqlite_url: str) -> None:
    """Two apps over one database share its keys, as processes of one service do."""
    first, second = (apps.create(name, sqlite_url) for name in ("first", "second"))
    key = new_key()
    assert ["first 1", "first 1"] == [send(app, key).text for app in (first, second)]
    assert 1 == len(apps.rows(second))


def test_two_objects_side_by_side(tmp_path: Path) -> None:
    """Two objects with an app each keep their loaders, protections and attempts apart."""
    both = [Apps(), Apps()]
    both[1].idempotency.scope_loader(lambda: "emca")
    made = [one.create(name, f"sqlite:///{tmp_path / name}") for one, name in zip(both, "ab", strict=True)]
    key = new_key()
    for one, app in zip(both, made, strict=True):
        assert 1 == len({send(app, key).data for _ in range(2)})
        assert 1 == len(one.runs)
    assert [["acme"], ["emca"]] == [[row.scope for row in one.rows(app)] for one, app in zip(both, made, strict=True)]
    for app in made:
        close(app)


def test_events_go_to_their_app(apps: Apps, tmp_path: Path) -> None:
    """A signal's sender is the app whose request it is about."""
    first, second = (apps.create(name, f"sqlite:///{tmp_path / name}") for name in ("first", "second"))
    key = new_key()
    with events(first) as of_first, events(second) as of_second:
        send(first, key)
        send(second, key)
        send(second, key)
    assert ["executed"] == [name for name, _ in of_first]
    assert ["executed", "replayed"] == [name for name, _ in of_second]


def test_protecting_one_of_two_apps(apps: Apps, tmp_path: Path) -> None:
    """A protected app is protected alone, a protected blueprint on every app that has it."""
    blueprint = Blueprint("more", __name__)
    blueprint.post("/y", endpoint="y")(lambda: "y")
    first, second = (apps.create(name, f"sqlite:///{tmp_path / name}") for name in ("first", "second"))
    for app in (first, second):
        app.register_blueprint(blueprint)
        app.post("/z", endpoint="z")(lambda: "z")
    apps.idempotency.protect(blueprint)
    apps.idempotency.protect(first, paths="^/z")
    found = {(app.name, path): app.test_client().post(f"/{path}").status_code for app in apps.made for path in "yz"}
    assert {("first", "y"): 400, ("first", "z"): 400, ("second", "y"): 400, ("second", "z"): 200} == found


def test_one_app_calls_another(apps: Apps, tmp_path: Path) -> None:
    """A guarded view that sends a request to another app in the process has its claim, and the other app its own."""
    first, second = (apps.create(name, f"sqlite:///{tmp_path / name}") for name in ("first", "second"))
    seen: list[Any] = []

    @first.post("/calls")
    @apps.idempotency.required
    def calls() -> str:
        before = apps.idempotency.current
        inner = send(second, request.headers["Idempotency-Key"]).text
        seen.append(before is apps.idempotency.current)
        return f"first of {inner}"

    key = new_key()
    assert ["first of second 1"] * 2 == [send(first, key, "/calls").text for _ in range(2)]
    assert [True] == seen
    assert "second 1" == send(second, key).text
    assert ["second"] == apps.runs


@pytest.mark.parametrize("inside", [True, False])
def test_apps_that_are_mounted(apps: Apps, sqlite_url: str, inside: bool) -> None:
    """An app mounted below another's path is guarded by its own, and the mount point counts in the fingerprint."""
    first, second = (apps.create(name, sqlite_url) for name in ("first", "second"))
    mounts = {"/mounted": second, "/again": second}
    if inside:
        first.wsgi_app = DispatcherMiddleware(first.wsgi_app, mounts)  # type: ignore[method-assign]
        client = Client(first)
    else:
        client = Client(DispatcherMiddleware(first, mounts))
    keys = [{"Idempotency-Key": new_key()} for _ in range(2)]
    assert ["first 1", "first 1"] == [client.post("/x", headers=keys[0]).text for _ in range(2)]
    assert ["second 2", "second 2"] == [client.post("/mounted/x", headers=keys[1]).text for _ in range(2)]
    assert [422, 422] == [client.post(path, headers=keys[1]).status_code for path in ("/again/x", "/x")]
    assert ["completed", "completed"] == [row.status for row in apps.rows(first)]


@pytest.mark.parametrize("order", ["before", "after"])
def test_middleware_around_the_app(apps: Apps, sqlite_url: str, order: str) -> None:
    """Middleware that copies the environ may be put around ``app.wsgi_app`` before or after the extension."""

    def copying(wsgi_app: Any) -> Any:
        return lambda environ, start_response: wsgi_app(dict(environ), start_response)

    app = Flask("wrapped")
    app.config["SQLALCHEMY_DATABASE_URI"] = sqlite_url
    apps.db.init_app(app)
    if order == "before":
        app.wsgi_app = ProxyFix(copying(app.wsgi_app))  # type: ignore[method-assign]
    apps.idempotency.init_app(app, apps.db)
    if order == "after":
        app.wsgi_app = ProxyFix(copying(app.wsgi_app))  # type: ignore[method-assign]
    app.register_blueprint(apps.blueprint)
    with app.app_context():
        apps.db.create_all()
    key = new_key()
    assert ["wrapped 1", "wrapped 1"] == [send(app, key).text for _ in range(2)]
    assert ["completed"] == [row.status for row in apps.rows(app)]
    close(app)


def test_one_key_in_flight_on_two_apps(apps: Apps, tmp_path: Path) -> None:
    """A claim that is held on one app's database is none on another's."""
    entered, go = threading.Event(), threading.Event()
    first, second = (apps.create(name, f"sqlite:///{tmp_path / name}") for name in ("first", "second"))

    def slow() -> str:
        entered.set()
        assert go.wait(20)
        return "slow"

    first.post("/slow")(apps.idempotency.required(slow))
    key = new_key()
    future = background(send, first, key, "/slow")
    assert entered.wait(20)
    assert [200, 422] == [send(app, key).status_code for app in (second, first)]
    go.set()
    assert "slow" == future.result(20).text


def test_views_of_a_factory(tmp_path: Path) -> None:
    """An app factory that defines its views inside, called many times, guards each app's own views."""
    db, idempotency = SQLAlchemy(), Idempotency()
    idempotency.scope_loader(lambda: "acme")

    def create_app(number: int) -> Flask:
        app = Flask(f"app{number}")
        app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path / str(number)}"
        db.init_app(app)
        idempotency.init_app(app)

        @app.post("/x")
        @idempotency.required
        def view() -> str:
            return f"of app{number}"

        with app.app_context():
            db.create_all()
        return app

    key = new_key()
    for number in range(3):
        app = create_app(number)
        assert [f"of app{number}"] * 2 == [send(app, key).text for _ in range(2)]
        close(app)
