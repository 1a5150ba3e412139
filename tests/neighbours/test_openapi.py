"""The OpenAPI documents of flask-smorest, APIFlask and Flask-RESTX, with what holds of guarded routes."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import flask_restx
import flask_smorest
import marshmallow
import pytest
import sqlalchemy as sa
from apiflask import APIFlask, Schema
from apiflask.fields import Integer
from flask import Blueprint, Flask
from hypothesis import example, given
from hypothesis import strategies as st
from openapi_spec_validator import OpenAPIV2SpecValidator, OpenAPIV30SpecValidator, OpenAPIV31SpecValidator

from flask_idempotency import Idempotency
from flask_idempotency.contrib import apiflask, openapi, restx, smorest
from flask_idempotency.errors import ConfigurationError, KeyInvalid
from flask_idempotency.key import parse_header

#: The extension wants a database, and no document needs one.
ENGINE = sa.create_engine("sqlite://")

VALIDATORS = {"2.0": OpenAPIV2SpecValidator, "3.0.3": OpenAPIV30SpecValidator, "3.1.0": OpenAPIV31SpecValidator}


class Amount(marshmallow.Schema):
    """What a client sends."""

    amount = marshmallow.fields.Integer(required=True)


class Headers(marshmallow.Schema):
    """A header of the key that the app has documented itself."""

    key = marshmallow.fields.UUID(data_key="idempotency-key", metadata={"description": "Mine."})


class Toolkit:
    """An app whose toolkit writes a document; routes are added one by one.

    :ivar idempotency: the extension, whose table is never needed.
    """

    version: str
    prefix = ""
    media_type = "application/problem+json"

    def __init__(self, app: Flask) -> None:
        self.app = app
        self.idempotency = Idempotency(app, ENGINE)

    def add(
        self, path: str, view: Callable[..., Any] | None = None, *, arguments: bool = False, **methods: Any
    ) -> None:
        """Add a route for POST, or for other methods, each with its view; with arguments that the toolkit checks."""
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """The document as it is served, which is valid."""
        served = self.app.test_client().get("/openapi.json")
        assert 200 == served.status_code, served.text
        return valid(served.json)


class Smorest(Toolkit):
    """flask-smorest's."""

    def __init__(self, app: Flask, version: str) -> None:
        app.config.update(API_TITLE="Charges", API_VERSION="1", OPENAPI_VERSION=version, OPENAPI_URL_PREFIX="/")
        super().__init__(app)
        self.version = version
        self.api = flask_smorest.Api(app)
        smorest.document(self.api)

    def add(
        self, path: str, view: Callable[..., Any] | None = None, *, arguments: bool = False, **methods: Any
    ) -> None:
        blueprint = flask_smorest.Blueprint(f"b{len(self.app.blueprints)}", __name__)
        for method, one in ({"post": view} if view else methods).items():
            one = blueprint.arguments(Amount)(one) if arguments else one
            blueprint.route(path, methods=[method.upper()])(one)
        self.api.register_blueprint(blueprint)


class OnAPIFlask(Toolkit):
    """APIFlask's."""

    def __init__(self, app: APIFlask, version: str) -> None:
        app.config["OPENAPI_VERSION"] = self.version = version
        super().__init__(app)
        apiflask.document(app)

    def add(
        self, path: str, view: Callable[..., Any] | None = None, *, arguments: bool = False, **methods: Any
    ) -> None:
        assert isinstance(self.app, APIFlask)
        for method, one in ({"post": view} if view else methods).items():
            one = self.app.input(Amount)(one) if arguments else one
            self.app.route(path, methods=[method.upper()], endpoint=f"e{len(self.app.view_functions)}")(one)


class Restx(Toolkit):
    """Flask-RESTX's."""

    version = "2.0"
    media_type = "application/json"

    def __init__(self, app: Flask, version: str) -> None:
        super().__init__(app)
        self.api = flask_restx.Api(app)
        restx.document(self.api)

    def add(
        self, path: str, view: Callable[..., Any] | None = None, *, arguments: bool = False, **methods: Any
    ) -> None:
        views = {"post": view} if view else methods
        name = f"R{len(self.app.view_functions)}"
        self.api.add_resource(type(name, (flask_restx.Resource,), dict(views)), path)

    def document(self) -> dict[str, Any]:
        """The document as it is served, which is valid."""
        served = self.app.test_client().get("/swagger.json")
        assert 200 == served.status_code, served.text
        return valid(served.json)


