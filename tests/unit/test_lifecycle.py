"""The protocol without Flask: what a stored key means for a request, and how a claim begins and ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotency import errors
from flask_idempotency.claim import Status, Stored
from flask_idempotency.heartbeat import Heartbeat
from flask_idempotency.lifecycle import Granted, Lifecycle, Refused, Replay, Request, Verdict, judge
from flask_idempotency.policy import Policy
from flask_idempotency.recorded import Recorded
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.waiting import LOOKS, WAITERS
from tests.store.support import count, execute, opened, row, shift
from tests.support.apps import until
from tests.support.barrier import background, together

KEY = "key-00000001"
ANSWER = Recorded(201, (("Content-Type", "text/plain"),), b"made")
UNAVAILABLE = Recorded(201)


def stored(
    status: Status = Status.IN_PROGRESS,
    *,
    stale: bool = False,
    expired: bool = False,
    stale_policy: str = "reexecute",
    recorded: Recorded | None = None,
    fingerprint: str = "a",
    version: int = 1,
) -> Stored:
    """A key as the store may find it."""
    return Stored(
        scope="acme",
        key=KEY,
        status=status,
        token="token",
        method="POST",
        path="/charges",
        fingerprint=fingerprint,
        fingerprint_version=version,
        attempts=1,
        stale_policy=stale_policy,
        stale=stale,
        expired=expired,
        age_seconds=1.0,
        recorded=recorded,
    )


def asked(fingerprint: str = "a", key: str = KEY, **options: Any) -> Request:
    """A request; its fingerprint is the same under every version."""
    return Request(
        scope="acme",
        key=key,
        method="POST",
        path="/charges",
        version=1,
        fingerprint=lambda version, like: fingerprint,
        policy=Policy(**options),
    )


LIVE = stored()
STALE = stored(stale=True)
STALE_REJECT = stored(stale=True, stale_policy="reject")
COMPLETED = stored(Status.COMPLETED, recorded=ANSWER)
UNKEPT = stored(Status.COMPLETED, recorded=UNAVAILABLE)
HELD = stored(Status.HELD)
RELEASED = stored(Status.RELEASED)
EXPIRED = stored(Status.COMPLETED, recorded=ANSWER, expired=True)
EXPIRED_CRASH = stored(stale=True, expired=True)

TABLE = {
    # what is stored: (the same request, another request, another request with on_mismatch=replay)
    "alive": (LIVE, errors.InFlight, errors.KeyReused, errors.InFlight),
    "lease ran out": (STALE, Verdict.TAKE, errors.KeyReused, errors.KeyReused),
    "lease ran out, reject": (STALE_REJECT, errors.OutcomeUnknown, errors.KeyReused, errors.KeyReused),
    "recorded": (COMPLETED, Verdict.REPLAY, errors.KeyReused, Verdict.REPLAY),
    "answer not kept": (UNKEPT, errors.RecordUnavailable, errors.KeyReused, errors.RecordUnavailable),
    "held": (HELD, errors.OutcomeUnknown, errors.KeyReused, errors.KeyReused),
    "released": (RELEASED, Verdict.TAKE, errors.KeyReused, errors.KeyReused),
    "retention over": (EXPIRED, Verdict.TAKE, Verdict.TAKE, Verdict.TAKE),
    "retention and lease over": (EXPIRED_CRASH, Verdict.TAKE, Verdict.TAKE, Verdict.TAKE),
}


@pytest.mark.scenario(3, 4, 13, 73)
@pytest.mark.parametrize("name", list(TABLE))
def test_judge(name: str) -> None:
    """Each state of a key means one thing for a retry, and another for a request with other contents."""
    found, same, other, lenient = TABLE[name]
    assert same is judge(found, asked())
    assert other is judge(found, asked("b"))
    assert same is judge(found, asked(on_mismatch="replay"))
    assert lenient is judge(found, asked("b", on_mismatch="replay"))


@pytest.mark.parametrize("policy", ["reexecute", "reject"])
def test_the_holders_policy_decides(policy: str) -> None:
    """Whether a claim may be taken over is what its holder stored with it, not what the asker is configured to."""
    expected = Verdict.TAKE if policy == "reexecute" else errors.OutcomeUnknown
    for own in ("reexecute", "reject"):
        assert expected is judge(stored(stale=True, stale_policy=policy), asked(stale=own))


@pytest.mark.scenario(30)
def test_judge_compares_by_the_stored_version() -> None:
    """A fingerprint is compared with one that was computed by the version it is stored with."""
    request = Request("acme", KEY, "POST", "/charges", 2, lambda version, like: f"by version {version}", Policy())
    found = stored(Status.COMPLETED, recorded=ANSWER, fingerprint="by version 1", version=1)
    assert Verdict.REPLAY is judge(found, request)
    found = stored(Status.COMPLETED, recorded=ANSWER, fingerprint="by version 2", version=1)
    assert errors.KeyReused is judge(found, request)


class Told:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def settled(self) -> None:
        self.words.append("settled")

    def lost(self) -> None:
        self.words.append("lost")

    def failed(self, error: Exception) -> None:
        self.words.append("failed")


@pytest.fixture
def store(sqlite_url: str) -> Iterator[SQLAlchemyStore]:
    """An empty store in an SQLite file."""
    with opened(sqlite_url) as one:
        yield one


@pytest.fixture
def lifecycle(store: SQLAlchemyStore) -> Iterator[Lifecycle]:
    """The protocol over that store, with a heartbeat of its own."""
    one = Lifecycle(store, Heartbeat())
    yield one
    for live in list(one.heartbeat._live.values()):
        one.heartbeat._live.pop(live.claim.token, None)


@pytest.fixture
def told() -> Told:
    """A watcher."""
    return Told()


def begun(lifecycle: Lifecycle, told: Told, request: Request | None = None) -> Granted:
    """A claim that is held."""
    granted = lifecycle.begin(request or asked())
    assert isinstance(granted, Granted)
    lifecycle.keep(granted, told)
    return granted


def refused(lifecycle: Lifecycle, request: Request | None = None) -> Refused:
    """How a request is refused."""
    with pytest.raises(Refused) as caught:
        lifecycle.begin(request or asked())
    return caught.value


def test_finish_then_replay(lifecycle: Lifecycle, told: Told) -> None:
    """A claim that is finished leaves its answer, and is renewed no more."""
    granted = begun(lifecycle, told)
    assert errors.InFlight is refused(lifecycle).error
    lifecycle.finish(granted, ANSWER, 60.0, told)
    outcome = lifecycle.begin(asked())
    assert isinstance(outcome, Replay)
    assert ANSWER == outcome.recorded
    assert ["settled"] == told.words
    assert not lifecycle.heartbeat.holds(granted.claim.token)


def test_release_then_run(lifecycle: Lifecycle, told: Told, store: SQLAlchemyStore) -> None:
    """A claim that is released leaves nothing, so that the next request gets one at once."""
    lifecycle.release(begun(lifecycle, told), told)
    assert 0 == count(store)
    again = begun(lifecycle, told)
    assert (1, None) == (again.claim.attempts, again.over)
    assert ["settled"] == told.words


@pytest.mark.scenario(3, 66)
def test_abandon_leaves_it_to_the_lease(lifecycle: Lifecycle, told: Told, store: SQLAlchemyStore) -> None:
    """An abandoned claim is renewed no more, keeps others out for its lease, and is then taken over once."""
    granted = begun(lifecycle, told)
    lifecycle.abandon(granted)
    assert not lifecycle.heartbeat.holds(granted.claim.token)
    assert errors.InFlight is refused(lifecycle).error
    shift(store, 31)
    again = begun(lifecycle, told)
    assert again.over is not None
    assert (granted.claim.token, 2) == (again.over.token, again.claim.attempts)
    assert again.over.age_seconds >= 31
    assert [] == told.words


@pytest.mark.scenario(12)
def test_a_lost_claim_records_nothing(lifecycle: Lifecycle, told: Told, store: SQLAlchemyStore) -> None:
    """A holder that was taken over is told so once, and neither its answer nor its release changes the key."""
    first = begun(lifecycle, told)
    shift(store, 31)
    second = begun(lifecycle, Told())
    lifecycle.finish(first, Recorded(500, (), b"late"), 60.0, told)
    lifecycle.release(first, told)
    assert ["lost"] == told.words
    lifecycle.finish(second, ANSWER, 60.0, Told())
    outcome = lifecycle.begin(asked())
    assert isinstance(outcome, Replay)
    assert ANSWER == outcome.recorded


@pytest.mark.scenario(61)
def test_retention_does_not_end_a_live_claim(lifecycle: Lifecycle, told: Told, store: SQLAlchemyStore) -> None:
    """A claim whose retention is shorter than its view is still nobody else's."""
    begun(lifecycle, told, asked(retention=1.0))
    shift(store, 2)
    assert 0 == store.prune(100).count
    assert errors.InFlight is refused(lifecycle, asked(retention=1.0)).error


