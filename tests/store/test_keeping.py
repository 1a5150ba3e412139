"""Steps, held and released keys as the table keeps them, and what a meddled table does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flask_idempotency.claim import Status
from flask_idempotency.errors import RowUnreadable, StoreError
from flask_idempotency.recorded import Recorded
from flask_idempotency.store import RecordRefused, SQLAlchemyStore
from flask_idempotency.testing import ANSWER, ask, claimed, stored
from tests.store.support import app_engine, backend_of, count, execute, row, shift

STEPS = {"charge": '{"id": "ch_1"}', "mail": "null"}


def without_times(row: Any) -> dict[str, Any]:
    """A row's columns but the two that tell when it was written last."""
    return {name: value for name, value in row._asdict().items() if name not in ("locked_at", "updated_at")}


def test_no_step_is_null(store: SQLAlchemyStore) -> None:
    """Without a step the column is NULL, so that nothing keeps the row: it is gone with the release."""
    claim = claimed(store, ask())
    for _ in range(2):
        assert execute(store, "SELECT count(*) FROM {table} WHERE steps IS NULL AND secret_id IS NULL") == [(1,)]
        assert store.keep_steps(claim, STEPS)
        assert execute(store, "SELECT count(*) FROM {table} WHERE steps IS NULL") == [(0,)]
        assert store.keep_steps(claim, {})
    assert store.release(claim)
    assert count(store) == 0


def test_what_a_step_writes(store: SQLAlchemyStore) -> None:
    """Resuming writes a sign of life alone; a step's result and a secret's id are one column more each."""
    claim = claimed(store, ask())
    calls: list[tuple[Callable[[], object], dict[str, Any]]] = [
        (lambda: store.resume(claim), {}),
        (lambda: store.keep_steps(claim, STEPS), {"steps": STEPS}),
        (lambda: store.note_secret(claim, "secret-1"), {"secret_id": "secret-1"}),
        (lambda: store.hold(claim), {"status": "held"}),
    ]
    for call, changed in calls:
        shift(store, 20)
        before = row(store)
        call()
        after = row(store)
        assert {**without_times(before), **changed} == without_times(after)
        assert after.locked_at > before.locked_at
        assert (after.updated_at > before.updated_at) == bool(changed)


def test_what_a_release_leaves(store: SQLAlchemyStore) -> None:
    """Of a key that was released with its steps, all but the status and its age stay: it ends with its retention."""
    for secret in (False, True):
        claim = claimed(store, ask())
        assert store.note_secret(claim, "secret-1") if secret else store.keep_steps(claim, STEPS)
        shift(store, 20)
        before = row(store)
        assert store.release(claim)
        after = row(store)
        assert {**without_times(before), "status": "released"} == without_times(after)
        assert after.locked_at > before.locked_at
        execute(store, "DELETE FROM {table}")


@pytest.mark.scenario(73)
def test_what_a_settled_key_has(store: SQLAlchemyStore) -> None:
    """A key that was settled is as one that was recorded, under its new token, and keeps its steps."""
    claim = claimed(store, ask())
    store.keep_steps(claim, STEPS)
    store.hold(claim)
    assert store.settle(stored(store, ask()), ANSWER, 3600, "new-token")
    after = row(store)
    assert (after.status, after.fencing_token, after.attempts, after.steps) == ("completed", "new-token", 1, STEPS)
    assert (after.response_status, after.response_body) == (ANSWER.status, ANSWER.body)
    assert 3590 < (after.expires_at - after.completed_at).total_seconds() < 3610
    assert after.completed_at == after.updated_at or after.completed_at >= after.locked_at


@pytest.mark.scenario(73)
def test_what_a_freed_record_leaves(store: SQLAlchemyStore) -> None:
    """Of the answer of a record that was freed by force nothing is left, even where its steps stay."""
    claim = claimed(store, ask())
    store.keep_steps(claim, STEPS)
    store.record(claim, ANSWER, 3600)
    assert store.free(stored(store, ask()), 60, "new-token", force=True)
    after = row(store)
    assert (after.status, after.fencing_token, after.steps) == ("released", "new-token", STEPS)
    assert (after.response_status, after.response_headers, after.response_body) == (None, None, None)
    assert execute(store, "SELECT count(*) FROM {table} WHERE response_headers IS NULL") == [(1,)]
    assert after.completed_at is None
    assert 50 < (after.expires_at - after.locked_at).total_seconds() < 70