def valid(document: dict[str, Any]) -> dict[str, Any]:
    """A document, once a validator of its version has found nothing."""
    version = document.get("swagger") or document["openapi"]
    assert [] == [error.message for error in VALIDATORS[version](document).iter_errors()]
    return document


KITS = {
    "smorest-2.0": (Flask, Smorest, "2.0"),
    "smorest-3.0": (Flask, Smorest, "3.0.3"),
    "smorest-3.1": (Flask, Smorest, "3.1.0"),
    "apiflask-3.0": (APIFlask, OnAPIFlask, "3.0.3"),
    "apiflask-3.1": (APIFlask, OnAPIFlask, "3.1.0"),
    "restx": (Flask, Restx, "2.0"),
}

Make = Callable[..., Toolkit]


@pytest.fixture(params=list(KITS))
def make(request: pytest.FixtureRequest) -> Make:
    """A function that makes an app of a toolkit, once for each and for each version of OpenAPI."""

    def build(**config: Any) -> Toolkit:
        app_class, kit, version = KITS[request.param]
        app = app_class("documented")
        app.config.update(config)
        return kit(app, version)

    return build


def view() -> Callable[..., Any]:
    """A view that is never called, and that no other route has."""

    def view(*_: Any, **__: Any) -> dict[str, int]:
        raise AssertionError

    return view


def header(document: dict[str, Any], path: str, method: str = "post", name: str = "Idempotency-Key") -> Any:
    """The parameter of that name of an operation, its schema's members beside the others; ``None``: it has none."""
    item = document["paths"][path]
    found = [
        one
        for one in [*item.get("parameters", ()), *item[method].get("parameters", ())]
        if (one["in"], one["name"]) == ("header", name)
    ]
    assert len(found) <= 1
    return {**found[0], **found[0].get("schema", {})} if found else None


def problems(kit: Toolkit, document: dict[str, Any], path: str, method: str = "post") -> dict[str, str]:
    """The descriptions of the answers of an operation that are problems, by status."""
    found = {}
    for status, answer in document["paths"][path][method]["responses"].items():
        schema = answer.get("schema") or answer.get("content", {}).get(kit.media_type, {}).get("schema", {})
        if schema.get("$ref", "").endswith("/IdempotencyProblem"):
            found[status] = answer["description"]
    return found


def test_required_and_optional(make: Make) -> None:
    """Each guarded route has the header, required or not, its length and pattern, and the three problem answers."""
    kit = make()
    kit.add("/required", kit.idempotency.required(view()))
    kit.add("/optional", kit.idempotency.optional(view()))
    document = kit.document()
    for path, required in (("/required", True), ("/optional", False)):
        found = header(document, path)
        assert (required, "string", 8, 255) == tuple(
            found[one] for one in ("required", "type", "minLength", "maxLength")
        )
        assert openapi.pattern(8) == found["pattern"]
        assert "retry" in found["description"]
        assert ["400", "409", "422"] == sorted(problems(kit, document, path))
        assert "Retry-After" in document["paths"][path]["post"]["responses"]["409"]["headers"]
    assert "key-missing" in problems(kit, document, "/required")["400"]
    assert "key-missing" not in problems(kit, document, "/optional")["400"]
    schemas = document.get("definitions") or document["components"]["schemas"]
    assert ["type", "title", "status", "detail", "error"] == schemas["IdempotencyProblem"]["required"]


def test_routes_without_a_guard_say_nothing(make: Make) -> None:
    """What is not guarded, or of another method than the guard looks at, is documented as before."""
    kit = make()
    kit.add("/plain", view())
    kit.add("/guarded", get=view(), post=kit.idempotency.required(view()), put=view())
    document = kit.document()
    for path, method in (("/plain", "post"), ("/guarded", "get"), ("/guarded", "put")):
        assert (None, {}) == (header(document, path, method), problems(kit, document, path, method))
    assert header(document, "/guarded")["required"]


def test_nothing_is_written_without_guards(make: Make) -> None:
    """Without a guarded route, or switched off, the document has no trace of the extension."""
    for kit in (make(), make(IDEMPOTENCY_ENABLED=False)):
        kit.add("/x", view() if kit.app.config.get("IDEMPOTENCY_ENABLED", True) else kit.idempotency.required(view()))
        assert "dempotency" not in json.dumps(kit.document()).replace("documented", "")


