"""Payments, as a user would write them: one route for each mode, and one without a guard.

Each writes one row for a payment. Short pauses stand where a fault hurts most, a few views fail by themselves, and
what happens is told in a file that all workers append to: it outlives them.
"""

from __future__ import annotations

import functools
import json
import os
import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from flask import Flask, current_app, g, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase

from flask_idempotency import Idempotency, signals
from tests.acceptance.proof.history import MODES, SIGNALS, Kind, Mode
from tests.acceptance.proof.provider import charge as charge_at_provider

LEASE = 1.0

#: Seconds. Long enough for the killer to meet a view in it, short enough for many views a second.
PAUSE = 0.012

#: How many of the views fail by themselves.
FAILING = 0.04

View = Callable[[], tuple[dict[str, Any], int]]


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)
idempotency = Idempotency()


class Payment(db.Model):  # type: ignore[name-defined]
    id = sa.orm.mapped_column(sa.Integer, primary_key=True)
    key = sa.orm.mapped_column(sa.String(100), nullable=False)
    run = sa.orm.mapped_column(sa.String(40), nullable=False)


def create_app() -> Flask:
    """The app on the database, log and provider that the environment names."""
    app = Flask("payments")
    app.config.from_prefixed_env("PROOF")
    app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {"pool_pre_ping": True}
    app.config["IDEMPOTENCY_LOCK_TIMEOUT"] = LEASE
    app.config["IDEMPOTENCY_SCOPE"] = "payments"
    db.init_app(app)
    idempotency.init_app(app, db)
    app.extensions["log"] = Log(Path(app.config["LOG"]))
    for mode in MODES:
        app.post(f"/{mode}", endpoint=mode)(VIEWS[mode])
    app.post("/unguarded", endpoint="unguarded")(told(pay))
    with app.app_context():
        db.create_all()
        db.engine.dispose()  # workers are forked from here
    return app


class Log:
    """Appends a line for everything that happens to a run of a view: one write each, so that none are mixed."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        #: The extension tells of an attempt even when its request is gone.
        self._runs: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._receivers = {kind: functools.partial(self._receive, kind) for kind in SIGNALS}
        for kind, receiver in self._receivers.items():
            getattr(signals, kind).connect(receiver)

    def run(self) -> str:
        """The name of this run of a view."""
        attempt = idempotency.current
        new = uuid.uuid4().hex
        return new if attempt is None else self._runs.setdefault(attempt, new)

    def tell(self, kind: Kind, key: str, run: str) -> None:
        """Append a line."""
        line = json.dumps({"kind": kind, "key": key, "run": run, "pid": os.getpid()})
        os.write(self._file, f"{line}\n".encode())

    def _receive(self, kind: Kind, app: Flask, *, key: str, **_: Any) -> None:
        self.tell(kind, key, self.run())


def told(view: View) -> View:
    """Tell when a view begins and ends, and give its run a name: ``g.key``, ``g.run``, ``g.dice``."""

    @functools.wraps(view)
    def telling() -> tuple[dict[str, Any], int]:
        log = request_log()
        g.key, g.run = request.headers["Idempotency-Key"], log.run()
        g.dice = random.Random(g.run)
        log.tell("begun", g.key, g.run)
        try:
            answer = ({"declined": g.key, "run": g.run}, 402) if request.get_json()["decline"] else view()
        except BaseException:
            log.tell("failed", g.key, g.run)
            raise
        log.tell("ended", g.key, g.run)
        return answer

    return telling


def request_log() -> Log:
    """The app's log."""
    log: Log = current_app.extensions["log"]
    return log


def pause() -> None:
    """Here a fault may fall."""
    time.sleep(g.dice.random() * PAUSE)


def fail_now_and_then() -> None:
    """What no view is free of."""
    if g.dice.random() < FAILING:
        raise RuntimeError("This run fails by itself.")


def write() -> Payment:
    """Add the payment's row to the session."""
    payment = Payment(key=g.key, run=g.run)
    db.session.add(payment)
    return payment


def pay() -> tuple[dict[str, Any], int]:
    """A payment in default mode, and without a guard: the view commits by itself."""
    fail_now_and_then()
    pause()
    payment = write()
    db.session.flush()
    pause()
    db.session.commit()
    pause()
    return {"id": payment.id, "run": g.run}, 201


def pay_atomically() -> tuple[dict[str, Any], int]:
    """A payment in atomic mode: the view commits, or leaves that to the extension."""
    pause()
    payment = write()
    db.session.flush()
    number = payment.id
    pause()
    if g.dice.random() < 0.5:
        db.session.commit()
        pause()
    fail_now_and_then()
    return {"id": number, "run": g.run}, 201


def pay_in_steps() -> tuple[dict[str, Any], int]:
    """A payment at a provider, and its row."""
    pause()
    derived = idempotency.derive_key("charge")
    charge = idempotency.step("charge", lambda: call_provider(derived))
    request_log().tell("stepped", g.key, g.run)
    pause()
    fail_now_and_then()
    number = idempotency.step("book", book)
    pause()
    return {"id": number, "charge": charge, "run": g.run}, 201


def call_provider(derived: str) -> str:
    """Charge at the provider."""
    charge = charge_at_provider(int(current_app.config["PROVIDER"]), derived, g.key, g.run)
    pause()
    return charge


def book() -> int:
    """Write the payment's row and commit."""
    payment = write()
    db.session.flush()
    number = int(payment.id)
    db.session.commit()
    pause()
    return number


VIEWS: dict[Mode, View] = {
    "default": idempotency.required(told(pay)),
    "atomic": idempotency.required(atomic=True)(told(pay_atomically)),
    "steps": idempotency.required(told(pay_in_steps)),
}
