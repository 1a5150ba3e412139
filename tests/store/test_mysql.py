"""What is MySQL's and MariaDB's own: texts, sizes, clocks, locks, deadlocks and broken connections."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa

from flask_idempotency.claim import Claim, Status, Stored
from flask_idempotency.errors import ConfigurationError, RecordRefused, RowUnreadable, StoreError
from flask_idempotency.recorded import Recorded
from flask_idempotency.store import SQLAlchemyStore, failures
from flask_idempotency.testing import ANSWER, ask, claimed, stored
from tests.store.support import app_engine, backend_of, count, execute, opened, row, shift
from tests.support.apps import until
from tests.support.barrier import background, together
from tests.support.mariadb import MariaDB, earlier_table

THREADS = 8


@pytest.fixture
def store(shared_mariadb_url: str) -> Iterator[SQLAlchemyStore]:
    """An empty store on MariaDB, in a database whose texts are latin1."""
    with opened(shared_mariadb_url) as store:
        yield store


def own_engine(store: SQLAlchemyStore) -> sa.Engine:
    """The engine of the store's own connections."""
    engine = backend_of(store).run._own
    assert isinstance(engine, sa.Engine)
    return engine


# The table


@pytest.mark.scenario(57, 58)
@pytest.mark.parametrize("dialect", ["mysql", "mariadb"])
@pytest.mark.parametrize(
    "collation", ["latin1_swedish_ci", "utf8mb4_general_ci", "utf8mb4_unicode_nopad_ci", "ucs2_general_ci"]
)
def test_types_whatever_the_defaults(mariadb_server: MariaDB, dialect: str, collation: str) -> None:
    """Both dialects make the same columns, exact and large enough, and nothing of them is the database's default."""
    with mariadb_server.database(collation.partition("_")[0], collation) as name:
        with opened(mariadb_server.url(name, dialect)) as store:
            table = store.table.name
            query = "SELECT column_name, column_type, character_set_name FROM information_schema.columns"
            found = {
                column: (type_, charset)
                for column, type_, charset in mariadb_server.execute(f"{query} WHERE table_name = %s", table)
            }
            path = "/租户/😀"
            for key in ("key", "KEY", "kéy", "key "):
                claimed(store, ask(key=key, path=path))
            assert stored(store, ask(key="kéy")).path == path
        assert found["scope"] == found["key"] == ("varbinary(1020)", None)
        assert found["response_body"] == ("longblob", None)
        assert found["lock_timeout"] == ("double", None)
        assert found["request_path"] == ("varchar(500)", "utf8mb4")
        times = [column for column in found if column.endswith("_at")]
        assert [found[column][0] for column in times] == ["datetime(6)"] * 5


@pytest.mark.parametrize("charset", ["ascii", "latin1", "utf8", "gbk", "utf8mb4"])
def test_any_charset_of_the_connection(mariadb_server: MariaDB, shared_mariadb: str, charset: str) -> None:
    """Scopes, keys and paths of any script are the same whatever character set the connection has."""
    url = mariadb_server.url(shared_mariadb).replace("charset=utf8mb4", f"charset={charset}")
    with opened(mariadb_server.url(shared_mariadb)) as usual, opened(url) as store:
        other = SQLAlchemyStore(app_engine(store), sa.MetaData(), table_name=usual.table.name)
        asking = ask(scope="租户 é 😀", key="kéy", path="/租户/é'\\/😀")
        claimed(usual, asking)
        assert stored(other, asking).token == asking.token
        another = ask(scope="租户 é 😀", key="another", path=asking.path)
        claimed(other, another)
        assert stored(usual, another).path == asking.path
        shift(usual, 31)
        assert other.take(another, stored(other, another)) is not None
        assert stored(usual, another).path == asking.path
        other.close()


def test_a_path_that_is_no_text(store: SQLAlchemyStore) -> None:
    """A path with a lone surrogate is kept without it: it is for people."""
    claimed(store, ask(path="/a\ud800b"))
    assert stored(store, ask()).path == "/a?b"


