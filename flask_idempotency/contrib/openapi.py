"""What an OpenAPI document says of guarded routes, whichever toolkit writes it: the header, and 400, 409 and 422.

These three are the routes' own. 401 and 503 can come from any route of an API, with other causes, too.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Any, Final

from flask import Flask

from .. import errors
from ..guard import Guard
from ..key import MAX_LENGTH
from ..listing import coverings_of, guard_met
from ..policy import Policy
from ..reading import SAFE_METHODS
from ..routes import exempted, guards_of, methods_of
from ..state import get_state

#: The name of the problem's schema in a document.
SCHEMA: Final = "IdempotencyProblem"

PROBLEM_JSON: Final = "application/problem+json"

_DESCRIPTION: Final = (
    "Names the operation: one value per operation, a UUID for example, and the same one on every retry. The operation "
    "is carried out once, and a retry gets the first answer."
)
_OPTIONAL: Final = " A request without it may be carried out once more by its retry."
_RETRY_AFTER: Final = (
    "Seconds after which to send the same request again, where the first one is still being processed."
)

Document = dict[str, Any]


@dataclass(frozen=True)
class Guarded:
    """How one method of a rule is guarded.

    :ivar required: whether each request needs a key. Not so where only some of the rule's paths are guarded.
    """

    policy: Policy
    required: bool


@dataclass(frozen=True)
class Form:
    """How a document puts things.

    :ivar version: the major version of OpenAPI, 2 or 3.
    :ivar base: what the ``type`` of a problem begins with.
    :ivar media_type: that of the problems, as they leave the toolkit.
    """

    version: int
    base: str
    media_type: str = PROBLEM_JSON

    @property
    def reference(self) -> Document:
        """A reference to the problem's schema."""
        return {"$ref": f"#/{'definitions' if self.version == 2 else 'components/schemas'}/{SCHEMA}"}

    def typed(self, schema: Document) -> Document:
        """A schema, as a parameter or a header has it."""
        return schema if self.version == 2 else {"schema": schema}


def needed(module: str, extra: str) -> ModuleType:
    """A toolkit, which is there if the app uses it.

    :raises ConfigurationError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise errors.ConfigurationError(
            f"flask_idempotency.contrib.{extra} needs {module}: pip install 'Flask-Idempotency[{extra}]'."
        ) from error


def guarded_routes(app: Flask) -> dict[tuple[str, str], Guarded]:
    """The guarded routes of a complete app, by their path in OpenAPI's form and their method in lower case.

    :raises ConfigurationError: the extension is not initialised on the app, or its options contradict each other.
    """
    state = get_state(app)
    found: dict[tuple[str, str], Guarded] = {}
    for rule in app.url_map.iter_rules() if state.settings.enabled else ():
        view = app.view_functions.get(rule.endpoint)
        if view is None:
            continue
        under = coverings_of(state, rule)
        for method in methods_of(rule) - SAFE_METHODS:
            own = list(guards_of(view, method))
            if own or not exempted(view, method):
                one = _guarded([guard_met(state, view, own, method, covering) for covering in under])
                if one is not None:
                    found.setdefault((path_of(rule.rule), method.lower()), one)
    return found


def path_of(rule: str) -> str:
    """A rule as OpenAPI writes it, and as the toolkits do: ``/charges/{id}`` for ``/charges/<int:id>``."""
    return re.sub(r"<(?:[^:<>]+:)?([^<>]+)>", r"{\1}", rule)


def form_of(app: Flask, version: str, media_type: str = PROBLEM_JSON) -> Form:
    """The form of an app's document of a version of OpenAPI, ``3.0.3`` say."""
    return Form(int(version.partition(".")[0]), get_state(app).settings.problem_base, media_type)


def complete(document: Document, routes: Mapping[tuple[str, str], Guarded], form: Form, prefix: str = "") -> None:
    """Write what holds of guarded routes into a document, in place. Does nothing a second time.

    :param routes: as from :func:`guarded_routes`.
    :param prefix: what the document leaves out of its paths.
    """
    for path, item in document.get("paths", {}).items():
        for method, operation in item.items():
            route = routes.get((prefix + path, method))
            if route is not None:
                shared = [resolve(document, one) for one in item.get("parameters", ())]
                describe(operation, route, form, shared, lambda one: resolve(document, one))
                _schemas(document, form.version).setdefault(SCHEMA, problem_schema(form.base))


def describe(
    operation: Document,
    route: Guarded,
    form: Form,
    shared: list[Document],
    resolved: Callable[[Document], Document],
    untold: Mapping[str, Document] = MappingProxyType({}),
) -> None:
    """Write what holds of a guarded route into its operation, in place. Does nothing a second time.

    A parameter of that name stays as the app wrote it. To an answer of that status the problem is added.

    :param shared: the parameters of all operations of the path.
    :param resolved: what a reference within the document leads to.
    :param untold: answers of the toolkit's that its document leaves out, by status.
    """
    parameters = [resolved(one) for one in operation.get("parameters", ())]
    if route.policy.key is None and not _takes_header([*shared, *parameters], route.policy.header):
        operation.setdefault("parameters", []).append(_parameter(route, form))
    answers = operation.setdefault("responses", {})
    for status, kinds in _problems(route):
        made, there = _answer(kinds, form), answers.get(status)
        # An answer by its status hides that of its range, or the default one, of which it was a case until now.
        hidden = answers.get(f"{status[0]}XX", answers.get("default", untold.get(status)))
        if there is not None:
            answers[status] = _both(resolved(there), made)
        elif hidden is not None and form.version > 2:
            answers[status] = _both(resolved(hidden), made)
        else:
            answers[status] = made


