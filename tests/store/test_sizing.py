"""The formula for the table's size, as the page shows it, against tables of PostgreSQL."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flask_idempotency.recorded import Recorded
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.testing import ask, claimed
from tests.store.support import execute

PAGE = Path(__file__).parents[2] / "docs/explanation/sizing.md"
ROWS = 6_000

#: Lengths of scope, key, path and body, and the number of headers: both sides of the limits that the formula has.
SHAPES = [(10, 36, 8, 10, 1), (36, 36, 30, 992, 3), (8, 20, 8, 1488, 1), (36, 36, 30, 3008, 3), (120, 100, 100, 96, 0)]


@pytest.fixture(scope="module")
def bytes_per_key() -> Callable[..., float]:
    """The function that the page shows."""
    namespace: dict[str, Callable[..., float]] = {}
    (shown,) = re.findall(r"^```python\n(from math .*?)^```$", PAGE.read_text(), re.M | re.S)
    exec(shown, namespace)
    return namespace["bytes_per_key"]


def filled(store: SQLAlchemyStore, scope: int, key: int, path: int, body: int, headers: int) -> int:
    """Fill the table, one random key after the other; returns the length of the headers."""
    recorded = Recorded(201, tuple((f"Header-{number}", "v" * 30) for number in range(headers)), b"")
    store.record(claimed(store, ask(scope="s" * scope, key="template", path="/" * path)), recorded, 86_400)
    made = {
        "key": f"rpad(md5(n::text), {key}, md5(n::text))",
        "expires_at": "expires_at + n * interval '1 microsecond'",
        "response_body": f"(SELECT substr(decode(string_agg(md5(n::text || g), ''), 'hex'), 1, {body}) "
        f"FROM generate_series(0, {body // 16}) g)",
    }
    columns = [column.name for column in store.table.c if column.name != "id"]
    chosen = ", ".join(made.get(name, name) for name in columns)
    source = f"(SELECT * FROM {{table}} WHERE {{key}} = 'template') t, generate_series(1, {ROWS}) n"
    execute(store, f"INSERT INTO {{table}} ({', '.join(columns)}) SELECT {chosen} FROM {source}")
    return len(json.dumps(recorded.headers))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_formula(
    postgres_store: SQLAlchemyStore, bytes_per_key: Callable[..., float], shape: tuple[int, int, int, int, int]
) -> None:
    """A table that was filled key by key is as large as the formula on the page says, within 5 %."""
    scope, key, path, body, _ = shape
    headers = filled(postgres_store, *shape)
    ((size,),) = execute(postgres_store, "SELECT pg_total_relation_size('{table}')")
    assert bytes_per_key(scope, key, path, headers, body) == pytest.approx(size / ROWS, rel=0.05)
