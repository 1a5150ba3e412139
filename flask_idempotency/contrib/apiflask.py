"""The OpenAPI document of APIFlask, with what holds of guarded routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import openapi


def document(app: Any) -> None:
    """Let the document of an app show, for each guarded route, the header and the answers 400, 409 and 422.

    It is done whenever APIFlask makes the document: routes and guards may come later. The app's ``spec_processor`` sees
    it done.

    :param app: APIFlask's object.
    :raises ConfigurationError: APIFlask is missing. The document raises it where the extension is not initialised on
        the app.
    """
    toolkit = openapi.needed("apiflask", "apiflask")
    if not isinstance(app, toolkit.APIFlask):
        raise TypeError(f"document() takes APIFlask's app, not {type(app).__name__}.")
    base = openapi.needed("apispec", "apiflask").BasePlugin
    app.spec_plugins.append(type("Idempotency", (_Described, base), {})(app))


class _Described:
    """What APIFlask's list of plugins takes, together with apispec's base class."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def init_spec(self, spec: Any) -> None:
        """A new document is begun. The app is complete by now."""
        self.components = spec.components
        self.routes = openapi.guarded_routes(self.app)
        self.form = openapi.form_of(self.app, str(spec.openapi_version))

    def operation_helper(self, path: str, operations: Mapping[str, Any], **_: Any) -> None:
        """The operations of a path are complete."""
        for method, operation in operations.items():
            route = self.routes.get((path, method))
            if route is not None:
                openapi.describe(operation, route, self.form, self._by_the_toolkit, [], lambda one: one)
                if openapi.SCHEMA not in self.components.schemas:
                    self.components.schema(openapi.SCHEMA, openapi.problem_schema(self.form.base))

    def _by_the_toolkit(self, status: str, answer: dict[str, Any]) -> bool:
        """Whether APIFlask has written an answer by itself, for input."""
        config = self.app.config
        said = (str(config["VALIDATION_ERROR_STATUS_CODE"]), config["VALIDATION_ERROR_DESCRIPTION"])
        return said == (status, answer.get("description"))