@pytest.mark.parametrize("kind", ["NO_CHAIN", "CHAIN", "RELEASE"])
@pytest.mark.parametrize("autocommit", [False, True])
def test_any_completion_type(shared_mariadb_url: str, store: SQLAlchemyStore, kind: str, autocommit: bool) -> None:
    """Whatever a commit is followed by on the app's connections, a claim is committed, and stays with its answer."""
    settings = {"init_command": f"SET completion_type = '{kind}'", "autocommit": autocommit}
    engine = sa.create_engine(shared_mariadb_url, connect_args=settings)
    other = SQLAlchemyStore(engine, sa.MetaData(), table_name=store.table.name)
    claim = claimed(other, ask())
    assert stored(store, ask()).token == claim.token
    assert other.record(claim, ANSWER, 3600)
    assert stored(store, ask()).recorded == ANSWER
    other.close()
    engine.dispose()


@pytest.mark.scenario(57, 58)
def test_a_table_of_before(mariadb_server: MariaDB, mariadb_database: str) -> None:
    """A table with plain types serves as it did, and where it takes one key for another, that is an error."""
    mariadb_server.execute(earlier_table("utf8mb4_general_ci"), database=mariadb_database)
    engine = sa.create_engine(mariadb_server.url(mariadb_database))
    store = SQLAlchemyStore(engine, sa.MetaData())
    claim = claimed(store, ask())
    assert store.record(claim, ANSWER, 3600)
    assert stored(store, ask()).recorded == ANSWER
    claimed(store, ask(key="kéy-0000001", scope="租户"))
    for other in (ask(key="KEY-00000001"), ask(key="key-00000001 "), ask(key="key-0000001", scope="租户")):
        with pytest.raises(RowUnreadable, match="binary collation"):
            store.claim(other)
    assert count(store) == 2
    store.close()
    engine.dispose()


@pytest.mark.scenario(60, 68)
def test_without_the_unique_index(store: SQLAlchemyStore) -> None:
    """Without the index no claim is granted, also where the table has another one; with it, one is."""
    name = store.table.name
    execute(store, f"DROP INDEX ix_{name}_scope ON {name}")
    execute(store, f"CREATE UNIQUE INDEX other ON {name} (scope, {{key}}, fencing_token)")
    execute(store, f"CREATE INDEX third ON {name} (scope, {{key}})")
    for _ in range(2):
        with pytest.raises(StoreError, match=r"flask db upgrade.*unique index"):
            store.claim(ask())
    assert count(store) == 0
    execute(store, f"CREATE UNIQUE INDEX ix_{name}_scope ON {name} (scope, {{key}})")
    claimed(store, ask())


def test_a_table_in_another_schema(mariadb_server: MariaDB, mariadb_database: str) -> None:
    """A table in another schema than the connection's is found there, translated names included."""
    with mariadb_server.database() as elsewhere:
        engine = sa.create_engine(mariadb_server.url(mariadb_database))
        engine = engine.execution_options(schema_translate_map={"keys": elsewhere})
        metadata = sa.MetaData(schema="keys")
        store = SQLAlchemyStore(engine, metadata)
        metadata.create_all(engine)
        claim = claimed(store, ask())
        assert store.record(claim, ANSWER, 3600)
        assert stored(store, ask()).recorded == ANSWER
        assert mariadb_server.execute("SELECT count(*) FROM idempotency_keys", database=elsewhere) == [(1,)]
        store.close()
        engine.dispose()


# Values


REFUSED: dict[str, Callable[[SQLAlchemyStore, Claim], object]] = {
    "a body for which the packet is too small": lambda store, claim: store.record(
        claim, Recorded(200, (), b"\0" * 600 * 1024), 3600
    ),
    "headers for which it is too small": lambda store, claim: store.record(
        claim, Recorded(200, (("X-Note", "\\" * 1000),) * 600, b""), 3600
    ),
    "steps for which it is too small": lambda store, claim: store.keep_steps(claim, {"charge": '"' * 400 * 1024}),
    "a header that is no JSON": lambda store, claim: store.record(
        claim, Recorded(200, (("X-Note", "\ud800"),), b""), 3600
    ),
    "a status out of range": lambda store, claim: store.record(claim, Recorded(2**40, (), b""), 3600),
}


@pytest.fixture
def small_packets(mariadb_server: MariaDB) -> Iterator[None]:
    """New connections take no more than 1 MiB at once."""
    mariadb_server.execute("SET GLOBAL max_allowed_packet = 1048576")
    yield
    mariadb_server.execute("SET GLOBAL max_allowed_packet = 16777216")


