"""One request in a process that ends at each of its statements in turn: before it is sent, or after its reply came.

A program of its own, which prints where the processes ended. Each has a key and an amount of its own, by the number
of its point, counted from 1; number 0 runs to its end before.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from flask import Response, request
from sqlalchemy.engine.default import DefaultDialect
from werkzeug.test import TestResponse

from flask_idempotency.store.message import Message
from tests.support.apps import Shop, close, make_shop

DIED = 9


def make_killable(url: str, ledger: Path, **config: Any) -> Shop:
    """A shop with a view of steps under ``/steps``, and where there is such a mode, an atomic one under ``/atomic``.

    :param ledger: the other systems' book: a line for each time that they are asked for something.
    """
    shop = make_shop(url, **config)
    session, Charge = shop.db.session, shop.Charge

    def tell(what: str, derived: str = "-") -> dict[str, str]:
        line = f"{what} {request.headers['Idempotency-Key']} {derived}\n"
        with ledger.open("a") as book:
            book.write(line)
        return {"told": what}

    @shop.app.post("/steps")
    @shop.idempotency.required
    def steps() -> tuple[Any, int]:
        key = shop.idempotency.derive_key("charge")
        charged = shop.idempotency.step("charge", lambda: tell("charge", key))
        mailed = shop.idempotency.step("mail", lambda: tell("mail"))
        session.add(Charge(amount=request.get_json()["amount"]))
        session.commit()
        return [charged, mailed], 201

    def atomic() -> tuple[Any, int]:
        shop.idempotency.after_commit(lambda: tell("committed"))
        amount = int(request.headers["X-Number"])
        session.add(Charge(amount=amount))
        session.commit()
        with session.begin_nested():
            session.add(Charge(amount=amount))
        return {}, 201  # and leaves the second one to be committed with the record

    if url.startswith(("sqlite", "postgresql")):
        shop.app.post("/atomic")(shop.idempotency.required(atomic=True)(atomic))
    return shop


def ask(shop: Shop, path: str, key: str, number: int) -> TestResponse:
    """The request of one point."""
    headers = {"Idempotency-Key": f"{key}-{number}", "X-Tenant": "acme", "X-Number": str(number)}
    # An atomic request's fingerprint is the same for all numbers: so rows can be made of one another.
    return shop.client.post(path, headers=headers, json={} if path == "/atomic" else {"amount": number})


def leave_stale(shop: Shop, key: str, number: int) -> None:
    """Leave a point's key as somebody in the default mode has who died an hour ago: made of the first one's row."""
    (row,) = [one for one in shop.rows() if one["key"] == f"{key}-0"]
    answer = {name: sa.null() for name in row if name.startswith("response_") or name in ("steps", "completed_at")}
    died = {"status": "in_progress", "fencing_token": "a", "locked_at": row["locked_at"] - timedelta(hours=1)}
    values = {**row, **answer, **died, "key": f"{key}-{number}"}
    del values["id"]
    shop.execute(sa.insert(shop.table).values(values))


def watch(point: Callable[[str], None]) -> None:
    """Call ``point`` before and after everything that is sent, on whichever engine's connection."""
    commit = DefaultDialect.do_commit

    def do_commit(self: DefaultDialect, connection: Any) -> None:
        point("before COMMIT")
        commit(self, connection)
        point("after COMMIT")

    pass_on = Message.pass_on

    def passed_on(self: Message, dialect: sa.Dialect, driver: Any, values: Mapping[str, Any]) -> tuple[list[Any], int]:
        point(f"before {self._text}")
        found = pass_on(self, dialect, driver, values)
        point(f"after {self._text}")
        return found

    Message.pass_on = passed_on  # type: ignore[method-assign]
    DefaultDialect.do_commit = do_commit  # type: ignore[method-assign]
    sa.event.listen(sa.Engine, "before_cursor_execute", lambda c, cursor, text, *rest: point(f"before {text}"))
    sa.event.listen(sa.Engine, "after_cursor_execute", lambda c, cursor, text, *rest: point(f"after {text}"))


def die_at(last: int, writing: int, serve: Callable[[], TestResponse], status: int) -> None:
    """Serve, tell at the point of that number where it is, and end there."""
    seen = 0

    def point(what: str) -> None:
        nonlocal seen
        seen += 1
        if seen == last:
            os.write(writing, what.encode())
            os._exit(DIED)

    watch(point)
    os._exit(0 if serve().status_code == status else 1)


def main(url: str, ledger: str, path: str, key: str, status: str, over_stale: str, config: str) -> None:
    """Fork processes until one gets through, each of them over a stale claim if this is asked for."""
    shop = make_killable(url, Path(ledger), **json.loads(config))

    @shop.app.after_request
    def decide(response: Response) -> Response:
        response.status_code = int(status)
        return response

    # What only a first request does is done: from here on all of them send the same.
    assert int(status) == ask(shop, path, key, 0).status_code
    points: list[str] = []
    while True:
        reading, writing = os.pipe()
        number = len(points) + 1
        if over_stale == "True":
            leave_stale(shop, key, number)
        close(shop.app)  # a connection is nothing that two processes could share
        child = os.fork()
        if child == 0:
            serve = functools.partial(ask, shop, path, key, number)
            die_at(number, writing, serve, int(status))
        os.close(writing)
        with open(reading, "rb") as pipe:
            what = pipe.read().decode()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            break
        assert code == DIED, code
        points.append(what)
    print(json.dumps(points))


if __name__ == "__main__":
    main(*sys.argv[1:])
