"""The objects that the whole app shares."""

from __future__ import annotations

from flask import request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase

from flask_idempotency import Idempotency


class Base(DeclarativeBase):
    """What all models have in common."""


db = SQLAlchemy(model_class=Base)
idempotency = Idempotency()

#: The accounts, by their tokens. A real app has them in its database, as ``examples/payments`` does.
ACCOUNTS = {"Bearer token-of-acme": "acme"}


@idempotency.scope_loader
def account() -> str | None:
    """Who is calling; a caller who is unknown gets 401."""
    return ACCOUNTS.get(request.headers.get("Authorization", ""))
