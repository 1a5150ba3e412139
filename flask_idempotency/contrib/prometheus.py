"""Metrics for Prometheus, with prometheus-client: what the signals tell, and what the store holds.

With several worker processes, set ``PROMETHEUS_MULTIPROC_DIR`` as prometheus-client asks for it. The processes' numbers
are added up then; what the store holds is asked by the worker that is scraped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flask import Flask, Response, request

from . import observing
from .observing import Figure, Observer
from .openapi import needed

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric


class IdempotencyMetrics(Observer):
    """Counts an app's events, and asks its store what it holds. Several apps may share one.

    :param app: the app, on which the extension is initialised; or call :meth:`init_app` later.
    :param registry: where the metrics are registered; prometheus-client's own if left out.
    :param store: whether the store is asked, when the metrics are scraped.
    :param max_age: for how many seconds the store's answer is given again. It counts all of its keys for one.
    :raises ConfigurationError: prometheus-client is missing, or the extension is not initialised on the app.
    :raises ValueError: the registry has these metrics already.
    """

    def __init__(
        self,
        app: Flask | None = None,
        *,
        registry: CollectorRegistry | None = None,
        store: bool = True,
        max_age: float = observing.MAX_AGE,
    ) -> None:
        client: Any = needed("prometheus_client", "prometheus")
        super().__init__(max_age)
        self._client = client
        self._registry = client.REGISTRY if registry is None else registry
        self.collector = StoreCollector(self, asks=store)
        self._registry.register(self.collector)  # the first: it lets the counters begin

        def made(kind: Any, figure: Figure, **options: Any) -> Any:
            return kind(figure.bare, figure.meaning, figure.labels, registry=self._registry, **options)

        self._requests = made(client.Counter, observing.REQUESTS)
        self._rejected = made(client.Counter, observing.REJECTED)
        self._passed = made(client.Counter, observing.PASSED)
        self._age = made(client.Histogram, observing.AGE, buckets=observing.AGES)
        self._duration = made(client.Histogram, observing.DURATION, buckets=observing.DURATIONS)
        self._pruned = made(client.Counter, observing.PRUNED)
        # A worker that is gone has no claims: they are left to their lease, and counted as stale after it.
        self._claims = made(client.Gauge, observing.CLAIMS, multiprocess_mode="livesum")
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Count the events of an app from now on. Opens no connection, starts no thread.

        :raises ConfigurationError: the extension is not initialised on the app, or this object is already.
        """
        super().init_app(app)
        app.extensions["idempotency"].lifecycle.counters.append(self._count_claims)

    def view(self) -> Response:
        """A view that answers a scrape, of all processes where ``PROMETHEUS_MULTIPROC_DIR`` is set."""
        registry = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = self._client.CollectorRegistry()
            multiprocess: Any = needed("prometheus_client.multiprocess", "prometheus")
            # Before the files of this process are read: what is counted from 0 is to be in them.
            self.count_from_zero()
            multiprocess.MultiProcessCollector(registry)
            registry.register(self.collector)
        encode, content_type = self._client.exposition.choose_encoder(request.headers.get("Accept", ""))
        return Response(encode(registry), content_type=content_type)

    def observe(self, outcome: str, endpoint: str, fields: Mapping[str, Any]) -> None:
        """Count an event."""
        self.count_from_zero()
        self._requests.labels(outcome, endpoint).inc()
        if outcome == "rejected":
            self._rejected.labels(fields["reason"], endpoint).inc()
        elif outcome == "unguarded":
            self._passed.labels(fields["reason"], endpoint).inc()
        elif outcome == "replayed":
            self._age.labels(endpoint).observe(fields["age_seconds"])
        elif outcome == "executed":
            self._duration.labels(endpoint).observe(fields["duration"])
        self._count_claims()

    def prune(self, deleted: int) -> None:
        """Count deleted keys."""
        self._pruned.inc(deleted)

    def count_from_zero(self) -> None:
        """Let the counters of guarded views begin: one that appears with its first event shows no increase."""
        for endpoint in self.newly_guarded():
            for outcome in observing.OUTCOMES.values():
                self._requests.labels(outcome, endpoint)
            for reason in observing.REJECTIONS:
                self._rejected.labels(reason, endpoint)
            for reason in observing.UNGUARDED:
                self._passed.labels(reason, endpoint)

    def _count_claims(self) -> None:
        self._claims.set(self.claims())


class StoreCollector:
    """What the store holds, for a registry. It is in the registry of its metrics already.

    With ``PROMETHEUS_MULTIPROC_DIR``, register it beside prometheus-client's ``MultiProcessCollector`` in the registry
    that is scraped: :meth:`IdempotencyMetrics.view` does.
    """

    def __init__(self, metrics: IdempotencyMetrics, *, asks: bool) -> None:
        self._metrics = metrics
        self._asks = asks

    def describe(self) -> Iterator[Metric]:
        """The metrics without numbers: the store is not asked when they are registered."""
        for figure in (observing.UP, observing.KEYS, observing.STALE, observing.EXPIRED) if self._asks else ():
            yield self._family(figure)

    def collect(self) -> Iterator[Metric]:
        """The numbers. Never raises for the store's sake."""
        self._metrics.count_from_zero()
        overview = self._metrics.overview() if self._asks else None
        if overview is None:
            return
        yield self._family(observing.UP, float(overview.up))
        if overview.up:
            keys = self._family(observing.KEYS)
            for status, count in overview.by_status.items():
                keys.add_metric([status.value], count)
            yield keys
            yield self._family(observing.STALE, overview.stale)
            yield self._family(observing.EXPIRED, overview.expired)

    def _family(self, figure: Figure, value: float | None = None) -> Any:
        core: Any = needed("prometheus_client.core", "prometheus")
        return core.GaugeMetricFamily(figure.bare, figure.meaning, value, labels=figure.labels or None)
