"""Where keys are kept."""

from .base import RecordRefused, Store
from .sqlalchemy import SQLAlchemyStore

__all__ = ["RecordRefused", "SQLAlchemyStore", "Store"]
