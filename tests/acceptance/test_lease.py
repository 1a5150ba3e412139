"""Claims of real processes: raced for, outlived, left behind by a kill, frozen."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import requests
import sqlalchemy as sa

from tests.acceptance.shop import Served, failures, replayed
from tests.support.apps import new_key, until
from tests.support.barrier import background, together

pytestmark = pytest.mark.thorough

IN_FLIGHT = "urn:problem-type:idempotency:in-flight"
KEY_REUSED = "urn:problem-type:idempotency:key-reused"


def taken_over_by_one_of_eight(two: Served, key: str) -> requests.Response:
    """Eight simultaneous retries until the lease is over: the answer of the one that took over."""

    def eight() -> tuple[list[requests.Response], Future[Any]]:
        answers: list[requests.Response] = []
        asked = background(together, 8, lambda number: answers.append(two.ask(key, server=number % 2)))
        until(lambda: len(answers) >= 7, 20)
        assert {409} == {one.status_code for one in answers[:7]}
        until(lambda: len(answers) == 8 or len(two.runs(key)) == 2, 20)
        return answers, asked

    with two.held(key):
        while len(two.runs(key)) == 1:
            answers, asked = eight()
    asked.result(20)
    assert 201 == answers[7].status_code
    return answers[7]


@pytest.mark.scenario(1, 60, 65)
def test_twenty_identical_on_two_ports(two: Served) -> None:
    """Of twenty identical requests to two processes one runs, and the others get 409 with Retry-After at once."""
    key = new_key()
    answers: list[requests.Response] = []
    before = [len(one.log) for one in two.servers]
    with two.held(key):
        asked = background(together, 20, lambda number: answers.append(two.ask(key, server=number % 2)))
        until(lambda: len(answers) == 19, 20)
        assert {(409, IN_FLIGHT, "2")} == {
            (one.status_code, one.json()["type"], one.headers["Retry-After"]) for one in answers
        }
    asked.result(20)
    assert 201 == answers[19].status_code
    assert 1 == len(two.runs(key))
    for number in range(2):
        retry = two.ask(key, server=number)
        assert (201, True, answers[19].content) == (retry.status_code, replayed(retry), retry.content)
    assert [] == failures(two.since(before))


@pytest.mark.scenario(2, 7)
def test_a_view_that_outlives_its_lease(two: Served) -> None:
    """A live view keeps its claim past the lease, from the other process too, while another key goes through."""
    key = new_key()
    with two.held(key):
        first = background(two.ask, key)
        two.running(key)
        begun = two.row(key)["locked_at"]
        assert 201 == two.ask(new_key()).status_code
        until(lambda: (two.row(key)["locked_at"] - begun).total_seconds() > 1.6)
        assert [409, 409] == [two.ask(key, server=number).status_code for number in range(2)]
    assert 201 == first.result(20).status_code
    assert replayed(two.ask(key, server=1))
    assert 1 == len(two.runs(key))
    assert 0 == two.logged("takeover", key)


@pytest.mark.scenario(3, 4, 13)
@pytest.mark.parametrize("where", ["before", "after"])
def test_killed_in_the_view(two: Served, where: str) -> None:
    """After SIGKILL, before or after the app's commit, there is 409 until the lease ends, then one logged takeover."""
    key = new_key()
    with two.held(key, where):
        first = background(two.ask, key)
        two.servers[0].kill(two.running(key, where))
        assert isinstance(first.exception(20), requests.RequestException)
        assert 409 == two.ask(key, server=1).status_code
        other = two.ask(key, 900, server=1)
        assert (422, KEY_REUSED) == (other.status_code, other.json()["type"])
    answer = taken_over_by_one_of_eight(two, key)
    other = two.ask(key, 900, server=1)
    assert (422, KEY_REUSED) == (other.status_code, other.json()["type"])
    retry = two.ask(key, server=1)
    assert (201, True, answer.content) == (retry.status_code, replayed(retry), retry.content)
    assert 2 == len(two.runs(key)) == two.row(key)["attempts"]
    assert 1 == two.logged("takeover", key)


