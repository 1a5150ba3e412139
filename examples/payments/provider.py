"""A stand-in for the payment provider: slow, as they are, and it takes no real money."""

from __future__ import annotations

import secrets
import time

from flask import current_app

#: The card that is always declined.
DECLINED_CARD = "card-declined"


class Declined(Exception):
    """The card's bank said no."""


def charge(card: str, amount: int, currency: str, *, key: str) -> str:
    """Take money from a card, and return the provider's reference for it.

    :param key: the provider's own idempotency key. A real one would take the money once for each.
    :raises Declined: there is no money to be had from this card.
    """
    time.sleep(current_app.config["PROVIDER_DELAY"])
    if card == DECLINED_CARD:
        raise Declined("The card was declined.")
    return f"ch_{secrets.token_hex(8)}"
