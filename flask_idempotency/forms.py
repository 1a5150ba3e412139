"""Overviews as JSON: plain values, times in ISO 8601 with UTC, durations in seconds."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import Any

from .overview import Rank
from .recorded import Elsewhere, Recorded
from .store.survey import Detail, Stats, Summary


def time(moment: datetime | None, digits: str = "milliseconds") -> str | None:
    """A time to the millisecond, or the second; ``None``: there is none, or it can't be read."""
    return None if moment is None else moment.isoformat(timespec=digits).replace("+00:00", "Z")


def stats(found: Stats, endpoints: Iterable[Rank]) -> dict[str, Any]:
    """The whole table at a glance, with the keys of each endpoint."""
    return {
        "keys": sum(found.by_status.values()) + found.unknown,
        "by_status": {status.value: keys for status, keys in found.by_status.items()},
        "unknown": found.unknown,
        "stale": found.stale,
        "expired": found.expired,
        "by_age": [{"younger_than": seconds, "keys": keys} for seconds, keys in found.by_age],
        "by_endpoint": [{"endpoint": one.name, "keys": one.keys} for one in endpoints],
        "bytes": found.bytes,
        "oldest": time(found.oldest),
        "counts": asdict(found.counts),
    }


def ranks(found: Iterable[Rank], by: str) -> dict[str, Any]:
    """Endpoints, or scopes, with their keys and counts."""
    return {
        "by": by,
        "found": [{by: one.name, "keys": one.keys, "retried": one.retried, **asdict(one.counts)} for one in found],
    }


def summary(one: Summary) -> dict[str, Any]:
    """One key of a list."""
    return {name: _plain(value) for name, value in asdict(one).items()}


def detail(found: Detail, body: bool) -> dict[str, Any]:
    """One key in full; its answer's body only if it is asked for."""
    answer = found.recorded
    return {
        **summary(found.summary),
        "fingerprint": found.fingerprint,
        "fingerprint_version": found.fingerprint_version,
        "secret_id": found.secret_id,
        "steps": {name: _loaded(text) for name, text in found.steps.items()},
        "answer": None if answer is None else _answer(answer, body),
    }


def text_of(body: bytes) -> str | None:
    """A body as a text; ``None``: it is none."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return text if all(one.isprintable() or one in "\t\r\n" for one in text) else None


def _answer(answer: Recorded, body: bool) -> dict[str, Any]:
    kept: dict[str, Any] = {"status": answer.status, "reason": answer.reason, "headers": answer.headers, "body": None}
    if isinstance(answer.body, Elsewhere):
        kept["body"] = {"bytes": answer.body.size, "name": answer.body.name, "sha256": answer.body.digest}
    elif answer.body is not None:
        kept["body"] = {"bytes": len(answer.body)}
        text = text_of(answer.body)
        if body and text is not None:
            kept["body"]["text"] = text
        elif body:
            kept["body"]["base64"] = base64.b64encode(answer.body).decode()
    return kept


def _loaded(text: str) -> Any:
    # What is no JSON any more is shown as the text that it is.
    try:
        return json.loads(text)
    except ValueError:
        return text


def _plain(value: Any) -> Any:
    return time(value) if isinstance(value, datetime) else value
