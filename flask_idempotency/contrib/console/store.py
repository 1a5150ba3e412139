"""What the pages ask of the app's store."""

from __future__ import annotations

from flask import current_app

from ...overview import survey_of
from ...state import AppState, get_state
from ...store.survey import Survey


def app_state() -> AppState:
    """The current app's state, its store ready for use outside of guarded views."""
    state = get_state(current_app)
    state.prepare()
    return state


def survey() -> Survey:
    """The current app's store.

    :raises SurveyMissing: it has no overviews.
    """
    return survey_of(app_state())
