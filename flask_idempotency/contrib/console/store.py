"""What the pages ask of the app's store."""

from __future__ import annotations

from typing import Any, Final, cast

from flask import current_app

from ...state import AppState, get_state
from ...store.survey import Survey

#: What is asked of a store; those of the survey's methods that write are not.
_ASKED: Final = ("stats", "tally", "listed", "detail")


class SurveyMissing(Exception):
    """The app's store does not have the methods that overviews are made of."""


def app_state() -> AppState:
    """The current app's state, its store ready for use outside of guarded views."""
    state = get_state(current_app)
    state.prepare()
    return state


def survey() -> Survey:
    """The current app's store.

    :raises SurveyMissing: it has no overviews.
    """
    store: Any = app_state().store
    if not all(callable(getattr(store, name, None)) for name in _ASKED):
        raise SurveyMissing
    return cast(Survey, store)