@pytest.mark.parametrize("what", REFUSED)
def test_an_answer_that_the_database_refuses(small_packets: None, store: SQLAlchemyStore, what: str) -> None:
    """What the server can't hold, or read, is an error of its own kind; the key can be completed without it."""
    claim = claimed(store, ask())
    with pytest.raises(RecordRefused, match="lower IDEMPOTENCY_MAX_BODY" if "too small" in what else "hold a value"):
        REFUSED[what](store, claim)
    assert stored(store, ask()).token == claim.token
    assert store.record(claim, Recorded(200), 3600)
    assert stored(store, ask()).recorded == Recorded(200)


def test_a_large_answer(store: SQLAlchemyStore) -> None:
    """A body of 5 MiB, far over what a BLOB holds, comes back as it was."""
    answer = Recorded(200, (), bytes(range(256)) * (5 * 4096))
    assert store.record(claimed(store, ask()), answer, 3600)
    assert stored(store, ask()).recorded == answer


def test_headers_of_any_text_survive(store: SQLAlchemyStore) -> None:
    """A strange header comes back as it was, from a database of another character set."""
    answer: Any = Recorded(200, (("X-Note", "a\0b é 😀"),), b"", "Good é")
    assert store.record(claimed(store, ask()), answer, 3600)
    assert stored(store, ask()).recorded == answer


def test_keys_that_it_refuses(store: SQLAlchemyStore) -> None:
    """A key that does not fit is a store error, cut short nowhere; a NUL is stored as it is."""
    for asking in (ask(scope="\ud800"), ask(key="k" * 1021)):
        with pytest.raises(StoreError, match="hold a value"):
            store.claim(asking)
    assert count(store) == 0
    claimed(store, ask(key="a\0b"))
    claimed(store, ask(key="a"))
    assert stored(store, ask(key="a\0b")).key == "a\0b"


def test_a_key_that_is_no_text(store: SQLAlchemyStore) -> None:
    """Bytes that are no text make the row unreadable, and nothing else."""
    claimed(store, ask())
    execute(store, "UPDATE {table} SET fencing_token = '', scope = CONCAT(scope, X'')")
    with pytest.raises(RowUnreadable):
        store.claim(ask())
    execute(store, "UPDATE {table} SET scope = X'ff'")
    with app_engine(store).connect() as connection, pytest.raises(UnicodeDecodeError):
        connection.execute(sa.select(backend_of(store).table)).all()


def test_a_retention_past_all_calendars(store: SQLAlchemyStore) -> None:
    """A time that the database can't hold is an error, and no claim that is taken for a duplicate."""
    with pytest.raises(StoreError, match="overflow"):
        store.claim(ask(retention=86400.0 * 365 * 9000))
    assert count(store) == 0


# The clock


@pytest.mark.parametrize("zone", ["+00:00", "-11:00", "+12:00"])
def test_the_sessions_time_zone_means_nothing(shared_mariadb_url: str, zone: str) -> None:
    """Lease, retention and age are the same in each session's time zone, and times are UTC."""
    command = {"init_command": f"SET time_zone = '{zone}'"}
    with opened(shared_mariadb_url, connect_args=command) as store:
        claimed(store, ask(lock_timeout=90.25))
        claimed(store, ask(key="another"))
        assert row(store).locked_at.microsecond + row(store, "another").locked_at.microsecond > 0
        shift(store, 60)
        assert not stored(store, ask()).stale
        shift(store, 30.5)
        seen = stored(store, ask())
        assert (seen.stale, 90.5 <= seen.age_seconds < 120) == (True, True)
        (ahead,) = execute(store, "SELECT TIMESTAMPDIFF(SECOND, UTC_TIMESTAMP(6), expires_at) FROM {table}")[0]
        assert 86000 < ahead <= 86400 - 90


# At once


@pytest.fixture(params=["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE", "snapshot"])
def isolated_store(request: pytest.FixtureRequest, shared_mariadb_url: str) -> Iterator[SQLAlchemyStore]:
    """A store on connections of each isolation level, and with MariaDB's stricter snapshots."""
    level = request.param
    command = f"SET SESSION TRANSACTION ISOLATION LEVEL {level}"
    if level == "snapshot":
        command = "SET SESSION innodb_snapshot_isolation = ON"
    with opened(shared_mariadb_url, connect_args={"init_command": command}, pool_size=1) as store:
        yield store


