"""``Idempotency``: the object that an app is initialised with, and whose decorators stand on its views."""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from flask import (
    Blueprint,
    Flask,
    Request,
    Response,
    current_app,
    got_request_exception,
    has_request_context,
    request,
    request_started,
)
from werkzeug.local import LocalProxy

from . import database
from .answer import restore
from .attempt import Attempt, current, slot_of
from .cli import group
from .config import Settings, read_config, read_keywords
from .errors import ConfigurationError, OptionError
from .guard import BELOW, EXEMPT, GUARD, Guard, View, is_covered, mark_of, put_mark
from .heartbeat import heartbeat
from .lifecycle import Lifecycle
from .prune import Pruned, prune
from .routes import exempted, find_problem, guard_of
from .state import EXTENSION, AppState, get_state, logger
from .store import SQLAlchemyStore
from .store.base import Store
from .wsgi import Settling

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Protection:
    """A blueprint, or paths of an app, of which every guarded method's view is guarded."""

    target: Blueprint | Flask
    paths: re.Pattern[str] | None
    options: Mapping[str, Any]

    def covers(self, app: Flask, asked: Request) -> bool:
        """Whether the request falls under it."""
        inside = self.nearness(app, asked.endpoint) is not None
        return inside and (self.paths is None or self.paths.search(asked.path) is not None)

    def nearness(self, app: Flask, endpoint: str | None) -> tuple[int, bool] | None:
        """How near it is to an endpoint, the nearest being the greatest; ``None`` if the endpoint is outside.

        The app is farther than a blueprint, an outer blueprint than one nested in it, the whole than some paths.
        """
        if isinstance(self.target, Flask):
            return (0, self.paths is not None) if self.target is app else None
        names = (endpoint or "").split(".")[:-1]
        for depth in range(len(names), 0, -1):
            if app.blueprints.get(".".join(names[:depth])) is self.target:
                return depth, self.paths is not None
        return None


