"""The checker sees what it should in histories that were written by hand, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.acceptance.proof.checker import account, check, kept
from tests.acceptance.proof.history import UNKNOWN, Answer, Charge, Event, History, Kind, Mode, Row

KEY = "payment-1"


def answer(number: int = 1, run: str = "a", *, replay: bool = False, status: int = 201) -> Answer:
    return Answer(KEY, status, json.dumps({"id": number, "run": run}), replay, run)


def held() -> Answer:
    return Answer(KEY, 409, json.dumps({"type": UNKNOWN}))


def event(kind: Kind, run: str = "a") -> Event:
    return Event(kind, KEY, run)


def history(mode: Mode = "default") -> History:
    """One operation, asked for twice and run once."""
    return History(
        modes={KEY: mode},
        answers=[answer(), answer(replay=True)],
        events=[event("begun"), event("stepped"), event("ended"), event("executed")],
        rows=[Row(1, KEY, "a")],
        charges=[Charge("derived-1", "ch_1", KEY, ("a",))] if mode == "steps" else [],
    )


def taken_over(mode: Mode = "default") -> History:
    """The same after a kill behind the commit: a second run, under a takeover."""
    one = history(mode)
    one.events = [event("begun"), event("taken_over", "b"), event("begun", "b"), event("stepped", "b")]
    one.rows = [Row(1, KEY, "a"), Row(2, KEY, "b")]
    one.answers = [answer(2, "b"), answer(2, "b", replay=True)]
    return one


def promises(one: History) -> set[str]:
    return {violation.promise for violation in check(one)}


@pytest.mark.parametrize("mode", ["default", "atomic", "steps"])
def test_nothing_happened(mode: Mode) -> None:
    """A run and its replay are as promised in each mode."""
    assert [] == check(history(mode))
    assert "" == account(history(mode))


def test_a_takeover_allows_a_second_row() -> None:
    """In default mode a takeover may do the work again; in atomic mode it may not."""
    assert [] == check(taken_over())
    assert {"1 rows"} == promises(taken_over("atomic"))


def test_a_second_row_without_a_takeover() -> None:
    """Two rows of one key that nobody took over are found."""
    one = taken_over()
    one.events = [event("begun"), event("begun", "b")]

    assert {"at most one row more than takeovers"} == promises(one)
    assert "Row(id=2" in account(one)


def test_a_failure_allows_no_row() -> None:
    """A view that failed and was released has left no row: if it had committed one, its key would be held."""
    one = taken_over()
    one.events = [event("begun"), event("failed"), event("released"), event("begun", "b")]

    assert {"at most one row more than takeovers"} == promises(one)


def test_a_row_without_an_answer() -> None:
    """In atomic mode a key that was declined, or held, has no row."""
    one = history("atomic")
    one.answers = [answer(status=402)]

    assert {"0 rows"} == promises(one)


def test_an_answer_without_its_row() -> None:
    """An answer that names a row which is not there is found, in each mode."""
    lost, other = history("atomic"), history()
    lost.rows = []
    other.rows = [Row(7, KEY, "a")]

    assert {"1 rows", "the row that an answer names"} == promises(lost)
    assert {"the row that an answer names"} == promises(other)


def test_a_replay_with_another_body() -> None:
    """A replay that differs from the first answer in its body or status alone is found."""
    for changed in (replace(answer(replay=True), body='{"id":1, "run":"a"}'), answer(replay=True, status=200)):
        one = history()
        one.answers = [answer(), changed]
        assert {"one answer"} == promises(one)


def test_an_answer_that_was_not_kept() -> None:
    """The answer of a run that lost its claim may differ from the others, a replay may not, and none in atomic mode."""
    one = taken_over()
    one.answers.append(answer(1, "a"))
    assert {"one answer"} == promises(one)

    one.events.append(event("claim_lost"))
    assert [] == check(one)
    assert answer(1, "a") not in kept(one)

    atomic = replace(one, modes={KEY: "atomic"}, rows=[Row(1, KEY, "a")])
    assert "one answer" in promises(atomic)
    one.answers.append(answer(1, "a", replay=True))
    assert {"one answer"} == promises(one)


@pytest.mark.parametrize("written", [None, "executed", "held"])
def test_an_answer_that_was_not_written(written: Kind | None) -> None:
    """What a process said, and had still to write when it was killed, may differ; once it is written, it may not."""
    for said in (answer(1, "a"), answer(1, "a", replay=True)):
        one = taken_over()
        one.events.append(event("record_failed"))
        one.answers.append(said)
        if written:
            one.events.append(event(written))
        assert ({"one answer"} if written else set()) == promises(one)


def test_a_held_key() -> None:
    """A hold is a final answer: as good as any on its own, and not beside a success."""
    one = history()
    one.answers = [held(), held()]
    assert one.answers[0].held
    assert [] == check(one)

    one.answers.append(answer())
    assert {"one answer"} == promises(one)


def test_a_key_that_is_stuck() -> None:
    """A client that got no final answer is found, though others did; so is a key that nobody was answered for."""
    one, other = history(), history()
    one.stuck = [KEY]
    other.answers = []

    assert {"a final answer once the faults have ended"} == promises(one)
    assert {"a final answer"} == promises(other)


def test_two_derived_keys() -> None:
    """Two derived keys of one key are found, and so are the two charges that they made."""
    one = history("steps")
    one.charges.append(Charge("derived-2", "ch_2", KEY, ("b",)))

    assert {"one derived key", "one charge"} == promises(one)


def test_a_derived_key_of_two() -> None:
    """A derived key that two keys share is found."""
    one = history("steps")
    one.charges.append(Charge("derived-1", "ch_1", "payment-2", ("b",)))

    assert {"a derived key of its own"} == promises(one)


def test_a_success_that_was_not_charged() -> None:
    """A successful payment that the provider does not know is found; one that was declined needs no charge."""
    one = history("steps")
    one.charges = []
    assert {"one charge"} == promises(one)

    one.answers = [answer(status=402)]
    assert [] == check(one)


@pytest.mark.parametrize(
    ("runs", "expected"), [(("a",), set()), (("a", "b"), {"a stored step is not run again"})], ids=["once", "twice"]
)
def test_a_stored_step(runs: tuple[str, ...], expected: set[str]) -> None:
    """A run that begins when the step is stored already must not call the provider."""
    one = history("steps")
    one.events = [event("begun"), event("stepped"), event("taken_over", "b"), event("begun", "b")]
    one.charges = [Charge("derived-1", "ch_1", KEY, runs)]

    assert expected == promises(one)


def test_a_step_that_was_not_stored() -> None:
    """A run that begins before the step is stored may call the provider again, under the same derived key."""
    one = taken_over("steps")
    one.charges = [Charge("derived-1", "ch_1", KEY, ("a", "b"))]

    assert [] == check(one)
