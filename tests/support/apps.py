"""A small app as a user would write it, for tests: charges in a table, and one guarded route that makes them."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from flask import Flask, request
from flask.testing import FlaskClient
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy.model import Model
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency, signals
from flask_idempotency.state import get_state
from flask_idempotency.store.message import Message

TIMES = ("locked_at", "expires_at", "completed_at", "created_at", "updated_at")


def new_key() -> str:
    """A key that no other request has."""
    return str(uuid.uuid4())


@dataclass
class Shop:
    """An app with its extension, database and model; ``runs`` counts how often the view ran."""

    app: Flask
    idempotency: Idempotency
    db: SQLAlchemy
    Charge: type[Model]
    runs: list[Any] = field(default_factory=list)

    @property
    def client(self) -> FlaskClient:
        """A new client, without cookies."""
        return self.app.test_client()

    def charge(self, key: str | None = None, amount: int = 100, tenant: str = "acme", **options: Any) -> TestResponse:
        """Ask for a charge."""
        headers = {"X-Tenant": tenant, **options.pop("headers", {})}
        if key is not None:
            headers["Idempotency-Key"] = key
        return self.client.post("/charges", json={"amount": amount}, headers=headers, **options)

    def charges(self) -> int:
        """How many charges are committed, seen from a connection of its own."""
        return int(self.execute(sa.select(sa.func.count()).select_from(self.Charge.__table__))[0][0])

    def rows(self) -> list[dict[str, Any]]:
        """All rows of the table of keys, with scope and key as texts on every database."""
        table = self.table
        rows = [dict(row._mapping) for row in self.execute(sa.select(table).order_by(table.c.id))]
        for row in rows:
            row.update({name: row[name].decode() for name in ("scope", "key") if isinstance(row[name], bytes)})
        return rows

    @property
    def table(self) -> sa.Table:
        """The table of keys."""
        return self.db.metadata.tables["idempotency_keys"]

    def execute(self, statement: Any) -> list[Any]:
        """Run a statement on a connection of its own and commit."""
        with self.app.app_context():
            engine = self.db.engine
        with engine.begin() as connection:
            result = connection.execute(statement)
            return list(result) if result.returns_rows else []

    def shift(self, seconds: float) -> None:
        """Let all keys be so many seconds older: what waiting would do."""
        with self.app.app_context():
            dialect = self.db.engine.dialect.name
        earlier = {
            "sqlite": f"strftime('%Y-%m-%d %H:%M:%f', {{}}, '-{seconds} seconds') || '000'",
            "postgresql": f"{{}} - interval '{seconds} seconds'",
        }.get(dialect, f"{{}} - INTERVAL {seconds} SECOND")
        moved = ", ".join(f"{one} = {earlier.format(one)}" for one in TIMES)
        self.execute(sa.text(f"UPDATE idempotency_keys SET {moved}"))


def make_shop(url: str, *, engine_options: dict[str, Any] | None = None, **config: Any) -> Shop:
    """The app on a database, with ``IDEMPOTENCY_…`` keys given in lower case and without the prefix.

    The scope is the header ``X-Tenant``; a request without it is turned away.
    """
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = url
    app.config["SECRET_KEY"] = "a secret of tests"
    if engine_options is not None:
        app.config["SQLALCHEMY_ENGINE_OPTIONS"] = engine_options
    app.config.update({f"IDEMPOTENCY_{name.upper()}": value for name, value in config.items()})
    db = SQLAlchemy(app)
    idempotency = Idempotency(app, db)

    class Charge(db.Model):  # type: ignore[name-defined]
        id = sa.Column(sa.Integer, primary_key=True)
        amount = sa.Column(sa.Integer, nullable=False)

    shop = Shop(app, idempotency, db, Charge)

    @idempotency.scope_loader
    def tenant() -> str | None:
        return request.headers.get("X-Tenant")

    @app.post("/charges")
    @idempotency.required
    def create_charge() -> tuple[dict[str, Any], int]:
        shop.runs.append(request.get_json())
        charge = Charge(amount=request.get_json()["amount"])
        db.session.add(charge)
        db.session.commit()
        return {"id": charge.id, "amount": charge.amount}, 201

    with app.app_context():
        db.create_all()
    return shop


def guard(shop: Shop, view: Callable[..., Any], path: str = "/x", **options: Any) -> None:
    """Add a guarded view to the shop, with options of ``required``."""
    guarded = shop.idempotency.required(**options)(view)
    shop.app.add_url_rule(path, path, guarded, methods=["POST"])


def answering(shop: Shop, answer: Callable[[], Any], **options: Any) -> str:
    """Guard a view at /x that gives this answer and notes its runs; returns a key."""

    def view() -> Any:
        shop.runs.append("run")
        return answer()

    guard(shop, view, **options)
    return new_key()


def send(shop: Shop, key: str, path: str = "/x", **options: Any) -> TestResponse:
    """A request of the tenant ``acme``."""
    headers = {"Idempotency-Key": key, "X-Tenant": "acme", **options.pop("headers", {})}
    return options.pop("client", shop.client).post(path, headers=headers, **options)


def command(app: Flask, *words: str, answer: str | None = None) -> tuple[int, str]:
    """The exit status and the output of ``flask idempotency``, which must not raise; ``answer`` is typed in."""
    result = app.test_cli_runner().invoke(args=["idempotency", *words], input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def alter(shop: Shop, key: str, **values: Any) -> None:
    """Write into a key's row, as somebody who may write to the table."""
    column = shop.table.c.key
    shop.execute(sa.update(shop.table).where(column == sa.literal(key, column.type)).values(**values))