@pytest.mark.scenario(1, 60)
def test_one_claim_a_key_at_every_isolation_level(isolated_store: SQLAlchemyStore) -> None:
    """Threads that claim, take over, renew, record, release and prune the same keys never get an error, nor two claims.

    Each uses keys of its own beside them, which are neighbours in the index: what InnoDB locks gaps for.
    """
    store, keys = isolated_store, [f"key-{number}" for number in range(20)]

    def everything(number: int) -> list[tuple[str, bool]]:
        found = []
        for key in keys:
            assert store.release(claimed(store, ask(key=f"{key}-{number}")))
            one = store.claim(ask(key=key))
            if isinstance(one, Claim):
                assert store.renew([one]) == {one.token}
                assert store.record(one, ANSWER, 3600)
            store.record(claimed(store, ask(key=f"{key}-{number}")), ANSWER, -1)
            assert store.prune(10).count <= 10
            found.append((one.token, isinstance(one, Claim)))
        return found

    for holders in zip(*together(THREADS, everything), strict=True):
        assert len({token for token, _ in holders}) == 1
        assert [granted for _, granted in holders].count(True) == 1
    shift(store, 3601)
    seen = {key: stored(store, ask(key=key)) for key in keys}
    taken = together(THREADS, lambda _: [store.take(ask(key=key), seen[key]) is not None for key in keys])
    assert [sum(column) for column in zip(*taken, strict=True)] == [1] * len(keys)
    shift(store, 86401)
    while store.prune(10).count:
        pass
    assert count(store) == 0


def waits(server: MariaDB) -> int:
    """How many transactions wait for a row."""
    # Not from information_schema.innodb_trx, which is made anew only when nobody has read it for 0.1 s.
    return int(server.execute("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")[0][1])


@pytest.mark.scenario(60)
@pytest.mark.parametrize("commit", [True, False])
def test_an_insert_of_another_transaction(store: SQLAlchemyStore, mariadb_server: MariaDB, commit: bool) -> None:
    """While another transaction has inserted the key, a claim waits for its end, and is granted only if it vanished."""
    claimed(store, ask())
    columns = ", ".join(column.name for column in store.table.c if column.name not in ("id", "key"))
    name = store.table.name
    with app_engine(store).connect() as connection:
        connection.execute(sa.text(f"INSERT INTO {name} (`key`, {columns}) SELECT 'other', {columns} FROM {name}"))
        waiting = background(store.claim, ask(key="other"))
        until(lambda: waits(mariadb_server) == 1)
        assert not waiting.done()
        connection.commit() if commit else connection.rollback()
    assert isinstance(waiting.result(10), Stored if commit else Claim)
    assert count(store) == 2


def test_a_deadlock(store: SQLAlchemyStore, mariadb_server: MariaDB) -> None:
    """A statement that InnoDB undoes as one of a deadlock is repeated, and the caller does not notice."""
    claimed(store, ask())
    for number in range(50):
        claimed(store, ask(key=f"weight-{number}"))
    shift(store, 31)
    seen = stored(store, ask())
    name = store.table.name
    before = deadlocks(mariadb_server)
    with app_engine(store).connect() as connection:
        # Whoever has changed less is undone.
        connection.execute(sa.text(f"UPDATE {name} SET attempts = 2 WHERE `key` LIKE 'weight%'"))
        connection.execute(sa.text(f"SELECT * FROM {name} WHERE id = {row(store).id} FOR UPDATE"))
        taking = background(store.take, ask(), seen)  # has the entry of the index, and waits for the row
        until(lambda: waits(mariadb_server) == 1)
        index = f"FORCE INDEX (ix_{name}_scope)"
        connection.execute(sa.text(f"SELECT id FROM {name} {index} WHERE scope = 'tenant-1' FOR UPDATE"))
        assert deadlocks(mariadb_server) == before + 1
        connection.commit()
    assert isinstance(taking.result(10), Claim)


def deadlocks(server: MariaDB) -> int:
    """How many there have been."""
    return int(server.execute("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'")[0][1])


NUMBERS: list[tuple[Callable[[BaseException], bool], type[pymysql.Error], int]] = [
    (failures.is_conflict, pymysql.err.OperationalError, 1213),
    (failures.is_conflict, pymysql.err.OperationalError, 1020),
    (failures.is_duplicate, pymysql.err.IntegrityError, 1062),
    (failures.is_value, pymysql.err.OperationalError, 1153),
    (failures.is_value, pymysql.err.OperationalError, 1118),
    (failures.is_value, pymysql.err.OperationalError, 3140),
    (failures.is_read_only, pymysql.err.OperationalError, 1290),
    (failures.is_read_only, pymysql.err.OperationalError, 1836),
]


