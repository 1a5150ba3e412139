"""Whether a history keeps the contract: a pure function, history in, violations out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from tests.acceptance.proof.history import Answer, Charge, History, Row, by_key


@dataclass(frozen=True)
class Violation:
    """A promise that was broken for a key."""

    promise: str
    key: str
    seen: str

    def __str__(self) -> str:
        return f"{self.key}: {self.promise}: {self.seen}"


def check(history: History) -> list[Violation]:
    """All violations; none if the history is as promised."""
    checks = (_answered, _equal, _rows_of_default, _rows_of_atomic, _lost_rows, _derived, _charged, _stepped_once)
    return [violation for one in checks for violation in one(history)]


def account(history: History) -> str:
    """What is known of the first few keys that have a violation, for whoever has to find out why."""
    lines: list[object] = []
    for key in dict.fromkeys(violation.key for violation in check(history)[:5]):
        lines += [violation for violation in check(history) if violation.key == key]
        for values in (history.events, history.answers, history.rows, history.charges):
            lines += [value for value in values if value.key == key][-20:]
    return "\n".join(map(str, lines))


def kept(history: History) -> list[Answer]:
    """The answers that bind: all but those that the contract lets go, which is in the log each time.

    In default mode, a holder that finds its claim taken over has done its work all the same, and its client is told.
    While the database is gone, a process gives the answer, and repeats it, that it goes on trying to record. If it is
    killed meanwhile, nobody else has heard of it. Atomic mode has no such answer.
    """
    lost = history.runs("claim_lost")
    failed = history.runs("record_failed")
    unwritten = failed & lost | failed - history.runs("executed", "released", "held")

    def lets_go(answer: Answer) -> bool:
        if history.modes[answer.key] == "atomic":
            return False
        return answer.run in unwritten or (answer.run in lost and not answer.replay)

    return [answer for answer in history.answers if not lets_go(answer)]


def _answered(history: History) -> Iterator[Violation]:
    """Nothing is stuck."""
    for key in history.stuck:
        yield Violation("a final answer once the faults have ended", key, "none")
    for key in history.modes.keys() - {answer.key for answer in history.answers} - set(history.stuck):
        yield Violation("a final answer", key, "nobody got one")


def _equal(history: History) -> Iterator[Violation]:
    """All final answers of a key are equal, apart from the replay marker."""
    for key, answers in by_key(kept(history)).items():
        different = {(answer.status, answer.body) for answer in answers}
        if len(different) > 1:
            yield Violation("one answer", key, " and ".join(f"{status} {body}" for status, body in sorted(different)))


def _rows_of_default(history: History) -> Iterator[Violation]:
    """Without atomic mode, a key has at most one row more than takeovers."""
    allowed = history.count("taken_over")
    for key, rows in _rows(history).items():
        if history.modes.get(key) != "atomic" and len(rows) > 1 + allowed[key]:
            seen = f"{len(rows)} rows, {allowed[key]} takeovers"
            yield Violation("at most one row more than takeovers", key, seen)


def _rows_of_atomic(history: History) -> Iterator[Violation]:
    """In atomic mode, a key has exactly one row if its answer says so, and none otherwise."""
    successful = {answer.key for answer in history.answers if answer.status < 300}
    rows = _rows(history)
    for key, mode in history.modes.items():
        found, expected = len(rows.get(key, [])), int(key in successful)
        if mode == "atomic" and found != expected:
            yield Violation(f"{expected} rows", key, f"{found} rows")


def _lost_rows(history: History) -> Iterator[Violation]:
    """What a successful answer tells of is there."""
    there = {(row.key, row.id) for row in history.rows}
    for key, answers in by_key(history.answers).items():
        told = {json.loads(answer.body)["id"] for answer in answers if answer.status < 300}
        for number in sorted(one for one in told if (key, one) not in there):
            yield Violation("the row that an answer names", key, f"no row {number}")


def _derived(history: History) -> Iterator[Violation]:
    """A key has one derived key, for all its attempts, and shares it with no other."""
    seen: dict[str, set[str]] = {}
    owners: dict[str, set[str]] = {}
    for charge in history.charges:
        seen.setdefault(charge.key, set()).add(charge.derived)
        owners.setdefault(charge.derived, set()).add(charge.key)
    for key, derived in seen.items():
        if len(derived) > 1:
            yield Violation("one derived key", key, ", ".join(sorted(derived)))
    for derived_key, keys in owners.items():
        if len(keys) > 1:
            seen_with = f"{derived_key} is that of {', '.join(sorted(keys))}"
            yield Violation("a derived key of its own", min(keys), seen_with)


def _charged(history: History) -> Iterator[Violation]:
    """A successful payment is charged once, and none more than once."""
    charges: dict[str, set[str]] = {}
    for charge in history.charges:
        charges.setdefault(charge.key, set()).add(charge.charge)
    for key, made in charges.items():
        if len(made) > 1:
            yield Violation("one charge", key, ", ".join(sorted(made)))
    for answer in history.answers:
        if history.modes[answer.key] == "steps" and answer.status < 300 and answer.key not in charges:
            yield Violation("one charge", answer.key, "none")


def _stepped_once(history: History) -> Iterator[Violation]:
    """A step whose result is stored does not run again."""
    callers: dict[str, Charge] = {charge.key: charge for charge in history.charges}
    stored: set[str] = set()
    for event in history.events:
        if event.kind == "stepped":
            stored.add(event.key)
        later = event.kind == "begun" and event.key in stored and event.key in callers
        if later and event.run in callers[event.key].runs:
            yield Violation("a stored step is not run again", event.key, f"by run {event.run}")


def _rows(history: History) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in history.rows:
        found.setdefault(row.key, []).append(row)
    return found
