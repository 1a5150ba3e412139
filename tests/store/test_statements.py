"""What a call costs, counted where it arrives: at the server, and at the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotency.claim import Claim, Stored
from flask_idempotency.store import SQLAlchemyStore, message
from flask_idempotency.store.message import Message
from flask_idempotency.store.terms import asked
from flask_idempotency.testing import ANSWER, ask, claimed, stored
from tests.store.support import app_engine, backend_of, execute, opened, shift
from tests.support.postgres import Postgres
from tests.support.proxy import CuttingProxy


@pytest.fixture
def tcp_store(tcp_url: str) -> Iterator[SQLAlchemyStore]:
    """A store behind a proxy that sees every message, warmed up."""
    with opened(tcp_url) as store:
        # The renewals have a connection of their own.
        store.renew([claimed(store, ask(key="warm-up"))])
        yield store


@contextmanager
def one_round_trip(proxy: CuttingProxy, times: int = 1) -> Iterator[None]:
    """So many statements arrive, in as many round trips: no BEGIN, SET, COMMIT, ROLLBACK or ping beside them."""
    before = proxy.round_trips
    with proxy.counting() as statements:
        yield
    assert len(statements) == times, statements
    assert proxy.round_trips - before == times
    assert not any(statement.split()[0] in ("BEGIN", "SET", "COMMIT", "ROLLBACK") for statement in statements)


@contextmanager
def counted(store: SQLAlchemyStore) -> Iterator[list[str]]:
    """The statements that the store's own engine hands to its driver."""
    found: list[str] = []

    def note(conn: object, cursor: object, statement: str, *rest: object) -> None:
        found.append(statement)

    own = backend_of(store).run._own
    sa.event.listen(own, "before_cursor_execute", note)
    yield found
    sa.event.remove(own, "before_cursor_execute", note)


def test_statements_are_built_at_their_first_use(sqlite_url: str) -> None:
    """A store that only claims has built what that takes, and no statement of prune's, of steps' or of settling's."""
    with opened(sqlite_url) as store:
        claimed(store, ask())
        assert {"_find", "_insert"} == {one._build.__name__ for one in backend_of(store).built}


def test_what_one_atomic_operation_builds_is_there_for_the_next(sqlite_url: str) -> None:
    """Each operation has a copy of the statements' owner, and none of them builds a statement again."""
    with opened(sqlite_url) as store, app_engine(store).connect() as connection:
        store.inside(connection)
        backend = store._atomic
        assert backend is not None
        first, second = backend.within(connection), backend.within(connection)
        assert first._complete is second._complete is backend._complete


def steps_in_one_round_trip_each(store: SQLAlchemyStore, proxy: CuttingProxy, claim: Claim) -> None:
    """Proof, result and secret; the release of a key that has them costs one statement more, and so does freeing it."""
    with one_round_trip(proxy):
        assert store.resume(claim) == {}
    with one_round_trip(proxy):
        assert store.keep_steps(claim, {"charge": "1"})
    with one_round_trip(proxy):
        assert store.note_secret(claim, "secret-1") == "secret-1"
    with one_round_trip(proxy, times=2):
        assert store.release(claim)
    retry = store.take(ask(key=claim.key), stored(store, ask(key=claim.key)))
    assert retry is not None
    with one_round_trip(proxy):
        assert store.hold(retry)
    seen = stored(store, ask(key=claim.key))
    with one_round_trip(proxy, times=2):
        assert store.free(seen, 3600, "new-token")


def test_every_call_is_one_round_trip(tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy) -> None:
    """On PostgreSQL each call of the store is one message and one round trip, on both drivers."""
    store, proxy = tcp_store, cutting_proxy
    with one_round_trip(proxy, times=2):
        first = claimed(store, ask())
        store.record(first, ANSWER, 3600)
    with one_round_trip(proxy):
        assert stored(store, ask()).recorded == ANSWER
    with one_round_trip(proxy):
        assert store.find("tenant-1", "key-00000001") is not None
    many = [claimed(store, ask(key=f"key-{number}")) for number in range(10)]
    with one_round_trip(proxy):
        assert len(store.renew(many)) == 10
    with one_round_trip(proxy):
        assert store.release(many[0])
    steps_in_one_round_trip_each(store, proxy, many[2])
    shift(store, 31)
    seen = stored(store, ask(key="key-1"))
    with one_round_trip(proxy):
        assert store.take(ask(key="key-1"), seen) is not None
    for number, call in enumerate(
        (
            lambda seen: store.settle(seen, ANSWER, 3600, "new-token"),
            lambda seen: store.free(seen, 3600, "new-token"),
        ),
        start=4,
    ):
        seen = stored(store, ask(key=f"key-{number}"))
        with one_round_trip(proxy):
            assert call(seen)
    with one_round_trip(proxy, times=2):
        store.prunable()
        store.prune(10)


