"""A small shop API, guarded by Flask-Idempotency: charges, refunds, and tenants with API tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from flask import Flask, json
from flask.cli import with_appcontext
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import HTTPException

from flask_idempotency.errors import IdempotencyError

from .auth import issue_token
from .extensions import db, idempotency
from .views import payments


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """The app, configured by defaults, then by ``FLASK_…`` environment variables, then by ``config``."""
    app = Flask(__name__)
    app.config.from_mapping(
        SQLALCHEMY_DATABASE_URI="sqlite:///payments.sqlite",
        SECRET_KEY="of this example alone",  # the keys for the provider are derived with it
        PROVIDER_DELAY=0.5,  # seconds that a charge takes
    )
    app.config.from_prefixed_env()
    app.config.from_mapping(config)
    db.init_app(app)
    idempotency.init_app(app, db)
    app.register_blueprint(payments)
    app.register_error_handler(HTTPException, as_problem)
    app.cli.add_command(issue_token_command)
    return app


def as_problem(error: HTTPException) -> ResponseReturnValue:
    """Every error as a problem document (RFC 9457); those of Flask-Idempotency are such already."""
    response = error.get_response()
    if not isinstance(error, IdempotencyError):
        problem = {"type": "about:blank", "title": error.name, "status": error.code, "detail": error.description}
        response.data = json.dumps(problem)
        response.content_type = "application/problem+json"
    return response


@click.command("issue-token")
@click.argument("tenant")
@with_appcontext
def issue_token_command(tenant: str) -> None:
    """Print a new API token of a tenant, who is added if new."""
    db.create_all()  # so that the example runs at once; a real app has migrations
    click.echo(issue_token(tenant))
