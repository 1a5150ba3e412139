"""Releasing a key: what is about to happen is shown first, and done for what was shown alone."""

from __future__ import annotations

from typing import Any

from flask import Response, current_app, request

from ... import outcomes
from ...claim import Status
from ...errors import KeyNotFound, SettleError
from ...marks import EXEMPT, put_mark
from ...store.survey import Detail, Summary
from . import tokens
from .pages import message, page
from .store import app_state
from .timeline import lives
from .views import found_detail, named


def confirm(scope: str, key: str) -> Response:
    """What releasing this key means, with the form that does it."""
    return _form(found_detail(*named(scope, key)))


def release(scope: str, key: str) -> Response:
    """Release it, if it still is what the form showed."""
    where = named(scope, key)
    seen = tokens.seen_in(request.form.get("token", ""))
    if seen is None or seen[:2] != list(where):
        return message(
            403, "Nothing was released", "The form is too old, or is not one of this session. Open the key again."
        )
    detail = found_detail(*where)
    if seen != _seen(detail.summary):
        return _form(detail, 409, "The key has changed since the form was shown. Look at it again.")
    try:
        outcomes.release(app_state(), *where, force=request.form.get("force") == "yes")
    except KeyNotFound:
        return message(404, "Nothing was released", "The key is past its retention, and new again already.")
    except SettleError as error:
        return _form(detail, 409, str(error))
    return page("released.html", one=detail.summary)


# A console under protect() needs no key: its form is safe to send twice, since the second time shows what has changed.
put_mark(release, EXEMPT, True)


def _form(detail: Detail, status: int = 200, problem: str = "") -> Response:
    one = detail.summary
    return page(
        "release.html",
        status,
        one=one,
        problem=problem,
        lives=lives(one),
        recorded=one.status is Status.COMPLETED,
        claimable=one.status is Status.RELEASED,
        token=tokens.made(_seen(one)),
        # Flask-WTF's own, where it looks after all forms of the app.
        csrf_token=current_app.jinja_env.globals.get("csrf_token"),
        csrf_name=current_app.config.get("WTF_CSRF_FIELD_NAME", "csrf_token"),
    )


def _seen(one: Summary) -> list[Any]:
    """What tells this state of a key from a later one. A live holder's signs of life change nothing."""
    times = [None if time is None else time.isoformat() for time in (one.created_at, one.completed_at)]
    return [one.scope, one.key, one.status, one.attempts, *times]
