"""What belongs to one app: its configuration, store and claims."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from flask import Flask
from sqlalchemy.orm import scoped_session

from . import changes
from .capping import Cap
from .config import Settings
from .counting import Counting
from .errors import ConfigurationError
from .lifecycle import Lifecycle
from .policy import Policy
from .signals import logger
from .store import SQLAlchemyStore
from .store.base import Store
from .unit import Unit

if TYPE_CHECKING:
    from .extension import Idempotency

EXTENSION: Final = "idempotency"


@dataclass(eq=False)
class AppState:
    """One app's. ``problem`` says why the app can't be served, once it is known to be complete."""

    app: Flask
    extension: Idempotency
    policy: Policy
    settings: Settings
    store: Store
    lifecycle: Lifecycle
    #: Flask-SQLAlchemy's object, or whatever stands for the app's database; ``None`` with a store of its own.
    db: Any = None
    #: What IDEMPOTENCY_COUNT_REPLAYS and IDEMPOTENCY_MAX_LIVE_KEYS ask for; ``None`` without them.
    counting: Counting | None = None
    cap: Cap | None = None
    problem: ConfigurationError | None = None
    complete: bool = False
    #: By endpoint, the views that ``protect`` has wrapped, as wrapped.
    protected: dict[str, Any] = field(default_factory=dict)
    _ready: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _said: set[str] = field(default_factory=set)

    def prepare(self) -> None:
        """Watch the app's connections, before the first request can use one. Opens none."""
        if self._ready:
            return
        with self._lock:
            changes.watch()
            prepare = getattr(self.store, "prepare", None)
            try:
                if prepare is not None:
                    prepare()
            except ConfigurationError as error:
                self.problem = error
            self._ready = True

    def unit(self) -> Unit:
        """A unit of work for one operation of the current context, in atomic mode."""
        assert isinstance(self.store, SQLAlchemyStore)
        session = self.db.session
        # Flask-SQLAlchemy-Lite's is this context's session itself, which is to be asked for anew in another context.
        sessions = session if isinstance(session, scoped_session) else lambda: self.db.session
        # The table's bind is the session's default one: anything else was refused before the first request.
        return Unit(sessions, self.store.engine, self.store)

    def warn_once(self, text: str) -> None:
        """Log a warning the first time that it is true of this app."""
        with self._lock:
            if text in self._said:
                return
            self._said.add(text)
        logger.warning(text)


def get_state(app: Flask) -> AppState:
    """The app's state.

    :raises ConfigurationError: the extension was not initialised on the app.
    """
    state = app.extensions.get(EXTENSION)
    if not isinstance(state, AppState):
        raise ConfigurationError(
            f"Flask-Idempotency is not initialised on the app {app.name!r}. Call idempotency.init_app(app) where the "
            "app is made, with the same Idempotency object whose decorators stand on its views."
        )
    return state