def test_options_of_the_route(make: Make) -> None:
    """The header's name, the shortest key, the status of a mismatch and the methods are the route's own."""
    kit = make(IDEMPOTENCY_HEADER="X-Key")
    own = {"header": "X-Request", "key_min_length": 20, "mismatch_status": 409, "methods": ["PUT"]}
    kit.add("/app", kit.idempotency.required(view()))
    kit.add("/own", put=kit.idempotency.required(**own)(view()))
    document = kit.document()
    assert header(document, "/app", name="X-Key")["required"]
    own_header = header(document, "/own", "put", "X-Request")
    assert (20, openapi.pattern(20)) == (own_header["minLength"], own_header["pattern"])
    found = problems(kit, document, "/own", "put")
    assert ["400", "409"] == sorted(found)
    assert "key-reused" in found["409"]


def test_a_key_from_elsewhere(make: Make) -> None:
    """Where the key comes from the app's callable there is no header, and there are the answers."""
    kit = make()
    kit.add("/hook", kit.idempotency.required(key=lambda: "delivery", scope="source")(view()))
    document = kit.document()
    assert header(document, "/hook") is None
    assert ["400", "409", "422"] == sorted(problems(kit, document, "/hook"))


def test_protected_and_exempt(make: Make) -> None:
    """``protect()`` counts, also after the routes and the document; ``exempt`` and other paths are left out."""
    kit = make()
    kit.add("/v1/charges", view())
    kit.add("/v1/free", kit.idempotency.exempt(view()))
    kit.add("/v1/own", kit.idempotency.optional(view()))
    kit.add("/v2/charges", view())
    kit.idempotency.protect(kit.app, paths="^/v1/")
    document = kit.document()
    assert [True, None, False, None] == [
        found and found["required"]
        for found in (header(document, path) for path in ("/v1/charges", "/v1/free", "/v1/own", "/v2/charges"))
    ]
    assert ["400", "409", "422"] == sorted(problems(kit, document, "/v1/charges"))
    assert {} == problems(kit, document, "/v1/free")
    # The first request puts the guard before the view.
    assert 400 == kit.app.test_client().post("/v1/charges").status_code
    assert document["paths"] == kit.document()["paths"]


def test_protected_in_part(make: Make) -> None:
    """Where only some paths of a rule are protected the header is not required: others do without."""
    kit = make()
    kit.add("/accounts/<name>/charges", view())
    kit.idempotency.protect(kit.app, paths="^/accounts/acme/")
    assert header(kit.document(), "/accounts/{name}/charges")["required"] is False


def test_problem_base(make: Make) -> None:
    """The types of the problems are those that the app sends."""
    kit = make(IDEMPOTENCY_PROBLEM_BASE="https://example.com/problems/")
    kit.add("/x", kit.idempotency.required(view()))
    assert "https://example.com/problems/key-reused" in problems(kit, kit.document(), "/x")["422"]


def test_the_document_twice(make: Make) -> None:
    """Asked for again, or with document() called twice, the document is the same."""
    kit = make()
    kit.add("/x", kit.idempotency.required(view()), arguments=True)
    first = kit.document()
    assert first == kit.document()
    twice = {Smorest: smorest, OnAPIFlask: apiflask, Restx: restx}[type(kit)]
    twice.document(getattr(kit, "api", kit.app))
    assert first == kit.document()


@pytest.mark.parametrize("make", [one for one in KITS if one != "restx"], indirect=True)  # it writes no such answer
def test_arguments_of_the_toolkit(make: Make) -> None:
    """An answer that the toolkit writes for its own checks says both: what it said, and the problem."""
    kit = make()
    kit.add("/x", kit.idempotency.required(view()), arguments=True)
    document = kit.document()
    answer = document["paths"]["/x"]["post"]["responses"]["422"]
    assert "key-reused" in answer["description"]
    if document.get("swagger"):
        assert "/Error" in answer["schema"]["$ref"]
    else:
        assert {"application/json", "application/problem+json"} == answer["content"].keys()


@pytest.mark.parametrize("make", [one for one in KITS if one.endswith(("3.0", "3.1"))], indirect=True)
def test_broken_json(make: Make) -> None:
    """What the toolkit answers to a body that is no JSON is documented beside the problems of that status."""
    kit = make()
    kit.add("/x", kit.idempotency.required(view()), arguments=True)
    broken = kit.app.test_client().post("/x", data="{", content_type="application/json")
    document = kit.document()
    answer = document["paths"]["/x"]["post"]["responses"][str(broken.status_code)]
    assert ("400", ["400", "409", "422"]) == (str(broken.status_code), sorted(problems(kit, document, "/x")))
    assert {"application/json", "application/problem+json"} == answer["content"].keys()
    name = answer["content"][broken.mimetype]["schema"]["$ref"].rpartition("/")[2]
    assert broken.json.keys() <= document["components"]["schemas"][name]["properties"].keys()


