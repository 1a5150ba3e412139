"""Claims in flight, seen through an app: who runs, who waits, what a crash leaves, who takes over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from flask import Response, request, stream_with_context
from gevent import Timeout
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency
from flask_idempotency.errors import OptionError
from flask_idempotency.heartbeat import heartbeat
from flask_idempotency.state import get_state
from flask_idempotency.waiting import Waiting
from tests.support.apps import Shop, events, make_shop, new_key, until
from tests.support.barrier import background, together

IN_FLIGHT = "urn:problem-type:idempotency:in-flight"
KEY_REUSED = "urn:problem-type:idempotency:key-reused"


class Slow:
    """A guarded view of a shop that makes a charge, and answers when the test lets it go."""

    def __init__(self, shop: Shop, **options: Any) -> None:
        self.shop = shop
        self.entered = threading.Semaphore(0)
        self.go = threading.Event()
        self.raises: BaseException | None = None

        @shop.app.post("/slow")
        @shop.idempotency.required(**options)
        def slow() -> tuple[dict[str, Any], int]:
            number = len(shop.runs) + 1
            shop.runs.append(request.get_json())
            shop.db.session.add(shop.Charge(amount=request.get_json()["amount"]))
            shop.db.session.commit()
            raises, go = self.raises, self.go
            self.entered.release()
            assert go.wait(20)
            if raises is not None:
                raise raises
            return {"run": number}, 201

    def ask(self, key: str, amount: int = 100) -> TestResponse:
        """Ask for a charge, and wait for the answer."""
        headers = {"X-Tenant": "acme", "Idempotency-Key": key}
        return self.shop.client.post("/slow", json={"amount": amount}, headers=headers)

    def start(self, key: str) -> Future[TestResponse]:
        """Ask for a charge, and return when the view runs."""
        asked = background(self.ask, key)
        assert self.entered.acquire(timeout=20)
        return asked

    def crash(self, key: str) -> None:
        """Let the view end as the abort of a worker ends it: after its commit, with no answer."""
        self.raises = SystemExit(1)
        asked = self.start(key)
        self.go.set()
        with pytest.raises(SystemExit):
            asked.result(20)
        self.raises = None


@pytest.fixture
def slow(shop: Shop) -> Iterator[Slow]:
    """A slow view with the default configuration, on each engine and driver."""
    one = Slow(shop)
    yield one
    one.go.set()


@pytest.fixture
def light_slow(light: Shop) -> Iterator[Slow]:
    """As ``slow``, on SQLite alone."""
    one = Slow(light)
    yield one
    one.go.set()


def names(seen: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The signals' names."""
    return [name for name, _ in seen]


# The race


