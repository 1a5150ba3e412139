"""The guard: what stands between a request and its view."""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Callable, Mapping, MutableMapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from urllib.parse import quote
from weakref import WeakKeyDictionary

from flask import Request, Response, current_app, request
from flask.views import MethodView
from werkzeug.exceptions import HTTPException

from . import body, caller, coding, errors, signals
from .answer import restore
from .attempt import Attempt, Slot, slot_of
from .config import overlay
from .fingerprint import CURRENT_VERSION, Form, UnknownVersion, Value, fingerprint
from .lifecycle import Refused, Replay
from .lifecycle import Request as Asked
from .policy import Policy
from .state import AppState, get_state

if TYPE_CHECKING:
    from .extension import Idempotency, Protection

View = Callable[..., Any]
T = TypeVar("T")

#: On a guarded view and, since ``functools.wraps`` copies it, on what wraps one: its guard.
GUARD: Final = "__idempotency_guard__"
#: On the function below a guard, so that one registered without its guard can be told.
BELOW: Final = "__idempotency_below__"
#: On a view that ``exempt`` was put on.
EXEMPT: Final = "__idempotency_exempt__"


#: The widths of the columns.
METHOD_LENGTH: Final = 10
PATH_LENGTH: Final = 500


#: Marks of methods of objects, which can have no attributes of their own. A toolkit may decorate one for each request.
_methods: Final[dict[str, MutableMapping[Any, Any]]] = {BELOW: WeakKeyDictionary(), EXEMPT: {}}


def put_mark(function: Any, name: str, value: Any) -> None:
    """Mark a view function."""
    if isinstance(function, MethodType):
        _methods[name][function] = value
    elif hasattr(function, "__dict__"):
        setattr(function, name, value)


def mark_of(function: Any, name: str) -> Any:
    """The mark on a view function; ``None`` if it has none."""
    own = _methods.get(name, {}).get(function) if isinstance(function, MethodType) else None
    return own or getattr(function, "__dict__", {}).get(name)


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
                replay = await _outside_of_the_loop(self.enter)
                if replay is not None:
                    return replay
                with _Inside():
                    return await view(*args, **kwargs)
        else:

            @functools.wraps(view)
            def guarded(*args: Any, **kwargs: Any) -> Any:
                replay = self.enter()
                if replay is not None:
                    return replay
                with _Inside():
                    return current_app.ensure_sync(view)(*args, **kwargs)

        setattr(guarded, GUARD, self)
        return guarded

    def above_others(self, asked: Request) -> bool:
        """Whether decorators of the view lie below this guard, those of a view class's methods included."""
        view = current_app.view_functions.get(asked.endpoint or "")
        view_class = getattr(view, "view_class", None)
        if self.outside or view_class is None or mark_of(view, GUARD) is not self:
            return self.outside
        methods = [getattr(view_class, name, None) for name in (asked.method.lower(), "dispatch_request")]
        # Flask-RESTful and Flask-RESTX put method_decorators on the method when it is called.
        return (
            any(hasattr(one, "__wrapped__") for one in methods)
            or bool(getattr(view_class, "method_decorators", None))
            or not _dispatches_alone(view_class)
        )

    def policy(self, state: AppState, asked: Request) -> Policy:
        """What holds here: the app's configuration, protections of the blueprint or path, this guard's options."""
        covering = [one for one in self.owner.protections if one.covers(state.app, asked)]
        # The nearest last; of two that are as near, the later one.
        over = tuple(sorted(covering, key=lambda one: one.nearness(state.app, asked.endpoint) or ()))
        known = self._policies.setdefault(state, {})
        policy = known.get(over)
        if policy is None:
            policy = known[over] = overlay(state.policy, *(one.options for one in over), self.options)
        return policy

    def enter(self) -> Response | None:
        """Let the request through to the view, with a claim or unguarded, or answer it.

        Returns ``None`` to let it through. A replay leaves as an exception, so that no decorator above takes it
        for the view's own value; it is returned where the app traps HTTP exceptions.

        :raises Replayed: the answer is recorded.
        :raises IdempotencyError: the request is refused.
        """
        state = get_state(current_app)
        asked: Request = request._get_current_object()  # type: ignore[attr-defined]
        slot = slot_of(asked.environ)
        if not state.settings.enabled or (slot.attempt is not None and slot.attempt._running):
            return None  # off; or inside a guarded view already, which holds the claim
        policy = self.policy(state, asked)
        if asked.method not in policy.methods:
            return None
        found = _Entering(self, state, policy, asked, slot).begin()
        if found is None:
            return None
        if current_app.config["TRAP_HTTP_EXCEPTIONS"]:
            return found
        raise Replayed(response=found)


