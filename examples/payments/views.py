"""The routes. The two that move money are guarded."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, abort, g, request, url_for
from flask.typing import ResponseReturnValue
from sqlalchemy import select, update
from werkzeug.exceptions import HTTPException

from . import provider
from .auth import authenticate
from .extensions import db, idempotency
from .models import Charge, Refund

#: In cents: enough for a shop, and far from what an INTEGER column can't hold.
LARGEST_AMOUNT = 99_999_999


class PaymentRequired(HTTPException):
    """The card was declined."""

    code = 402


payments = Blueprint("payments", __name__)
payments.before_request(authenticate)


@payments.get("/charges")
def list_charges() -> ResponseReturnValue:
    charges = db.session.scalars(select(Charge).where(Charge.tenant_id == g.tenant_id).order_by(Charge.id))
    return {"charges": [charge.as_json() for charge in charges]}


@payments.get("/charges/<int:charge_id>")
def get_charge(charge_id: int) -> ResponseReturnValue:
    return find_charge(charge_id).as_json()


@payments.post("/charges")
@idempotency.required
def create_charge() -> ResponseReturnValue:
    return charge_card()


def charge_card() -> ResponseReturnValue:
    """Take the money that the request asks for, and write it into the ledger."""
    body = read_body()
    amount, currency, card = read_amount(body), read_text(body, "currency"), read_text(body, "card")
    if len(currency) != 3:
        abort(400, "currency must be a code of three letters.")
    db.session.close()  # hold no connection while the provider takes its time
    try:
        # Should this process be killed after the provider has taken the money, the attempt that takes over asks with
        # the same key: for the same charge, not for another one.
        reference = provider.charge(card, amount, currency, key=idempotency.derive_key("charge"))
    except provider.Declined as declined:
        # An answer like any other: it is recorded, and a retry gets it again. Another card is another operation.
        raise PaymentRequired(str(declined)) from declined
    charge = Charge(tenant_id=g.tenant_id, amount=amount, currency=currency, reference=reference)
    db.session.add(charge)
    db.session.commit()
    return charge.as_json(), 201, {"Location": url_for("payments.get_charge", charge_id=charge.id)}


@payments.get("/charges/<int:charge_id>/refunds")
def list_refunds(charge_id: int) -> ResponseReturnValue:
    charge = find_charge(charge_id)
    refunds = db.session.scalars(select(Refund).where(Refund.charge_id == charge.id).order_by(Refund.id))
    return {"refunds": [refund.as_json() for refund in refunds]}


@payments.post("/charges/<int:charge_id>/refunds")
@idempotency.required
def create_refund(charge_id: int) -> ResponseReturnValue:
    amount = read_amount(read_body())
    charge = find_charge(charge_id)
    # One statement checks and books, so that two refunds at once can't exceed the charge together.
    booked = db.session.scalar(
        update(Charge)
        .where(Charge.id == charge.id, Charge.refunded + amount <= Charge.amount)
        .values(refunded=Charge.refunded + amount)
        .returning(Charge.id)
    )
    if booked is None:
        db.session.rollback()
        abort(422, "The refunds of a charge can't exceed its amount.")
    refund = Refund(charge_id=charge_id, amount=amount)
    db.session.add(refund)
    db.session.commit()
    return refund.as_json(), 201


def find_charge(charge_id: int) -> Charge:
    """One of the tenant's own charges; to anybody else it does not exist."""
    mine = select(Charge).where(Charge.id == charge_id, Charge.tenant_id == g.tenant_id)
    charge: Charge | None = db.session.scalar(mine)
    return charge or abort(404, "There is no such charge.")


def read_body() -> dict[str, Any]:
    """The JSON object that was sent; 400 if it is none."""
    body = request.get_json()
    return body if isinstance(body, dict) else abort(400, "The body must be a JSON object.")


def read_amount(body: dict[str, Any]) -> int:
    """The amount in cents; 400 if it can't be one."""
    amount = body.get("amount")
    if type(amount) is not int or not 1 <= amount <= LARGEST_AMOUNT:
        abort(400, f"amount must be a whole number of cents, from 1 to {LARGEST_AMOUNT}.")
    return amount


def read_text(body: dict[str, Any], name: str) -> str:
    """A string that must not be empty; 400 if it is none."""
    text = body.get(name)
    return text if isinstance(text, str) and text else abort(400, f"{name} must be a string that is not empty.")