def test_a_default_answer(smorest_kit: Smorest) -> None:
    """What the default answer covers stays covered for the statuses that hide it now, and it stays itself."""
    smorest_kit.add("/x", smorest_kit.idempotency.required(view()))
    document = smorest_kit.document()
    answers = document["paths"]["/x"]["post"]["responses"]
    assert {"$ref": "#/components/responses/DEFAULT_ERROR"} == answers["default"]
    for status in ("400", "409", "422"):
        assert {"$ref": "#/components/schemas/Error"} == answers[status]["content"]["application/json"]["schema"]
        assert answers[status]["description"].startswith("Default error response. ")
    assert ["400", "409", "422"] == sorted(problems(smorest_kit, document, "/x"))


@pytest.mark.parametrize("given", ["4XX", "default", "409"])
def test_answers_that_lead_elsewhere(given: str) -> None:
    """A range covers what it covered, and what lies outside of the document stays a reference."""
    app = Flask("plain")
    idempotency = Idempotency(app, ENGINE)
    app.post("/x")(idempotency.required(view()))
    document: dict[str, Any] = {
        "openapi": "3.0.3",
        "info": {"title": "Charges", "version": "1"},
        "paths": {"/x": {"post": {"responses": {"default": {"description": "Any other."}}}}},
    }
    answers = document["paths"]["/x"]["post"]["responses"]
    content = {"text/plain": {"schema": {"type": "string"}}}
    answers[given] = {"$ref": "more.json#/Late"} if given == "409" else {"description": "Wrong.", "content": content}
    for _ in range(2):
        openapi.complete(document, openapi.guarded_routes(app), openapi.form_of(app, "3.0.3"))
        if given == "409":
            assert ({"$ref": "more.json#/Late"}, "Any other. ") == (answers["409"], answers["400"]["description"][:11])
        else:
            for status, begins in (("400", "Wrong. Idempotency key"), ("409", "Wrong. Request in flight")):
                assert answers[status]["description"].startswith(begins)
                assert {"text/plain", "application/problem+json"} == answers[status]["content"].keys()
            assert {"description": "Wrong.", "content": content} == answers[given]
            assert valid(document)


@pytest.fixture
def smorest_kit() -> Smorest:
    """An app with flask-smorest."""
    app = Flask("documented")
    return Smorest(app, "3.0.3")


def test_what_the_app_wrote_stays_in_smorest(smorest_kit: Smorest) -> None:
    """A header that the app documents itself stays as it wrote it, and its answers get the problems beside theirs."""
    blueprint = flask_smorest.Blueprint("own", __name__)
    mine = {"Application/Problem+JSON; charset=utf-8": {"schema": {"type": "object"}}}
    smorest_kit.api.spec.components.response("Mine", {"description": "My own.", "content": mine})

    @blueprint.route("/own", methods=["POST"])
    @blueprint.arguments(Headers, location="headers")
    @blueprint.alt_response(409, schema=Amount, description="Mine.")
    @blueprint.alt_response(400, "Mine")
    @smorest_kit.idempotency.required
    def own(headers: Any) -> None: ...

    smorest_kit.api.register_blueprint(blueprint)
    document = smorest_kit.document()
    responses = document["paths"]["/own"]["post"]["responses"]
    assert responses["409"]["description"].startswith("Mine. Request in flight (")
    assert {"$ref": "#/components/schemas/Amount"} == responses["409"]["content"]["application/json"]["schema"]
    assert "Retry-After" in responses["409"]["headers"]
    assert responses["400"]["description"].startswith("My own. Idempotency key missing (")
    assert mine == responses["400"]["content"]
    assert "My own." == document["components"]["responses"]["Mine"]["description"]
    assert ["409", "422"] == sorted(problems(smorest_kit, document, "/own"))
    assert document == smorest_kit.document()
    assert header(document, "/own") is None
    assert "Mine." == header(document, "/own", name="idempotency-key")["description"]


