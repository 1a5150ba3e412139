"""Signals and log records: one of each per event.

Every event is one record on the logger ``flask_idempotency``, with an ``event`` name and its fields both in
``extra`` and in the message as ``name=value``, and one Blinker signal, sent with the app as its sender and the
fields as keyword arguments. All but :data:`pruned` carry ``key``, ``scope``, ``method``, ``path`` and
``endpoint``; ``key`` and ``scope`` are ``None`` where the request was turned away before they were known.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from blinker import NamedSignal, Namespace

_signals = Namespace()

#: The view ran and the key is completed. ``status``; ``duration`` in seconds, from the claim to the answer;
#: ``attempts``: claims taken so far, this one included.
executed: Final = _signals.signal("executed")
#: A request was answered from the record. ``original_status``; ``age_seconds`` since the recording.
replayed: Final = _signals.signal("replayed")
#: A duplicate got 409. ``age_seconds`` since the holder's last sign of life; ``waited`` in seconds.
conflicted: Final = _signals.signal("conflicted")
#: A used key came with another request. ``original_path``; ``age_seconds``.
mismatched: Final = _signals.signal("mismatched")
#: A request was turned away for another reason. ``reason``: the last part of the problem's ``type``. Where the body of
#: a recorded answer could not be had, an error in the log, also ``exception``: why, and ``remedy``: what to do.
rejected: Final = _signals.signal("rejected")
#: A claim was given up with nothing recorded. ``status`` of the answer, or ``exception`` that escaped.
released: Final = _signals.signal("released")
#: A request failed after it had committed something, so that its outcome is unknown and the key waits for a person.
#: ``status`` of the answer, or ``exception`` that escaped; ``seen``: what it had committed; ``remedy``: what to do.
held: Final = _signals.signal("held")
#: A claim whose lease ran out was replaced. ``age_seconds`` since its last sign of life; ``attempts``.
taken_over: Final = _signals.signal("taken_over")
#: A holder found that its claim had been taken over; its answer is not recorded.
claim_lost: Final = _signals.signal("claim_lost")
#: An answer could not be recorded, or is not kept (too large, or a stream that broke off), or a view ran without
#: protection. ``exception``: what was in the way.
record_failed: Final = _signals.signal("record_failed")
#: A guarded view is about to run without a claim; once per request and reason. ``reason``: ``no-key``, it is optional;
#: ``store-unavailable`` (logged as a warning), where the store can't answer and the app runs the view all the same,
#: beside :data:`record_failed`. ``user_agent``: what the client calls itself, cut to 200 characters.
unguarded: Final = _signals.signal("unguarded")
#: Keys past their retention were deleted. ``deleted``; ``batches``; ``duration`` in seconds.
pruned: Final = _signals.signal("pruned")

logger: Final = logging.getLogger("flask_idempotency")


@dataclass(frozen=True)
class Event:
    """What happens when an event does: its name in the log, how loud it is there, and its signal."""

    name: str
    level: int
    signal: NamedSignal


EXECUTE: Final = Event("idempotency.execute", logging.DEBUG, executed)
REPLAY: Final = Event("idempotency.replay", logging.INFO, replayed)
CONFLICT: Final = Event("idempotency.conflict", logging.INFO, conflicted)
MISMATCH: Final = Event("idempotency.mismatch", logging.WARNING, mismatched)
REJECT: Final = Event("idempotency.reject", logging.INFO, rejected)
RELEASE: Final = Event("idempotency.release", logging.INFO, released)
HOLD: Final = Event("idempotency.hold", logging.ERROR, held)
TAKEOVER: Final = Event("idempotency.takeover", logging.WARNING, taken_over)
LOST: Final = Event("idempotency.lost", logging.ERROR, claim_lost)
RECORD_FAILED: Final = Event("idempotency.record_failed", logging.ERROR, record_failed)
UNGUARDED: Final = Event("idempotency.unguarded", logging.INFO, unguarded)
PRUNE: Final = Event("idempotency.prune", logging.INFO, pruned)


#: What is to be done about a held key.
REMEDY: Final = (
    "Find out what was done. Then make the key claimable again, flask idempotency release SCOPE KEY, or record the "
    "answer, idempotency.settle(scope, key, response)."
)


def is_heard(event: Event) -> bool:
    """Whether anybody would get it, as loud as the event is by itself: a log's handlers, or a receiver."""
    return logger.isEnabledFor(event.level) or bool(event.signal.receivers)


def emit(event: Event, app: Any, values: Mapping[str, Any], level: int | None = None) -> None:
    """Log the event and send its signal.

    A receiver that raises is logged and changes nothing: an answer is not lost because a counter failed.

    :param level: how loud this one is in the log; as the event is if left out.
    """
    level = event.level if level is None else level
    if logger.isEnabledFor(level):
        # The event's name is a part of the template, by which collectors such as Sentry group what they are sent.
        logger.log(level, f"{event.name} %s", worded(values), extra={"event": event.name, **values})
    if event.signal.is_muted or not event.signal.receivers:
        return
    for receiver in event.signal.receivers_for(app):
        try:
            app.ensure_sync(receiver)(app, **values)
        except Exception:
            logger.exception("A receiver of the signal %s failed.", event.signal.name)


def worded(values: Mapping[str, Any]) -> str:
    """Fields as a message has them: ``name=value``, with blanks in between."""
    return " ".join(f"{name}={shown(value)}" for name, value in values.items())


def shown(value: Any) -> str:
    """A value as a message has it."""
    # A scope is the app's own text, and may hold blanks and line breaks: quoted, it can't forge a log line.
    text = str(value)
    return text if text and text.isascii() and text.isprintable() and not set(' "=') & set(text) else json.dumps(text)