class Idempotency:
    """Makes ``POST`` and ``PATCH`` safe to retry.

    :param app: initialise this app at once; otherwise call :meth:`init_app`.
    :param db: the app's Flask-SQLAlchemy object, or an engine; found in ``app.extensions`` if left out.
    """

    def __init__(self, app: Flask | None = None, db: Any | None = None) -> None:
        self.loader: Callable[..., Any] | None = None
        self.protections: list[Protection] = []
        self._wrapping = threading.Lock()
        if app is not None:
            self.init_app(app, db)

    def init_app(self, app: Flask, db: Any | None = None) -> None:
        """Read the app's ``IDEMPOTENCY_…`` keys and put the extension in place.

        Opens no connection, starts no thread and issues no DDL.

        :param db: the app's Flask-SQLAlchemy object, whose own ``init_app`` may come later; or an engine.
        :raises ConfigurationError: an option is wrong, the app is initialised already, or there is no database.
        """
        app = _plain(app)
        if EXTENSION in app.extensions:
            raise ConfigurationError(f"Flask-Idempotency is initialised on the app {app.name!r} already: do it once.")
        policy, settings = read_config(app.config)
        store = _store(app, db, settings)
        state = AppState(app, self, policy, settings, store, Lifecycle(store, heartbeat))
        app.extensions[EXTENSION] = state
        app.cli.add_command(group)
        if not settings.enabled:
            logger.warning("IDEMPOTENCY_ENABLED is off: no view of the app %r is guarded.", app.name)
            return
        app.before_request(self._before_request)
        got_request_exception.connect(self._note_exception, app)
        # This one goes first: no hook that answers by itself may hide what is wrong.
        app.before_request(self._before_all)
        hooks = app.before_request_funcs[None]
        hooks.insert(0, hooks.pop())
        app.after_request(self._after_request)
        app.teardown_request(self._teardown_request)
        app.wsgi_app = Settling(app.wsgi_app, state)  # type: ignore[method-assign]

    @overload
    def required(self, view: Decorated, /) -> Decorated: ...

    @overload
    def required(self, /, **options: Any) -> Callable[[Decorated], Decorated]: ...

    def required(self, view: Any = None, /, **options: Any) -> Any:
        """Guard a view: a request without a key is refused.

        :param options: any ``IDEMPOTENCY_…`` option that is not the app's alone, in lower case, without the prefix.
        :raises OptionError: an option is unknown or has a wrong value.
        """
        return self._decorator("required", view, options)

    @overload
    def optional(self, view: Decorated, /) -> Decorated: ...

    @overload
    def optional(self, /, **options: Any) -> Callable[[Decorated], Decorated]: ...

    def optional(self, view: Any = None, /, **options: Any) -> Any:
        """Guard a view for those who send a key: a request without one runs unguarded.

        :param options: as for :meth:`required`.
        :raises OptionError: an option is unknown or has a wrong value.
        """
        return self._decorator("optional", view, options)

    def exempt(self, view: Decorated) -> Decorated:
        """Leave a view, or a view class, of a protected blueprint or path unguarded."""
        if not callable(view):
            raise TypeError("@idempotency.exempt takes a view function, or a view class.")
        if mark_of(view, GUARD) is not None:
            raise ConfigurationError("@idempotency.exempt stands on a view that is guarded: take one of the two away.")
        put_mark(view, EXEMPT, True)
        return view

    def protect(
        self, target: Blueprint | Flask, *, paths: str | re.Pattern[str] | None = None, **options: Any
    ) -> None:
        """Guard every view of a blueprint or of an app, so that none is forgotten.

        The guard stands outside of the views' own decorators: what checks credentials belongs into a
        ``before_request`` function or the scope loader.

        :param paths: a regular expression that is searched in the request's path; all paths if left out.
        :param options: as for :meth:`required`, whose options win.
        :raises OptionError: an option is unknown or has a wrong value.
        """
        target = _plain(target)
        if not isinstance(target, (Blueprint, Flask)):
            raise TypeError("protect() takes a blueprint or an app.")
        self.protections.append(Protection(target, _pattern(paths), read_keywords("protect", options)))
        # On any app that the target turns up in: one that was forgotten to initialise must not serve it unguarded.
        request_started.connect(self._refuse_uninitialised)

    def scope_loader(self, loader: Decorated) -> Decorated:
        """Register the function that returns the caller's stable id, or ``None`` where there is no caller (401).

        It is called with no argument, or with the request if it takes one.
        """
        if not callable(loader):
            raise TypeError("@idempotency.scope_loader takes a function.")
        self.loader = loader
        return loader

    @property
    def current(self) -> Attempt | None:
        """The attempt of the guarded request that is being served; ``None`` outside of one."""
        return current()

    def prune(
        self, batch_size: int = 5_000, max_batches: int | None = None, *, pause: float = 0.0, dry_run: bool = False
    ) -> Pruned:
        """Delete the keys of the current app that are past their retention. What ``flask idempotency prune`` does.

        :param batch_size: keys a batch; each batch is a transaction of its own.
        :param max_batches: stop after so many batches; all if left out.
        :param pause: seconds between two batches.
        :param dry_run: only count.
        :raises StoreError: the store can't be reached, or its table is missing.
        """
        state = get_state(current_app)
        return prune(state, batch_size=batch_size, max_batches=max_batches, pause=pause, dry_run=dry_run)

    def _decorator(self, name: str, view: Any, options: Mapping[str, Any]) -> Any:
        read = read_keywords(name, options)

        def decorate(function: Any) -> Any:
            if inspect.isclass(function):
                raise TypeError(
                    f"@idempotency.{name} stands on a class. Put it on the class's methods, or into its `decorators`."
                )
            if not callable(function):
                raise TypeError(f"@idempotency.{name} takes a view function.")
            if mark_of(function, EXEMPT):
                raise ConfigurationError(
                    f"@idempotency.{name} stands on a view that is exempt: take one of the two away."
                )
            guard = Guard(self, read, required=name == "required", outside=is_covered(function))
            wrapped = guard.wrap(function)
            # The route's decorator may stand on any function of the chain: then the guard is registered nowhere.
            below = function
            while below is not None:
                put_mark(below, BELOW, guard)
                below = getattr(below, "__wrapped__", None)
            return wrapped

        return decorate if view is None else decorate(view)

    def _refuse_uninitialised(self, app: Flask, **_: Any) -> None:
        """Refuse to serve what is protected by this object on an app that it was not initialised on."""
        state = app.extensions.get(EXTENSION)
        if state is not None and state.extension is self:
            return
        targets = [one.target for one in self.protections]
        if app in targets or any(blueprint in targets for blueprint in app.blueprints.values()):
            raise ConfigurationError(
                f"The app {app.name!r} is protected by an Idempotency object that is not initialised on it. Call "
                "init_app(app) of the object whose protect() was called."
            )

    def _note_exception(self, app: Flask, exception: BaseException | None = None, **_: Any) -> None:
        """The answer that Flask is about to make of an exception, a hook's for example, is no answer of the view's."""
        slot = slot_of(request.environ) if has_request_context() else None
        if slot is not None and slot.attempt is not None:
            slot.attempt._raised = exception

    def _before_all(self) -> None:
        """Refuse to serve an app that is set up in a way that leaves views unguarded."""
        slot_of(request.environ)  # from here on it belongs to this request, and not to one that copies its environ
        state = get_state(current_app)
        if not state.complete:
            state.problem = state.problem or find_problem(state)
            state.complete = True
        if state.problem is not None:
            raise state.problem.with_traceback(None)

    def _before_request(self) -> None:
        """Wrap the view that is about to run if it is protected."""
        state = get_state(current_app)
        if self.protections and request.url_rule is not None:
            self._wrap_protected(state, request.url_rule.endpoint)

    def _wrap_protected(self, state: AppState, endpoint: str) -> None:
        # From a hook of the request itself, it does not matter in which order views and protections came, and the
        # wrapped view still runs after every before_request function.
        asked: Request = request._get_current_object()  # type: ignore[attr-defined]
        if asked.method not in state.policy.methods and not any(one.options for one in self.protections):
            return
        if not any(one.covers(state.app, asked) for one in self.protections):
            return
        with self._wrapping:
            view = state.app.view_functions[endpoint]
            # Looked at each time: an extension may have put another view in its place.
            if view is not state.protected.get(endpoint):
                state.app.view_functions[endpoint] = state.protected[endpoint] = self._protected(view)

    def _protected(self, view: View) -> View:
        guarded = Guard(self, {}, required=True, outside=True).wrap(view)
        inner = guard_of(view)

        # With its name: other extensions know a view by that.
        @functools.wraps(view)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            asked: Request = request._get_current_object()  # type: ignore[attr-defined]
            covered = any(one.covers(current_app._get_current_object(), asked) for one in self.protections)  # type: ignore[attr-defined]
            own = guard_of(view, asked.method)
            if own is not None or exempted(view, asked.method) or not covered:
                return current_app.ensure_sync(view)(*args, **kwargs)
            return current_app.ensure_sync(guarded)(*args, **kwargs)

        if inner is not None:
            setattr(chosen, GUARD, inner)
        return chosen

    def _after_request(self, response: Response) -> Response:
        """Take down the answer; on a replay, put the record over whatever was made of it on the way here."""
        slot = slot_of(request.environ)
        attempt = slot.attempt
        if attempt is None:
            return response
        if attempt._record is not None:
            return restore(attempt._record.recorded, response, attempt._policy)
        if attempt._granted is not None:
            attempt._answered(response)
            if not slot.wrapped:
                attempt._settle_unwrapped(response)
        return response

    def _teardown_request(self, error: BaseException | None) -> None:
        """The end of a request that no wrapper sees, in a bare ``test_request_context()``."""
        slot = slot_of(request.environ)
        # What ends while the view runs is a copied context.
        if slot.wrapped or slot.attempt is None or slot.attempt._views:
            return
        if isinstance(error, Exception):
            slot.attempt._settle(error)
        elif error is not None or slot.attempt._answer is None:
            # A crash; or nobody made an answer of what the view returned, and all that is known is that it ran.
            slot.attempt._abandon()


def _plain(app: Any) -> Any:
    """The app itself, where ``current_app`` was given."""
    return app._get_current_object() if isinstance(app, LocalProxy) else app


def _pattern(paths: object) -> re.Pattern[str] | None:
    if paths is None or (isinstance(paths, re.Pattern) and isinstance(paths.pattern, str)):
        return paths
    try:
        if isinstance(paths, str):
            return re.compile(paths)
    except re.error as error:
        raise OptionError(f"protect(paths=…): {paths!r} is no regular expression: {error}.") from error
    raise OptionError(f"protect(paths=…): {paths!r} won't do: it must be a regular expression, as text or compiled.")


def _store(app: Flask, db: Any | None, settings: Settings) -> Store:
    if settings.store is not None:
        store: Store = settings.store
        return store
    db = database.find(app, db)
    return SQLAlchemyStore(
        database.engine_of(app, db, settings.bind_key),
        database.metadata_of(db, settings.bind_key),
        table_name=settings.table_name,
        pool_size=settings.pool_size,
    )
