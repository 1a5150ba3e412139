"""The ledger, and who may write into it. Amounts are whole cents."""

from __future__ import annotations

from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column, relationship

from .extensions import db


class Tenant(db.Model):  # type: ignore[name-defined, misc]
    """A customer of this API."""

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)


class ApiCredential(db.Model):  # type: ignore[name-defined, misc]
    """A bearer token, kept as its hash alone. Deleting it revokes the token."""

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[int] = mapped_column(ForeignKey(Tenant.id), index=True)
    token_hash: Mapped[str] = mapped_column(String(64), unique=True)

    tenant: Mapped[Tenant] = relationship()


class Charge(db.Model):  # type: ignore[name-defined, misc]
    """Money that was taken from a card."""

    __table_args__ = (CheckConstraint("refunded BETWEEN 0 AND amount", name="refunded_at_most_once"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[int] = mapped_column(ForeignKey(Tenant.id), index=True)
    amount: Mapped[int]
    currency: Mapped[str] = mapped_column(String(3))
    reference: Mapped[str] = mapped_column(String(64))  # the provider's name for it
    refunded: Mapped[int] = mapped_column(default=0)

    def as_json(self) -> dict[str, Any]:
        """What a client sees of it."""
        return {
            "id": self.id,
            "amount": self.amount,
            "currency": self.currency,
            "reference": self.reference,
            "refunded": self.refunded,
        }


class Refund(db.Model):  # type: ignore[name-defined, misc]
    """Money that goes back, all of a charge or a part of it."""

    id: Mapped[int] = mapped_column(primary_key=True)
    charge_id: Mapped[int] = mapped_column(ForeignKey(Charge.id), index=True)
    amount: Mapped[int]

    def as_json(self) -> dict[str, Any]:
        """What a client sees of it."""
        return {"id": self.id, "charge_id": self.charge_id, "amount": self.amount}
