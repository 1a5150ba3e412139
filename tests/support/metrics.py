"""What Prometheus' text says, and stores that can be asked what they hold."""

from __future__ import annotations

import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families

from flask_idempotency.claim import Status
from flask_idempotency.errors import StoreError
from flask_idempotency.state import get_state
from flask_idempotency.store.survey import Stats
from tests.support.apps import Shop

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    """Each sample's value by its name and its labels, in the order of their names."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float | None:
    """One of them; ``None`` if it is not there."""
    return found.get((name, tuple(sorted(labels.items()))))


def surveyed(shop: Shop) -> Shop:
    """The shop, its store able to say what it holds: by its own ``stats()``, or where it has none, by one made here."""
    store = get_state(shop.app).store
    if not hasattr(store, "stats"):
        store.stats = lambda: _counted(shop)  # type: ignore[attr-defined]
    return shop


def _counted(shop: Shop) -> Stats:
    """What the table holds, by the clock of SQLite."""
    try:
        by_status = shop.execute(sa.text("SELECT status, count(*) FROM idempotency_keys GROUP BY status"))
        now, over = "julianday('now')", "julianday({}) < julianday('now')"
        lease = f"status = 'in_progress' AND julianday(locked_at) + lock_timeout / 86400 < {now}"
        kept = "status IN ('completed', 'released') AND " + over.format("expires_at")
        stale, expired = (
            shop.execute(sa.text(f"SELECT count(*) FROM idempotency_keys WHERE {which}"))[0][0]
            for which in (lease, kept)
        )
    except sa.exc.SQLAlchemyError as error:
        raise StoreError(str(error)) from error
    return Stats({Status(name): count for name, count in by_status}, stale, expired, (), None, None)
