"""The guard: what stands between a request and its view."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary

from flask import Flask, Request, Response, current_app, request
from flask.views import MethodView
from flask.views import View as FlaskView
from werkzeug.exceptions import HTTPException

from .attempt import Attempt
from .changes import noting
from .config import overlay
from .entering import Entering
from .marks import GUARD, View, mark_of
from .policy import Policy
from .slot import slot_of
from .state import AppState, get_state

if TYPE_CHECKING:
    from .extension import Idempotency
    from .protection import Protection

T = TypeVar("T")

_REGISTERED: Final = frozenset(HTTPStatus)

#: Toolkits whose resources call the handler of the method, as Flask's ``MethodView`` does.
_TOOLKITS: Final = frozenset({"flask_restful", "flask_restx"})


class Replayed(HTTPException):
    """A replay on its way out. Without a code it passes every error handler."""

    code = None


class Guard:
    """One use of ``required`` or ``optional``, or one view of a protected blueprint or path.

    :ivar outside: whether decorators of the view lie below it, which have not looked at the request yet.
    """

    def __init__(self, owner: Idempotency, options: Mapping[str, Any], *, required: bool, outside: bool) -> None:
        self.owner = owner
        self.options = options
        self.required = required
        self.outside = outside
        self._policies: WeakKeyDictionary[AppState, dict[tuple[Protection, ...], Policy]] = WeakKeyDictionary()

    def wrap(self, view: View) -> View:
        """The view with this guard before it: a coroutine function if it is one, else a function."""
        if inspect.iscoroutinefunction(view):

            @functools.wraps(view)
            async def guarded(*args: Any, **kwargs: Any) -> Any:
                while True:
                    inside = await _outside_of_the_loop(functools.partial(self.enter, guarded))
                    if isinstance(inside, Response):
                        return inside
                    try:
                        with inside:
                            return await view(*args, **kwargs)
                    except Exception as error:
                        escaped = error
                    if not await _outside_of_the_loop(functools.partial(inside.again, escaped)):
                        raise escaped
        else:

            @functools.wraps(view)
            def guarded(*args: Any, **kwargs: Any) -> Any:
                while True:
                    inside = self.enter(guarded)
                    if isinstance(inside, Response):
                        return inside
                    try:
                        with inside:
                            return current_app.ensure_sync(view)(*args, **kwargs)
                    except Exception as error:
                        if not inside.again(error):
                            raise

        setattr(guarded, GUARD, self)
        return guarded

    def above_others(self, asked: Request) -> bool:
        """Whether decorators of the view lie below this guard, those of a view class's methods included."""
        return self.above(current_app.view_functions.get(asked.endpoint or ""), asked.method)

    def above(self, view: View | None, method: str) -> bool:
        """The same, of a view that need not be asked for."""
        view_class = getattr(view, "view_class", None)
        if self.outside or view_class is None:
            return self.outside
        if mark_of(view_class.dispatch_request, GUARD) is self:
            return handler_decorated(view_class, method)
        return mark_of(view, GUARD) is self and class_decorates(view_class, method)

    def policy(self, state: AppState, asked: Request) -> Policy:
        """What holds here: the app's configuration, protections of the blueprint or path, this guard's options."""
        return self.policy_under(state, covering_of(self.owner, state.app, asked))

    def policy_under(self, state: AppState, covering: tuple[Protection, ...]) -> Policy:
        """What holds under these protections, of which the nearest is the last."""
        known = self._policies.setdefault(state, {})
        policy = known.get(covering)
        if policy is None:
            policy = known[covering] = overlay(state.policy, *(one.options for one in covering), self.options)
        return policy

    def enter(self, guarded: View) -> Response | _Inside:
        """Let the request through to the view, with a claim or unguarded, or answer it.

        Returns what to run the view in. A replay leaves as an exception, so that no decorator above takes it
        for the view's own value; it is returned where nothing is above, or the app traps HTTP exceptions.

        :param guarded: the view with this guard before it.
        :raises Replayed: the answer is recorded.
        :raises IdempotencyError: the request is refused.
        """
        state = get_state(current_app)
        asked: Request = request._get_current_object()  # type: ignore[attr-defined]
        slot = slot_of(asked.environ)
        if slot.attempt is not None and slot.attempt._running:
            return _Inside(slot.attempt, first=False)  # of a guarded view already, which holds the claim
        policy = self.policy(state, asked)
        if not state.settings.enabled or asked.method not in policy.methods:
            if policy.atomic and slot.after_commit is None:
                slot.after_commit = []  # the view is the same, and calls after_commit() here, too
            slot.passed = True
            return _Inside(slot.attempt, first=False)
        found = Entering(self, state, policy, asked, slot).begin()
        if found is None:
            return _Inside(slot.attempt, first=True)
        if state.app.config["TRAP_HTTP_EXCEPTIONS"] or self._is_outermost(guarded, state, asked):
            return found
        raise Replayed(response=found if _has_standard_status(found) else state.app.response_class())


    def _is_outermost(self, guarded: View, state: AppState, asked: Request) -> bool:
        """Whether it is Flask itself that takes what the guarded view returns."""
        app = state.app
        if getattr(app.dispatch_request, "__func__", None) is not Flask.dispatch_request:
            return False  # the app's own may do something to what a view returns
        view = app.view_functions.get(asked.endpoint or "")
        # What a protection has put in the view's place returns what the guard returns.
        protected = view is not None and view is state.protected.get(asked.endpoint or "")
        return (self.outside or getattr(view, "__wrapped__", None) is guarded) if protected else view is guarded


