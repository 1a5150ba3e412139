"""Pages in the place of those that were asked for, where these can't be shown."""

from __future__ import annotations

from typing import Any, Final

from flask import Response, request

from ...errors import RowUnreadable, StoreError
from ...overview import SurveyMissing
from ...signals import logger
from .pages import message
from .store import app_state
from .tokens import SecretMissing


class KeyGone(Exception):
    """There is no such key, or the address is of none."""


def _key_gone(error: KeyGone) -> Response:
    return message(404, "No such key", "It was released, deleted or pruned, or was never stored.")


def _row_unreadable(error: RowUnreadable) -> Response:
    # Not an error of this request's: it is what there is to say of the key.
    return message(200, "This key can't be read", str(error), "Retries get 503.")


def _survey_missing(error: SurveyMissing) -> Response:
    kind = type(app_state().store).__name__
    return message(501, "No overviews", f"The store of this app ({kind}) can't list its keys, which a console needs.")


def _secret_missing(error: SecretMissing) -> Response:
    return message(501, "Nothing can be released here", "The app has no SECRET_KEY, which forms are signed with.")


def _store_failed(error: StoreError) -> Response:
    logger.error("The idempotency console could not show %s: %s", request.endpoint, error)
    return message(503, "The store can't answer", str(error))


#: By exception, the function that makes the page.
HANDLERS: Final[dict[type[Exception], Any]] = {
    KeyGone: _key_gone,
    RowUnreadable: _row_unreadable,
    SurveyMissing: _survey_missing,
    SecretMissing: _secret_missing,
    StoreError: _store_failed,
}