@pytest.mark.scenario(5)
def test_a_waiter_gets_the_answer(lifecycle: Lifecycle, told: Told) -> None:
    """A waiter whose owner finishes reads the key again, and replays."""
    granted = begun(lifecycle, told)
    waiting = background(lifecycle.begin, asked(wait=20.0))
    until(lambda: lifecycle.places._value < WAITERS)
    lifecycle.finish(granted, ANSWER, 60.0, told)
    outcome = waiting.result(10)
    assert isinstance(outcome, Replay)
    assert ANSWER == outcome.recorded
    assert WAITERS == lifecycle.places._value


@pytest.mark.scenario(5)
def test_a_waiter_checks_the_fingerprint(lifecycle: Lifecycle, told: Told) -> None:
    """A request with other contents does not wait at all."""
    begun(lifecycle, told)
    found = refused(lifecycle, asked("b", wait=20.0))
    assert (errors.KeyReused, 0.0) == (found.error, found.waited)


@pytest.mark.scenario(6)
def test_a_waiter_that_gives_up(lifecycle: Lifecycle, told: Told) -> None:
    """A waiter whose time is over is refused, and the owner's claim is as it was."""
    granted = begun(lifecycle, told)
    found = refused(lifecycle, asked(wait=0.1))
    assert errors.InFlight is found.error
    assert found.waited > 0.09  # a sleep may end a clock's tick early
    lifecycle.finish(granted, ANSWER, 60.0, told)
    assert ["settled"] == told.words


