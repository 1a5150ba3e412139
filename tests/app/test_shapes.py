"""Code and migration in either order: release 0.4 on this table, and this release on that of 0.4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotency.counting import write_counts
from flask_idempotency.errors import StoreError
from flask_idempotency.store.table import COUNTS, build_table
from tests.support.apps import Shop, assert_replayed, guard, new_key, send
from tests.support.release_0_4 import sent

Make = Callable[..., Shop]


def to_shape_1(shop: Shop) -> Shop:
    """Give the table the shape of release 0.4."""
    for name in COUNTS:
        shop.execute(sa.text(f"ALTER TABLE idempotency_keys DROP COLUMN {name}"))
    return shop


def rows(shop: Shop) -> list[Any]:
    """Key, status and attempts of each row, on a table of either shape."""
    return shop.execute(sa.text("SELECT key, status, attempts FROM idempotency_keys ORDER BY id"))


def test_release_0_4_on_the_new_table(shop: Shop) -> None:
    """What release 0.4 sends claims, records, takes over, begins anew, releases and prunes on the table as it is now,
    and each release replays what the other one has recorded.
    """
    key, token = new_key(), "a" * 32
    first = shop.charge(key)
    _, found = sent(shop, "find", scope="acme", key=key)
    assert (201, b'{"amount":100') == (found[0].response_status, bytes(found[0].response_body)[:13])
    fingerprint = found[0].request_fingerprint
    values = {"scope": "acme", "retention": 3600.0, "headers": "[]", "body": first.data, "fingerprint": fingerprint}
    other = new_key()
    assert 1 == sent(shop, "insert", key=other, token=token, **values)[0]
    held = {"id": shop.rows()[1]["id"], "key": other, "token": token, **values}
    assert 409 == shop.charge(other).status_code
    assert 1 == sent(shop, "record", **held)[0]
    assert_replayed(shop.charge(other), first)
    shop.shift(90_000)
    assert 1 == sent(shop, "fresh", seen=token, **{**held, "token": "b" * 32})[0]
    shop.shift(31)
    assert 1 == sent(shop, "takeover", seen="b" * 32, **held)[0]
    assert (2, 1) == (shop.rows()[1]["attempts"], sent(shop, "release_kept", **held)[0])
    assert 1 == sent(shop, "takeover", seen=token, **held)[0]
    assert 1 == sent(shop, "prune")[0]
    assert (1, []) == (sent(shop, "release", **held)[0], shop.rows())


def test_this_release_on_the_table_of_0_4(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Before the migration all requests are served, keys begin anew, prune and check work; counting says once that the
    migration is missing, and counts once it has been run.
    """
    shop = to_shape_1(make(count_replays=True, max_live_keys=5))
    key = new_key()
    first = shop.charge(key)
    assert_replayed(shop.charge(key), first)
    assert 422 == shop.charge(key, amount=1).status_code
    for _ in range(2):
        with pytest.raises(StoreError, match="flask db migrate"):
            write_counts(shop.app)
    shop.app.extensions["idempotency"].counting._write_quietly()
    shop.app.extensions["idempotency"].counting._write_quietly()
    (said,) = [one for one in caplog.records if "Counts of replays can't be written" in one.message]
    assert ("ERROR", True) == (said.levelname, "flask db upgrade" in said.message)
    shop.shift(90_000)
    assert "Idempotent-Replay" not in shop.charge(key).headers
    assert [(key, "completed", 1)] == rows(shop)
    check = shop.app.test_cli_runner().invoke(args=["idempotency", "check"])
    assert (1, True) == (check.exit_code, "release 0.4" in check.output)
    for name in COUNTS:
        shop.execute(sa.text(f"ALTER TABLE idempotency_keys ADD COLUMN {name} INTEGER"))
    write_counts(shop.app)
    assert (1, 1) == (shop.rows()[0]["replays"], shop.rows()[0]["mismatches"])
    shop.shift(90_000)
    prune = shop.app.test_cli_runner().invoke(args=["idempotency", "prune"])
    assert (0, []) == (prune.exit_code, rows(shop))


def test_the_rest_of_a_life_on_the_table_of_0_4(make: Make) -> None:
    """Takeovers, releases with steps, holds and what people settle need no newer column."""
    shop = to_shape_1(make())

    def step() -> tuple[str, int]:
        shop.idempotency.step("one", lambda: shop.runs.append("one"))
        return ("again", 503) if len(shop.runs) == 1 else ("held", 503)

    guard(shop, step, on_error="release")
    guard(shop, lambda: ("held", 500), "/held", on_error="hold")
    key, held = new_key(), new_key()
    assert 503 == send(shop, key).status_code
    assert 503 == send(shop, key).status_code
    assert 500 == send(shop, held, "/held").status_code
    assert [(key, "released", 2), (held, "held", 1)] == rows(shop)
    with shop.app.app_context():
        shop.idempotency.settle("acme", held, ("settled", 201))
        shop.idempotency.release("acme", held, force=True)
    assert [(key, "released", 2)] == rows(shop)


def test_atomic_on_the_table_of_0_4(make_atomic: Make) -> None:
    """In atomic mode a key past its retention begins anew within the transaction, whatever the table's shape."""
    for shop in (to_shape_1(make_atomic()), make_atomic(url="sqlite://")):
        key = new_key()
        shop.charge(key)
        shop.shift(90_000)
        again = shop.charge(key)
        assert (201, None) == (again.status_code, again.headers.get("Idempotent-Replay"))
        assert_replayed(shop.charge(key), again)
        assert [(key, "completed", 1)] == rows(shop)


def test_a_metadata_without_the_columns(sqlite_url: str) -> None:
    """A table that the app describes itself, as release 0.4 has it, is taken as it is."""
    built, own = build_table(sa.MetaData()), sa.MetaData()
    table = sa.Table(built.name, own, *(sa.Column(c.name, c.type) for c in built.c if c.name not in COUNTS))
    assert build_table(own) is table
