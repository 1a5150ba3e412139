"""Overviews on a terminal. What comes from rows is quoted where it could forge a line, or drive the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from .claim import Status
from .forms import text_of, time
from .overview import Rank
from .recorded import Elsewhere, Recorded
from .signals import shown
from .store.survey import EARLY, LATE, Counts, Detail, Stats, Summary
from .tabular import figures, pairs, table

#: What to do about a table that lacks what is counted. In the words that the store's own errors have.
MIGRATE: Final = (
    "The table has no columns for counts, so that they are zero here. Run the migration (flask db migrate, then flask "
    "db upgrade)."
)
NOT_COUNTED: Final = (
    "IDEMPOTENCY_COUNT_REPLAYS is off: replays, conflicts and mismatches are not counted, and a key is retried where "
    "it was claimed more than once."
)
_MEANING: Final = (
    f"Replays under {EARLY:.0f} s after the recording: a network's hiccups, mostly.",
    f"Replays over {LATE:.0f} s: an aggressive client, which retries although it has been answered.",
    "Mismatches: a bug of the client's, which sends one key with two requests.",
)
_AGES: Final = {60.0: "a minute", 3_600.0: "an hour", 86_400.0: "a day", 604_800.0: "a week"}

#: Bytes of a body that is no text which are shown, and how many on a line.
_DUMPED: Final = 1_024
_LINE: Final = 16


def stats(found: Stats, endpoints: Iterable[Rank]) -> Iterator[str]:
    """The whole table at a glance."""
    states = [(status.value, str(keys)) for status, keys in found.by_status.items()]
    if found.unknown:
        states.append(("unknown", str(found.unknown)))
    yield from figures(("status", "keys"), states)
    yield ""
    ages = [(_age(seconds), str(keys)) for seconds, keys in found.by_age]
    yield from figures(("stored", "keys"), ages)
    yield ""
    yield from figures(("endpoint", "keys"), [(shown(one.name), str(one.keys)) for one in endpoints])
    yield ""
    total = sum(found.by_status.values()) + found.unknown
    size = "" if found.bytes is None else f", {bytes_of(found.bytes)} with their indexes"
    oldest = "" if found.oldest is None else f". The oldest was stored at {time(found.oldest)}"
    yield f"{counted(total, 'key')}{size}{oldest}."
    if found.counts != Counts():
        yield f"Asked for again: {_counts(found.counts)}."
    yield from _to_do(found)


def ranks(found: Iterable[Rank], by: str) -> Iterator[str]:
    """Endpoints, or scopes: first those for whose used keys most requests came."""
    rows = []
    for one in found:
        counts = one.counts
        numbers = (counts.replays, counts.early, counts.late, counts.conflicts, counts.mismatches)
        rows.append((shown(one.name), *map(str, (one.keys, one.retried, *numbers))))
    heads = (by, "keys", "retried", "replays", f"under {EARLY:.0f} s", f"over {LATE:.0f} s", "conflicts", "mismatches")
    yield from figures(heads, rows)
    yield ""
    yield from _MEANING


def listed(found: Iterable[Summary]) -> Iterator[str]:
    """Keys, a line each, and what is wrong with those that can't be read."""
    rows, problems = [], []
    for one in found:
        request = f"{shown(one.method)} {shown(one.path)}"
        answer = "" if one.response_status is None else str(one.response_status)
        stored = time(one.created_at, "seconds") or "?"
        rows.append((stored, _state(one), answer, request, shown(one.scope), shown(one.key)))
        problems += [one.problem] if one.problem else []
    yield from table(("stored", "status", "answer", "request", "scope", "key"), rows)
    yield from problems


