"""A table of PostgreSQL in hash partitions, made as the docs show it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flask_idempotency.claim import Claim
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.store.rows import answer_parameters
from flask_idempotency.store.terms import asked, held
from flask_idempotency.testing import ANSWER, StoreConformance, ask, claimed
from tests.store.support import backend_of, execute, shift
from tests.store.test_statements import filled, plan_of

PAGE = Path(__file__).parents[2] / "docs/explanation/sizing.md"
DDL = re.compile(r"<!-- partitions: .*? -->\n```sql\n(.*?)^```$", re.M | re.S)
PARTITIONS = 16


@pytest.fixture
def store(postgres_store: SQLAlchemyStore) -> Iterator[SQLAlchemyStore]:
    """An empty store whose table is in partitions."""
    (ddl,) = DDL.findall(PAGE.read_text())
    execute(postgres_store, ddl.replace("idempotency_keys", "{table}"))
    yield postgres_store
    # The shared database is emptied in one go, and each partition would cost that a lock for every index.
    execute(postgres_store, "DROP TABLE {table}")


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


def scanned(store: SQLAlchemyStore, name: str, values: dict[str, Any]) -> set[str]:
    """The partitions that a statement of the store looks into, by the planner's word."""
    plan = plan_of(store, getattr(backend_of(store), name), **values)
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
