"""Between rows and values. What a row may hold is checked here, so that nothing corrupt is ever acted on."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, TypeVar

import sqlalchemy as sa

from ..claim import Asking, Claim, Status, Stored
from ..errors import RowUnreadable
from ..recorded import Elsewhere, Recorded
from .survey import Counts, Summary
from .table import COUNTS

T = TypeVar("T")

#: Before the headers, under names that no header can have: a status text of the app's own; where a body lies that is
#: not in the row, and how to know it.
REASON = ":status"
BODY = ":body"

_ELSEWHERE = re.compile(r"([!-~]{1,255}) ([0-9]{1,18}) ([0-9a-f]{64})")

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

#: The columns that make a :class:`~flask_idempotency.claim.Stored`, beside the judgements of time.
COLUMNS = (
    "id",
    "scope",
    "key",
    "status",
    "fencing_token",
    "request_method",
    "request_path",
    "request_fingerprint",
    "fingerprint_version",
    "attempts",
    "lock_timeout",
    "stale_policy",
    "response_status",
    "response_headers",
    "response_body",
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the database's clock says of a row."""

    stale: bool
    expired: bool
    age_seconds: float


def claim_of(asking: Asking, id: int, attempts: int = 1) -> Claim:
    """The claim that ``asking`` got."""
    return Claim(id, asking.scope, asking.key, asking.token, asking.lock_timeout, attempts)


def answer_values(recorded: Recorded) -> dict[str, Any]:
    """The columns that hold an answer."""
    if recorded.body is None:
        return {"response_status": recorded.status, "response_headers": None, "response_body": None}
    headers = [[name, value] for name, value in recorded.headers]
    if recorded.reason is not None:
        headers.insert(0, [REASON, recorded.reason])
    answer = {"response_status": recorded.status, "response_headers": headers, "response_body": recorded.body}
    if isinstance(body := recorded.body, Elsewhere):
        headers.insert(0, [BODY, f"{body.name} {body.size} {body.digest}"])
        answer["response_body"] = None
    return answer


def answer_parameters(recorded: Recorded) -> dict[str, Any]:
    """The same, as parameters of a statement."""
    return {f"kept_{column}": value for column, value in answer_values(recorded).items()}


def found(row: sa.Row[Any], asking: Asking, stored: Stored) -> Claim | Stored:
    """What a look-up for ``asking`` came to. A row that carries its own token is its claim, whose reply was lost."""
    if stored.token == asking.token and stored.status is Status.IN_PROGRESS:
        return claim_of(asking, row.id, stored.attempts)
    return stored


def judged(row: sa.Row[Any]) -> Judgement:
    """The judgements that the database made beside the row."""
    if row.stale is None or row.expired is None or row.age is None:
        raise _unreadable(row, "a time is missing, or is none")
    # SQLite and MySQL spell a boolean 0 or 1.
    return Judgement(bool(row.stale), bool(row.expired), float(row.age))


def judged_by_clock(row: sa.Row[Any]) -> Judgement:
    """The same, made here of the row's times and of the database's clock, which was read beside them."""
    now = _instant(row, "clock")
    idle = now - _instant(row, "locked_at")
    running = row.status == Status.IN_PROGRESS.value
    # What is no number is found out when the row is read.
    stale = running and isinstance(row.lock_timeout, (int, float)) and idle > row.lock_timeout
    settled = row.status in (Status.COMPLETED.value, Status.RELEASED.value)
    over = settled or (stale and row.stale_policy == "reexecute")
    completed = row.status == Status.COMPLETED.value
    age = now - _instant(row, "completed_at") if completed else idle
    return Judgement(stale, over and _instant(row, "expires_at") <= now, age)


