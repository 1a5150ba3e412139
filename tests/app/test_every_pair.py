"""Two requests with one key, at every pair of their statements: the first waits before one, the second runs up to one
of its own, the first goes on to its end, and then the second does.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from werkzeug.test import TestResponse

from tests.support.apps import Shop, close, new_key, until
from tests.support.kinds import ask, charged, make_kinds, settled
from tests.support.postgres import Postgres
from tests.support.proxy import CuttingProxy, Rule

pytestmark = [pytest.mark.one_driver, pytest.mark.thorough]

#: How many statements a request of each kind sends, connections being there.
STATEMENTS = {"/plain": 5, "/stepped": 7, "/atomic": 6}


class Process:
    """An app of its own, over one database with the other, and a request that can be stopped before a statement."""

    def __init__(self, server: Postgres, database: str, driver: str, run: ThreadPoolExecutor) -> None:
        self.proxy = CuttingProxy(server.socket)
        self.shop: Shop = make_kinds(self.proxy.url(database, driver))
        self.run = run

    def warm(self) -> None:
        """Have connections."""
        settled(self.shop, "/plain", new_key(), 0)

    def ask(self, path: str, key: str, amount: int, before: int) -> tuple[Rule, Future[TestResponse]]:
        """Begin a request; returns when it waits before that statement of its own, or is at its end."""
        rule = self.proxy.hold_request("", after=before)
        answer = self.run.submit(ask, self.shop, path, key, amount)
        until(lambda: rule.happened or answer.done())
        return rule, answer


@pytest.fixture
def pair(postgres_server: Postgres, postgres_database: str, driver: str) -> Iterator[tuple[Process, Process]]:
    """Two apps over one database."""
    with ThreadPoolExecutor(2) as run:
        first = Process(postgres_server, postgres_database, driver, run)
        second = Process(postgres_server, postgres_database, driver, run)
        yield first, second
        for one in (first, second):
            close(one.shop.app)
            one.proxy.stop()


@pytest.mark.scenario(1)
@pytest.mark.parametrize("path", STATEMENTS)
def test_two_requests_at_every_pair_of_statements(pair: tuple[Process, Process], path: str) -> None:
    """One of them runs the view; the other gets its answer or 409; and nothing is done twice."""
    first, second = pair
    first.warm()
    second.warm()
    held = 0
    pairs = [(m, n) for m in range(STATEMENTS[path]) for n in range(STATEMENTS[path])]
    for amount, (before, other) in enumerate(pairs, start=1):
        key = new_key()
        waits, one = first.ask(path, key, amount, before)
        also, two = second.ask(path, key, amount, other)
        held += waits.happened
        waits.left = 0
        waits.release()
        answers = [one.result(10)]
        also.left = 0
        also.release()
        answers.append(two.result(10))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) <= {201, 409}, (before, other, statuses)
        assert 201 in statuses, (before, other, statuses)
        final = settled(second.shop, path, key, amount)
        assert (201, "true") == (final.status_code, final.headers.get("Idempotent-Replay")), (before, other)
        runs = first.shop.runs + second.shop.runs
        if path == "/stepped":
            assert 1 == len(runs), (before, other)
        else:
            assert 1 == charged(first.shop, amount), (before, other)
        first.shop.runs.clear()
        second.shop.runs.clear()
    assert held == len(pairs), "a request sends fewer statements than it is stopped before"
