"""``Idempotency``: the object that an app is initialised with, and whose decorators stand on its views."""

from __future__ import annotations

import inspect
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from flask import Blueprint, Flask, Request, Response, current_app, has_request_context, request, request_started
from werkzeug.local import LocalProxy

from . import atomic, database, hooks, outcomes
from .attempt import Attempt
from .commands import Commands
from .config import read_config, read_keywords
from .errors import ConfigurationError, OptionError, StepError
from .guard import Guard
from .heartbeat import heartbeat
from .lifecycle import Lifecycle
from .marks import BELOW, EXEMPT, GUARD, MAKES, chain, is_covered, mark_of, put_mark
from .protection import Protection, is_guarded, keep_with, pattern
from .provision import store_of
from .prune import Pruned, prune
from .signals import logger
from .slot import current, slot_of
from .state import EXTENSION, AppState, get_state
from .wsgi import Settling

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
T = TypeVar("T")


class Idempotency:
    """Makes ``POST`` and ``PATCH`` safe to retry.

    :param app: initialise this app at once; otherwise call :meth:`init_app`.
    :param db: the app's Flask-SQLAlchemy object, or an engine; found in ``app.extensions`` if left out.
    """

    def __init__(self, app: Flask | None = None, db: Any | None = None) -> None:
        self.loader: Callable[..., Any] | None = None
        self.protections: list[Protection] = []
        self.wrapping = threading.Lock()
        self.bare = Guard(self, {}, required=True, outside=True)  # what a protection puts where no guard stands
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
        db = database.find(app, db) if settings.store is None else None
        store = store_of(app, db, settings)
        state = AppState(app, self, policy, settings, store, Lifecycle(store, heartbeat), db)
        app.extensions[EXTENSION] = state
        app.cli.add_command(Commands())
        if not settings.enabled:
            logger.warning("IDEMPOTENCY_ENABLED is off: no view of the app %r is guarded.", app.name)
            hooks.install_unguarded(app)
            return
        hooks.install(state)
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
        self,
        target: Blueprint | Flask,
        *,
        paths: str | re.Pattern[str] | None = None,
        required: bool = True,
        **options: Any,
    ) -> None:
        """Guard every view of a blueprint or of an app, so that none is forgotten.

        The guard stands outside of the views' own decorators: what checks credentials belongs into a
        ``before_request`` function or the scope loader.

        :param paths: a regular expression that is searched in the request's path; all paths if left out.
        :param required: whether a request without a key is refused; if not, it runs unguarded, as for
            :meth:`optional`. Where two calls cover a request, the nearer one's holds.
        :param options: as for :meth:`required`, whose options win.
        :raises OptionError: an option is unknown or has a wrong value.
        """
        target = _plain(target)
        if not isinstance(target, (Blueprint, Flask)):
            raise TypeError("protect() takes a blueprint or an app.")
        if not isinstance(required, bool):
            raise OptionError(f"protect(required=…): {required!r} won't do: it must be True or False.")
        self.protections.append(Protection(target, pattern(paths), required, read_keywords("protect", options)))
        # On any app that the target turns up in: one that was forgotten to initialise must not serve it unguarded.
        request_started.connect(self._refuse_uninitialised)
        keep_with(target, self)

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

    def step(self, name: str, function: Callable[[], T]) -> T:
        """Do a part of the operation that happens in another system, at most once per attempt, and keep its result.

        The claim proves in the database that it still holds; then the function is called, and its result is stored at
        once. A later attempt at the same operation gets the stored result, the function not called. A crash between
        the call and the storing calls it again, with the same :meth:`derive_key`. A function that raises stores
        nothing. Without a key (optional routes, outside of requests) the function is just called.

        :param name: what the step is called; each only once a request.
        :param function: takes nothing, returns plain data that JSON can hold. The result comes back as JSON gives it:
            a list for a tuple.
        :raises ClaimLost: a later request took the operation over; the function was not called.
        :raises StepError: the name was used before, the result is no JSON, the view is atomic, or its guard has not
            been reached yet.
        :raises StoreError: the store can't answer; on SQLite also where the app has uncommitted writes.
        """
        attempt = current()
        if attempt is None or self._unguarded():
            _refuse_before_guard()
            return function()
        result: T = attempt._step(name, function)
        return result

    def derive_key(self, name: str) -> str:
        """A key to hand to the next system: the same on every attempt at this operation, unguessable from outside.

        A UUID (36 characters) made of the scope, the key and the name with the app's ``SECRET_KEY``. Which secret that
        was is noted, so that a rotation through ``SECRET_KEY_FALLBACKS`` changes nothing; not so where the store could
        not answer and the view runs all the same (``IDEMPOTENCY_ON_STORE_ERROR``). Without a key it is a fresh value.

        :raises ClaimLost: a later request took the operation over.
        :raises SecretGone: the secret that was used first is no longer among the app's.
        :raises StepError: the app has no secret, the view is atomic, or its guard has not been reached yet.
        """
        attempt = current()
        if attempt is None:
            _refuse_before_guard()
            return str(uuid.uuid4())
        if self._unguarded():
            return attempt._derive_unnoted(name)
        return attempt._derive_key(name)

    def after_commit(self, function: Callable[[], Any]) -> None:
        """In an atomic view: call the function when the view's work and the record are committed, and not otherwise.

        The place to tell a task queue. Functions are called in order, before the answer leaves, at most once: lost if
        the process dies in between. What one raises is logged, and the answer stays. Where an atomic view runs
        without a key, it is called when the request has been answered with a status below 400.

        :raises RuntimeError: the view is not atomic: there is no commit of the extension's to wait for.
        """
        atomic.after_commit(function)

    def settle(self, scope: str, key: str, response: Any, *, force: bool = False) -> None:
        """Record an answer for a key of the current app that is held, or whose claim's lease is over.

        :param scope: in its stored form, as the log has it.
        :param response: anything that a view may return.
        :param force: also for a claim whose lease is alive; its holder will record nothing.
        :raises KeyNotFound: there is no such key.
        :raises SettleError: it has an answer, or its claim is alive and force is off, or it changed meanwhile; or the
            response is larger than ``IDEMPOTENCY_MAX_BODY``, and there is no ``IDEMPOTENCY_BODY_STORE``.
        :raises StoreError: the store, or the body store, can't answer.
        """
        state = get_state(current_app)
        outcomes.settle(state, scope, key, _made(state.app, response), force=force)

    def release(self, scope: str, key: str, *, force: bool = False) -> None:
        """Make a key of the current app claimable, so that the next retry runs the view: a held one, or one whose
        claim's lease is over.

        :param scope: in its stored form, as the log has it.
        :param force: also for a claim whose lease is alive, and for a key with an answer, which is dropped.
        :raises KeyNotFound: there is no such key.
        :raises SettleError: its claim is alive or it has an answer, and force is off, or it changed meanwhile.
        :raises StoreError: the store can't answer.
        """
        outcomes.release(get_state(current_app), scope, key, force=force)

    def prune(
        self,
        batch_size: int = 5_000,
        max_batches: int | None = None,
        *,
        pause: float = 0.0,
        dry_run: bool = False,
        body_store: bool = False,
    ) -> Pruned:
        """Delete the keys of the current app that are past their retention. What ``flask idempotency prune`` does.

        :param batch_size: keys a batch; each batch is a transaction of its own.
        :param max_batches: stop after so many batches; all if left out.
        :param pause: seconds between two batches.
        :param dry_run: only count.
        :param body_store: then also delete what lies in the body store and belongs to no key.
        :raises StoreError: the store or the body store can't be reached, or the table is missing.
        """
        return prune(
            get_state(current_app),
            batch_size=batch_size,
            max_batches=max_batches,
            pause=pause,
            dry_run=dry_run,
            body_store=body_store,
        )

    def _unguarded(self) -> bool:
        """Whether this request's view runs without a claim, by the app's choice."""
        return has_request_context() and slot_of(request.environ).unguarded

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
            for below in chain(function):
                put_mark(below, BELOW, guard)
            return wrapped

        put_mark(decorate, MAKES, (self, read, name == "required"))
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


