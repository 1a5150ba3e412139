"""A table of PostgreSQL in hash partitions, made as the docs show it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flask_idempotency.claim import Claim, Status, Stored
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.store.rows import answer_parameters
from flask_idempotency.store.sqlalchemy import _atomic_backend
from flask_idempotency.store.terms import asked, held
from flask_idempotency.testing import ANSWER, StoreConformance, ask, claimed, stored
from tests.store.support import backend_of, execute, opened, shift
from tests.store.test_inside import LEVELS, Race, make_charges, operation
from tests.store.test_statements import filled, plan_of

PAGE = Path(__file__).parents[2] / "docs/explanation/sizing.md"
DDL = re.compile(r"<!-- (?:partitions|autovacuum): .*? -->\n```postgresql\n(.*?)^```$", re.M | re.S)
PARTITIONS = 16


@contextmanager
def divided(store: SQLAlchemyStore) -> Iterator[SQLAlchemyStore]:
    """The store, its table in partitions."""
    make, tune = DDL.findall(PAGE.read_text())
    for ddl in (make, tune):
        execute(store, ddl.replace("idempotency_keys", "{table}"))
    yield store
    # The shared database is emptied in one go, and each partition would cost that a lock for every index.
    execute(store, "DROP TABLE {table}")


@pytest.fixture
def store(postgres_store: SQLAlchemyStore) -> Iterator[SQLAlchemyStore]:
    """An empty store whose table is in partitions."""
    with divided(postgres_store) as store:
        yield store


class TestPartitionedTable(StoreConformance):
    """Every promise of a store holds on it."""

    def shift(self, store: Any, seconds: float) -> None:
        shift(store, seconds)


@pytest.fixture
def claim(store: SQLAlchemyStore) -> Claim:
    """A claim among many rows, in all partitions."""
    claim = claimed(store, ask())
    filled(store, 5_000)
    return claim


def scanned(store: SQLAlchemyStore, name: str, values: dict[str, Any], atomic: bool = False) -> set[str]:
    """The partitions that a statement of the store, or of atomic mode, looks into, by the planner's word."""
    backend = _atomic_backend(backend_of(store)) if atomic else backend_of(store)
    plan = plan_of(store, getattr(backend, name), **values)
    assert "Seq Scan" not in plan, plan
    return set(re.findall(rf" on {store.table.name}_(p\d+)", plan))


REQUEST = "_find _insert _own _token _fresh _takeover"
HOLDER = "_record _hold _kept _resume _keep_steps _note_secret _release _release_kept"
SETTLING = "_settle _settle_forced _free _free_forced _free_kept _free_kept_forced"


@pytest.mark.parametrize("name", f"{REQUEST} {HOLDER} {SETTLING}".split())
def test_a_statement_for_one_key_looks_into_one_partition(store: SQLAlchemyStore, claim: Claim, name: str) -> None:
    """Whatever a request, or who settles a key, sends to the table is planned for the key's partition alone."""
    seen = {"seen_token": claim.token, "seen_status": "in_progress", "new_token": "new-token"}
    kept = {**answer_parameters(ANSWER), "kept_steps": {}, "kept_secret": "secret-1"}
    values = {**asked(ask()), **held(claim), **seen, **kept}
    assert len(scanned(store, name, values)) == 1


def test_only_renewal_and_pruning_look_into_all(store: SQLAlchemyStore, claim: Claim) -> None:
    """Renewals and pruning meet the keys of all partitions, and use the indexes of each."""
    renewal = {"held_ids": [claim.id], "held_tokens": [claim.token]}
    assert len(scanned(store, "_renew", renewal)) == PARTITIONS
    assert len(scanned(store, "_prune", {"batch_size": 100})) == PARTITIONS


def test_a_place_is_looked_up_in_the_keys_partition(store: SQLAlchemyStore, claim: Claim) -> None:
    """The row that atomic mode has inserted first is found by its place, which is of one partition, and there alone."""
    values = {**held(claim), **answer_parameters(ANSWER), "held_place": "(0,1)", "asked_retention": 3600}
    assert len(scanned(store, "_complete_early", values, atomic=True)) == 1


@pytest.mark.each_driver
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("url", ["shared_psycopg2_url", "shared_psycopg_url"])
def test_atomic_mode(request: pytest.FixtureRequest, level: str, url: str) -> None:
    """In atomic mode one of many callers runs, at every isolation level, and what is past its retention is taken."""
    options: dict[str, Any] = {"isolation_level": level, "pool_size": 4}
    with opened(request.getfixturevalue(url), **options) as whole, divided(whole) as store:
        make_charges(store)
        race = Race(store, 3 * PARTITIONS).go(4)
        race.assert_once()
        for key in race.keys:
            assert stored(store, ask(key=key)).recorded == ANSWER
        shift(store, 3601)
        for key in race.keys[:PARTITIONS]:
            asking = ask(key=key)
            with operation(store) as one:
                found = one.enter(asking)
                assert isinstance(found, Stored)
                taken = one.take(asking, found)
                assert taken is not None
                assert one.finish(taken, asking, ANSWER, 3600)
            assert stored(store, ask(key=key)).token == asking.token


def test_two_keys_at_one_place(shared_psycopg2_url: str) -> None:
    """Rows at the same place of two partitions, inserted first under SERIALIZABLE, each get their own answer."""
    with opened(shared_psycopg2_url, isolation_level="SERIALIZABLE") as whole, divided(whole) as store:
        make_charges(store)
        all_asked = [ask(key=f"key-{number}") for number in range(4)]
        with ExitStack() as stack:
            entered = [(stack.enter_context(operation(store)), asking) for asking in all_asked]
            claims = [one.enter(asking) for one, asking in entered]
            for (one, asking), claim in zip(entered, claims, strict=True):
                assert isinstance(claim, Claim)
                assert vars(one._backend)["_place"] == "(0,1)"
                assert one.finish(claim, asking, replace(ANSWER, body=asking.key.encode()), 3600)
        for asking in all_asked:
            recorded = stored(store, ask(key=asking.key)).recorded
            assert recorded is not None
            assert recorded.body == asking.key.encode()


def test_the_size_is_that_of_all_partitions(store: SQLAlchemyStore) -> None:
    """What the keys of each partition take is in the figures."""
    before = store.stats().bytes
    assert before is not None
    for number in range(2 * PARTITIONS):
        claim = claimed(store, ask(key=f"key-{number}"))
        store.record(claim, replace(ANSWER, body=secrets.token_bytes(20_000)), 3600)
    after = store.stats()
    assert after.bytes is not None
    assert after.bytes - before > 2 * PARTITIONS * 20_000
    assert after.by_status[Status.COMPLETED] == 2 * PARTITIONS
