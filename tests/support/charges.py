"""Charges of a shop: how views make them, and which are committed."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tests.support.apps import Shop


def add(shop: Shop, amount: int = 100) -> Any:
    """A charge, in the session and no further."""
    charge = shop.Charge(amount=amount)
    shop.db.session.add(charge)
    return charge


def charge(shop: Shop, amount: int = 100) -> None:
    """A charge, committed as apps do."""
    add(shop, amount)
    shop.db.session.commit()


def amounts(shop: Shop) -> list[int]:
    """The charges that are committed, seen from a connection of its own."""
    return sorted(row[0] for row in shop.execute(sa.select(shop.Charge.__table__.c.amount)))