CORRUPT = ["'[1]'", "'7'", "'null'", "'\"text\"'", "'{\"charge\": 1}'", "'{\"charge\": null}'", "'{\"a\": {}}'"]
#: What only SQLite lets in, whose columns have no types.
UNTYPED = ["'{'", "''", "x'ff'", "CAST(x'ff' AS TEXT)"]


def test_corrupt_steps(store: SQLAlchemyStore) -> None:
    """Steps that are no object of texts are an error, not no steps: running them again could charge twice."""
    for value in [*CORRUPT, *(UNTYPED if app_engine(store).dialect.name == "sqlite" else [])]:
        claim = claimed(store, ask())
        with app_engine(store).begin() as connection:
            connection.exec_driver_sql(f"UPDATE {store.table.name} SET steps = {value}")
        for _ in range(2):
            with pytest.raises(RowUnreadable) as caught:
                store.resume(claim)
            assert claim.key not in str(caught.value)
        found = stored(store, ask())
        assert (found.status, found.token) == (Status.IN_PROGRESS, claim.token)
        # Nor are they thrown away.
        assert store.release(claim)
        assert stored(store, ask()).status is Status.RELEASED
        execute(store, "DELETE FROM {table}")


def test_a_step_that_the_database_refuses(postgres_store: SQLAlchemyStore) -> None:
    """What PostgreSQL can't hold is an error, after which the steps from before are still there."""
    claim = claimed(postgres_store, ask())
    assert postgres_store.keep_steps(claim, STEPS)
    for strange in ({"a\0b": "1"}, {"a": "\0"}, {"\ud800": "1"}, {"a": "\ud800"}):
        with pytest.raises(RecordRefused):
            postgres_store.keep_steps(claim, {**STEPS, **strange})
    with pytest.raises(StoreError, match="hold a value"):
        postgres_store.note_secret(claim, "s" * 65)
    with pytest.raises(RecordRefused):
        postgres_store.settle(stored(postgres_store, ask()), Recorded(2**40, (), b""), 60, "new-token", force=True)
    assert postgres_store.resume(claim) == STEPS


def test_steps_of_any_text_survive_on_sqlite(sqlite_store: SQLAlchemyStore) -> None:
    """Where the database can hold a strange name or text, it comes back as it was."""
    claim = claimed(sqlite_store, ask())
    strange = {"a\0b\ud800": "\0\ud800"}
    assert sqlite_store.keep_steps(claim, strange)
    assert sqlite_store.resume(claim) == strange


@pytest.mark.scenario(3, 11, 73)
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("way", ["renew", "record"])
@pytest.mark.parametrize("call", ["take", "settle", "free", "prune"])
def test_a_key_that_moves_between_look_and_write(
    portable_store: SQLAlchemyStore, monkeypatch: pytest.MonkeyPatch, call: str, way: str, steps: bool
) -> None:
    """Where a claim is judged first and written then, one that was renewed or recorded meanwhile is left alone."""
    store, backend = portable_store, backend_of(portable_store)
    claim = claimed(store, ask(retention=60.0 if call == "prune" else 3600.0))
    if steps:
        store.keep_steps(claim, STEPS)
    shift(store, 61)
    seen = stored(store, ask())
    assert (seen.stale, seen.expired) == (True, call == "prune")
    looks = {"prune": "_gone"}.get(call, "_look")
    look = getattr(backend, looks)

    def late(*asked: Any) -> list[Any]:
        found = list(look(*asked))
        assert store.renew([claim]) if way == "renew" else store.record(claim, ANSWER, 3600)
        return found

    monkeypatch.setattr(backend, looks, late)
    calls: dict[str, Callable[[], object]] = {
        "take": lambda: store.take(ask(), seen),
        "settle": lambda: store.settle(seen, ANSWER, 60, "new-token"),
        "free": lambda: store.free(seen, 60, "new-token"),
        "prune": lambda: store.prune(10).count,
    }
    assert not calls[call]()
    after = row(store)
    assert (after.fencing_token, after.attempts) == (claim.token, 1)
    assert after.status == ("in_progress" if way == "renew" else "completed")
