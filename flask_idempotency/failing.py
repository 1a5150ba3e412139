"""Answers of requests that failed when everything had been done but the commit."""

from __future__ import annotations

from flask import Response, current_app, got_request_exception
from werkzeug.exceptions import HTTPException, InternalServerError

from .errors import IdempotencyError
from .state import get_state


def respond(error: Exception) -> Response:
    """What the app makes of an exception, by its own error handlers and ``after_request`` functions."""
    response = handled(error)
    try:
        # The functions have seen the answer whose place this one takes; Flask does the same after one that failed.
        response = current_app.process_response(response)
    except Exception:
        current_app.logger.exception("An after_request function failed on the answer of a request that failed.")
    return response


def handled(error: Exception) -> Response:
    """What the app's own error handlers make of an exception.

    Where Flask would let it out (``TESTING``, ``PROPAGATE_EXCEPTIONS``), it is logged and answered all the same: an
    answer was made already, and it is this one's place that has to be taken.
    """
    app = current_app._get_current_object()  # type: ignore[attr-defined]
    if isinstance(error, IdempotencyError):
        error.under(get_state(app).settings.problem_base)
    shown = error if isinstance(error, HTTPException) else InternalServerError(original_exception=error)
    if shown is not error:
        app.log_exception((type(error), error, error.__traceback__))
        got_request_exception.send(app, _async_wrapper=app.ensure_sync, exception=error)
    try:
        response: Response = app.make_response(app.handle_user_exception(shown))
    except Exception:
        response = app.make_response(shown.get_response())
    return response


def overwrite(response: Response, other: Response) -> None:
    """Make ``response`` what ``other`` is: it is on its way out already."""
    response.status = other.status
    response.headers = other.headers
    response.direct_passthrough = other.direct_passthrough
    response.response = other.response
    response.call_on_close(other.close)
