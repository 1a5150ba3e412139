"""A page for the shop API: pay, let the answer get lost, and see in the ledger what was charged."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from flask import Blueprint, Flask, Response
from flask.typing import ResponseReturnValue

from .. import create_app as create_api
from ..auth import authenticate, issue_token
from ..extensions import db, idempotency
from ..views import charge_card
from .lost import LostAnswers

#: The page loads its own files and asks its own server, and nothing else. No script is written into it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)

shop = Blueprint("shop", __name__, static_folder="static", static_url_path="/shop")
unguarded = Blueprint("unguarded", __name__, url_prefix="/unguarded")
unguarded.before_request(authenticate)


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """The shop API with its page at ``/``. Its tables are made here, so that the page works at once."""
    app = create_api(config)
    app.register_blueprint(shop)
    app.register_blueprint(unguarded)
    app.wsgi_app = LostAnswers(app.wsgi_app)  # type: ignore[method-assign]
    with app.app_context():
        db.create_all()
        db.engine.dispose()  # a server may fork now, and no connection may be in two processes
    return app


@shop.get("/")
def show_page() -> ResponseReturnValue:
    return shop.send_static_file("shop.html")


@shop.after_request
def keep_to_itself(response: Response) -> Response:
    """Put the page's policy on all that it consists of."""
    response.headers["Content-Security-Policy"] = POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
    return response


@shop.post("/visits")
@idempotency.exempt
def begin_visit() -> ResponseReturnValue:
    """Let anybody in who asks, as a tenant of their own with an empty ledger. A real shop has accounts."""
    return {"token": issue_token(f"visitor-{secrets.token_hex(8)}")}, 201, {"Cache-Control": "no-store"}


@unguarded.post("/charges")
@idempotency.exempt
def create_charge() -> ResponseReturnValue:
    """The twin of ``POST /charges`` for comparison: the same work without the guard, so each retry charges again."""
    return charge_card()