def test_ten_thousand_claims_are_renewed_in_one_statement(
    tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy
) -> None:
    """On PostgreSQL ten thousand live claims get their sign of life in one round trip, on both drivers."""
    filled(tcp_store, 9_999)  # with that of the warm-up: ten thousand
    execute(tcp_store, "UPDATE {table} SET fencing_token = md5({key})")
    rows = execute(tcp_store, "SELECT id, scope, {key}, fencing_token FROM {table}")
    claims = [Claim(*found, lock_timeout=30) for found in rows]
    with one_round_trip(cutting_proxy):
        assert len(tcp_store.renew(claims)) == 10_000


def test_nothing_is_prepared(postgres_server: Postgres, postgres_store: SQLAlchemyStore) -> None:
    """However often a statement is sent, no session keeps a prepared one: a pooling proxy would lose it."""
    claimed(postgres_store, ask())
    for _ in range(20):
        stored(postgres_store, ask())
    own = backend_of(postgres_store).run._own
    with own.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM pg_prepared_statements")).scalar() == 0


def statistics(store: SQLAlchemyStore) -> tuple[int, int, int]:
    """The database's commits and rollbacks, and the bytes that the store's connection wrote to the log of writes."""
    counters = (
        "SELECT xact_commit, xact_rollback, (SELECT wal_bytes FROM pg_stat_get_backend_wal(pg_backend_pid()))::bigint "
        "FROM pg_stat_database WHERE datname = current_database()"
    )
    with backend_of(store).run._own.connect() as connection:
        # An idle session's counters reach the views when the session is told to.
        connection.execute(sa.text("SELECT pg_stat_force_next_flush()"))
        commits, rollbacks, log = connection.execute(sa.text(counters)).one()
        return int(commits), int(rollbacks), int(log)


def test_a_first_run_is_two_commits(postgres_url: str) -> None:
    """The server counts a transaction for the claim and one for the record, and none is rolled back."""
    with opened(postgres_url) as store:
        claimed(store, ask(key="warm-up"))
        before = statistics(store)
        store.record(claimed(store, ask()), ANSWER, 3600)
        after = statistics(store)
    # The two statements that read the counters are transactions, too.
    assert (after[0] - before[0] - 2, after[1] - before[1]) == (2, 0)
    assert after[2] > before[2]


def test_a_replay_writes_nothing(postgres_url: str, postgres_server: Postgres) -> None:
    """A replay takes no transaction id and no row id, logs no write, and waits for no lock on its row."""
    with opened(postgres_url) as store:
        store.record(claimed(store, ask()), ANSWER, 3600)
        assert stored(store, ask()).recorded == ANSWER
        xid = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
        last_id = "SELECT last_value FROM {table}_id_seq"

        def position() -> tuple[Any, ...]:
            return postgres_server.execute(xid), execute(store, last_id), statistics(store)[2]

        # A look may clear away what the recording has left of the row before it, once nobody can see that any more.
        quiet = False
        for _ in range(5):
            before = position()
            for _ in range(50):
                stored(store, ask())
            quiet = quiet or before == position()
        assert quiet
        with app_engine(store).begin() as connection:
            connection.execute(sa.select(store.table).with_for_update())
            assert stored(store, ask()).recorded == ANSWER


def test_a_replay_leaves_no_lock_behind(postgres_store: SQLAlchemyStore) -> None:
    """Inside a transaction too, the statement of a replay gets no transaction id and locks no row."""
    claimed(postgres_store, ask())
    with app_engine(postgres_store).begin() as connection:
        (found,), _ = backend_of(postgres_store)._claim.send(connection, asked(ask()))
        assert found.fencing_token != ask().token
        held = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype IN ('tuple', 'transactionid')"
        for nothing in ("SELECT count(pg_current_xact_id_if_assigned())", held):
            assert connection.execute(sa.text(nothing)).scalar() == 0
        locker = sa.select(sa.literal_column("xmax::text", sa.String)).select_from(postgres_store.table)
        assert connection.execute(locker).scalar() == "0"