@pytest.mark.scenario(1)
def test_twenty_identical(slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    """Of twenty identical requests one runs, the other nineteen get 409 with Retry-After, and nothing is an error."""
    key = new_key()
    caplog.set_level(logging.INFO)
    answers: list[TestResponse] = []
    with events(slow.shop.app) as seen:
        all_asked = background(together, 20, lambda _: answers.append(slow.ask(key)))
        until(lambda: len(answers) == 19, 20)
        slow.go.set()
        all_asked.result(20)
    assert [201, *[409] * 19] == sorted(one.status_code for one in answers)
    refused = [one for one in answers if one.status_code == 409]
    assert {(IN_FLIGHT, "2")} == {(one.json["type"], one.headers["Retry-After"]) for one in refused}
    assert 1 == len(slow.shop.runs) == slow.shop.charges() == len(slow.shop.rows())
    assert [*["conflicted"] * 19, "executed"] == sorted(names(seen))
    assert not [one for one in caplog.records if one.levelno > logging.INFO]


@pytest.mark.scenario(1, 5)
def test_twenty_identical_that_wait(make_light: Callable[..., Shop]) -> None:
    """With ``WAIT`` those that find a place get the replay; nobody runs a second time, and nobody gets an error."""
    slow = Slow(make_light(wait=20))
    key = new_key()
    answers: list[TestResponse] = []
    all_asked = background(together, 20, lambda _: answers.append(slow.ask(key)))
    until(lambda: len(answers) == 17, 20)
    slow.go.set()
    all_asked.result(20)
    assert [*[201] * 3, *[409] * 17] == sorted(one.status_code for one in answers)
    made = [one for one in answers if one.status_code == 201]
    assert {b'{"run":1}\n'} == {one.data for one in made}
    assert 2 == sum("Idempotent-Replay" in one.headers for one in made)
    assert 1 == len(slow.shop.runs) == slow.shop.charges()


@pytest.mark.scenario(5)
def test_a_waiter_replays(make: Callable[..., Shop]) -> None:
    """A duplicate that waits gets the answer of the first as soon as it is there, says so, and never runs."""
    slow = Slow(make(wait=20))
    key = new_key()
    places = get_state(slow.shop.app).lifecycle.places
    first = slow.start(key)
    with events(slow.shop.app) as seen:
        waiter = background(slow.ask, key)
        until(lambda: places._value == 1)
        other = slow.ask(key, amount=900)
        slow.go.set()
        answer, original = waiter.result(10), first.result(10)
    assert (201, original.data) == (answer.status_code, answer.data)
    assert "true" == answer.headers["Idempotent-Replay"]
    assert (422, KEY_REUSED) == (other.status_code, other.json["type"])
    assert 1 == len(slow.shop.runs)
    assert {"mismatched", "executed", "replayed"} == set(names(seen))


def test_the_time_of_the_last_look() -> None:
    """A waiter's time counts its last look, also if that ends after the time that it may wait."""
    with Waiting(0.05, threading.Semaphore(1)) as waiting:
        while waiting.pause():
            time.sleep(0.05)  # a look
    assert waiting.waited >= 0.05


@pytest.mark.scenario(6)
def test_a_waiter_that_gives_up(make_light: Callable[..., Shop]) -> None:
    """A waiter that gives up gets 409 and the time it waited is told; the owner's answer is recorded as ever."""
    slow = Slow(make_light(wait=0.2))
    key = new_key()
    first = slow.start(key)
    with events(slow.shop.app) as seen:
        assert 409 == slow.ask(key).status_code
    ((name, fields),) = seen
    assert "conflicted" == name
    assert fields["waited"] >= 0.2
    slow.go.set()
    assert 201 == first.result(10).status_code
    assert "true" == slow.ask(key).headers["Idempotent-Replay"]


@pytest.mark.scenario(6)
def test_the_loser_leaves_the_winners_claim(light_slow: Slow) -> None:
    """Duplicates that were refused, and requests that reused the key, end nothing of the claim in flight."""
    key = new_key()
    first = light_slow.start(key)
    before = light_slow.shop.rows()
    assert [409, 409, 422] == [light_slow.ask(key, amount).status_code for amount in (100, 100, 900)]
    assert before == light_slow.shop.rows()
    assert heartbeat.holds(before[0]["fencing_token"])
    light_slow.go.set()
    assert 201 == first.result(10).status_code


@pytest.mark.scenario(7)
def test_another_key_does_not_wait(slow: Slow) -> None:
    """While the view of one key runs, another key's goes through, on the same and on another route."""
    key = new_key()
    first = slow.start(key)
    go, slow.go = slow.go, threading.Event()
    slow.go.set()
    assert 201 == slow.ask(new_key()).status_code
    assert 201 == slow.shop.charge(new_key()).status_code
    assert not first.done()
    go.set()
    assert 201 == first.result(10).status_code


# The lease


@pytest.mark.scenario(2, 15)
def test_a_slow_view_is_not_taken_over(make: Callable[..., Shop]) -> None:
    """A view that takes longer than its lease keeps its claim, and its answer is recorded."""
    slow = Slow(make(lock_timeout=1))
    key = new_key()
    with events(slow.shop.app) as seen:
        first = slow.start(key)
        begun = slow.shop.rows()[0]["locked_at"]
        until(lambda: (slow.shop.rows()[0]["locked_at"] - begun).total_seconds() > 1.2)
        assert 409 == slow.ask(key).status_code
        slow.go.set()
        assert 201 == first.result(10).status_code
    assert ["conflicted", "executed"] == names(seen)
    assert "true" == slow.ask(key).headers["Idempotent-Replay"]
    assert 1 == len(slow.shop.runs)


@pytest.mark.scenario(9)
@pytest.mark.parametrize("value", [0, -1, None, "0", "", "soon", float("nan"), True], ids=repr)
def test_no_lease_is_refused(value: Any, sqlite_url: str) -> None:
    """A lease of zero, less or none is refused when the app is built, and at the decorator."""
    with pytest.raises(OptionError, match="IDEMPOTENCY_LOCK_TIMEOUT"):
        make_shop(sqlite_url, lock_timeout=value)
    with pytest.raises(OptionError, match="lock_timeout"):
        Idempotency().required(lock_timeout=value)


@pytest.mark.scenario(3, 13, 66)
def test_a_crash_is_taken_over_once(slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    """After a crash retries get 409 until the lease is over; then one of eight takes over, logged and signalled."""
    key = new_key()
    slow.crash(key)
    assert [409] * 3 == [slow.ask(key).status_code for _ in range(3)]
    slow.shop.shift(29)
    assert 409 == slow.ask(key).status_code
    slow.shop.shift(2)
    slow.go.clear()
    answers: list[TestResponse] = []
    with events(slow.shop.app) as seen:
        all_asked = background(together, 8, lambda _: answers.append(slow.ask(key)))
        until(lambda: len(answers) == 7, 20)
        slow.go.set()
        all_asked.result(20)
    assert [201, *[409] * 7] == sorted(one.status_code for one in answers)
    (fields,) = [fields for name, fields in seen if name == "taken_over"]
    assert 31 < fields["age_seconds"] < 60
    assert (2, key, "acme", "POST", "/slow", "slow") == tuple(
        fields[name] for name in ("attempts", "key", "scope", "method", "path", "endpoint")
    )
    (record,) = [one for one in caplog.records if getattr(one, "event", "") == "idempotency.takeover"]
    assert logging.WARNING == record.levelno
    assert f"key={key}" in record.getMessage()
    assert 2 == len(slow.shop.runs)
    assert b'{"run":2}\n' == slow.ask(key).data


@pytest.mark.scenario(3)
def test_the_view_is_told_of_a_takeover(light: Shop) -> None:
    """``current`` says whether this attempt took over another's claim, and how many there were before."""
    told: list[tuple[bool, int, bool]] = []

    @light.app.post("/told")
    @light.idempotency.required
    def view() -> str:
        current = light.idempotency.current
        assert current is not None
        told.append((current.takeover, current.attempts, current.replay))
        if len(told) < 3:
            raise SystemExit
        return "done"

    headers = {"X-Tenant": "acme", "Idempotency-Key": new_key()}
    for _ in range(2):
        with pytest.raises(SystemExit):
            light.client.post("/told", headers=headers)
        light.shift(31)
    assert b"done" == light.client.post("/told", headers=headers).data
    assert [(False, 0, False), (True, 1, False), (True, 2, False)] == told
    assert 3 == light.rows()[0]["attempts"]


@pytest.mark.scenario(3)
def test_the_holders_lease_counts(make_light: Callable[..., Shop]) -> None:
    """A deploy that shortens the lease does not end claims that were taken under the longer one, and the reverse."""
    long = Slow(make_light(lock_timeout=3600))
    short = Slow(make_light(lock_timeout=1))
    key, another = new_key(), new_key()
    long.crash(key)
    short.crash(another)
    long.shop.shift(100)
    assert 409 == short.ask(key).status_code
    long.go.set()
    assert 201 == long.ask(another).status_code


@pytest.mark.scenario(4)
def test_another_amount_after_a_crash(light_slow: Slow) -> None:
    """The key of a request that crashed is not to be had for another request: not in flight, not after the lease."""
    key = new_key()
    light_slow.crash(key)
    assert (422, KEY_REUSED) == ((answer := light_slow.ask(key, 900)).status_code, answer.json["type"])
    light_slow.shop.shift(31)
    before = light_slow.shop.rows()
    answers = together(4, lambda _: light_slow.ask(key, 900))
    assert [422] * 4 == [one.status_code for one in answers]
    assert before == light_slow.shop.rows()
    assert [{"amount": 100}] == light_slow.shop.runs
    assert 201 == light_slow.ask(key).status_code


@pytest.mark.scenario(61)
def test_a_short_retention_and_a_long_view(make_light: Callable[..., Shop]) -> None:
    """Retention ends no live claim, neither for duplicates nor for the pruner; it counts from the recording."""
    slow = Slow(make_light(retention=1))
    key = new_key()
    first = slow.start(key)
    slow.shop.shift(2)
    with slow.shop.app.app_context():
        assert 0 == slow.shop.idempotency.prune().deleted
    assert 409 == slow.ask(key).status_code
    slow.go.set()
    assert 201 == first.result(10).status_code
    assert "true" == slow.ask(key).headers["Idempotent-Replay"]
    slow.shop.shift(2)
    assert b'{"run":2}\n' == slow.ask(key).data


# Lost claims


@pytest.mark.scenario(12)
def test_a_holder_that_was_taken_over(slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    """A holder that was taken over answers its own client, records nothing and says so; the second answer stays."""
    key = new_key()
    with events(slow.shop.app) as seen:
        first = slow.start(key)
        slow.shop.shift(31)
        go, slow.go = slow.go, threading.Event()
        second = slow.start(key)
        go.set()
        assert (201, b'{"run":1}\n') == ((answer := first.result(10)).status_code, answer.data)
        assert 409 == slow.ask(key).status_code
        slow.go.set()
        assert b'{"run":2}\n' == second.result(10).data
    assert ["taken_over", "claim_lost", "conflicted", "executed"] == names(seen)
    assert b'{"run":2}\n' == slow.ask(key).data
    assert 2 == len(slow.shop.runs)
    (record,) = [one for one in caplog.records if getattr(one, "event", "") == "idempotency.lost"]
    assert logging.ERROR == record.levelno
    assert f"key={key}" in record.getMessage()


@pytest.mark.scenario(12)
def test_a_release_by_a_holder_that_was_taken_over(light_slow: Slow) -> None:
    """A failed view that was taken over releases nothing of its successor's."""
    key = new_key()
    light_slow.raises = RuntimeError("The provider does not answer.")
    with events(light_slow.shop.app) as seen:
        first = light_slow.start(key)
        light_slow.shop.shift(31)
        go, light_slow.go, light_slow.raises = light_slow.go, threading.Event(), None
        second = light_slow.start(key)
        go.set()
        assert 500 == first.result(10).status_code
        assert 409 == light_slow.ask(key).status_code
        light_slow.go.set()
        assert 201 == second.result(10).status_code
    assert ["taken_over", "claim_lost", "conflicted", "executed"] == names(seen)


@pytest.mark.scenario(12)
def test_the_heartbeat_finds_a_lost_claim(make_light: Callable[..., Shop]) -> None:
    """A claim that is taken over while the view still runs is found lost by its next renewal, and told once."""
    slow = Slow(make_light(lock_timeout=2))
    key = new_key()
    with events(slow.shop.app) as seen:
        first = slow.start(key)
        token = slow.shop.rows()[0]["fencing_token"]
        # Taken over by another host, as far as this process can tell.
        slow.shop.execute(slow.shop.table.update().values(fencing_token="another", attempts=2))
        until(lambda: names(seen) == ["claim_lost"])
        assert not heartbeat.holds(token)
        slow.go.set()
        assert 201 == first.result(10).status_code
    assert ["claim_lost"] == names(seen)
    assert ("another", "in_progress") == (slow.shop.rows()[0]["fencing_token"], slow.shop.rows()[0]["status"])


# Exceptions that are no Exception


def gevent_timeout() -> BaseException:
    """gevent's time-out, which is no ``Exception``."""
    return Timeout(1)


CRASHES: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(1),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "gevent.Timeout": gevent_timeout,
}

#: Where in a request it comes.
PLACES = ("view", "coroutine", "after_request", "teardown_request", "stream", "recording")


@pytest.mark.scenario(66)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", list(CRASHES))
def test_a_crash_records_and_releases_nothing(
    name: str, place: str, light: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception that is no ``Exception``, wherever it comes, leaves the claim to its lease, renewed no more."""
    crash = CRASHES[name]()
    armed = [place]

    def strike(here: str) -> None:
        if armed == [here]:
            armed.clear()
            raise crash

    def chunks() -> Iterator[bytes]:
        yield b"first "
        strike("stream")
        yield b"second"

    @light.app.after_request
    def after(response: Response) -> Response:
        strike("after_request")
        return response

    @light.app.teardown_request
    def teardown(error: BaseException | None) -> None:
        strike("teardown_request")

    def answer() -> Any:
        light.runs.append(name)
        strike("view")
        return Response(stream_with_context(chunks())) if place == "stream" else "first second"

    async def coroutine() -> Any:
        strike("coroutine")
        return answer()

    view = coroutine if place == "coroutine" else answer
    light.app.post("/crash", endpoint="crash")(light.idempotency.required(view))
    lifecycle = get_state(light.app).lifecycle
    finish = type(lifecycle).finish
    monkeypatch.setattr(type(lifecycle), "finish", lambda self, *given: (strike("recording"), finish(self, *given)))

    def ask() -> TestResponse:
        headers = {"X-Tenant": "acme", "Idempotency-Key": "key-00000001"}
        return light.client.post("/crash", headers=headers, buffered=True)

    with events(light.app) as seen:
        with pytest.raises(type(crash)):
            ask()
        (row,) = light.rows()
        assert not heartbeat.holds(row["fencing_token"])
        assert "in_progress" == row["status"]
        assert [] == names(seen)
        assert 409 == ask().status_code
    light.shift(31)
    with events(light.app) as seen:
        assert (200, b"first second") == ((after_lease := ask()).status_code, after_lease.data)
    assert ["taken_over", "executed"] == names(seen)
    assert "true" == ask().headers["Idempotent-Replay"]


def test_a_process_that_can_start_no_thread(light: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started to renew the claim, the view does not run and the claim is given up."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    key = new_key()
    with monkeypatch.context() as patched:
        patched.setattr(heartbeat, "_thread", None)
        patched.setattr(threading.Thread, "start", start)
        assert 500 == light.charge(key).status_code
    assert [] == light.runs == light.rows()
    assert 201 == light.charge(key).status_code


# Where nothing is separate


def test_in_memory_a_live_claim_is_never_taken_over() -> None:
    """On SQLite in memory, where no thread may renew, a claim that this process holds is alive for all its time."""
    slow = Slow(make_shop("sqlite://"))
    key = new_key()
    first = slow.start(key)
    slow.shop.shift(31)
    assert 409 == slow.ask(key).status_code
    slow.go.set()
    assert 201 == first.result(10).status_code
    slow.crash(another := new_key())
    slow.shop.shift(31)
    assert 201 == slow.ask(another).status_code
