"""Overviews of a table as it may be: corrupt, of an older shape, large, and changed while it is looked at."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import sqlalchemy as sa

from flask_idempotency.claim import Status
from flask_idempotency.errors import RowUnreadable, StoreError
from flask_idempotency.recorded import Elsewhere
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.store.survey import Counts, Filters, Stats
from flask_idempotency.store.table import COUNTS
from flask_idempotency.testing import ANSWER, ask, claimed
from flask_idempotency.testing.surveys import added, keys
from tests.store.support import app_engine, backend_of, count, execute, opened, shift
from tests.store.test_rows import CORRUPT, UNTYPED, corrupt
from tests.store.test_statements import counted

#: The columns of a row that a list does not look into.
UNLISTED = ("fencing_token", "request_fingerprint", "fingerprint_version", "response_headers", "response_body")


def looked_over(store: SQLAlchemyStore) -> Stats:
    """All overviews, one after the other."""
    assert sum(one.keys for one in store.tally("scope")) == sum(one.keys for one in store.tally("path")) == count(store)
    assert len(keys(store)) == count(store)
    return store.stats()


def test_corrupt_rows_are_listed(store: SQLAlchemyStore) -> None:
    """Each is in the list with what can be read of it, and what is wrong; looked at by itself, it is an error."""
    values = [*CORRUPT, *(UNTYPED if app_engine(store).dialect.name == "sqlite" else [])]
    for number, (column, value) in enumerate(values):
        store.record(claimed(store, ask(key=f"{number}")), ANSWER, 3600)
        corrupt(store, f"{number}", column, value)
    sound = claimed(store, ask(key="sound"))
    listed = {one.key: one for one in store.listed(Filters(), 100)}
    assert len(listed) == len(values) + 1
    assert (listed["sound"].problem, listed["sound"].status) == (None, Status.IN_PROGRESS)
    for number, (column, _) in enumerate(values):
        one = listed[f"{number}"]
        assert (one.problem is None) == (column in UNLISTED), (column, one)
        assert one.scope == "tenant-1"
        assert one.method == "POST" or column == "request_method"
        assert one.created_at is not None
        with pytest.raises(RowUnreadable):
            store.detail("tenant-1", f"{number}")
    assert listed["0"].status is None
    assert "melted" in (listed["0"].problem or "")
    assert keys(store, status=Status.IN_PROGRESS) == ["sound"]
    assert store.erase("tenant-1", 100).count == len(values) + 1
    assert not store.release(sound)


def test_rows_of_unknown_status_are_counted(store: SQLAlchemyStore) -> None:
    """They have a number of their own, so that the figures add up."""
    claimed(store, ask())
    store.record(claimed(store, ask(key="corrupt")), ANSWER, 3600)
    corrupt(store, "corrupt", "status", "'melted'")
    stats = looked_over(store)
    assert (stats.unknown, sum(stats.by_status.values()), stats.expired) == (1, 1, 0)


def test_times_that_are_none(sqlite_store: SQLAlchemyStore, postgres_store: SQLAlchemyStore) -> None:
    """A time that Python has no word for spoils neither the list nor the figures."""
    for store, value in ((sqlite_store, "'yesterday'"), (postgres_store, "'-infinity'")):
        for name in ("created_at", "updated_at", "locked_at", "expires_at"):
            claimed(store, ask(key=name))
            corrupt(store, name, name, value)
        for one in store.listed(Filters(), 10):
            assert getattr(one, one.key) is None
            assert "a time is missing" in (one.problem or "")
        assert looked_over(store).by_status[Status.IN_PROGRESS] == 4


def filled_counts(store: SQLAlchemyStore) -> None:
    """Three keys of which two were asked for again."""
    for number in range(3):
        claimed(store, ask(key=f"key-{number}", scope=f"tenant-{number % 2}"))
    counts = "replays = 5, conflicts = 4, mismatches = 3, early_replays = 2, late_replays = 1"
    execute(store, f"UPDATE {{table}} SET {counts} WHERE {{key}} = 'key-1'")
    execute(store, "UPDATE {table} SET replays = 7 WHERE {key} = 'key-2'")


def test_counts_of_replays(store: SQLAlchemyStore) -> None:
    """They are with each key, and added up; of a key that was never counted they are zero."""
    filled_counts(store)
    one = Counts(replays=5, conflicts=4, mismatches=3, early=2, late=1)
    assert [summary.counts for summary in store.listed(Filters(), 10)] == [Counts(7), one, Counts()]
    found = store.detail("tenant-1", "key-1")
    assert found is not None
    assert found.summary.counts == one
    assert looked_over(store).counts == replace(one, replays=12)
    assert added(store.tally("scope")) == {("tenant-0", None, None): (2, 1), ("tenant-1", None, None): (1, 1)}
    assert {tally.scope: tally.counts for tally in store.tally("scope")} == {"tenant-0": Counts(7), "tenant-1": one}


def test_a_table_of_the_older_shape(store: SQLAlchemyStore) -> None:
    """On a table that 0.4 has made the overviews work, counts being zero; one statement finds it out, once."""
    filled_counts(store)
    for name in COUNTS:
        execute(store, f"ALTER TABLE {{table}} DROP COLUMN {name}")
    assert not store.older
    with counted(store) as statements:
        assert len(keys(store)) == 3
    assert store.older
    assert len(statements) == 2
    with counted(store) as statements:
        assert all(one.counts == Counts() for one in store.listed(Filters(), 10))
    assert len(statements) == 1
    assert looked_over(store).counts == Counts()
    found = store.detail("tenant-1", "key-1")
    assert found is not None
    assert found.summary.counts == Counts()
    assert store.erase("tenant-1", 10).count == 1


@pytest.mark.scenario(68)
def test_a_missing_table(store: SQLAlchemyStore) -> None:
    """Without the table each overview says to migrate, and is as ever once it is there."""
    store.table.metadata.drop_all(app_engine(store))
    calls = (
        lambda: store.stats(),
        lambda: list(store.tally("path")),
        lambda: store.listed(Filters(), 10),
        lambda: store.detail("tenant-1", "key-00000001"),
        lambda: store.erase("tenant-1", 10),
    )
    for call in calls:
        with pytest.raises(StoreError, match="flask db upgrade"):
            call()
    store.table.metadata.create_all(app_engine(store))
    filled_counts(store)
    assert not store.older
    assert looked_over(store).counts.replays == 12


def test_many_keys_come_page_by_page(store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """No statement looks at more keys than a page has, and nothing is missing or there twice."""
    monkeypatch.setattr("flask_idempotency.store.surveying.TALLIED", 3)
    monkeypatch.setattr("flask_idempotency.store.surveying.PAGE", 3)
    for number in range(9):
        claimed(store, ask(key=f"{number}", scope=f"tenant-{number % 2}", lock_timeout=30.0 if number % 3 else 300.0))
    shift(store, 31)
    assert {scope: found[0] for (scope, *_), found in added(store.tally("scope")).items()} == {
        "tenant-0": 5,
        "tenant-1": 4,
    }
    assert max(tally.keys for tally in store.tally("path")) == 3
    assert keys(store) == list("876543210")
    assert keys(store, 4) == list("8765")
    assert keys(store, stale=True) == list("875421")
    assert keys(store, 4, stale=True) == list("8754")
    monkeypatch.setattr("flask_idempotency.store.erasing.ERASED", 2)
    assert [store.erase("tenant-0", 4).count for _ in range(2)] == [4, 1]


@contextmanager
def between(store: SQLAlchemyStore, beginning: str, act: object) -> Iterator[None]:
    """Do something once, right after the store's next statement that begins so."""
    own, todo = backend_of(store).run._own, [act]

    def done(conn: object, cursor: object, statement: str, *rest: object) -> None:
        if statement.startswith(beginning) and todo:
            todo.pop()()  # type: ignore[operator]

    sa.event.listen(own, "after_cursor_execute", done)
    yield
    sa.event.remove(own, "after_cursor_execute", done)
    assert not todo