def test_a_header_of_the_whole_path_stays_in_smorest(smorest_kit: Smorest) -> None:
    """A header that the app documents for a path, by a reference, is seen."""
    mine = {"in": "header", "name": "Idempotency-Key", "schema": {"type": "string"}}
    smorest_kit.api.spec.components.parameter("Key", "header", mine)
    blueprint = flask_smorest.Blueprint("own", __name__)
    blueprint.route("/own", methods=["POST"], parameters=["Key"])(smorest_kit.idempotency.required(view()))
    smorest_kit.api.register_blueprint(blueprint)
    item = smorest_kit.document()["paths"]["/own"]
    assert [{"$ref": "#/components/parameters/Key"}] == item["parameters"]
    assert "parameters" not in item["post"]


def test_what_the_app_wrote_stays_in_apiflask() -> None:
    """A header that the app documents itself stays as it wrote it, and so does a header of its answers, beside which
    the problems stand; its processor comes last.
    """
    app = APIFlask("documented")
    kit = OnAPIFlask(app, "3.0.3")

    retry = {"retry-after": {"description": "Mine.", "schema": {"type": "string"}}}

    class Key(Schema):
        key = Integer(data_key="Idempotency-Key", metadata={"description": "Mine."})

    @app.post("/own")
    @app.input(Key, location="headers")
    @app.doc(responses={409: {"description": "Mine.", "headers": retry}, 422: "Mine, too."})
    @kit.idempotency.required
    def own(headers_data: Any) -> None: ...

    @app.spec_processor
    def last(spec: dict[str, Any]) -> dict[str, Any]:
        seen.append(sorted(spec["paths"]["/own"]["post"]["responses"]))
        return spec

    seen: list[list[str]] = []
    document = kit.document()
    responses = document["paths"]["/own"]["post"]["responses"]
    assert responses["409"]["description"].startswith("Mine. Request in flight (")
    assert responses["422"]["description"].startswith("Mine, too. Idempotency key reused (")
    assert retry == responses["409"]["headers"]
    assert {"$ref": "#/components/schemas/ValidationError"} == responses["422"]["content"]["application/json"]["schema"]
    assert ["400", "409", "422"] == sorted(problems(kit, document, "/own"))
    assert "Mine." == header(document, "/own")["description"]
    assert [["400", "409", "422"]] == seen


@pytest.mark.parametrize("errors", ["as JSON", "as HTML", "of a class"])
def test_errors_of_apiflask(errors: str) -> None:
    """An app that answers errors as HTML has no JSON in its document, and of a schema by class none is made."""
    app = APIFlask("documented", json_errors=errors != "as HTML")
    if errors == "of a class":
        app.config["HTTP_ERROR_SCHEMA"] = Amount
    kit = OnAPIFlask(app, "3.0.3")
    kit.add("/x", kit.idempotency.required(view()))
    content = kit.document()["paths"]["/x"]["post"]["responses"]["400"]["content"]
    schema = {"as JSON": {"$ref": "#/components/schemas/HTTPError"}, "of a class": {}}.get(errors)
    assert ({"schema": schema} if schema is not None else None) == content.get("application/json")


def test_what_the_app_wrote_stays_in_restx() -> None:
    """A header that the app documents itself stays as it wrote it; its answers keep their schema, or keep none, and say
    that they may be problems.
    """
    app = Flask("documented")
    kit = Restx(app, "2.0")

    @kit.api.route("/own")
    class Own(flask_restx.Resource):  # type: ignore[misc]
        @kit.api.doc(params={"Idempotency-Key": {"in": "header", "description": "Mine."}})
        @kit.api.response(409, "Mine.")
        @kit.idempotency.required
        def post(self) -> None: ...

    document = kit.document()
    found = document["paths"]["/own"]["post"]["responses"]["409"]
    assert found["description"].startswith("Mine. Request in flight (")
    assert {"description", "headers"} == found.keys()
    assert "Mine." == header(document, "/own")["description"]
    assert ["400", "422"] == sorted(problems(kit, document, "/own"))


@pytest.mark.parametrize("decorated", ["method_decorators", "decorators"])
def test_restx_on_a_blueprint_below_a_mount(decorated: str) -> None:
    """In an ``Api`` of a blueprint, with a prefix, namespaces and lists of decorators, under a mount point."""
    app = Flask("documented")
    idempotency = Idempotency(app, ENGINE)
    blueprint = Blueprint("api", __name__, url_prefix="/v1")
    api = flask_restx.Api(blueprint, prefix="/money")
    restx.document(api)
    namespace = api.namespace("charges", path="/charges")
    lists = {decorated: [idempotency.required]}
    namespace.route("/<int:id>")(type("Charge", (flask_restx.Resource,), {"post": view(), **lists}))
    app.register_blueprint(blueprint)
    served = app.test_client().get("/v1/money/swagger.json", environ_overrides={"SCRIPT_NAME": "/mounted"})
    document = valid(served.json)
    assert "/mounted/v1/money" == document["basePath"]
    assert header(document, "/charges/{id}")["required"]


