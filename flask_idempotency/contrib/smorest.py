"""The OpenAPI document of flask-smorest, with what holds of guarded routes."""

from __future__ import annotations

import copy
from typing import Any

from ..errors import ConfigurationError
from . import openapi


def document(api: Any) -> None:
    """Let the document of an ``Api`` show, for each guarded route, the header and the answers 400, 409 and 422.

    It is done whenever the document is asked for: routes and guards may come later.

    :param api: flask-smorest's object, after its ``init_app``.
    :raises ConfigurationError: flask-smorest is missing, or the object is not initialised yet. The document raises it
        where the extension is not initialised on the app.
    """
    toolkit = openapi.needed("flask_smorest", "smorest")
    if not isinstance(api, toolkit.Api):
        raise TypeError(f"document() takes flask-smorest's Api, not {type(api).__name__}.")
    if api.spec is None:
        raise ConfigurationError("document(api) comes after api.init_app(app): there is no document before.")
    # A copy of what is there: the toolkit's object goes on collecting paths.
    plain, app, version = api.spec.to_dict, api._app, str(api.spec.openapi_version)

    def to_dict() -> dict[str, Any]:
        found: dict[str, Any] = copy.deepcopy(plain())
        openapi.complete(found, openapi.guarded_routes(app), openapi.form_of(app, version))
        return found

    api.spec.to_dict = to_dict