# Without options they stand in a toolkit's list themselves; whose they are, they say then.
put_mark(Idempotency.required, MAKES, (None, {}, True))
put_mark(Idempotency.optional, MAKES, (None, {}, False))


def _refuse_before_guard() -> None:
    """A step of a guarded view, in a hook that runs before the guard, would be done again by each attempt."""
    if not has_request_context() or slot_of(request.environ).passed:
        return
    state = current_app.extensions.get(EXTENSION)
    asked: Request = request._get_current_object()  # type: ignore[attr-defined]
    if isinstance(state, AppState) and state.settings.enabled and is_guarded(state, asked):
        raise StepError(
            "Steps and derived keys belong into the guarded view: no claim is held yet, in a hook or a decorator that "
            "runs before its guard."
        )


def _made(app: Flask, response: Any) -> Response:
    """What a view returned, as the response that Flask makes of it."""
    try:
        if has_request_context():
            return app.make_response(response)
        with app.test_request_context():
            return app.make_response(response)
    except TypeError as error:
        raise TypeError(
            f"settle() takes a response, or anything else that a view may return, not {type(response).__name__}."
        ) from error


def _plain(app: Any) -> Any:
    """The app itself, where ``current_app`` was given."""
    return app._get_current_object() if isinstance(app, LocalProxy) else app