def test_restx_stays_what_it_was() -> None:
    """The object is still of its class, subclasses included, and Postman's collection has the header, too."""

    class Own(flask_restx.Api):  # type: ignore[misc]
        pass

    app = Flask("documented")
    api = Own(app)
    restx.document(api)
    assert isinstance(api, Own)
    assert "Own" == type(api).__name__
    api.add_resource(type("X", (flask_restx.Resource,), {"post": Idempotency(app, ENGINE).required(view())}), "/x")
    with app.test_request_context():
        assert "Idempotency-Key" in json.dumps(api.as_postman())


def test_smorest_by_its_other_ways_out(smorest_kit: Smorest) -> None:
    """The command line and a script get the same document, and the toolkit's own object stays as it is."""
    smorest_kit.add("/x", smorest_kit.idempotency.required(view()))
    before = copy.deepcopy(smorest_kit.api.spec._paths)
    printed = smorest_kit.app.test_cli_runner().invoke(args=["openapi", "print"])
    assert smorest_kit.document() == json.loads(printed.output) == smorest_kit.api.spec.to_dict()
    assert before == smorest_kit.api.spec._paths


@pytest.mark.parametrize(
    ("module", "needs", "extra"),
    [(smorest, "flask_smorest", "smorest"), (apiflask, "apiflask", "apiflask"), (restx, "flask_restx", "restx")],
)
def test_a_missing_toolkit(monkeypatch: pytest.MonkeyPatch, module: ModuleType, needs: str, extra: str) -> None:
    """Without the toolkit the error names the extra to install."""
    monkeypatch.setitem(sys.modules, needs, None)
    with pytest.raises(ConfigurationError, match=re.escape(f"pip install 'Flask-Idempotency[{extra}]'")):
        module.document(object())


@pytest.mark.parametrize("module", [smorest, apiflask, restx])
def test_another_object(module: ModuleType) -> None:
    """What is not the toolkit's object is refused by name."""
    with pytest.raises(TypeError, match="not Flask"):
        module.document(Flask("plain"))


def test_smorest_before_its_app() -> None:
    """Before init_app there is no document, and the error says what comes first."""
    with pytest.raises(ConfigurationError, match=r"after api.init_app"):
        smorest.document(flask_smorest.Api())


def test_without_the_extension() -> None:
    """The document of an app without the extension is an error that says what to call, not one that lacks half."""
    app = Flask("documented")
    app.config.update(API_TITLE="Charges", API_VERSION="1", OPENAPI_VERSION="3.0.3")
    api = flask_smorest.Api(app)
    smorest.document(api)
    with pytest.raises(ConfigurationError, match=r"idempotency.init_app\(app\)"):
        api.spec.to_dict()


def keys() -> st.SearchStrategy[str]:
    printable = st.characters(min_codepoint=0x20, max_codepoint=0x7E)
    inside = st.lists(st.sampled_from(['\\"', "\\\\", "a", ",", '"', "\\", " "]) | printable, max_size=300)
    return st.one_of(
        st.text(printable, max_size=300),
        st.text(max_size=20),
        inside.map(lambda parts: f'"{"".join(parts)}"'),
        st.builds('"{}"{}'.format, st.text(printable, max_size=12), st.text(printable, max_size=4)),
    )


@given(keys(), st.sampled_from([1, 2, 8, 255]))
@example('"abcdef"', 8)
@example('"abcd"efgh', 8)
@example('"' + 255 * '\\"' + '"', 8)
@example("a", 1)
@example("ab", 2)
@example(255 * "a", 255)
@example(256 * "a", 8)
@example(f'"{256 * "a"}"', 8)
def test_the_schema_of_a_key(text: str, shortest: int) -> None:
    """The schema lets through the keys that the header takes, bare or in quotes, and no other."""
    if text != text.strip(" \t"):  # a server takes blanks at the ends away
        return
    fits = re.search(openapi.pattern(shortest).replace("$", r"\Z"), text) is not None
    try:
        parse_header(text, shortest)
    except KeyInvalid:
        assert not fits
    else:
        assert fits or (text.startswith('"') and '";' in text)  # parameters, of which the schema says nothing