@pytest.mark.scenario(12)
def test_frozen_taken_over_thawed(two: Served) -> None:
    """A process that was frozen past its lease, taken over and thawed records nothing, and says that it lost."""
    key = new_key()
    with two.held(key, "after"):
        first = background(two.ask, key)
        pid = two.running(key, "after")
        two.freeze(pid)
        try:
            with two.held(key):
                while len(two.runs(key)) == 1:
                    second = background(two.ask, key, 100, 1)
                    until(lambda second=second: second.done() or len(two.runs(key)) == 2, 20)
        finally:
            two.servers[0].thaw(pid)
    late, answer = first.result(20), second.result(20)
    assert (201, 201) == (late.status_code, answer.status_code)
    assert late.content != answer.content
    until(lambda: two.logged("lost", key) == 1)
    for number in range(2):
        retry = two.ask(key, server=number)
        assert (201, True, answer.content) == (retry.status_code, replayed(retry), retry.content)
    assert 2 == len(two.runs(key))
    assert (1, 1) == (two.logged("takeover", key), two.logged("lost", key))


@pytest.mark.scenario(79)
def test_frozen_taken_over_thawed_before_a_step(two: Served) -> None:
    """A process that was frozen past its lease, taken over and thawed takes no further step: one charge is made."""
    key = new_key()
    with two.held(key):
        first = background(two.ask, key, path="/pay")
        pid = two.running(key)
        two.freeze(pid)
    try:
        until(lambda: two.ask(key, server=1, path="/pay").status_code == 201, 20)
    finally:
        two.servers[0].thaw(pid)
    assert 500 == first.result(20).status_code
    until(lambda: two.logged("lost", key) == 1)
    other = two.runs(key)[1]
    assert ([pid, other], [other]) == (two.runs(key), two.charged(key))
    for number in range(2):
        retry = two.ask(key, server=number, path="/pay")
        assert (201, True, {"by": other}) == (retry.status_code, replayed(retry), retry.json())
    assert (1, 1) == (two.logged("takeover", key), two.logged("lost", key))


@pytest.mark.scenario(12)
def test_frozen_and_thawed_without_a_rival(two: Served) -> None:
    """A process that was frozen past its lease, and that nobody took over, goes on and records its answer."""
    key = new_key()
    with two.held(key):
        first = background(two.ask, key)
        pid = two.running(key)
        two.freeze(pid)
        seen = two.row(key)["locked_at"]
        time.sleep(two.config["lock_timeout"] + 0.2)
        assert seen == two.row(key)["locked_at"]
        two.servers[0].thaw(pid)
        until(lambda: two.row(key)["locked_at"] > seen)
        assert 409 == two.ask(key, server=1).status_code
    assert 201 == first.result(20).status_code
    assert replayed(two.ask(key, server=1))
    assert 1 == len(two.runs(key))


@pytest.mark.scenario(64)
def test_a_client_that_goes_away(two: Served) -> None:
    """A view whose client is gone runs to its end: 409 meanwhile, then the replay."""
    key = new_key()
    with two.held(key):
        connection = http.client.HTTPConnection(two.servers[0].host, two.servers[0].port, timeout=20)
        with contextlib.closing(connection):
            headers = {"Idempotency-Key": key, "X-Tenant": "acme", "Content-Type": "application/json"}
            connection.request("POST", "/work", json.dumps({"amount": 100}), headers)
            two.running(key)
        assert 409 == two.ask(key).status_code
    until(lambda: two.row(key)["status"] == "completed", 20)
    retry = two.ask(key, server=1)
    assert (201, True) == (retry.status_code, replayed(retry))
    assert 1 == len(two.runs(key))


@pytest.mark.scenario(20)
def test_many_keys_at_once(two: Served) -> None:
    """Distinct keys in several threads of two processes all go through, each run once, and nothing is locked."""
    keys = [new_key() for _ in range(48)]
    before = [len(one.log) for one in two.servers]

    def ask(number: int) -> list[int]:
        mine = keys[number::16]
        return [two.ask(key, server=number % 2).status_code for key in mine for _ in range(2)]

    answers = together(16, ask)
    assert [] == failures(two.since(before))
    assert [[201] * 6] * 16 == answers
    assert {1} == {len(two.runs(key)) for key in keys}


