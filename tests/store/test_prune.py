"""Pruning beside requests, and beside other pruners."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa

from flask_idempotency.claim import Claim
from flask_idempotency.recorded import Elsewhere
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.testing import ANSWER, ask, claimed, stored
from tests.store.support import app_engine, backend_of, count, execute, row, shift
from tests.support.barrier import background, together


def expired(store: SQLAlchemyStore) -> int:
    """How many rows to prune: the portable back end deletes one by one."""
    return 60 if store._portable else 2000


@pytest.fixture
def full_store(store: SQLAlchemyStore) -> SQLAlchemyStore:
    """A store with many records past their retention, and one that is kept."""
    store.record(claimed(store, ask(key="old")), ANSWER, 60)
    table = backend_of(store).table
    old = row(store, "old")._asdict()
    old.pop("id")
    with app_engine(store).begin() as connection:
        connection.execute(sa.insert(table), [{**old, "key": f"old-{number}"} for number in range(expired(store) - 1)])
    shift(store, 61)
    store.record(claimed(store, ask(key="kept")), ANSWER, 60)
    return store


@pytest.mark.scenario(62)
def test_pruners_share_the_work(full_store: SQLAlchemyStore) -> None:
    """Pruners at once delete each row once between them, while requests go on."""
    batch = expired(full_store) // 10
    deleted: list[int] = []

    def work(number: int) -> None:
        if number < 2:
            while found := full_store.prune(batch).count:
                assert found <= batch
                deleted.append(found)
        else:
            for turn in range(10):
                full_store.record(claimed(full_store, ask(key=f"new-{number}-{turn}")), ANSWER, 3600)

    together(4, work)
    assert sum(deleted) == expired(full_store)
    assert full_store.prunable() == 0
    assert count(full_store) == 1 + 20


@pytest.mark.scenario(62)
def test_rows_at_work_are_left_out(postgres_store: SQLAlchemyStore) -> None:
    """A row that somebody has locked is skipped, not waited for, and the others are deleted."""
    for number in range(3):
        postgres_store.record(claimed(postgres_store, ask(key=f"old-{number}")), ANSWER, 0)
    with app_engine(postgres_store).connect() as connection:
        locked = sa.select(postgres_store.table).where(postgres_store.table.c.key == "old-1").with_for_update()
        connection.execute(locked)
        assert background(postgres_store.prune, 10).result(5).count == 2
        connection.rollback()
    assert postgres_store.prune(10).count == 1


@pytest.mark.scenario(62)
def test_a_pruner_keeps_no_request_waiting(postgres_store: SQLAlchemyStore) -> None:
    """While a batch is being deleted other keys are claimed, and the batch's own are new, never an error."""
    for number in range(2):
        postgres_store.record(claimed(postgres_store, ask(key=f"old-{number}")), ANSWER, 0)
    seen = stored(postgres_store, ask(key="old-0"))
    with app_engine(postgres_store).connect() as connection:
        connection.execute(backend_of(postgres_store)._prune, {"batch_size": 10})
        assert isinstance(background(postgres_store.claim, ask(key="new")).result(5), Claim)
        assert background(lambda: stored(postgres_store, ask(key="old-1"))).result(5).expired
        taking = background(postgres_store.take, ask(key="old-0"), seen)
        connection.commit()
    assert taking.result(5) is None
    assert isinstance(postgres_store.claim(ask(key="old-0")), Claim)


@pytest.mark.scenario(61, 73)
def test_what_is_pruned_by_status(store: SQLAlchemyStore) -> None:
    """Of keys past retention and lease alike, those that wait for a person, or are unknown, stay for ever."""
    statuses = ("held", "in_progress", "completed", "released", "unknown")
    for status in statuses:
        for policy in ("reexecute", "reject"):
            claimed(store, ask(key=f"{status}-{policy}", stale_policy=policy))
            key = {"key": f"{status}-{policy}"}
            execute(
                store, f"UPDATE {{table}} SET status = '{status}', completed_at = locked_at WHERE {{key}} = :key", **key
            )
    shift(store, 86400 * 400)
    assert store.prunable() == 5
    assert store.prune(10).count == 5
    with app_engine(store).connect() as connection:
        left = set(connection.scalars(sa.select(backend_of(store).table.c.key)))
    assert left == {"held-reexecute", "held-reject", "in_progress-reject", "unknown-reexecute", "unknown-reject"}


