"""The ledger, and the outbox beside it. Amounts are whole cents."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column, relationship

from .extensions import db


class Charge(db.Model):  # type: ignore[name-defined, misc]
    """Money that is taken from a card. ``reference`` is the provider's name for it, once it was told."""

    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]
    # Unique: one payment at the provider is one charge here, whoever books it.
    reference: Mapped[str | None] = mapped_column(String(64), unique=True)

    def as_json(self) -> dict[str, Any]:
        """What a client sees of it."""
        return {"id": self.id, "amount": self.amount, "state": "charged" if self.reference else "pending"}


class Message(db.Model):  # type: ignore[name-defined, misc]
    """What the provider is still to be told: written in one transaction with the charge, deleted when it was told."""

    id: Mapped[int] = mapped_column(primary_key=True)
    charge_id: Mapped[int] = mapped_column(ForeignKey(Charge.id))
    key: Mapped[str] = mapped_column(String(36))  # the provider's idempotency key, the same on every delivery

    charge: Mapped[Charge] = relationship()