@pytest.mark.scenario(8)
def test_waiters_leave_room(serve: Callable[..., Served], sqlite_url: str) -> None:
    """With four threads, a slow owner and ten duplicates that would wait, an unrelated GET is answered."""
    served = serve(sqlite_url, wait=20)
    server = served.start(worker_class="gthread", threads=4)
    key = new_key()
    answers: list[requests.Response] = []
    with served.held(key):
        owner = background(served.ask, key)
        served.running(key)
        waiting = background(together, 10, lambda _: answers.append(served.ask(key)))
        until(lambda: len(answers) == 8, 20)
        assert 200 == requests.get(f"{server.url}/ping", timeout=5).status_code
        assert {409} == {one.status_code for one in answers}
    waiting.result(20)
    assert [201, 201] == [one.status_code for one in answers[8:]]
    assert {(True, owner.result(20).content)} == {(replayed(one), one.content) for one in answers[8:]}
    assert 1 == len(served.runs(key))


@pytest.mark.scenario(65)
@pytest.mark.parametrize("worker_class", ["gthread", "gevent"])
def test_preload_with_four_workers(worker_class: str, serve: Callable[..., Served], postgres_url: str) -> None:
    """Workers that were forked from one preloaded app run a key once, and renew its claim past the lease."""
    served = serve(postgres_url, lock_timeout=1)
    served.start(worker_class=worker_class, workers=4, threads=4, preload=True)
    key = new_key()
    answers: list[requests.Response] = []
    with served.held(key):
        asked = background(together, 20, lambda _: answers.append(served.ask(key)))
        until(lambda: len(answers) == 19, 20)
        begun = served.row(key)["locked_at"]
        until(lambda: (served.row(key)["locked_at"] - begun).total_seconds() > 1.1)
        assert 409 == served.ask(key).status_code
    asked.result(20)
    assert {409} == {one.status_code for one in answers[:19]}
    assert 201 == answers[19].status_code
    assert 1 == len(served.runs(key))
    assert replayed(served.ask(key))
    others = together(16, lambda _: served.ask(new_key()).status_code)
    assert [201] * 16 == others
    assert [] == failures(served.logs)
    # What is done beside the renewals (telling of a lost claim) stops no worker either.
    lost = new_key()
    with served.held(lost):
        first = background(served.ask, lost)
        served.running(lost)
        changed = sa.update(served.shop.table).where(served.shop.table.c.key == lost)
        served.shop.execute(changed.values(fencing_token="another"))
        until(lambda: served.logged("lost", lost) == 1)
    assert 201 == first.result(20).status_code
    assert [201] * 16 == together(16, lambda _: served.ask(new_key()).status_code)


@pytest.mark.scenario(66)
def test_gunicorns_time_out(serve: Callable[..., Served], postgres_url: str) -> None:
    """A worker whose time is over ends in its view, by SystemExit: 409 until the lease ends, then a takeover."""
    served = serve(postgres_url, lock_timeout=4)
    server = served.start(worker_class="sync", workers=2, timeout=1)
    key = new_key()
    with served.held(key):
        first = background(served.ask, key)
        pid = served.running(key)
        assert first.exception(20) or first.result().status_code >= 500
        until(lambda: pid not in server.pids)
        assert 409 == served.ask(key).status_code
    assert 1 == len(served.runs(key))
    assert "in_progress" == served.row(key)["status"]
    assert 0 == served.logged("release", key)
    served.shop.shift(5)
    assert (201, False) == ((answer := served.ask(key)).status_code, replayed(answer))
    assert (2, 1) == (len(served.runs(key)), served.logged("takeover", key))


def test_the_process_ends_though_a_claim_is_alive(serve: Callable[..., Served], sqlite_url: str) -> None:
    """A server that is stopped in the middle of a view is gone within its grace, and leaves the claim to its lease."""
    served = serve(sqlite_url)
    server = served.start(worker_class="gthread", threads=2, options=["--graceful-timeout=1"])
    key = new_key()
    with served.held(key):
        background(served.ask, key)
        served.running(key)
        background(server.stop).result(20)
        assert "Shutting down: Master" in server.log  # it was not killed
    assert "in_progress" == served.row(key)["status"]