def _has_standard_status(response: Response) -> bool:
    """Whether Flask-RESTX can handle a response on its way out. It fails on a status that is not registered; a stand-in
    serves as well there, over which the ``after_request`` function puts the record.
    """
    return response.status_code in _REGISTERED


def covering_of(owner: Idempotency, app: Flask, asked: Request) -> tuple[Protection, ...]:
    """The protections under which a request falls, the nearest last."""
    covering = [one for one in owner.protections if one.covers(app, asked)]
    return nearest_last(app, asked.endpoint, covering) if covering else ()


def nearest_last(app: Flask, endpoint: str | None, covering: Iterable[Protection]) -> tuple[Protection, ...]:
    """Protections in the order in which their options count; of two that are as near, the later one counts more."""
    return tuple(sorted(covering, key=lambda one: one.nearness(app, endpoint) or ()))


def class_decorates(view_class: Any, method: str) -> bool:
    """Whether a view class may check credentials before the method's own code, below a guard around its whole view."""
    return (
        hasattr(view_class.dispatch_request, "__wrapped__")
        or handler_decorated(view_class, method)
        or bool(own_code(view_class))
    )


def handler_decorated(view_class: Any, method: str) -> bool:
    """Whether a view class puts decorators on the method's handler."""
    # Flask-RESTful and Flask-RESTX put method_decorators on the method when it is called.
    handler = getattr(view_class, method.lower(), None)
    return hasattr(handler, "__wrapped__") or bool(getattr(view_class, "method_decorators", None))


def own_code(view_class: Any) -> list[Any]:
    """What a view class runs before the handler, beside decorators: an ``__init__`` of its own, a ``dispatch_request``
    that is not the handler itself.
    """
    found = [] if view_class.__init__ is FlaskView.__init__ else [view_class.__init__]
    inherited = "dispatch_request" not in vars(view_class)  # of a plain class: one that calls the class's own method
    if not dispatches_alone(view_class) or (not issubclass(view_class, MethodView) and inherited):
        found.append(view_class.dispatch_request)
    return found


def dispatches_alone(view_class: Any) -> bool:
    """Whether a view class's ``dispatch_request`` only calls the method's handler, or is the handler itself."""
    if not inspect.isclass(view_class) or not issubclass(view_class, MethodView):
        return True
    return view_class.dispatch_request is MethodView.dispatch_request


def calls_handlers(view_class: Any) -> bool:
    """Whether a request surely comes to the handler of its method. An app's own dispatching may not."""
    if dispatches_alone(view_class):
        return True
    module = getattr(view_class.dispatch_request, "__module__", None) or ""
    return module.partition(".")[0] in _TOOLKITS


async def _outside_of_the_loop(function: Callable[[], T]) -> T:
    """Call a function from a coroutine, in the thread of the request that waits for it.

    There the app's hooks have worked with its session, and there coroutines that the app handed in can be run.
    """
    try:
        from asgiref.sync import AsyncToSync, SyncToAsync
    except ImportError:  # the app runs its coroutines in a way of its own
        return function()
    waits = getattr(AsyncToSync.executors, "current", None) is not None
    return await SyncToAsync(function, thread_sensitive=waits)()


class _Inside:
    """While the view runs. Remembers what escaped it: the 500 that is made of it is no answer of the view's."""

    def __init__(self, attempt: Attempt | None, *, first: bool) -> None:
        self._attempt = attempt
        self._first = first
        # A view that runs without a claim works for the one that has called it, if one has.
        self._noting: AbstractContextManager[None] = nullcontext() if attempt is None else noting(attempt._changes)

    def again(self, error: Exception) -> bool:
        """Whether the view is to be run again after what escaped it, from the claim on. Not that of a guarded view
        within a guarded view: the outer one has done a part of the work.
        """
        return self._first and self._attempt is not None and self._attempt._again(error)

    def __enter__(self) -> None:
        self._noting.__enter__()
        if self._attempt is not None:
            self._attempt._enter_view()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._noting.__exit__(None, None, None)
        if self._attempt is None:
            return
        if isinstance(error, Exception):
            if not isinstance(error, HTTPException):
                self._attempt._raised = error
        elif error is not None:
            # A crash, whatever somebody above makes of it: gevent's Timeout, a cancelled task, a worker's time-out.
            self._attempt._abandon()
        self._attempt._leave_view()
