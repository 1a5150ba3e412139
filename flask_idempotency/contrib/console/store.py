"""What the pages ask of the app's store, and of what is recorded there."""

from __future__ import annotations

from typing import Any, Final, cast

from flask import current_app

from ...overview import answer_of
from ...recorded import Recorded
from ...sealing import opened, opened_step
from ...state import AppState, get_state
from ...store.survey import Detail, Survey

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


def recorded_of(detail: Detail) -> Recorded | None:
    """The recorded answer, as people may read it; ``None``: there is none.

    :raises RowUnreadable: it is encrypted, and can't be opened.
    """
    recorded, one = answer_of(detail), detail.summary
    return None if recorded is None else opened(app_state().settings.encryption_keys, recorded, one.scope, one.key)


def steps_of(detail: Detail) -> dict[str, str]:
    """The results of steps by their names, as JSON texts that people may read.

    :raises RowUnreadable: one is encrypted, and can't be opened.
    """
    keys, one = app_state().settings.encryption_keys, detail.summary
    return {name: opened_step(keys, text, one.scope, one.key, name) for name, text in detail.steps.items()}
