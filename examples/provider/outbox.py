"""What the provider is to be told after a commit, and is told at least once."""

from __future__ import annotations

from flask import current_app
from sqlalchemy import delete, select, update

from .extensions import db
from .models import Charge, Message


def deliver() -> int:
    """Tell the provider what is in the outbox; returns how many messages that were.

    A process that dies between the provider's answer and the commit leaves the message in the outbox. It is delivered
    again with the same key, so that the provider takes the money once. The same holds for two that deliver at once.

    :raises OSError: the provider did not answer. What was not delivered stays in the outbox.
    """
    provider = current_app.extensions["provider"]
    messages = select(Message.id, Message.key, Charge.id, Charge.amount).join(Charge).order_by(Message.id)
    waiting = db.session.execute(messages).all()
    db.session.commit()  # hold no transaction while the provider takes its time
    for message, key, charge, amount in waiting:
        reference = provider.charge(amount, key)
        db.session.execute(update(Charge).where(Charge.id == charge).values(reference=reference))
        db.session.execute(delete(Message).where(Message.id == message))
        db.session.commit()
    return len(waiting)