def stored_of(row: sa.Row[Any], scope: str, key: str, judgement: Judgement) -> Stored:
    """A row as a value.

    :raises RowUnreadable: it is corrupt, unknown, or not the row that was asked for.
    """
    if row.scope != scope or row.key != key:
        raise RowUnreadable(
            "The database compares scopes or keys inexactly: another one was found than was asked for. On MySQL and "
            "MariaDB run the migration (flask db migrate, then flask db upgrade), which makes the columns scope and "
            "key exact; elsewhere give them a binary collation, which tells case, accents and trailing blanks apart."
        )
    status = _status(row)
    _lease(row)
    return Stored(
        scope=scope,
        key=key,
        status=status,
        token=_text(row, "fencing_token", empty=False),
        method=_text(row, "request_method"),
        path=_text(row, "request_path"),
        fingerprint=_text(row, "request_fingerprint", empty=False),
        fingerprint_version=_number(row, "fingerprint_version"),
        attempts=_number(row, "attempts", least=1),
        stale_policy=_policy(row),
        stale=judgement.stale,
        expired=judgement.expired,
        age_seconds=judgement.age_seconds,
        recorded=_recorded(row) if status is Status.COMPLETED else None,
    )


def summary_of(row: Any, judge: Callable[[Any], Judgement]) -> Summary:
    """A row in a list. What can't be read of it is empty, zero or ``None``, and ``problem`` says what that is.

    :param judge: what makes the judgements of time of it.
    """
    found: list[RowUnreadable] = []

    def read(reader: Callable[..., T], default: T, *args: Any) -> T:
        try:
            return reader(row, *args)
        except RowUnreadable as error:
            found.append(error)
            return default

    status = read(_status, None)
    judgement = read(lambda row: judge(row), Judgement(False, False, 0.0))
    completed = status is Status.COMPLETED
    return Summary(
        id=row.id,
        scope=read(_text, "", "scope"),
        key=read(_text, "", "key"),
        status=status,
        method=read(_text, "", "request_method"),
        path=read(_text, "", "request_path"),
        attempts=read(_number, 0, "attempts", 1),
        stale=judgement.stale,
        expired=judgement.expired,
        stale_policy=read(_policy, ""),
        lock_timeout=read(_lease, 0.0),
        response_status=read(_number, None, "response_status", 100, 999) if completed else None,
        created_at=read(_time, None, "told_created_at"),
        updated_at=read(_time, None, "told_updated_at"),
        locked_at=read(_time, None, "told_locked_at"),
        completed_at=read(_time, None, "told_completed_at") if completed else None,
        expires_at=read(_time, None, "told_expires_at"),
        counts=counts_of(row),
        problem=str(found[0]) if found else None,
    )


def counts_of(row: Any) -> Counts:
    """What a row, or a sum over some, has of counts. Nothing that matters hangs on them: what is none, is zero."""
    numbers = (getattr(row, name, None) for name in COUNTS)
    return Counts(*(int(number) if isinstance(number, (int, float, Decimal)) else 0 for number in numbers))


def time_of(value: object) -> datetime | None:
    """A time, of whatever a driver makes of it: in UTC, to the microsecond; ``None``: it is none.

    A number is of seconds since 1970. What carries no zone was written in UTC.
    """
    try:
        if isinstance(value, (int, float)):
            # A float of today's seconds has no more than six digits behind the point.
            return _EPOCH + timedelta(seconds=value)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.astimezone(timezone.utc) if value.tzinfo else value.replace(tzinfo=timezone.utc)
    except (ValueError, OverflowError):
        pass
    return None


def body_named(headers: object) -> str | None:
    """The name of the body that a row without one has elsewhere, by its headers; ``None`` where they name none."""
    match headers:
        case [[name, str(text)], *_] if name == BODY and (found := _ELSEWHERE.fullmatch(text)):
            return found[1]
    return None


def named(headers: Iterable[object]) -> tuple[str, ...]:
    """The names of bodies, of those that have one elsewhere."""
    return tuple(name for one in headers if one is not None and (name := body_named(one)))


def steps_of(row: sa.Row[Any]) -> dict[str, str]:
    """The results of steps by their names.

    :raises RowUnreadable: they are none. To take them for no results would run the steps again.
    """
    if row.stepless:
        return {}
    steps = row.steps
    if not isinstance(steps, dict) or not all(isinstance(result, str) for result in steps.values()):
        raise _unreadable(row, "steps is not an object of texts")
    return steps


