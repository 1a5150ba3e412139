"""A shop whose views do what the header ``Do`` says, for tests of what is told about requests."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from flask import Response, abort, request

from flask_idempotency.heartbeat import heartbeat
from tests.support.apps import Shop, until


def equip(shop: Shop) -> Shop:
    """Give a shop its views: ``/x``, which ``Do`` tells how to end, and others that are guarded less, or not at all."""

    @shop.app.post("/x/<int:number>", endpoint="x")
    @shop.app.post("/x", endpoint="x")
    @shop.idempotency.required
    def view(number: int = 0) -> Response:
        do = request.headers.get("Do", "")
        if do == "die":
            raise SystemExit
        if do.startswith("commit"):
            shop.db.session.add(shop.Charge(amount=1))
            shop.db.session.commit()
            do = "503" if do == "commit" else "raise"
        if do == "raise":
            raise ZeroDivisionError
        if do == "wait":
            entered, go = shop.app.config["EVENTS"]
            entered.set()
            assert go.wait(20)
            return Response("waited", 201)
        if do == "drop":
            drop(shop)
        if do.isdigit():
            abort(int(do))
        return Response("ran", 201)

    unguarded = shop.idempotency.required(on_store_error="execute")(lambda: "unguarded")
    shop.app.post("/unguarded", endpoint="unguarded")(unguarded)
    shop.app.post("/optional", endpoint="optional")(shop.idempotency.optional(lambda: "optional"))
    shop.app.post("/open", endpoint="open")(lambda: "open")
    return shop


def drop(shop: Shop) -> None:
    """Take the table of keys away."""
    shop.execute(sa.text("DROP TABLE idempotency_keys"))


def mend(shops: Iterable[Shop]) -> None:
    """Put it back, and see what waited for it written: it would be tried again and again."""
    for shop in shops:
        with shop.app.app_context():
            shop.db.create_all()
    for live in list(heartbeat._postponed.values()):
        heartbeat.postponed(live.store, live.claim.scope, live.claim.key)
    until(lambda: not heartbeat._live)
