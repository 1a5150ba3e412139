"""What a request costs: statements, round trips and commits, counted on the wire and at the server; never timed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from flask import request

from tests.support.apps import Shop, close, guard, make_shop, new_key, send, statements, until
from tests.support.postgres import Postgres
from tests.support.proxy import CuttingProxy

pytestmark = pytest.mark.each_driver


@pytest.fixture
def counted(tcp_url: str) -> Iterator[Shop]:
    """A shop on PostgreSQL behind the counting proxy, once for each driver, with every connection open already."""
    shop = make_shop(tcp_url)
    bare(shop)
    for _ in range(2):
        assert 201 == shop.charge(new_key()).status_code
    yield shop
    close(shop.app)


def bare(shop: Shop) -> None:
    """The same view without a guard."""

    @shop.app.post("/bare")
    def bare_charge() -> tuple[dict[str, Any], int]:
        charge = shop.Charge(amount=request.get_json()["amount"])
        shop.db.session.add(charge)
        shop.db.session.commit()
        return {"id": charge.id, "amount": charge.amount}, 201


@contextmanager
def cost(proxy: CuttingProxy) -> Iterator[dict[str, int]]:
    """Statements, round trips and transactions of a ``with`` block."""
    found: dict[str, int] = {}
    before = proxy.round_trips
    with proxy.counting() as statements:
        yield found
    begun = inside = alone = sent = 0
    for message in statements:
        words = words_of(message)
        sent += sum(word not in ("BEGIN", "COMMIT", "ROLLBACK") for word in words)
        begun += words.count("BEGIN")
        alone += not inside and "BEGIN" not in words
        for word in words:
            inside = word == "BEGIN" or (inside and word not in ("COMMIT", "ROLLBACK"))
    found.update(statements=sent, round_trips=proxy.round_trips - before, transactions=begun + alone)


def words_of(message: str) -> list[str]:
    """The first words of the statements of one message."""
    return [word.upper() for word in re.findall(r"(?:^|;\s*)(\w+)(?=[\s;]|$)", message.strip())]


def test_first_execution(counted: Shop, cutting_proxy: CuttingProxy) -> None:
    """A first run takes two messages, of three statements, and two commits beyond the view's own."""
    with cost(cutting_proxy) as without:
        counted.client.post("/bare", json={"amount": 1})
    with cost(cutting_proxy) as with_key:
        assert 201 == counted.charge(new_key()).status_code
    more = {"statements": 3, "round_trips": 2, "transactions": 2}
    assert {name: count + more[name] for name, count in without.items()} == with_key


def test_replay(counted: Shop, cutting_proxy: CuttingProxy) -> None:
    """A replay takes one round trip: an insert that inserts nothing, and the look-up."""
    key = new_key()
    counted.charge(key)
    with cost(cutting_proxy) as found:
        assert "true" == counted.charge(key).headers["Idempotent-Replay"]
    assert {"statements": 2, "round_trips": 1, "transactions": 1} == found


def test_mismatch(counted: Shop, cutting_proxy: CuttingProxy) -> None:
    """A mismatch costs what a replay does."""
    key = new_key()
    counted.charge(key)
    with cost(cutting_proxy) as found:
        assert 422 == counted.charge(key, amount=900).status_code
    assert {"statements": 2, "round_trips": 1, "transactions": 1} == found


def test_conflict(counted: Shop, cutting_proxy: CuttingProxy) -> None:
    """A duplicate in flight costs what a replay does."""
    key, inner = new_key(), []

    @counted.idempotency.required
    def slow() -> tuple[str, int]:
        with cost(cutting_proxy) as found:
            headers = {"Idempotency-Key": key, "X-Tenant": "acme"}
            inner.append(counted.client.post("/slow", headers=headers).status_code)
        inner.append(found)
        return "done", 201

    # Flask has served its first request already, so the route is put in place beneath it.
    counted.app.view_functions["slow"] = slow
    counted.app.url_map.add(counted.app.url_rule_class("/slow", endpoint="slow", methods=["POST"]))
    headers = {"Idempotency-Key": key, "X-Tenant": "acme"}
    assert 201 == counted.client.post("/slow", headers=headers).status_code
    assert [409, {"statements": 2, "round_trips": 1, "transactions": 1}] == inner


