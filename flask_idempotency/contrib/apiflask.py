"""The OpenAPI document of APIFlask, with what holds of guarded routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from . import openapi

#: The name that APIFlask gives the schema of its own errors.
_HTTP_ERROR: Final = "HTTPError"


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
                untold = {} if "400" in operation.get("responses", ()) else self._of_broken_json()
                openapi.describe(operation, route, self.form, [], self._resolved, untold)
                if openapi.SCHEMA not in self.components.schemas:
                    self.components.schema(openapi.SCHEMA, openapi.problem_schema(self.form.base))

    def _of_broken_json(self) -> dict[str, Any]:
        """What APIFlask answers to a body that is no JSON, and does not document."""
        if not self.app.json_errors:
            return {}
        schema = self.app.config["HTTP_ERROR_SCHEMA"]
        if not isinstance(schema, dict):  # a class, of which APIFlask alone makes a schema
            schema = {}
        elif _HTTP_ERROR not in self.components.schemas:
            self.components.schema(_HTTP_ERROR, schema)
        shown = {"$ref": f"#/components/schemas/{_HTTP_ERROR}"} if schema else {}
        return {"400": {"description": "Bad Request", "content": {"application/json": {"schema": shown}}}}

    def _resolved(self, one: dict[str, Any]) -> dict[str, Any]:
        components = {"responses": self.components.responses, "parameters": self.components.parameters}
        return openapi.resolve({"components": components}, one)
