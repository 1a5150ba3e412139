"""The app that is measured: every variant of one view beside the others, on one database.

The view is that of most APIs: it inserts a row, commits, and answers 201 with JSON.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from flask_idempotency import Idempotency
from flask_idempotency.state import get_state

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

#: Under which path the app without the extension is mounted in :func:`create_wsgi`.
PLAIN: Final = "/plain"

Answer = tuple[dict[str, Any], int]


@dataclass
class Bench:
    """An app to be measured. ``held`` is what its views ``/held…`` wait for, ``reached`` what they set before."""

    app: Flask
    db: SQLAlchemy
    idempotency: Idempotency | None
    held: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def engines(self) -> list[sa.Engine]:
        """The app's engines, and that of the view ``/select``."""
        with self.app.app_context():
            return [*self.db.engines.values(), self.app.extensions["benchmark-select"]]

    def many_writers(self) -> bool:
        """Whether one transaction may write while another does: not so on SQLite."""
        return all(engine.dialect.name != "sqlite" for engine in self.engines())

    def close(self) -> None:
        """Give back every connection; what follows opens new ones."""
        if self.idempotency is not None:
            close = getattr(get_state(self.app).store, "close", None)
            if close is not None:
                close()
        for engine in self.engines():
            engine.dispose()


def create_app(url: str, *, extension: bool = True, **config: Any) -> Bench:
    """The app on a database, whose tables it creates.

    :param extension: without it there are the views ``/bare``, ``/select`` and ``/hello`` alone.
    :param config: ``IDEMPOTENCY_…`` keys in lower case and without the prefix.
    """
    log_nowhere()
    app = Flask("benchmark")
    app.config["SQLALCHEMY_DATABASE_URI"] = url
    app.config.update({f"IDEMPOTENCY_{name.upper()}": value for name, value in config.items()})
    db = SQLAlchemy(app)
    bench = Bench(app, db, Idempotency(app, db) if extension else None)
    add_views(bench, url)
    with app.app_context():
        if db.engine.dialect.name == "sqlite":
            with db.engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA journal_mode = wal")
        db.create_all()
        db.engine.dispose()  # workers may be forked from here
    return bench


def log_nowhere() -> None:
    """Log records are made and formatted as in an app, and go to no terminal."""
    log = logging.getLogger("flask_idempotency")
    if not log.handlers:
        log.addHandler(logging.StreamHandler(Path(os.devnull).open("w")))  # noqa: SIM115 - as long as the process
        log.propagate = False


def add_views(bench: Bench, url: str) -> None:
    """``/bare``, ``/select`` (one ``SELECT 1`` in autocommit), ``/hello`` (no database), and the guarded views."""
    app, db = bench.app, bench.db

    class Charge(db.Model):  # type: ignore[name-defined, misc, unused-ignore]
        id = sa.Column(sa.Integer, primary_key=True)
        amount = sa.Column(sa.Integer, nullable=False)

    def charge() -> Answer:
        row = Charge(amount=request.get_json()["amount"])
        db.session.add(row)
        db.session.flush()
        answer = {"id": row.id, "amount": row.amount}  # read before the commit, which expires it: three round trips
        db.session.commit()
        return answer, 201

    # One round trip: begun and ended by the statement itself.
    alone = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    app.extensions["benchmark-select"] = alone

    def select() -> dict[str, Any]:
        with alone.connect() as connection:
            return {"one": connection.execute(sa.text("SELECT 1")).scalar()}

    def hello() -> Answer:
        return {"hello": "world"}, 201

    views: dict[str, Callable[[], Any]] = {"/bare": charge, "/select": select, "/hello": hello}
    for path, view in views.items():
        app.add_url_rule(path, path, view, methods=["POST"])
    if bench.idempotency is not None:
        add_guarded(bench, bench.idempotency, charge)


def add_guarded(bench: Bench, idempotency: Idempotency, charge: Callable[[], Answer]) -> None:
    """The view in each mode, and one in each mode that waits for :attr:`Bench.held`."""

    @idempotency.scope_loader
    def tenant() -> str | None:
        return request.headers.get("X-Tenant")

    def hold() -> Answer:
        bench.reached.set()
        bench.held.wait(600)
        return {"held": True}, 201

    for mode, atomic in {"default": False, "atomic": True}.items():
        for path, view in {f"/{mode}": charge, f"/held-{mode}": hold}.items():
            guarded = idempotency.required(atomic=atomic)(view)
            bench.app.add_url_rule(path, path, guarded, methods=["POST"])


def create_wsgi() -> WSGIApplication:
    """For a server: the app on ``BENCH_DATABASE``, and below :data:`PLAIN` the one without the extension."""
    url = os.environ["BENCH_DATABASE"]
    plain = create_app(url, extension=False).app
    mounted: Iterable[tuple[str, WSGIApplication]] = [(PLAIN, plain.wsgi_app)]
    return DispatcherMiddleware(create_app(url).app.wsgi_app, dict(mounted))