def test_on_sqlite_a_first_run_is_three_statements(sqlite_store: SQLAlchemyStore) -> None:
    """On SQLite a replay is one statement that only reads; a claim is one more than its insert."""
    with counted(sqlite_store) as statements:
        sqlite_store.record(claimed(sqlite_store, ask()), ANSWER, 3600)
    assert [statement.split()[0] for statement in statements] == ["SELECT", "INSERT", "UPDATE"]
    with counted(sqlite_store) as statements:
        assert isinstance(sqlite_store.claim(ask()), Stored)
    assert [statement.split()[0] for statement in statements] == ["SELECT"]


def test_on_sqlite_a_step_reads_what_it_has_proved(sqlite_store: SQLAlchemyStore) -> None:
    """On SQLite the results of steps are read after the sign of life; storing one is a single statement."""
    claim = claimed(sqlite_store, ask())
    with counted(sqlite_store) as statements:
        assert sqlite_store.resume(claim) == {}
        assert sqlite_store.keep_steps(claim, {"charge": "1"})
        assert sqlite_store.note_secret(claim, "secret-1") == "secret-1"
        assert sqlite_store.release(claim)
    words = [statement.split()[0] for statement in statements]
    assert words == ["UPDATE", "SELECT", "UPDATE", "UPDATE", "SELECT", "DELETE", "UPDATE"]


def filled(store: SQLAlchemyStore, rows: int) -> None:
    """Copy the one row there is, under other keys, and let the planner know."""
    columns = ", ".join(column.name for column in store.table.c if column.name not in ("id", "key"))
    copies = f"SELECT 'copy-' || n, {columns} FROM {{table}}, generate_series(1, {rows}) n"
    execute(store, f"INSERT INTO {{table}} (key, {columns}) {copies}")
    execute(store, "ANALYZE {table}")


def plan_of(store: SQLAlchemyStore, statement: Any, **values: Any) -> str:
    """How PostgreSQL would carry a statement out."""

    with app_engine(store).connect() as connection:
        explained = Message(statement)
        explained._compile(connection.dialect)
        explained._text = f"EXPLAIN {explained._text}"
        explained._row = lambda *values: values  # the column's name is none of Python's
        return "\n".join(line for (line,) in explained.send(connection, values)[0])


def test_renewal_uses_the_primary_key(postgres_store: SQLAlchemyStore) -> None:
    """The renewal of many claims finds its rows by their ids, whatever the size of the table."""
    claimed(postgres_store, ask())
    filled(postgres_store, 5000)
    tokens = [ask().token for _ in range(100)]
    plan = plan_of(postgres_store, backend_of(postgres_store)._renew, held_ids=list(range(100)), held_tokens=tokens)
    assert f"{postgres_store.table.name}_pkey" in plan
    assert "Seq Scan" not in plan


def test_pruning_uses_the_indexes(postgres_store: SQLAlchemyStore) -> None:
    """Pruning finds what is past retention by the index on it, and deletes by the primary key."""
    claimed(postgres_store, ask())
    filled(postgres_store, 5000)
    plan = plan_of(postgres_store, backend_of(postgres_store)._prune, batch_size=100)
    assert f"ix_{postgres_store.table.name}_expires_at" in plan
    assert "Index Cond: (expires_at <= " in plan  # not only the order is taken from it
    assert f"{postgres_store.table.name}_pkey" in plan
    assert "Seq Scan" not in plan


class Bang(BaseException):
    """What ends a worker, or a greenlet."""


@pytest.mark.each_driver
def test_a_connection_that_was_left_in_the_middle(
    postgres_store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a time-out or a kill comes while a reply is awaited, nobody gets that connection after it."""
    own, cursor_of = backend_of(postgres_store).run._own, message._cursor

    def pid() -> int:
        with own.connect() as connection:
            return int(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())

    class Killed:
        def __init__(self, *of: Any) -> None:
            self._cursor = cursor_of(*of)

        def execute(self, *statement: Any) -> None:
            self._cursor.execute(*statement)
            raise Bang

        def close(self) -> None:
            self._cursor.close()

    claimed(postgres_store, ask(key="opens-the-connection"))
    before, asking = pid(), ask()
    with monkeypatch.context() as patch:
        patch.setattr(message, "_cursor", Killed)
        with pytest.raises(Bang):
            postgres_store.claim(asking)
    assert before != pid()
    # Carried out all the same: whoever asks with the same token has the claim.
    assert isinstance(postgres_store.claim(asking), Claim)