def detail(found: Detail, body: bool) -> Iterator[str]:
    """One key in full; its answer's body only if it is asked for."""
    one = found.summary
    over = " (over)" if one.stale else ""
    rows = [
        ("scope", shown(one.scope)),
        ("key", shown(one.key)),
        ("status", _state(one)),
        ("request", f"{shown(one.method)} {shown(one.path)}"),
        ("fingerprint", f"{shown(found.fingerprint)}, version {found.fingerprint_version}"),
        ("attempts", str(one.attempts)),
        ("stored", time(one.created_at) or ""),
        ("sign of life", time(one.locked_at) or ""),
        ("lease", f"{one.lock_timeout:g} s{over}, then {one.stale_policy}"),
        ("recorded", time(one.completed_at) or ""),
        ("kept until", "it is settled" if one.waits else time(one.expires_at) or ""),
        ("asked again", _counts(one.counts) if one.counts != Counts() else ""),
        ("secret", "" if found.secret_id is None else shown(found.secret_id)),
        *(("step", f"{shown(name)} = {printable(text)}") for name, text in found.steps.items()),
    ]
    answer = found.recorded
    if answer is not None:
        rows += _answer(answer)
    elif one.response_status is not None:  # there is one, which can't be opened
        rows.append(("answer", str(one.response_status)))
    yield from pairs(row for row in rows if row[1])
    if body and answer is not None and isinstance(answer.body, bytes) and answer.body:
        yield ""
        yield from _body(answer.body)


def bytes_of(number: int) -> str:
    """A size as people say it."""
    size, unit = float(number), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{number} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


def counted(number: int, one: str, more: str | None = None) -> str:
    """A number of things."""
    return f"{number} {one if number == 1 else more or one + 's'}"


def printable(text: str) -> str:
    """A text in which nothing drives a terminal, and which is one line."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _to_do(found: Stats) -> Iterator[str]:
    held = found.by_status[Status.HELD]
    if held:
        yield f"{counted(held, 'key')} held, waiting for a person: flask idempotency list --status held."
    if found.stale:
        yield f"{counted(found.stale, 'claim')} past {_of(found.stale)} lease: flask idempotency list --stale."
    if found.expired:
        over = f"{counted(found.expired, 'key')} past {_of(found.expired)} retention"
        yield f"{over}, which flask idempotency prune deletes."
    if found.unknown:
        yield f"{counted(found.unknown, 'row')} of unknown status: corrupt, or of a later version."


def _of(number: int) -> str:
    return "its" if number == 1 else "their"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "before"
    return f"within {_AGES.get(seconds, f'{seconds:g} s')}"


def _state(one: Summary) -> str:
    if one.status is None:
        return "unreadable"
    marks = [mark for mark, is_so in (("stale", one.stale), ("expired", one.expired)) if is_so]
    return f"{one.status.value}, {marks[0]}" if marks else one.status.value


def _counts(counts: Counts) -> str:
    aged = f"{counts.early} under {EARLY:.0f} s, {counts.late} over {LATE:.0f} s"
    others = f"{counted(counts.conflicts, 'conflict')}, {counted(counts.mismatches, 'mismatch', 'mismatches')}"
    return f"{counted(counts.replays, 'replay')} ({aged}), {others}"


def _answer(answer: Recorded) -> Iterator[tuple[str, str]]:
    yield "answer", f"{answer.status} {printable(answer.reason or '')}".rstrip()
    for name, value in answer.headers:
        yield "header", f"{printable(name)}: {printable(value)}"
    if isinstance(answer.body, Elsewhere):
        where = f"in the body store as {shown(answer.body.name)}, SHA-256 {answer.body.digest}"
        yield "body", f"{counted(answer.body.size, 'byte')}, {where}"
    elif answer.body is None:
        yield "body", "not kept"
    else:
        yield "body", counted(len(answer.body), "byte")


def _body(body: bytes) -> Iterator[str]:
    text = text_of(body)
    if text is not None:
        yield from (printable(line.replace("\t", "    ")) for line in text.splitlines())
        return
    for start in range(0, min(len(body), _DUMPED), _LINE):
        line = body[start : start + _LINE]
        letters = "".join(chr(one) if 32 <= one < 127 else "." for one in line)
        yield f"{start:08x}  {line.hex(' ').ljust(3 * _LINE - 1)}  {letters}"
    if len(body) > _DUMPED:
        yield f"… {len(body) - _DUMPED} bytes binary more"
