"""The OpenAPI document (Swagger 2.0) of Flask-RESTX, with what holds of guarded routes."""

from __future__ import annotations

from typing import Any

from flask import Flask, current_app
from werkzeug.utils import cached_property

from . import openapi


def document(api: Any) -> None:
    """Let the document of an ``Api`` show, for each guarded route, the header and the answers 400, 409 and 422.

    It is done when Flask-RESTX makes the document, once: routes and guards may come later than this call.

    :param api: Flask-RESTX's object, initialised or not.
    :raises ConfigurationError: Flask-RESTX is missing. The document raises it where the extension is not initialised on
        the app.
    """
    toolkit = openapi.needed("flask_restx", "restx")
    if not isinstance(api, toolkit.Api):
        raise TypeError(f"document() takes Flask-RESTX's Api, not {type(api).__name__}.")
    if isinstance(api, _Described):
        return
    # The document is a property of the class, and there is no other place that all who ask for it pass.
    plain = type(api)
    api.__class__ = type(plain.__name__, (_Described, plain), {"__module__": plain.__module__})


class _Described:
    """What goes before the class of an ``Api``."""

    @cached_property
    def __schema__(self) -> Any:
        found = super().__schema__  # type: ignore[misc]
        app: Flask = current_app._get_current_object()  # type: ignore[attr-defined]
        # Flask-RESTX's own error handler makes its media type of a problem's.
        form = openapi.form_of(app, "2.0", "application/json")
        openapi.complete(found, openapi.guarded_routes(app), form, prefix=_prefix(self, app))
        return found


def _prefix(api: Any, app: Flask) -> str:
    """What the document leaves out of its paths, since it is in ``basePath``: the place of the root."""
    root = next(app.url_map.iter_rules(api.endpoint("root")))
    return openapi.path_of(root.rule).rstrip("/")
