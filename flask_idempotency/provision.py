"""Where an app's keys go: the store that it was given, or a table of its own database."""

from __future__ import annotations

from typing import Any, Final

from flask import Flask

from . import database
from .config import Settings
from .errors import ConfigurationError
from .store import SQLAlchemyStore
from .store.base import Store

#: What options ask of a store beyond the protocol that every store has.
_NEEDED: Final = {"count_replays": "count", "max_live_keys": "kept"}


def store_of(app: Flask, db: Any | None, settings: Settings) -> Store:
    """The app's store.

    :raises ConfigurationError: an option needs what the given store lacks; or there is no database.
    """
    if settings.store is not None:
        store: Store = settings.store
        for option, method in _NEEDED.items():
            if getattr(settings, option) and not callable(getattr(store, method, None)):
                raise ConfigurationError(
                    f"IDEMPOTENCY_{option.upper()} needs a store that has {method}(), see "
                    f"flask_idempotency.store.survey.Survey, and {type(store).__name__} has none. Leave the option out."
                )
        return store
    return SQLAlchemyStore(
        database.engine_of(app, db, settings.bind_key),
        database.metadata_of(db, settings.bind_key),
        table_name=settings.table_name,
        pool_size=settings.pool_size,
    )