def _recorded(row: sa.Row[Any]) -> Recorded:
    # Three digits (RFC 9110, section 15): apps do send some that no standard knows.
    status = _number(row, "response_status", least=100, most=999)
    body = row.response_body
    if body is None and row.response_headers is None:
        return Recorded(status)
    if isinstance(body, memoryview):
        body = bytes(body)
    if not isinstance(body, bytes | None):
        raise _unreadable(row, "response_body is not binary")
    headers = tuple(_headers(row))
    if body is None:
        body, headers = _elsewhere(row, headers), headers[1:]
    elif headers and headers[0][0] == BODY:
        raise _unreadable(row, "its body is there, and elsewhere too")
    if headers and headers[0][0] == REASON:
        return Recorded(status, headers[1:], body, headers[0][1])
    return Recorded(status, headers, body)


def _elsewhere(row: sa.Row[Any], headers: tuple[tuple[str, str], ...]) -> Elsewhere:
    if not headers or headers[0][0] != BODY:
        raise _unreadable(row, "headers without a body")
    match = _ELSEWHERE.fullmatch(headers[0][1])
    if match is None:
        raise _unreadable(row, "where its body lies is not said as it should be")
    return Elsewhere(match[1], int(match[2]), match[3])


def _headers(row: sa.Row[Any]) -> Iterable[tuple[str, str]]:
    if not isinstance(row.response_headers, list):
        raise _unreadable(row, "response_headers is not a list")
    for pair in row.response_headers:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise _unreadable(row, "response_headers is not a list of pairs of strings")
        yield pair[0], pair[1]


def _time(row: Any, column: str) -> datetime:
    found = time_of(getattr(row, column))
    if found is None:
        raise _unreadable(row, "a time is missing, or is none")
    return found


def _instant(row: sa.Row[Any], column: str) -> float:
    """A time in seconds since 1970. What carries no zone was written in UTC.

    As a number: two times of one zone Python subtracts as its clocks show them, without their change to summer time.
    """
    value = getattr(row, column)
    if isinstance(value, float):
        return value
    if not isinstance(value, datetime):
        raise _unreadable(row, "a time is missing, or is none")
    return (value if value.tzinfo is not None else value.replace(tzinfo=timezone.utc)).timestamp()


def _status(row: sa.Row[Any]) -> Status:
    try:
        return Status(row.status)
    except ValueError:
        raise _unreadable(row, f"unknown status {row.status!r}") from None


def _lease(row: sa.Row[Any]) -> float:
    if not (isinstance(row.lock_timeout, (int, float)) and 0 < row.lock_timeout < math.inf):
        # Judged by such a lease, a claim would never be over.
        raise _unreadable(row, "lock_timeout is not a number of seconds")
    return row.lock_timeout


def _text(row: sa.Row[Any], column: str, empty: bool = True) -> str:
    value = getattr(row, column)
    if not isinstance(value, str) or not (value or empty):
        raise _unreadable(row, f"{column} is not a text, or is empty")
    return value


def _number(row: sa.Row[Any], column: str, least: int = 0, most: int | None = None) -> int:
    value = getattr(row, column)
    if not isinstance(value, int) or value < least or (most is not None and value > most):
        raise _unreadable(row, f"{column} is not a number, or out of range")
    return value


def _policy(row: sa.Row[Any]) -> str:
    policy = _text(row, "stale_policy")
    if policy not in ("reexecute", "reject"):
        raise _unreadable(row, f"unknown stale_policy {policy!r}")
    return policy


def _unreadable(row: sa.Row[Any], what: str) -> RowUnreadable:
    # By its id: the key itself may be a secret of the client's, and has its own field in a log record.
    return RowUnreadable(
        f"The stored row with id {row.id} can't be read: {what}. It is corrupt, or was written by a later version of "
        "Flask-Idempotency. It is left as it is."
    )
