"""What is counted, whoever keeps the numbers: which outcome an event is, with which labels, and what a store is asked.

No label is a key, a scope or a path: a client could make as many of these as it likes.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from blinker import NamedSignal
from flask import Flask

from .. import errors, signals
from ..claim import Status
from ..errors import ConfigurationError
from ..listing import OPTIONAL, PARTLY, PROTECTED, REQUIRED, list_routes
from ..state import AppState, get_state
from ..store import SQLAlchemyStore
from ..store.survey import Stats

#: What became of a request, by the signal that tells of it.
OUTCOMES: Final[Mapping[NamedSignal, str]] = {
    signals.executed: "executed",
    signals.replayed: "replayed",
    signals.conflicted: "conflict",
    signals.mismatched: "mismatch",
    signals.rejected: "rejected",
    signals.released: "released",
    signals.held: "held",
    signals.claim_lost: "lost",
    signals.unguarded: "unguarded",
    signals.taken_over: "takeover",
    signals.record_failed: "record_failed",
}

#: Outcomes that come beside another one of the same request.
BESIDE: Final = frozenset({"takeover", "record_failed"})

#: Why a request is turned away, and why a view runs without a claim.
REJECTIONS: Final = (
    errors.KeyMissing.slug,
    errors.KeyInvalid.slug,
    errors.ScopeMissing.slug,
    errors.RecordUnavailable.slug,
    errors.TooManyKeys.slug,
    errors.StoreUnavailable.slug,
)
UNGUARDED: Final = ("no-key", "store-unavailable")

#: In place of an endpoint that is none of the app's.
OTHER: Final = "other"

#: Seconds. The store counts all of its rows when it is asked, so it is not asked at every scrape.
MAX_AGE: Final = 30.0

#: Seconds. A retry within the first few is a network's hiccup, one past 30 s a client's own; a day is the retention.
AGES: Final = (1.0, 5.0, 30.0, 60.0, 300.0, 1800.0, 3600.0, 21600.0, 86400.0)

#: Seconds, with the lease of 30 s among them.
DURATIONS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class Figure:
    """A metric, by its names.

    :ivar prometheus: with the suffix of its kind, as a query has it.
    :ivar kind: ``counter``, ``histogram`` or ``gauge``.
    :ivar unit: as OpenTelemetry spells it: seconds are ``s``, and what is counted stands in braces.
    :ivar labels: Prometheus' names of them; see :data:`ATTRIBUTES` for OpenTelemetry's.
    """

    prometheus: str
    opentelemetry: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def bare(self) -> str:
        """Prometheus' name without a counter's suffix."""
        return self.prometheus.removesuffix("_total")


#: OpenTelemetry's names of the labels.
ATTRIBUTES: Final = {
    "outcome": "idempotency.outcome",
    "endpoint": "flask.endpoint",
    "reason": "idempotency.reason",
    "status": "idempotency.status",
}

REQUESTS: Final = Figure(
    "idempotency_requests_total",
    "idempotency.requests",
    "counter",
    "{request}",
    ("outcome", "endpoint"),
    "Requests to guarded views by outcome.",
)
REJECTED: Final = Figure(
    "idempotency_rejections_total",
    "idempotency.rejections",
    "counter",
    "{request}",
    ("reason", "endpoint"),
    "Requests that were turned away, by the last part of the problem's type.",
)
PASSED: Final = Figure(
    "idempotency_unguarded_total",
    "idempotency.unguarded",
    "counter",
    "{request}",
    ("reason", "endpoint"),
    "Views that ran without a claim, by reason.",
)
AGE: Final = Figure(
    "idempotency_replay_age_seconds",
    "idempotency.replay.age",
    "histogram",
    "s",
    ("endpoint",),
    "Age of the record when it was replayed.",
)
DURATION: Final = Figure(
    "idempotency_execution_seconds",
    "idempotency.execution.duration",
    "histogram",
    "s",
    ("endpoint",),
    "Time from the claim to the answer, of requests whose key was completed.",
)
CLAIMS: Final = Figure(
    "idempotency_claims_in_progress",
    "idempotency.claims.in_progress",
    "gauge",
    "{claim}",
    (),
    "Claims that the process renews: its views that run, and answers that could not be written yet.",
)
PRUNED: Final = Figure(
    "idempotency_pruned_keys_total",
    "idempotency.keys.pruned",
    "counter",
    "{key}",
    (),
    "Keys past their retention that this process has deleted.",
)
UP: Final = Figure(
    "idempotency_store_up",
    "idempotency.store.up",
    "gauge",
    "1",
    (),
    "1 if the store answered when it was asked last, 0 if not; then the figures below are left out.",
)
KEYS: Final = Figure(
    "idempotency_keys",
    "idempotency.keys",
    "gauge",
    "{key}",
    ("status",),
    "Keys in the store by status. Those that are held wait for a person.",
)
STALE: Final = Figure(
    "idempotency_stale_claims",
    "idempotency.claims.stale",
    "gauge",
    "{claim}",
    (),
    "Claims in the store that are past their lease.",
)
EXPIRED: Final = Figure(
    "idempotency_expired_keys",
    "idempotency.keys.expired",
    "gauge",
    "{key}",
    (),
    "Keys in the store that are past their retention and wait to be pruned.",
)

FIGURES: Final = (REQUESTS, REJECTED, PASSED, AGE, DURATION, CLAIMS, PRUNED, UP, KEYS, STALE, EXPIRED)


@dataclass(frozen=True)
class Overview:
    """What the stores hold. ``up`` is false where one could not be asked; then the rest says nothing."""

    up: bool
    by_status: Mapping[Status, int]
    stale: int = 0
    expired: int = 0


_UNKNOWN: Final = Overview(False, {})


class Surveyor:
    """Asks stores what they hold, and remembers it for ``max_age`` seconds; asking never raises."""

    def __init__(self, max_age: float) -> None:
        self._max_age = max_age
        self._asking = threading.Lock()
        #: ``time.monotonic()`` of the answer, and the answer.
        self._known: tuple[float, Overview | None] = (-math.inf, None)
        self._failing = False

    def look(self, states: Iterable[AppState]) -> Overview | None:
        """All of them together; ``None`` where no app has a store that can say, or none has said anything yet."""
        # One caller asks. A store that hangs does not take a thread of each that comes meanwhile.
        if not self._asking.acquire(blocking=False):
            at, known = self._known
            return _UNKNOWN if known is not None and time.monotonic() > at + 2 * self._max_age else known
        try:
            if time.monotonic() >= self._known[0] + self._max_age:
                found = self._ask(states)
                self._known = time.monotonic(), found
            return self._known[1]
        finally:
            self._asking.release()

    def _ask(self, states: Iterable[AppState]) -> Overview | None:
        try:
            found = [ask() for ask in _stores(states)]
        except Exception as error:
            if not self._failing:  # said once: an outage may be long
                known = isinstance(error, (errors.StoreError, ConfigurationError))
                signals.logger.warning("The store can't be asked for metrics: %s", error, exc_info=not known)
            self._failing = True
            return _UNKNOWN
        self._failing = False
        if not found:
            return None
        counts: Counter[Status] = Counter()
        for stats in found:
            counts.update(stats.by_status)
        stale, expired = sum(one.stale for one in found), sum(one.expired for one in found)
        return Overview(True, {status: counts[status] for status in Status}, stale, expired)


def _stores(states: Iterable[AppState]) -> Iterator[Callable[[], Stats]]:
    """How to ask each store. Apps that share a table have a store each, and the table is asked once."""
    places: dict[Any, Callable[[], Stats]] = {}
    for state in states:
        if not state.settings.enabled:
            continue
        ask = getattr(state.store, "stats", None)
        if ask is None:
            state.warn_once("The store can't say what it holds (it has no stats()), so no metric does.")
            continue
        state.prepare()
        if state.problem is not None:
            raise state.problem.with_traceback(None)
        places.setdefault(_place(state.store), ask)
    return iter(places.values())


def _place(store: Any) -> Any:
    if isinstance(store, SQLAlchemyStore) and store.separate:
        return store.engine.url, store.table.fullname
    return id(store)


class Observer:
    """Hears the events of apps. What is made of them is the subclass's."""

    def __init__(self, max_age: float) -> None:
        self.surveyor = Surveyor(max_age)
        self._states: weakref.WeakSet[AppState] = weakref.WeakSet()
        self._begun: weakref.WeakSet[AppState] = weakref.WeakSet()
        # Signals refer to receivers weakly. This object keeps them; the app keeps it, by what the subclass puts there.
        self._receivers = [(signal, self._receiver(outcome)) for signal, outcome in OUTCOMES.items()]
        self._receivers.append((signals.pruned, lambda app, deleted, **_: self.prune(deleted)))

    def init_app(self, app: Flask) -> None:
        """Count the events of an app from now on. Opens no connection, starts no thread.

        :raises ConfigurationError: the extension is not initialised on the app, or this object is already.
        """
        state = get_state(app)
        if state in self._states:
            raise ConfigurationError(f"These metrics are initialised on the app {app.name!r} already.")
        self._states.add(state)
        for signal, receiver in self._receivers:
            signal.connect(receiver, app)

    def _receiver(self, outcome: str) -> Callable[..., None]:
        def receive(app: Flask, endpoint: str | None = None, **fields: Any) -> None:
            known = endpoint if endpoint is not None and endpoint in app.view_functions else OTHER
            self.observe(outcome, known, fields)

        return receive

    def observe(self, outcome: str, endpoint: str, fields: Mapping[str, Any]) -> None:
        """Count an event."""
        raise NotImplementedError

    def prune(self, deleted: int) -> None:
        """Count deleted keys."""
        raise NotImplementedError

    def claims(self) -> int:
        """How many claims of its apps this process has."""
        return sum(state.lifecycle.heartbeat.count(state.store) for state in list(self._states))

    def overview(self) -> Overview | None:
        """What the apps' stores hold; ``None`` where none can say."""
        return self.surveyor.look(list(self._states))

    def newly_guarded(self) -> Iterator[str]:
        """The endpoints with a guarded view, once for each app, when it is complete."""
        for state in list(self._states):
            if state.complete and state not in self._begun:
                self._begun.add(state)
                listing = list_routes(state)
                guarded = (REQUIRED, OPTIONAL, PROTECTED, PARTLY) if listing.enabled else ()
                yield from {route.endpoint for route in listing.routes if route.state in guarded}
