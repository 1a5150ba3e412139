"""Which of several databases of one kind, or of two orders, a test meets.

Where a test is about the extension rather than about a database, one is enough at a time. Which one is the test's own,
so that all are met; and ``IDEMPOTENCY_TESTS_TURN`` passes it on to the next. ``.ci/run`` takes other turns for the
wheel and for the oldest dependencies: there a test about the app meets two of three databases, and one that has two to
choose from meets both.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable

import pytest

#: How databases are called in the names of tests; those in one line stand for each other.
_TWO_DRIVERS = re.compile(r"postgresql-psycopg[23]|shared_psycopg2?_url|postgres_url|psycopg_url|psycopg2?\b")
_TWO_FILES = re.compile(r"\b(?:memory|sqlite)\b")
_TWO_PORTABLE = re.compile(r"\bportable-(?:sqlite|postgresql)\b")
_THREE_DATABASES = re.compile(r"\b(?:sqlite|postgresql-psycopg[23])\b")

#: How the order is called in which an extension and its neighbour are set up.
_TWO_ORDERS = re.compile(r"\b(?:before|after)\b")

_PATTERNS = {
    "one_driver": (_TWO_DRIVERS, _TWO_FILES, _TWO_PORTABLE),
    "one_database": (_THREE_DATABASES, _TWO_DRIVERS),
    "one_order": (_TWO_ORDERS,),
}


def left_out(items: Iterable[pytest.Item], turn: str) -> list[pytest.Item]:
    """The tests whose twin runs this time: of those marked ``one_driver``, ``one_database`` or ``one_order``.

    :param turn: 1, 2 or 3; or ``all`` to leave out none.
    """
    if turn == "all":
        return []
    if turn not in ("1", "2", "3"):
        raise pytest.UsageError(f"IDEMPOTENCY_TESTS_TURN={turn}: it must be 1, 2, 3 or all.")
    gone: list[pytest.Item] = []
    for mark, patterns in _PATTERNS.items():
        marked = [item for item in items if item.get_closest_marker(mark)]
        for pattern in patterns:
            lost = list(_losers(marked, pattern, int(turn)))
            marked = [item for item in marked if item not in lost]
            gone += lost
    return gone


def _losers(items: list[pytest.Item], pattern: re.Pattern[str], turn: int) -> Iterable[pytest.Item]:
    twins: dict[str, list[pytest.Item]] = {}
    for item in items:
        test, bracket, case = item.nodeid.partition("[")
        if pattern.search(case):
            twins.setdefault(test + bracket + pattern.sub("*", case, count=1), []).append(item)
    for name, group in twins.items():
        group.sort(key=lambda item: item.nodeid)
        # Of two, the first turn takes one and both others take the other.
        place = int(turn > 1) if len(group) == 2 else turn
        del group[(zlib.crc32(name.encode()) + place) % len(group)]
        yield from group