@pytest.mark.parametrize(("says", "kind", "number"), NUMBERS)
def test_what_error_numbers_mean(says: Callable[[BaseException], bool], kind: type[pymysql.Error], number: int) -> None:
    """An error's number tells what to do, also where there is no SQLSTATE; another driver's number tells nothing."""
    others = [one for one, _, _ in NUMBERS if one is not says]
    error = sa.exc.DBAPIError("SELECT 1", {}, kind(number, "words"))
    assert says(error)
    assert not any(one(error) for one in others)
    assert not says(sa.exc.DBAPIError("SELECT 1", {}, sqlite3.OperationalError(number, "words")))


def test_a_lock_that_is_waited_for_in_vain(shared_mariadb_url: str) -> None:
    """A row that somebody keeps locked is an error that says so; nothing was done, and the claim is still good."""
    command = {"init_command": "SET innodb_lock_wait_timeout = 0"}
    with opened(shared_mariadb_url, connect_args=command) as store:
        claim = claimed(store, ask())
        with app_engine(store).connect() as connection:
            connection.execute(sa.text(f"SELECT * FROM {store.table.name} FOR UPDATE"))
            with pytest.raises(StoreError, match="innodb_lock_wait_timeout"):
                store.record(claim, ANSWER, 3600)
        assert store.record(claim, ANSWER, 3600)


