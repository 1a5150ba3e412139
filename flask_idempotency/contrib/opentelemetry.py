"""OpenTelemetry: metrics of what the signals tell and of what the store holds, and attributes of the request's span."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from flask import Flask, Response, has_request_context, request

from .. import __version__
from ..slot import SLOT, current, emitting
from . import observing
from .observing import ATTRIBUTES, Figure, Observer, Overview
from .openapi import needed

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

#: Where the outcome of a request waits for its span, which ends before a claim does.
_OUTCOME: Final = "flask_idempotency.opentelemetry.outcome"


class IdempotencyTelemetry(Observer):
    """Counts an app's events, asks its store what it holds, and marks the spans of its requests.

    A guarded request's span gets ``idempotency.replay`` and ``idempotency.takeover``, and ``idempotency.outcome`` where
    that is known before the span ends: of replays, refusals and views that run without a claim. Never a key or a scope.

    :param app: the app, on which the extension is initialised; or call :meth:`init_app` later.
    :param meter_provider: where the metrics come from; the process's own if left out.
    :param store: whether the store is asked, when the metrics are exported.
    :param max_age: for how many seconds the store's answer is given again. It counts all of its keys for one.
    :raises ConfigurationError: opentelemetry-api is missing, or the extension is not initialised on the app.
    """

    def __init__(
        self,
        app: Flask | None = None,
        *,
        meter_provider: MeterProvider | None = None,
        store: bool = True,
        max_age: float = observing.MAX_AGE,
    ) -> None:
        self._metrics: Any = needed("opentelemetry.metrics", "opentelemetry")
        self._trace: Any = needed("opentelemetry.trace", "opentelemetry")
        super().__init__(max_age)
        meter = self._metrics.get_meter("flask_idempotency", __version__, meter_provider)

        def made(create: Callable[..., Any], figure: Figure, **options: Any) -> Any:
            return create(figure.opentelemetry, unit=figure.unit, description=figure.meaning, **options)

        self._requests = made(meter.create_counter, observing.REQUESTS)
        self._rejected = made(meter.create_counter, observing.REJECTED)
        self._passed = made(meter.create_counter, observing.PASSED)
        ages, durations = observing.AGES, observing.DURATIONS
        self._age = made(meter.create_histogram, observing.AGE, explicit_bucket_boundaries_advisory=ages)
        self._duration = made(meter.create_histogram, observing.DURATION, explicit_bucket_boundaries_advisory=durations)
        self._pruned = made(meter.create_counter, observing.PRUNED)
        # Each process has its own claims, so they add up. What the store holds is the same whoever asks.
        made(meter.create_observable_up_down_counter, observing.CLAIMS, callbacks=[self._observed(self._claims)])
        for figure, read in _OVERVIEWS.items() if store else ():
            made(meter.create_observable_gauge, figure, callbacks=[self._observed(self._reading(read))])
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Count the events of an app and mark its spans from now on. Opens no connection, starts no thread.

        :raises ConfigurationError: the extension is not initialised on the app, or this object is already.
        """
        super().init_app(app)
        app.after_request(self._mark)

    def observe(self, outcome: str, endpoint: str, fields: Mapping[str, Any]) -> None:
        """Count an event, and keep it for the span."""
        where = {ATTRIBUTES["endpoint"]: endpoint}
        self._requests.add(1, {ATTRIBUTES["outcome"]: outcome, **where})
        if outcome == "rejected":
            self._rejected.add(1, {ATTRIBUTES["reason"]: fields["reason"], **where})
        elif outcome == "unguarded":
            self._passed.add(1, {ATTRIBUTES["reason"]: fields["reason"], **where})
        elif outcome == "replayed":
            self._age.record(fields["age_seconds"], where)
        elif outcome == "executed":
            self._duration.record(fields["duration"], where)
        if outcome not in observing.BESIDE and _is_about_this_request():
            request.environ[_OUTCOME] = outcome

    def prune(self, deleted: int) -> None:
        """Count deleted keys."""
        self._pruned.add(deleted)

    def _mark(self, response: Response) -> Response:
        """Write on the span. A guard may stand within a span of the app's own; here it is the request's."""
        span = self._trace.get_current_span()
        attempt, outcome = current(), request.environ.get(_OUTCOME)
        if span.is_recording():
            if attempt is not None:
                span.set_attribute("idempotency.replay", attempt.replay)
                span.set_attribute("idempotency.takeover", attempt.takeover)
            if outcome is not None:
                span.set_attribute(ATTRIBUTES["outcome"], outcome)
        return response

    def _claims(self) -> Iterator[tuple[int, dict[str, str]]]:
        yield self.claims(), {}

    def _reading(self, read: Callable[[Overview], Any]) -> Callable[[], Iterator[tuple[int, dict[str, str]]]]:
        def readings() -> Iterator[tuple[int, dict[str, str]]]:
            overview = self.overview()
            if overview is not None:
                yield from read(overview)

        return readings

    def _observed(
        self, read: Callable[[], Iterator[tuple[int, dict[str, str]]]]
    ) -> Callable[[CallbackOptions], Iterator[Observation]]:
        def observations(options: CallbackOptions) -> Iterator[Observation]:
            for value, attributes in read():
                yield self._metrics.Observation(value, attributes)

        return observations


def _is_about_this_request() -> bool:
    """Whether the event is, and not about one that this request has made within the process."""
    if not has_request_context():
        return False
    about, slot = emitting.get(), request.environ.get(SLOT)
    return about is None or (slot is not None and slot.attempt is about[0])


def _up(overview: Overview) -> Iterator[tuple[int, dict[str, str]]]:
    yield int(overview.up), {}


def _keys(overview: Overview) -> Iterator[tuple[int, dict[str, str]]]:
    for status, count in overview.by_status.items():
        yield count, {ATTRIBUTES["status"]: status.value}


def _stale(overview: Overview) -> Iterator[tuple[int, dict[str, str]]]:
    if overview.up:
        yield overview.stale, {}


def _expired(overview: Overview) -> Iterator[tuple[int, dict[str, str]]]:
    if overview.up:
        yield overview.expired, {}


_OVERVIEWS: Final[Mapping[Figure, Callable[[Overview], Iterator[tuple[int, dict[str, str]]]]]] = {
    observing.UP: _up,
    observing.KEYS: _keys,
    observing.STALE: _stale,
    observing.EXPIRED: _expired,
}
