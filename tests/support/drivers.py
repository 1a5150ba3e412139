"""Which of two databases of one kind a test runs on.

Where a test is about the extension rather than about a driver, one of two is enough at a time: psycopg2 or psycopg 3,
an SQLite file or one in memory. Each is met by half of the tests; ``IDEMPOTENCY_TESTS_DRIVERS`` turns this around, and
``.ci/run`` does both.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable

import pytest

#: The values of the variable, and which half of the pairs they choose.
CHOICES = {"one": 0, "other": 1}

#: How the two of each pair are called in the names of tests.
_PAIRS = (
    (re.compile(r"postgresql-psycopg2|shared_psycopg2_url|postgres_url|psycopg2"),
     re.compile(r"postgresql-psycopg3|shared_psycopg_url|psycopg_url|psycopg(?!2)")),
    (re.compile(r"\bmemory\b"), re.compile(r"\bsqlite\b")),
)  # fmt: skip


def left_out(items: Iterable[pytest.Item], choice: str) -> list[pytest.Item]:
    """The tests marked ``one_driver`` whose twin runs instead.

    :param choice: ``one`` or ``other`` of each pair, or ``all`` to leave out none.
    """
    if choice not in (*CHOICES, "all"):
        raise pytest.UsageError(f"IDEMPOTENCY_TESTS_DRIVERS={choice}: it must be one, other or all.")
    marked = [item for item in items if item.get_closest_marker("one_driver")]
    return [] if choice == "all" else [item for pair in _PAIRS for item in _losers(marked, *pair, CHOICES[choice])]


def _losers(
    items: list[pytest.Item], first: re.Pattern[str], second: re.Pattern[str], half: int
) -> Iterable[pytest.Item]:
    twins: dict[str, dict[int, pytest.Item]] = {}
    for item in items:
        test, bracket, case = item.nodeid.partition("[")
        for side, pattern in enumerate((first, second)):
            if pattern.search(case):
                twins.setdefault(test + bracket + pattern.sub("*", case, count=1), {})[side] = item
                break
    for name, sides in twins.items():
        if len(sides) == 2:
            yield sides[(zlib.crc32(name.encode()) + half) % 2]