def _dispatches_alone(view_class: Any) -> bool:
    """Whether a view class's ``dispatch_request`` only calls the method's handler, or is the handler itself."""
    dispatch = getattr(view_class, "dispatch_request", None)
    return dispatch is MethodView.dispatch_request or not issubclass(view_class, MethodView)


def is_covered(view: View) -> bool:
    """Whether a view's own function lies below something else that may check credentials first."""
    return hasattr(view, "__wrapped__") or not isinstance(view, (FunctionType, MethodType))


class _Entering:
    """One request at one guard, from its header to its claim or its answer."""

    def __init__(self, guard: Guard, state: AppState, policy: Policy, asked: Request, slot: Slot) -> None:
        self.guard = guard
        self.state = state
        self.policy = policy
        self.asked = asked
        self.slot = slot
        self.fields: dict[str, Any] = {
            "key": None,
            "scope": None,
            "method": asked.method,
            "path": asked.script_root + asked.path,
            "endpoint": asked.endpoint,
        }

    def begin(self) -> Response | None:
        """``None`` to run the view; a response that replays."""
        try:
            key = caller.find_key(self.asked, self.policy)
            if key is None and not self.guard.required:
                return None
            if key is None:
                raise errors.KeyMissing(**self._where(f"Send it in the header {self.policy.header}. "))
            self.fields["key"] = key
            self.fields["scope"] = caller.find_scope(self.asked, self.state, self.guard, self.policy)
        except errors.IdempotencyError as error:
            self._turn_away(error)
        request = self._read()
        attempt = Attempt(
            self.state.app, self.state.lifecycle, self.policy, request.fingerprint(CURRENT_VERSION), self.fields
        )
        self.slot.attempt = attempt
        try:
            outcome = self.state.lifecycle.begin(request)
        except Refused as refused:
            self._refuse(refused)
        except errors.StoreError as error:
            self._without_store(error)
            self.slot.unguarded = True
            return None
        if isinstance(outcome, Replay):
            return self._replay(attempt, outcome)
        attempt._grant(outcome)
        return None

    def _where(self, hint: str) -> dict[str, Any]:
        detail = " ".join((inspect.getdoc(errors.KeyMissing) or "").split())
        return {"detail": f"{detail} {hint.strip()}"} if self.policy.key is None else {}

    def _read(self) -> Asked:
        """The request with its fingerprint, taken once, before the view can change what it parsed."""
        own = self.policy.fingerprint
        instead = Value(caller.call(own, self.asked)) if callable(own) else None
        before = body.kept(self.asked)
        message = body.message(self.asked, instead, own if isinstance(own, tuple) else ())
        # What is in memory needs no closing, and may be looked at when the request is over, by a test say.
        if not isinstance(message.body, (Value, Form, io.BytesIO)) and message.body is not before:
            self.slot.keep(message.body)
        known: dict[int, str] = {}

        def by_version(version: int) -> str:
            if version not in known:
                try:
                    known[version] = fingerprint(message, version)
                except UnknownVersion as error:
                    raise errors.RowUnreadable(f"A stored row can't be compared with the request: {error}") from error
            return known[version]

        by_version(CURRENT_VERSION)
        return Asked(
            scope=self.fields["scope"],
            key=self.fields["key"],
            method=self.asked.method[:METHOD_LENGTH],
            path=for_people(self.fields["path"]),
            version=CURRENT_VERSION,
            fingerprint=by_version,
            policy=self.policy,
        )

    def _replay(self, attempt: Attempt, replay: Replay) -> Response:
        suited = coding.suited(replay.recorded, self.asked.headers.get("Accept-Encoding"))
        if suited is None:
            error = errors.RecordUnavailable(original_status=replay.recorded.status)
            self._turn_away(error)
        attempt._replay(Replay(replay.asking, suited, replay.stored))
        return restore(suited, current_app.response_class(), self.policy)

    def _refuse(self, refused: Refused) -> NoReturn:
        stored, age = refused.stored, refused.stored.age_seconds
        if refused.error is errors.KeyReused:
            self._emit(signals.MISMATCH, original_path=stored.path, age_seconds=age)
            raise self._error(errors.KeyReused, status=self.policy.mismatch_status) from None
        if refused.error is errors.RecordUnavailable:
            status = stored.recorded.status if stored.recorded else None
            self._turn_away(errors.RecordUnavailable(original_status=status))
        self._emit(signals.CONFLICT, age_seconds=age, waited=refused.waited)
        if refused.error is errors.InFlight:
            raise self._error(errors.InFlight, retry_after=self.policy.retry_after) from None
        raise self._error(refused.error) from None

    def _without_store(self, error: errors.StoreError) -> None:
        """Refuse with 503; or return, where the app chose to run unguarded then."""
        known = isinstance(error, (errors.WriterHeld, errors.RowUnreadable))
        if self.policy.on_store_error == "execute" and not known:
            self._emit(signals.RECORD_FAILED, exception=f"running unguarded: {error}")
            return
        # Its text has the cause. A traceback for each request that comes meanwhile would only bury it.
        signals.logger.error("The store can't answer, and the view is not run: %s", error)
        detail = None
        if isinstance(error, errors.WriterHeld):
            detail = f"{error} {_hooks(self.asked)}".strip()
        self._turn_away(errors.StoreUnavailable(detail, retry_after=self.policy.retry_after))

    def _turn_away(self, error: errors.IdempotencyError) -> NoReturn:
        self._emit(signals.REJECT, reason=error.slug)
        raise error.under(self.state.settings.problem_base) from None

    def _error(self, kind: type[errors.IdempotencyError], **how: Any) -> errors.IdempotencyError:
        return kind(base=self.state.settings.problem_base, **how)

    def _emit(self, event: signals.Event, **values: Any) -> None:
        signals.emit(event, self.state.app, {**self.fields, **values})


def for_people(path: str) -> str:
    """A path as it is kept beside a key: cut, and without what a column or a terminal can't hold."""
    return "".join(one if one.isprintable() else quote(one, errors="surrogatepass") for one in path)[:PATH_LENGTH]


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

    def __init__(self) -> None:
        self._attempt = slot_of(request.environ).attempt

    def __enter__(self) -> None:
        if self._attempt is not None:
            self._attempt._enter_view()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._attempt is None:
            return
        if isinstance(error, Exception):
            if not isinstance(error, HTTPException):
                self._attempt._raised = error
        elif error is not None:
            # A crash, whatever somebody above makes of it: gevent's Timeout, a cancelled task, a worker's time-out.
            self._attempt._abandon()
        self._attempt._leave_view()


def _hooks(asked: Request) -> str:
    """The functions that ran before the view, one of which left its work uncommitted."""
    functions = [
        function
        for name in (None, *asked.blueprints)
        for function in current_app.before_request_funcs.get(name, ())
        if not (getattr(function, "__module__", "") or "").startswith(__package__ or "flask_idempotency")
    ]
    names = ", ".join(f"{one.__module__}.{getattr(one, '__qualname__', one)}" for one in functions)
    return f"Functions that ran before the view: {names}." if names else ""
