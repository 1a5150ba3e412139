"""Flask-Idempotency: ``POST`` and ``PATCH`` that are safe to retry."""

from .extension import Idempotency

__version__ = "0.5.0"

__all__ = ["Idempotency", "__version__"]