def test_waiting_leaves_random_alone(lifecycle: Lifecycle, told: Told) -> None:
    """An app that seeds `random` draws the same numbers, whoever waits meanwhile."""
    begun(lifecycle, told)
    before = random.getstate()
    assert refused(lifecycle, asked(wait=0.1)).waited > 0
    assert before == random.getstate()


@pytest.mark.scenario(8)
def test_few_may_wait(lifecycle: Lifecycle, told: Told) -> None:
    """Of ten duplicates two wait, and eight are refused at once."""
    granted = begun(lifecycle, told)
    waiting = [background(lifecycle.begin, asked(wait=20.0)) for _ in range(10)]
    until(lambda: sum(one.done() for one in waiting) == 8)
    lifecycle.finish(granted, ANSWER, 60.0, told)
    errors_of = [one.exception(10) for one in waiting]
    assert 2 == errors_of.count(None)
    assert {0.0} == {one.waited for one in errors_of if isinstance(one, Refused)}


def test_a_waiter_runs_what_was_released(lifecycle: Lifecycle, told: Told) -> None:
    """A waiter whose owner gives up gets the claim; two of them do not both get it."""
    granted = begun(lifecycle, told)
    waiting = [background(lifecycle.begin, asked(wait=1.0)) for _ in range(2)]
    until(lambda: lifecycle.places._value == 0)
    lifecycle.release(granted, told)
    outcomes = [one.exception(10) or one.result() for one in waiting]
    assert {Granted, Refused} == {type(one) for one in outcomes}


