"""The objects that the whole app shares."""

from __future__ import annotations

from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase

from flask_idempotency import Idempotency


class Base(DeclarativeBase):
    """What all models have in common."""


db = SQLAlchemy(model_class=Base)
idempotency = Idempotency()