def pattern(shortest: int) -> str:
    """What a key in the header looks like: the bare key, or a string in quotes.

    Printable ASCII; in a bare key no comma, no quote in front and no blank at an end; in a string a backslash before
    quotes and backslashes. It has counts of its own, since the quotes and that backslash are no part of a key.
    Parameters behind a string are left out. It is of ECMA 262's expressions, as OpenAPI asks, and of Python's too.

    :param shortest: the fewest characters of a key.
    """
    end = "[!-+\\--~]"
    tail = f"[ -+\\--~]{{{shortest - 2},{MAX_LENGTH - 2}}}{end}"
    tail = tail if shortest > 1 else f"([ -+\\--~]{{0,{MAX_LENGTH - 2}}}{end})?"
    return rf'^("([ !#-\[\]-~]|\\["\\]){{{shortest},{MAX_LENGTH}}}"|[!#-+\--~]{tail})$'


def problem_schema(base: str) -> Document:
    """The schema of a problem document (RFC 9457, section 3.1), as the extension makes it."""
    text = {"type": "string"}
    return {
        "type": "object",
        "description": "A problem document (RFC 9457).",
        "required": ["type", "title", "status", "detail", "error"],
        "properties": {
            "type": {**text, "format": "uri", "example": base + errors.KeyReused.slug},
            "title": text,
            "status": {"type": "integer", "description": "The status of the answer."},
            "detail": {**text, "description": "What to do next."},
            "error": {**text, "description": "The same sentence as detail."},
            "original_status": {"type": "integer", "description": "The status of an answer that can't be given again."},
        },
    }


def _guarded(met: list[tuple[Guard, Policy] | None]) -> Guarded | None:
    """What holds of a rule, of what holds of its paths."""
    found = [one for one in met if one is not None]
    if not found:
        return None
    everywhere = len(found) == len(met)
    return Guarded(found[-1][1], everywhere and all(guard.required for guard, _ in found))


def _takes_header(parameters: list[Document], name: str) -> bool:
    there = ((one.get("in"), str(one.get("name")).lower()) for one in parameters)
    return ("header", name.lower()) in there


def _parameter(route: Guarded, form: Form) -> Document:
    # The length is the bare key's. A quoted one is two characters longer, or more, and is accepted with a key of up to
    # 255 all the same: a document may promise less than is accepted, and never more.
    schema = {
        "type": "string",
        "minLength": route.policy.key_min_length,
        "maxLength": MAX_LENGTH,
        "pattern": pattern(route.policy.key_min_length),
    }
    return {
        "name": route.policy.header,
        "in": "header",
        "required": route.required,
        "description": _DESCRIPTION + ("" if route.required else _OPTIONAL),
        **form.typed(schema),
    }


def _problems(route: Guarded) -> Iterator[tuple[str, list[type[errors.IdempotencyError]]]]:
    """The errors that a client of the route can get, by status."""
    by_status: dict[int, list[type[errors.IdempotencyError]]] = {
        400: [errors.KeyMissing, errors.KeyInvalid] if route.required else [errors.KeyInvalid],
        409: [errors.InFlight, errors.OutcomeUnknown, errors.RecordUnavailable],
    }
    by_status.setdefault(route.policy.mismatch_status, []).append(errors.KeyReused)
    return ((str(status), kinds) for status, kinds in by_status.items())


def _answer(kinds: list[type[errors.IdempotencyError]], form: Form) -> Document:
    said = "; ".join(f"{kind.title} (`{form.base}{kind.slug}`)" for kind in kinds)
    answer: Document = {"description": f"{said}."}
    if errors.InFlight in kinds:
        header = {"description": _RETRY_AFTER, **form.typed({"type": "integer", "minimum": 1})}
        answer["headers"] = {"Retry-After": header}
    if form.version == 2:
        return {**answer, "schema": form.reference}
    return {**answer, "content": {form.media_type: {"schema": form.reference}}}


def _both(there: Document, made: Document) -> Document:
    """An answer that the document has, with a problem beside it: what is there stays.

    OpenAPI 2 has one schema an answer: there it stays as it is, and only the description says both.
    """
    said = there.get("description", "")
    if "$ref" in there or made["description"] in said:  # it leads out of the document; or it was done before
        return there
    both = copy.deepcopy(there)
    both["description"] = f"{said.rstrip('.')}. {made['description']}".lstrip(". ")
    for part in {"content", "headers"} & made.keys():
        both[part] = {**_without(made[part], there.get(part, {})), **both.get(part, {})}
    return both


def _without(ours: Document, theirs: Document) -> Document:
    """Of our media types or headers those that are not among theirs. Both are named in any case (RFC 9110)."""
    named = {name.partition(";")[0].strip().lower() for name in theirs}
    return {name: value for name, value in ours.items() if name.lower() not in named}


def resolve(document: Document, one: Document) -> Document:
    """What a reference within the document leads to; what is none, or leads nowhere, itself."""
    if "$ref" not in one:
        return one
    found: Any = document
    for name in one["$ref"].removeprefix("#/").split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~"), {})
    return dict(found) or one


def _schemas(document: Document, version: int) -> Document:
    parent = document if version == 2 else document.setdefault("components", {})
    schemas: Document = parent.setdefault("definitions" if version == 2 else "schemas", {})
    return schemas
