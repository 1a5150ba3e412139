"""A shop that takes money through a payment provider: in default mode with steps, and in atomic mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from flask import Flask
from flask.cli import with_appcontext

from . import accidents, outbox
from .extensions import db, idempotency
from .provider import Provider
from .views import charges


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """The app, configured by defaults, then by ``FLASK_…`` environment variables, then by ``config``."""
    app = Flask(__name__)
    app.config.from_mapping(
        SQLALCHEMY_DATABASE_URI="sqlite:///provider.sqlite",
        SECRET_KEY="of this example alone",  # derived keys are made with it
        PROVIDER_URL="http://127.0.0.1:8001",
    )
    app.config.from_prefixed_env()
    app.config.from_mapping(config)
    app.extensions["provider"] = Provider(app.config["PROVIDER_URL"])
    db.init_app(app)
    idempotency.init_app(app, db)
    app.register_blueprint(charges)
    app.cli.add_command(deliver_command)
    if app.config.get("ACCIDENTS"):
        accidents.install(app)
    return app


@click.command("deliver")
@with_appcontext
def deliver_command() -> None:
    """Tell the provider what the outbox still holds. Run it from cron, beside the app."""
    click.echo(f"Delivered {outbox.deliver()}.")
