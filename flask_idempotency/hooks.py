"""The hooks that the extension puts on an app."""

from __future__ import annotations

from typing import Any, Final

from flask import (
    Flask,
    Request,
    Response,
    current_app,
    got_request_exception,
    has_request_context,
    request,
    request_finished,
)
from werkzeug.exceptions import HTTPException

from .answer import restore
from .atomic import AtomicAttempt, call, conclude
from .attempt import Attempt
from .body import stand_in
from .capping import Cap
from .counting import Counting
from .errors import IdempotencyError
from .intake import is_sent
from .origins import made_of, put_on
from .protection import is_guarded, wrap_protected
from .reading import UNSAFE_METHODS
from .routes import find_problems
from .slot import slot_of
from .state import AppState, get_state

#: Toolkits that handle every HTTP exception of an app, and make a body of their own of it: the status and nothing else.
_RESHAPING: Final = frozenset({"apiflask", "flask_smorest"})


def install(state: AppState) -> None:
    """Put the hooks on the state's app."""
    app, settings = state.app, state.settings
    if settings.count_replays:
        state.counting = Counting(app, state.store)
    if settings.max_live_keys is not None:
        state.cap = Cap(state.store, settings.max_live_keys)
    app.before_request(_before_request)
    got_request_exception.connect(_note_exception, app)
    # This one goes first: no hook that answers by itself may hide what is wrong.
    app.before_request(_before_all)
    hooks = app.before_request_funcs[None]
    hooks.insert(0, hooks.pop())
    app.after_request(_after_request)
    request_finished.connect(_request_finished, app)
    app.teardown_request(_teardown_request)


def install_unguarded(app: Flask) -> None:
    """Put on an app whose views are not guarded what they need all the same: ``after_commit()``."""
    request_finished.connect(_request_finished, app)


def _note_exception(app: Flask, exception: BaseException | None = None, **_: Any) -> None:
    """The answer that Flask is about to make of an exception, a hook's for example, is no answer of the view's."""
    slot = slot_of(request.environ) if has_request_context() else None
    if slot is not None and slot.attempt is not None:
        slot.attempt._raised = exception


def _before_all() -> None:
    """Refuse to serve an app that is set up in a way that leaves views unguarded; keep what hooks read of a body."""
    asked: Request = request._get_current_object()  # type: ignore[attr-defined]
    slot_of(asked.environ)  # from here on it belongs to this request, and not to one that copies its environ
    state = get_state(current_app)
    if not state.complete:
        state.problem = state.problem or next((error for _, error in find_problems(state)), None)
        _pass_by_toolkits(state.app)
        state.complete = True
    if state.problem is not None:
        raise state.problem.with_traceback(None)
    # Before any hook can read of it. Of an upload to a view without a guard nothing is copied.
    if asked.method in UNSAFE_METHODS and is_sent(asked) and is_guarded(state, asked):
        stand_in(asked)


def _pass_by_toolkits(app: Flask) -> None:
    """Let the extension's answers pass a toolkit's own handler for every HTTP exception.

    Now that the app is complete, it does not matter which of the two was set up first. A handler that the app has in
    the toolkit's place is the app's word, and so is one that is nearer to the error: both stay.
    """
    handlers = app.error_handler_spec[None][None]
    general = handlers.get(HTTPException)
    # APIFlask's asks a function of the app's, if the app has one, what to answer.
    asked = getattr(app, "error_callback", general)
    modules = (getattr(one, "__module__", None) or "" for one in (general, asked))
    if all(module.partition(".")[0] in _RESHAPING for module in modules):
        handlers.setdefault(IdempotencyError, lambda error: error)


def _before_request() -> None:
    """Wrap the view that is about to run if it is protected."""
    state = get_state(current_app)
    if state.extension.protections and request.url_rule is not None:
        wrap_protected(state, request.url_rule.endpoint)


def _after_request(response: Response) -> Response:
    """Take down the answer; on a replay, put the record over whatever was made of it on the way here."""
    slot = slot_of(request.environ)
    attempt = slot.attempt
    if attempt is None:
        return response
    if attempt._record is not None:
        slot.cross_origin = made_of(response.headers)
        if attempt._restored is not None and attempt._restored.is_still(response):
            return response
        chunks = attempt._chunks() if attempt._chunks is not None else None
        return restore(attempt._record.recorded, response, attempt._policy, chunks)
    if attempt._running:
        _forget_answered(attempt, response)
        attempt._answered(response)
        if not slot.wrapped:
            attempt._settle_unwrapped(response)
    return response


def _forget_answered(attempt: Attempt, response: Response) -> None:
    """Flask-RESTX and Flask-RESTful tell of each HTTP exception as if it had escaped, and make the answer of it.

    Flask tells of those alone that nobody answers, and makes a 500 of them.
    """
    if isinstance(attempt._raised, HTTPException) and attempt._raised.code == response.status_code:
        attempt._raised = None


def _request_finished(app: Flask, response: Response, **_: Any) -> None:
    """The answer is made, after all ``after_request`` functions: an atomic view's work is committed with it now."""
    slot = slot_of(request.environ)
    if isinstance(slot.attempt, AtomicAttempt):
        conclude(response)
    record = slot.attempt._record if slot.attempt is not None else None
    if record is not None:
        put_on(response, slot.cross_origin, record.recorded.headers, request.environ.get("HTTP_ORIGIN"))
    later = slot.after_commit
    if later and response.status_code < 400:
        for function in later:
            call(function)


def _teardown_request(error: BaseException | None) -> None:
    """The end of a request that no wrapper sees, in a bare ``test_request_context()``."""
    slot = slot_of(request.environ)
    # What ends while the view runs is a copied context.
    if slot.wrapped or slot.attempt is None or slot.attempt._views:
        return
    if isinstance(error, Exception):
        slot.attempt._settle(error)
    elif error is not None or slot.attempt._answer is None or isinstance(slot.attempt, AtomicAttempt):
        # A crash; or nobody made an answer of what the view returned, and all that is known is that it ran.
        slot.attempt._abandon()
