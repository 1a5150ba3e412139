"""The app's database, whichever object stands for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from flask import Flask

from .errors import ConfigurationError

MISSING = (
    "Flask-Idempotency found no Flask-SQLAlchemy object on this app. Either call db.init_app(app) before "
    "Idempotency(app), or pass the object: Idempotency(app, db)."
)

NO_DEFAULT = (
    "The app's database has no default engine that Flask-Idempotency can use; an async one won't do. With "
    'Flask-SQLAlchemy-Lite, name one in SQLALCHEMY_ENGINES["default"], or another with IDEMPOTENCY_BIND_KEY.'
)


def find(app: Flask, db: Any | None) -> Any:
    """The object that was passed, or the app's Flask-SQLAlchemy object.

    :raises ConfigurationError: there is none; a ``RuntimeError`` that names both remedies.
    """
    db = db if db is not None else app.extensions.get("sqlalchemy")
    if db is None:
        raise ConfigurationError(MISSING)
    # Not asked of the object itself: Flask-SQLAlchemy's own engines can only be had within an app context.
    engines = isinstance(db, sa.Engine) or inspect.getattr_static(db, "engines", None) is not None
    if not engines and not hasattr(type(db), "__getattr__"):
        raise ConfigurationError(
            f"Idempotency(app, db) takes the app's Flask-SQLAlchemy object or an engine, not {type(db).__name__}."
        )
    return db


def metadata_of(db: Any, bind_key: str | None) -> sa.MetaData:
    """The metadata that the table belongs to, so that ``create_all()`` and migrations see it.

    An object without one, a plain engine for example, gets metadata of its own. So does another engine than the default
    one, of an object that has one metadata for all: its ``create_all()`` would make the table on the default one.
    """
    metadatas = getattr(db, "metadatas", None)
    if metadatas is None:
        found = getattr(db, "metadata", None) if bind_key is None else None
        return found if isinstance(found, sa.MetaData) else sa.MetaData()
    if bind_key not in metadatas:
        # Flask-SQLAlchemy makes a bind's metadata with the bind's first table, as this one does; its info is
        # what db.session and db.create_all() find the engine by.
        metadatas[bind_key] = sa.MetaData(
            naming_convention=metadatas[None].naming_convention, info={"bind_key": bind_key}
        )
    metadata: sa.MetaData = metadatas[bind_key]
    return metadata


def engine_of(app: Flask, db: Any, bind_key: str | None) -> Callable[[], sa.Engine]:
    """How to get the engine once the app is complete. Opens no connection.

    The function raises :class:`ConfigurationError` when ``db`` was never initialised on the app, or has no
    such bind.
    """

    if isinstance(db, sa.Engine) and bind_key is not None:
        raise ConfigurationError("IDEMPOTENCY_BIND_KEY: an engine was given as the database, which has no binds.")

    def engine() -> sa.Engine:
        if isinstance(db, sa.Engine):
            return db
        try:
            with app.app_context():
                engines = db.engines
        except RuntimeError as error:
            raise ConfigurationError(
                "The database object that Idempotency was given is not initialised on this app: call db.init_app(app)."
            ) from error
        for name in (bind_key, "default" if bind_key is None else bind_key):
            if name in engines:
                found: sa.Engine = engines[name]
                return found
        if bind_key is None:
            raise ConfigurationError(NO_DEFAULT)
        raise ConfigurationError(f"IDEMPOTENCY_BIND_KEY: the app's database has no bind {bind_key!r}.")

    return engine
