"""Flask with each guard: the extension, two that are written by hand, and idemkit's middleware."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from flask import Flask, Response, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from flask_idempotency import Idempotency

from .subjects import plain_url

View = Callable[[], Response]


def lease() -> int:
    """How long a lock counts, in seconds."""
    return int(os.environ.get("BENCH_LEASE", "30"))


def create(variant: str) -> DispatcherMiddleware:
    """The app with a guard, and below ``/plain`` the one without."""
    return DispatcherMiddleware(app_with(variant)[0].wsgi_app, {"/plain": app_with("")[0].wsgi_app})


def create_tables() -> None:
    """Every table that the apps of this module need."""
    for variant in ("classic", "default"):
        app, db = app_with(variant)
        with app.app_context():
            db.create_all()


def app_with(variant: str) -> tuple[Flask, SQLAlchemy]:
    """One app, whose view is guarded as the variant says."""
    app = Flask("others")
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["BENCH_DATABASE"]
    app.config["IDEMPOTENCY_LOCK_TIMEOUT"] = lease()
    db = SQLAlchemy(app)

    class Charge(db.Model):  # type: ignore[name-defined, misc, unused-ignore]
        id = sa.Column(sa.Integer, primary_key=True)
        amount = sa.Column(sa.Integer, nullable=False)

    def charge() -> Response:
        time.sleep(float(request.headers.get("X-Pause", 0)))
        row = Charge(amount=request.get_json()["amount"])
        db.session.add(row)
        db.session.flush()
        content = app.json.dumps({"id": row.id, "amount": row.amount})
        db.session.commit()
        if "X-Kill" in request.headers:
            os.kill(os.getpid(), signal.SIGKILL)
        return Response(content, 201, mimetype="application/json")

    guarded = GUARDS[variant](app, db, charge)
    app.add_url_rule("/charge", "charge", guarded, methods=["POST"])
    return app, db


def unguarded(app: Flask, db: SQLAlchemy, view: View) -> View:
    """The bare view."""
    return view


def ours(**options: Any) -> Callable[[Flask, SQLAlchemy, View], View]:
    """The extension with some options."""

    def guard(app: Flask, db: SQLAlchemy, view: View) -> View:
        idempotency = Idempotency(app, db)
        idempotency.scope_loader(lambda: request.headers.get("X-Tenant"))
        return idempotency.required(**options)(view)  # type: ignore[no-any-return, unused-ignore]

    return guard


def classic(app: Flask, db: SQLAlchemy, view: View) -> View:
    """A row and its commit, the view, the answer and its commit. A row without an answer is never taken over."""

    class Key(db.Model):  # type: ignore[name-defined, misc, unused-ignore]
        __tablename__ = "classic_keys"
        key = sa.Column(sa.String(255), primary_key=True)
        status = sa.Column(sa.Integer)
        body = sa.Column(sa.LargeBinary)

    def guarded() -> Response:
        key = request.headers["Idempotency-Key"]
        db.session.add(Key(key=key))
        try:
            db.session.commit()
        except sa.exc.IntegrityError:
            db.session.rollback()
            row: Any = db.session.get(Key, key)
            if row.status is None:
                return Response(status=409)
            return Response(row.body, row.status, mimetype="application/json")
        answer = view()
        row = db.session.get(Key, key)
        row.status, row.body = answer.status_code, answer.get_data()
        db.session.commit()
        return answer

    return guarded


def set_if_absent(app: Flask, db: SQLAlchemy, view: View) -> View:
    """``SET NX EX``, the view, ``SET EX``."""
    client = importlib.import_module("redis").Redis.from_url(os.environ["BENCH_REDIS"])

    def guarded() -> Response:
        key = "hand:" + request.headers["Idempotency-Key"]
        if not client.set(key, b"", nx=True, ex=lease()):
            body = client.get(key)
            return Response(body, 201, mimetype="application/json") if body else Response(status=409)
        answer = view()
        client.set(key, answer.get_data(), ex=86400)
        return answer

    return guarded


def idemkit(store: str) -> Callable[[Flask, SQLAlchemy, View], View]:
    """idemkit's WSGI middleware around the app."""

    def guard(app: Flask, db: SQLAlchemy, view: View) -> View:
        package: Any = importlib.import_module("idemkit")
        if store == "redis":
            backend = package.RedisBackend.from_url(os.environ["BENCH_REDIS"])
        else:
            backend = package.PostgresBackend.from_url(plain_url())
        config = package.HttpConfig(scope=lambda asked: asked.headers["x-tenant"], lease_ttl_seconds=lease())
        wrapped = package.WSGIIdempotencyMiddleware(app.wsgi_app, backend=backend, config=config)
        app.wsgi_app = wrapped  # type: ignore[method-assign]
        return view

    return guard


GUARDS: dict[str, Callable[[Flask, SQLAlchemy, View], View]] = {
    "": unguarded,
    "default": ours(),
    "reject": ours(stale="reject"),
    "atomic": ours(atomic=True),
    "classic": classic,
    "redis": set_if_absent,
    "idemkit-postgres": idemkit("postgres"),
    "idemkit-redis": idemkit("redis"),
}