@pytest.mark.scenario(73)
def test_a_held_key_is_never_taken(store: SQLAlchemyStore) -> None:
    """A held key is neither stale nor expired, and no take-over of it is granted."""
    claimed(store, ask())
    execute(store, "UPDATE {table} SET status = 'held'")
    shift(store, 86400 * 400)
    seen = stored(store, ask())
    assert (seen.status.value, seen.stale, seen.expired) == ("held", False, False)
    assert store.take(ask(), seen) is None


@pytest.mark.scenario(6)
def test_a_claim_that_was_given_up_records_nothing(store: SQLAlchemyStore) -> None:
    """Once a key is released or held, its last holder can neither record, release nor renew, token or not."""
    for status in ("released", "held"):
        claim = claimed(store, ask(key=status))
        execute(store, "UPDATE {table} SET status = :status WHERE {key} = :status", status=status)
        assert not store.record(claim, ANSWER, 3600)
        assert not store.release(claim)
        assert store.renew([claim]) == set()
        assert row(store, status).status == status


def test_a_released_key_goes_on(store: SQLAlchemyStore) -> None:
    """A key that was released with its row kept is taken at once, by the same fingerprint, and its steps stay."""
    claimed(store, ask())
    execute(store, "UPDATE {table} SET status = 'released', steps = '[1]', secret_id = 'a'")
    began = row(store).created_at
    seen = stored(store, ask())
    assert (seen.stale, seen.expired) == (False, False)
    assert store.take(ask(fingerprint="f" * 64), seen) is None
    claim = store.take(ask(), seen)
    assert claim is not None
    after = row(store)
    assert (claim.attempts, after.attempts, after.status) == (2, 2, "in_progress")
    assert (after.steps, after.secret_id, after.created_at) == ([1], "a", began)


def test_an_expired_key_begins_anew(store: SQLAlchemyStore) -> None:
    """A key past its retention is as if it had never been there: nothing of the old row is left."""
    store.record(claimed(store, ask()), ANSWER, 60)
    execute(store, "UPDATE {table} SET steps = '[1]', secret_id = 'a'")
    shift(store, 61)
    before = row(store)
    claim = store.take(ask(stale_policy="reject", lock_timeout=5.0), stored(store, ask()))
    assert claim is not None
    after = row(store)
    gone = (after.steps, after.secret_id, after.response_status, after.response_headers, after.response_body)
    assert gone == (None,) * 5
    assert after.completed_at is None
    assert after.created_at > before.created_at
    assert after.created_at == after.locked_at or after.created_at > before.locked_at
    assert (after.stale_policy, after.lock_timeout, after.attempts) == ("reject", 5.0, 1)


def test_bodies_elsewhere_where_a_delete_tells_nothing(sqlite_url: str) -> None:
    """SQLite before 3.35 knows no RETURNING: pruning tells of the same bodies all the same."""
    engine = sa.create_engine(sqlite_url)
    engine.dialect.delete_returning = False
    metadata = sa.MetaData()
    store = SQLAlchemyStore(engine, metadata)
    metadata.create_all(engine)
    for number in range(3):
        large = replace(ANSWER, body=Elsewhere(f"body-{number}", 10, "0" * 64))
        store.record(claimed(store, ask(key=f"large-{number}")), large, 60)
        store.record(claimed(store, ask(key=f"small-{number}")), ANSWER, 60)
    shift(store, 61)
    batches = [store.prune(4, bodies=True) for _ in range(2)]
    assert [batch.count for batch in batches] == [4, 2]
    assert sorted(name for batch in batches for name in batch.bodies) == ["body-0", "body-1", "body-2"]
    store.close()
    engine.dispose()


def test_tokens_in_use_come_page_by_page(store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many keys there are, each page is a short statement; what goes or comes meanwhile disturbs nothing."""
    monkeypatch.setattr("flask_idempotency.store.backend.PAGE", 3)
    claims = [claimed(store, ask(key=f"key-{number}")) for number in range(6)]
    store.record(claims[1], ANSWER, 60)
    tokens = store.tokens_in_use()
    found = [next(tokens)]
    store.release(claims[2])
    store.release(claims[4])
    late = claimed(store, ask(key="late"))
    found += tokens
    assert set(found) - {claims[2].token} == {claims[0].token, claims[3].token, claims[5].token, late.token}
    for claim in (claims[0], claims[3], claims[5], late):
        store.release(claim)
    assert list(store.tokens_in_use()) == []
