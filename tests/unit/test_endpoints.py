"""Which endpoint a stored path belongs to."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Blueprint, Flask
from werkzeug.routing import BaseConverter

from flask_idempotency.endpoints import CUT, Endpoints


class Account(BaseConverter):
    """An app's own converter, which may not be called: its database is not asked."""

    regex = "acc_[0-9]+"

    def to_python(self, value: str) -> Any:
        raise AssertionError("the converter was called")


def make(**config: Any) -> Flask:
    """An app with rules of several kinds."""
    app = Flask(__name__)
    app.config.update(config)
    app.url_map.converters["account"] = Account
    for rule, endpoint, methods in (
        ("/charges", "charges", ["POST"]),
        ("/charges", "list", ["GET"]),
        ("/charges/<int:id>", "change", ["PATCH"]),
        ("/charges/export", "export", ["PATCH", "POST"]),
        ("/charges/<id>/refunds/", "refunds", ["POST"]),
        ("/accounts/<account:account>/close", "close", ["POST"]),
        ("/files/<path:name>", "upload", ["POST", "PUT"]),
        ("/notes/<name>", "note", ["POST"]),
        ("/notes/<name>/<part>", "part", ["POST"]),
    ):
        app.add_url_rule(rule, endpoint, lambda **_: "", methods=methods)
    api = Blueprint("api", __name__, url_prefix="/api")
    api.add_url_rule("/charges", "charges", lambda: "", methods=["POST"])
    app.register_blueprint(api)
    return app


@pytest.mark.parametrize(
    ("endpoint", "method", "path"),
    [
        ("charges", "POST", "/charges"),
        ("api.charges", "POST", "/api/charges"),
        ("change", "PATCH", "/charges/7"),
        ("export", "PATCH", "/charges/export"),
        ("refunds", "POST", "/charges/7/refunds/"),
        ("close", "POST", "/accounts/acc_7/close"),
        ("upload", "PUT", "/files/a/b é.txt"),
        (None, "PATCH", "/charges"),
        (None, "PATCH", "/charges/seven"),
        (None, "POST", "/charges/7/refunds"),  # the client was sent on
        (None, "POST", "/accounts/7/close"),
        (None, "POST", "/gone"),
        (None, "POST", ""),
        (None, "melted", "/charges"),
    ],
)
def test_endpoints_of_paths(endpoint: str | None, method: str, path: str) -> None:
    """A path has the endpoint that a request for it reaches now, and none where no view would run."""
    assert endpoint == Endpoints(make()).at(method, path)


@pytest.mark.parametrize("root", ["/shop", "/shop/"])
def test_a_script_root_that_is_configured(root: str) -> None:
    """What APPLICATION_ROOT says is no part of the rules; a path without it may have come another way."""
    endpoints = Endpoints(make(APPLICATION_ROOT=root))
    assert ("charges", "charges") == (endpoints.at("POST", "/shop/charges"), endpoints.at("POST", "/charges"))
    assert None is endpoints.at("POST", "/shopcharges")
    assert None is endpoints.at("POST", "/other/charges")


def test_a_script_root_that_is_not_known() -> None:
    """Looked for below any root, a path has the endpoint of the longest part of it that has one."""
    endpoints = Endpoints(make())
    assert None is endpoints.at("POST", "/v1/charges")
    assert "charges" == endpoints.below("POST", "/v1/charges")
    assert "api.charges" == endpoints.below("POST", "/v1/mounted/api/charges")
    assert None is endpoints.below("POST", "/v1/gone")


def test_a_path_that_was_cut() -> None:
    """Where the end of a path is missing, its beginning tells, unless two endpoints' paths begin so."""
    endpoints = Endpoints(make(APPLICATION_ROOT="/shop"))
    for beginning, endpoint in (
        ("/accounts/acc_", "close"),
        ("/shop/accounts/acc_", "close"),
        ("/notes/", None),
        ("/gone/", None),
    ):
        assert endpoint == endpoints.at("POST", beginning.ljust(CUT, "7"))
    assert None is endpoints.at("POST", "/accounts/acc_".ljust(CUT - 1, "7"))
    assert "close" == endpoints.below("POST", "/v1/accounts/acc_".ljust(CUT, "7"))
    assert "note" == endpoints.at("POST", "/notes/".ljust(CUT - 1, "7"))


def test_hosts_and_subdomains() -> None:
    """A path has no host, so that the rules of all hosts are looked at."""
    app = Flask(__name__, host_matching=True, static_host="static.example")
    app.add_url_rule("/charges", "charges", lambda: "", methods=["POST"], host="<tenant>.example")
    assert "charges" == Endpoints(app).at("POST", "/charges")
    app = Flask(__name__)
    app.add_url_rule("/charges", "charges", lambda: "", methods=["POST"], subdomain="api")
    assert "charges" == Endpoints(app).at("POST", "/charges")


def test_the_apps_own_rules_stay() -> None:
    """Looking at the routes changes none of them."""
    app = make()
    before = [repr(rule) for rule in app.url_map.iter_rules()]
    Endpoints(app).at("POST", "/charges")
    assert before == [repr(rule) for rule in app.url_map.iter_rules()]
    assert 405 == app.test_client().patch("/charges").status_code