def row_of(shop: Shop, key: str) -> dict[str, Any]:
    """A key's row."""
    (found,) = [row for row in shop.rows() if row["key"] == key]
    return found


def assert_replayed(answer: TestResponse, first: TestResponse) -> None:
    """Assert that an answer is the replay of the first one."""
    assert (first.status_code, first.data) == (answer.status_code, answer.data)
    assert "true" == answer.headers["Idempotent-Replay"]


@contextmanager
def events(app: Flask) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The signals that the app sends meanwhile, as (name, fields)."""
    seen: list[tuple[str, dict[str, Any]]] = []
    receivers = []
    for event in vars(signals).values():
        if isinstance(event, signals.Event):

            def receive(sender: Any, *, _name: str = event.signal.name, **fields: Any) -> None:
                seen.append((_name, fields))

            event.signal.connect(receive, sender=app)
            receivers.append((event.signal, receive))
    try:
        yield seen
    finally:
        for signal, receive in receivers:
            signal.disconnect(receive, sender=app)


@contextmanager
def statements() -> Iterator[list[str]]:
    """The statements that this thread sends meanwhile, by whichever engine; a message of several is one text."""
    seen: list[str] = []
    here = threading.get_ident()

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if threading.get_ident() == here:
            seen.append(statement)

    # No event of SQLAlchemy's tells of a message.
    pass_on = Message.pass_on

    def passed_on(self: Message, dialect: sa.Dialect, driver: Any, values: Mapping[str, Any]) -> tuple[list[Any], int]:
        try:
            return pass_on(self, dialect, driver, values)
        finally:
            note(None, None, self._text)  # afterwards, since the first sending compiles it

    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    Message.pass_on = passed_on  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Message.pass_on = pass_on  # type: ignore[method-assign]
        sa.event.remove(sa.Engine, "before_cursor_execute", note)


def until(condition: Any, timeout: float = 10.0) -> None:
    """Wait for something that another thread or process is about to do."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("It did not happen in time.")
        time.sleep(0.01)


def close(app: Flask) -> None:
    """Give back all connections of the app and the extension."""
    store = get_state(app).store
    if hasattr(store, "close"):
        store.close()
    database = app.extensions["sqlalchemy"]
    with app.app_context():
        for engine in database.engines.values():
            engine.dispose()
