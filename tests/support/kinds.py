"""A shop with views of each kind, each of which makes one charge, and what a client does there."""

from __future__ import annotations

import sqlalchemy as sa
from flask import request
from werkzeug.test import TestResponse

from tests.support.apps import Shop, make_shop, send, until


def make_kinds(url: str) -> Shop:
    """A shop with a view that commits under ``/plain``, one of steps under ``/stepped``, and an atomic one under
    ``/atomic``. Each charges what the header ``X-Amount`` says; steps charge by noting their derived key in ``runs``.
    """
    shop = make_shop(url, retry_after=0.01)
    session, told = shop.db.session, shop.runs

    def plain() -> tuple[str, int]:
        session.add(shop.Charge(amount=int(request.headers["X-Amount"])))
        session.commit()
        return "x", 201

    def stepped() -> tuple[str, int]:
        derived = shop.idempotency.derive_key("provider")
        shop.idempotency.step("charge", lambda: told.append(derived))
        return shop.idempotency.step("mail", lambda: "sent"), 201

    def savepoints() -> tuple[str, int]:
        plain()
        with session.begin_nested():
            session.add(shop.Charge(amount=-int(request.headers["X-Amount"])))
        return "x", 201

    guard = shop.idempotency.required
    shop.app.post("/plain", endpoint="plain")(guard(plain))
    shop.app.post("/stepped", endpoint="stepped")(guard(stepped))
    shop.app.post("/atomic", endpoint="atomic")(guard(atomic=True)(savepoints))
    return shop


def ask(shop: Shop, path: str, key: str, amount: int) -> TestResponse:
    """One request."""
    return send(shop, key, path, headers={"Idempotency-Key": key, "X-Tenant": "acme", "X-Amount": str(amount)})


def settled(shop: Shop, path: str, key: str, amount: int) -> TestResponse:
    """What a client has who retries until an answer is final."""
    answers: list[TestResponse] = []

    def final() -> bool:
        answers.append(ask(shop, path, key, amount))
        in_flight = answers[-1].status_code == 409 and answers[-1].json["type"].endswith("in-flight")
        return not in_flight and answers[-1].status_code < 500

    until(final)
    return answers[-1]


def charged(shop: Shop, amount: int) -> int:
    """How many charges of that amount there are."""
    amounts = shop.Charge.__table__.c.amount
    ((count,),) = shop.execute(sa.select(sa.func.count()).where(amounts == amount))
    return int(count)