@pytest.mark.parametrize("url", ["shared_psycopg2_url", "shared_mariadb_url"])
def test_a_key_recorded_while_its_scope_is_erased(request: pytest.FixtureRequest, url: str) -> None:
    """A body that comes to lie elsewhere between the look at its key and the deletion is named all the same."""
    with opened(request.getfixturevalue(url)) as store:
        claims = [claimed(store, ask(key=f"key-{number}")) for number in range(3)]
        large = replace(ANSWER, body=Elsewhere("body-1", 10, "0" * 64))
        other = SQLAlchemyStore(app_engine(store), sa.MetaData(), table_name=store.table.name)
        with between(store, "SELECT", lambda: other.record(claims[1], large, 3600)):
            erased = store.erase("tenant-1", 10, bodies=True)
        assert (erased.count, erased.bodies) == (3, ("body-1",))
        assert count(store) == 0
        other.close()


def test_the_size_is_that_of_the_table(store: SQLAlchemyStore) -> None:
    """It grows with what is stored, in or beside the rows, and not with other tables; ``None`` where nobody knows."""
    if backend_of(store).__class__.__name__ == "PortableBackend" or not tells_sizes(store):
        assert store.stats().bytes is None
        return
    assert 0 < (store.stats().bytes or 0) < 100_000
    store.record(claimed(store, ask()), replace(ANSWER, body=secrets.token_bytes(300_000)), 3600)
    name = f"beside_{store.table.name}"
    execute(store, f"CREATE TABLE {name} AS SELECT * FROM {{table}}")
    if app_engine(store).dialect.name == "mysql":
        execute(store, "ANALYZE TABLE {table}")
    assert 300_000 < (store.stats().bytes or 0) < 600_000
    execute(store, f"DROP TABLE {name}")


def tells_sizes(store: SQLAlchemyStore) -> bool:
    """Not every SQLite is built with what does."""
    option = "SELECT 1 FROM pragma_compile_options WHERE compile_options = 'ENABLE_DBSTAT_VTAB'"
    return app_engine(store).dialect.name != "sqlite" or bool(execute(store, option))
