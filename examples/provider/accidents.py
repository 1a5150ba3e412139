"""Accidents for the demo: the process is killed at a moment that a request names in the header ``Accident``.

No app needs this. It stands apart from the views, which know nothing of it.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from flask import Flask, has_request_context, request
from sqlalchemy import event

from .extensions import db
from .provider import Provider


def install(app: Flask) -> None:
    """Let accidents happen in the app."""
    app.extensions["provider"] = _Dangerous(app.config["PROVIDER_URL"])
    with app.app_context():
        event.listen(db.session, "after_commit", lambda *_: _moment("after the session's commit"))


def _moment(name: str) -> None:
    if has_request_context() and request.headers.get("Accident") == name:
        os.kill(os.getpid(), signal.SIGKILL)


class _Dangerous(Provider):
    def charge(self, *args: Any) -> str:
        _moment("before the provider is asked")
        reference = super().charge(*args)
        _moment("after the provider's answer")
        return reference