@pytest.mark.scenario(3)
def test_eight_takers(lifecycle: Lifecycle, told: Told, store: SQLAlchemyStore) -> None:
    """Of eight that find a lease over, one takes the claim, and the rest are refused."""
    lifecycle.abandon(begun(lifecycle, told))
    shift(store, 31)

    def take(_: int) -> Any:
        try:
            return lifecycle.begin(asked())
        except Refused as error:
            return error.error

    outcomes = together(8, take)
    assert 7 == outcomes.count(errors.InFlight)
    assert 1 == sum(isinstance(one, Granted) for one in outcomes)


@pytest.mark.scenario(10)
def test_a_key_that_never_stands_still(lifecycle: Lifecycle, told: Told, store: SQLAlchemyStore) -> None:
    """A key that others change between every two statements is looked at so often and no more; nothing is granted."""
    lifecycle.abandon(begun(lifecycle, told))
    shift(store, 31)
    moves: list[str] = []

    def meddle(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        # Another taker, between the look and the take: its token is another, and its lease is over as well.
        if statement.startswith(f"UPDATE {store.table.fullname} SET request_method") and not moves[LOOKS * 2 :]:
            moves.append(statement)
            execute(store, f"UPDATE {{table}} SET fencing_token = 'other-{len(moves)}'")

    sa.event.listen(sa.Engine, "before_cursor_execute", meddle)
    try:
        with pytest.raises(errors.StoreError, match="changed 10 times"):
            lifecycle.begin(asked())
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", meddle)
    assert LOOKS == len(moves)


@pytest.mark.scenario(10)
def test_a_key_that_is_gone_again(lifecycle: Lifecycle, told: Told, store: SQLAlchemyStore) -> None:
    """A key that is given up between the look and the take is claimed anew."""
    lifecycle.abandon(begun(lifecycle, told))
    shift(store, 31)

    def meddle(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith(f"UPDATE {store.table.fullname} SET request_method"):
            execute(store, "DELETE FROM {table}")

    sa.event.listen(sa.Engine, "before_cursor_execute", meddle)
    try:
        granted = lifecycle.begin(asked())
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", meddle)
    assert isinstance(granted, Granted)
    assert (1, None) == (granted.claim.attempts, granted.over)
    assert granted.claim.token == row(store).fencing_token


def test_a_crash_while_recording(lifecycle: Lifecycle, told: Told, store: SQLAlchemyStore) -> None:
    """An exception that is no ``Exception`` in the middle of the recording stops the renewal, as a crash does."""
    granted = begun(lifecycle, told)

    def crash(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith(f"UPDATE {store.table.fullname} SET status"):
            raise SystemExit(1)

    sa.event.listen(sa.Engine, "before_cursor_execute", crash)
    try:
        with pytest.raises(SystemExit):
            lifecycle.finish(granted, ANSWER, 60.0, told)
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", crash)
    assert [] == told.words
    assert not lifecycle.heartbeat.holds(granted.claim.token)
    assert "in_progress" == row(store).status


def test_keys_do_not_wait_for_each_other(lifecycle: Lifecycle, told: Told) -> None:
    """While one key is held, and waited for, others are claimed."""
    begun(lifecycle, told)
    waiting = threading.Event()
    background(lambda: (waiting.set(), lifecycle.begin(asked(wait=1.0))))
    assert waiting.wait(5)
    for number in range(3):
        begun(lifecycle, told, asked(key=f"key-other-{number}"))