@pytest.mark.parametrize(
    ("key", "tenant", "status"), [(None, "acme", 400), ("short", "acme", 400), ("a, list of keys", "acme", 400)]
)
def test_rejection_before_the_claim(
    counted: Shop, cutting_proxy: CuttingProxy, key: str | None, tenant: str, status: int
) -> None:
    """Whoever is turned away before the claim costs the database nothing."""
    with cost(cutting_proxy) as found:
        assert status == counted.charge(key, tenant=tenant).status_code
    assert {"statements": 0, "round_trips": 0, "transactions": 0} == found


# Atomic mode


@pytest.fixture
def atomic(tcp_url: str) -> Iterator[Shop]:
    """As ``counted``, in atomic mode."""
    shop = make_shop(tcp_url, atomic=True)
    bare(shop)
    for view in (once, thrice, idle):
        shop.app.post(f"/bare-{view.__name__}", endpoint=f"bare-{view.__name__}")(lambda view=view: view(shop))
        guard(shop, lambda view=view: view(shop), f"/{view.__name__}")
    for path in ("/bare", "/bare-once", "/bare-thrice", "/bare-idle"):
        assert 201 == shop.client.post(path, json={"amount": 1}).status_code
    for path in ("/charges", "/once", "/thrice", "/idle"):
        assert 201 == send(shop, new_key(), path, json={"amount": 1}).status_code
    yield shop
    close(shop.app)


def once(shop: Shop) -> tuple[str, int]:
    """One unit of work."""
    shop.db.session.add(shop.Charge(amount=1))
    shop.db.session.commit()
    return "x", 201


def thrice(shop: Shop) -> tuple[str, int]:
    """Three units of work."""
    for amount in range(3):
        shop.db.session.add(shop.Charge(amount=amount))
        shop.db.session.commit()
    return "x", 201


def idle(shop: Shop) -> tuple[str, int]:
    """No work at all."""
    return "x", 201


def commits(found: list[str]) -> int:
    """How many of the statements are commits."""
    return sum(words_of(one).count("COMMIT") for one in found)


def test_first_execution_in_atomic_mode(atomic: Shop, cutting_proxy: CuttingProxy) -> None:
    """A first run has no commit beyond the view's, and the loading anew after it, which is work of the transaction,
    is one round trip less: there is nothing to begin and to roll back.
    """
    with cost(cutting_proxy) as without, cutting_proxy.counting() as bare_statements:
        assert 201 == atomic.client.post("/bare", json={"amount": 1}).status_code
    with cost(cutting_proxy) as with_key, cutting_proxy.counting() as seen:
        assert 201 == atomic.charge(new_key()).status_code
    assert 1 == commits(bare_statements) == commits(seen)
    # psycopg 3 forgets what it has prepared, for the app, with the first transaction after a rollback.
    assert with_key["round_trips"] - seen.count("DEALLOCATE ALL") < without["round_trips"], seen
    assert 1 == with_key["transactions"]


@pytest.mark.parametrize(("path", "more"), [("once", 0), ("thrice", -2), ("idle", 2)])
def test_what_a_view_adds_in_atomic_mode(atomic: Shop, cutting_proxy: CuttingProxy, path: str, more: int) -> None:
    """A view with one commit takes the round trips of the bare one; each further commit takes one less than there."""
    with cost(cutting_proxy) as without:
        assert 201 == atomic.client.post(f"/bare-{path}").status_code
    with cost(cutting_proxy) as with_key, cutting_proxy.counting() as seen:
        assert 201 == send(atomic, new_key(), f"/{path}").status_code
    assert (1, 1) == (commits(seen), with_key["transactions"])
    # psycopg 3 forgets what it has prepared, for the app, with the first transaction after a rollback.
    assert with_key["round_trips"] - seen.count("DEALLOCATE ALL") == without["round_trips"] + more, seen


