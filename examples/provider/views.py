"""The same charge twice: in default mode, with a step, and in atomic mode, with an outbox."""

from __future__ import annotations

import uuid

from flask import Blueprint, abort, current_app, request
from flask.typing import ResponseReturnValue
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from . import outbox
from .extensions import db, idempotency
from .models import Charge, Message

charges = Blueprint("charges", __name__)


@charges.post("/charges")
@idempotency.required
def create_charge() -> ResponseReturnValue:
    """Default mode. The client waits for the provider, and learns what it said."""
    amount = read_amount()
    provider = current_app.extensions["provider"]
    key = idempotency.derive_key("charge")  # the same on every attempt at this operation
    reference = idempotency.step("charge", lambda: provider.charge(amount, key))
    charge = Charge(amount=amount, reference=reference)
    db.session.add(charge)
    try:
        db.session.commit()
    except IntegrityError:  # an attempt before this one has committed, and died before its answer was recorded
        db.session.rollback()
        charge = db.session.scalars(select(Charge).where(Charge.reference == reference)).one()
    return charge.as_json(), 201


@charges.post("/orders")
@idempotency.required(atomic=True)
def create_order() -> ResponseReturnValue:
    """Atomic mode. The client learns that the charge is booked; the provider is told once that is committed."""
    charge = Charge(amount=read_amount())
    db.session.add(charge)
    db.session.add(Message(charge=charge, key=str(uuid.uuid4())))
    db.session.flush()  # for the number; the commit is the extension's
    idempotency.after_commit(outbox.deliver)
    return charge.as_json(), 202


def read_amount() -> int:
    """The amount in cents; 400 if it can't be one."""
    body = request.get_json()
    amount = body.get("amount") if isinstance(body, dict) else None
    return amount if type(amount) is int and 1 <= amount <= 99_999_999 else abort(400, "amount must be whole cents.")