def test_a_row_that_was_renewed_is_not_pruned(store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was past its retention for the look-up, and is not for the deletion, stays."""
    claim = claimed(store, ask(retention=60.0))
    shift(store, 3600)
    run = backend_of(store).run
    read = type(run).read

    def renewed(self: Any, *arguments: Any) -> Any:
        found = read(self, *arguments)
        monkeypatch.setattr(type(run), "read", read)
        assert store.renew([claim]) == {claim.token}
        return found

    monkeypatch.setattr(type(run), "read", renewed)
    assert store.prune(10).count == 0
    assert store.record(claim, ANSWER, 3600)


@pytest.mark.scenario(62)
def test_a_batch_is_short_only_at_the_end(store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another pruner was quicker to delete is no part of a batch, so that neither takes itself for done."""
    for number in range(15):
        store.record(claimed(store, ask(key=f"old-{number}")), ANSWER, -1)
    run = backend_of(store).run
    read = type(run).read

    def pruned(self: Any, *arguments: Any) -> Any:
        found = read(self, *arguments)
        monkeypatch.setattr(type(run), "read", read)
        assert store.prune(5).count == 5
        return found

    monkeypatch.setattr(type(run), "read", pruned)
    assert store.prune(10).count == 10
    assert (count(store), store.prune(10).count) == (0, 0)


def test_nothing_is_sent_beside_the_statements(store: SQLAlchemyStore, mariadb_server: MariaDB) -> None:
    """Each decision is a statement, with no COMMIT or ROLLBACK of its own: a first run is three, a replay one."""

    def sent() -> list[int]:
        query = "SHOW GLOBAL STATUS WHERE variable_name IN ('Com_commit', 'Com_rollback', 'Com_select', 'Com_insert', "
        counted = dict(mariadb_server.execute(query + "'Com_update')"))
        return [int(counted[f"Com_{name}"]) for name in ("commit", "rollback", "select", "insert", "update")]

    store.record(claimed(store, ask(key="warm-up")), ANSWER, 3600)
    before = sent()
    claim = store.claim(ask())
    assert isinstance(claim, Claim)
    store.record(claim, ANSWER, 3600)
    assert isinstance(store.claim(ask()), Stored)
    assert [now - then for now, then in zip(sent(), before, strict=True)] == [0, 0, 2, 1, 1]


# Connections that break


class Cut:
    """Ends the store's own connection, once, when a statement with that text comes: before or after it."""

    def __init__(self, server: MariaDB, store: SQLAlchemyStore, text: str, when: str) -> None:
        self.server, self.text, self.when, self.left = server, text, when, 1
        for one in {own_engine(store), backend_of(store).run.reserved._own}:
            sa.event.listen(one, f"{when}_cursor_execute", self)

    def __call__(self, connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if self.text in statement and self.left:
            self.left -= 1
            driver = connection.connection.driver_connection
            self.server.execute(f"KILL {driver.thread_id()}")
            until(lambda: self._gone(driver.thread_id()))
            if self.when == "after":
                driver.ping(reconnect=False)  # raises what a reply that does not come raises

    def _gone(self, number: int) -> bool:
        return not self.server.execute("SELECT 1 FROM information_schema.processlist WHERE id = %s", number)


@pytest.fixture(params=["before", "after"])
def cut(request: pytest.FixtureRequest, store: SQLAlchemyStore, mariadb_server: MariaDB) -> Callable[[str], Cut]:
    """A function that has the next statement with a text lose its request, or its reply."""
    return lambda text: Cut(mariadb_server, store, text, request.param)


@pytest.mark.scenario(75)
def test_a_claim_whose_connection_is_killed(store: SQLAlchemyStore, cut: Callable[[str], Cut]) -> None:
    """Whether its INSERT was carried out or not, the caller holds the claim, and the row is its own."""
    cutting, asking = cut("INSERT INTO"), ask()
    claim = claimed(store, asking)
    assert (cutting.left, claim.token) == (0, asking.token)
    assert (count(store), row(store).attempts) == (1, 1)


@pytest.mark.scenario(75)
def test_a_record_whose_connection_is_killed(store: SQLAlchemyStore, cut: Callable[[str], Cut]) -> None:
    """Whether its UPDATE was carried out or not, the answer is recorded, and the holder knows it."""
    claim = claimed(store, ask())
    cutting = cut("response_body")
    assert store.record(claim, ANSWER, 3600)
    assert cutting.left == 0
    assert stored(store, ask()).recorded == ANSWER


@pytest.mark.scenario(75)
def test_a_takeover_whose_connection_is_killed(store: SQLAlchemyStore, cut: Callable[[str], Cut]) -> None:
    """Whether its UPDATE was carried out or not, the caller holds the claim, taken over once."""
    claimed(store, ask())
    shift(store, 31)
    seen, asking = stored(store, ask()), ask()
    cutting = cut("SET request_method")
    claim = store.take(asking, seen)
    assert claim is not None
    assert (cutting.left, claim.token, claim.attempts) == (0, asking.token, 2)


@pytest.mark.scenario(11, 75)
def test_what_else_is_repeated(store: SQLAlchemyStore, cut: Callable[[str], Cut]) -> None:
    """Renewal, hold and release go on, on a new connection, as if nothing had been."""
    first, second = claimed(store, ask(key="first")), claimed(store, ask(key="second"))
    cutting = cut("SET locked_at")
    assert store.renew([first, second]) == {first.token, second.token}
    assert cutting.left == 0
    cut("DELETE FROM")
    assert store.release(first)
    assert store.find("tenant-1", "first") is None
    cut("status='held'")
    assert store.hold(second)
    assert stored(store, ask(key="second")).status is Status.HELD


@pytest.mark.scenario(59)
def test_all_connections_killed(store: SQLAlchemyStore, mariadb_server: MariaDB, shared_mariadb: str) -> None:
    """After a restart of the server the next call goes through, whatever connections were left in the pool."""
    together(4, lambda number: claimed(store, ask(key=f"key-{number}")))
    assert mariadb_server.disconnect(shared_mariadb) > 0
    claims = together(4, lambda number: claimed(store, ask(key=f"new-{number}")))
    assert store.renew(claims) == {claim.token for claim in claims}


def test_a_server_that_takes_no_writes(store: SQLAlchemyStore, mariadb_server: MariaDB) -> None:
    """A replica is an error that says so; once the primary is elsewhere, a new connection finds it."""
    claim = claimed(store, ask())
    mariadb_server.execute("SET GLOBAL read_only = 1")
    try:
        with pytest.raises(StoreError, match="takes no writes"):
            store.record(claim, ANSWER, 3600)
        # The connections that are open already lead to the old one.
        sa.event.listen(
            app_engine(store).pool, "connect", lambda *_: mariadb_server.execute("SET GLOBAL read_only = 0")
        )
        store.close()
        assert store.record(claim, ANSWER, 3600)
    finally:
        mariadb_server.execute("SET GLOBAL read_only = 0")


def test_atomic_mode_is_refused(store: SQLAlchemyStore) -> None:
    """There is no atomic mode here, and the error names the databases that have one."""
    assert not store.supports_atomic
    with app_engine(store).connect() as connection, pytest.raises(ConfigurationError, match="PostgreSQL and SQLite"):
        store.inside(connection)