def test_a_replay_in_atomic_mode(atomic: Shop, cutting_proxy: CuttingProxy) -> None:
    """A replay and a mismatch take a look-up in a transaction that is rolled back: two round trips."""
    key = new_key()
    atomic.charge(key)
    for amount in (100, 900):
        with cost(cutting_proxy) as found, cutting_proxy.counting() as seen:
            assert (200 if amount == 100 else 422) <= atomic.charge(key, amount=amount).status_code
        assert 0 == commits(seen)
        # psycopg 3 forgets what it has prepared, for the app, with each rollback.
        assert found["round_trips"] - seen.count("DEALLOCATE ALL") == 2, seen


def test_the_row_is_written_once(postgres_url: str, postgres_server: Postgres, postgres_database: str) -> None:
    """In atomic mode a key's row is inserted once, complete: no update, nothing dead for the vacuum."""
    shop = make_shop(postgres_url, atomic=True)
    key = new_key()
    for name in (key, key, new_key(), new_key()):
        assert 201 == shop.charge(name).status_code
    assert 422 == shop.charge(key, amount=900).status_code
    rows = postgres_server.execute("SELECT xmin::text, xmax::text FROM idempotency_keys", database=postgres_database)
    charges = postgres_server.execute("SELECT xmin::text FROM charge", database=postgres_database)
    assert [("0",)] * 3 == [(xmax,) for _, xmax in rows]
    # Subtransactions, savepoints that is, have numbers of their own, next to their transaction's.
    assert 3 == len({xmin for xmin, _ in rows}) == len(charges)
    close(shop.app)  # what a connection has done is counted when it ends at the latest
    query = "SELECT n_tup_ins, n_tup_upd, n_tup_del, n_dead_tup FROM pg_stat_user_tables WHERE relname = %s"

    def written() -> Any:
        return postgres_server.execute(query, "idempotency_keys", database=postgres_database)

    until(lambda: written()[0][0] == 3)
    assert [(3, 0, 0, 0)] == written()


def test_replay_writes_nothing(postgres_url: str, postgres_server: Postgres, postgres_database: str) -> None:
    """A replay, a mismatch and a prune of nothing leave the server's log and transaction ids where they were."""
    shop = make_shop(postgres_url)
    key = new_key()
    shop.charge(key)

    def position() -> tuple[Any, ...]:
        query = "SELECT pg_current_wal_insert_lsn()::text, pg_snapshot_xmax(pg_current_snapshot())::text"
        return postgres_server.execute(query, database=postgres_database)[0]

    # Background processes of the server write now and then: one quiet try in five is proof enough.
    quiet = False
    for _ in range(5):
        before = position()
        assert "true" == shop.charge(key).headers["Idempotent-Replay"]
        assert 422 == shop.charge(key, amount=900).status_code
        quiet = quiet or before == position()
    assert quiet
    close(shop.app)


def test_sqlite(sqlite_url: str) -> None:
    """On SQLite a first run takes one more statement, since a look-up comes before its insert; a replay takes one."""
    shop = make_shop(sqlite_url)
    bare(shop)
    with statements() as seen:

        def count(action: Any) -> int:
            seen.clear()
            action()
            return len(seen)

        key = new_key()
        shop.charge(new_key())
        without = count(lambda: shop.client.post("/bare", json={"amount": 1}))
        assert without + 3 == count(lambda: shop.charge(key))
        assert 1 == count(lambda: shop.charge(key))
        assert seen[0].lstrip().upper().startswith("SELECT")
        assert 0 == count(lambda: shop.charge(None))
    close(shop.app)
