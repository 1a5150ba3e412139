"""OpenTelemetry's metrics and span attributes of the extension's own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Response, request
from opentelemetry.instrumentation.flask import FlaskInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flask_idempotency.contrib import observing
from flask_idempotency.contrib.opentelemetry import IdempotencyTelemetry
from flask_idempotency.state import get_state
from tests.support.apps import Shop, close, make_shop, new_key, send
from tests.support.barrier import background

Points = dict[tuple[tuple[str, Any], ...], Any]


class Traced:
    """A shop with telemetry, its spans that have ended, and its metrics as they would be exported now."""

    def __init__(self, shop: Shop, order: str) -> None:
        self.shop = shop
        self.spans, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.meters = MeterProvider(metric_readers=[self.reader])

        def instrument() -> None:
            FlaskInstrumentor().instrument_app(shop.app, tracer_provider=self.tracers, meter_provider=self.meters)

        if order == "before":
            instrument()
        IdempotencyTelemetry(shop.app, meter_provider=self.meters, max_age=0)
        if order == "after":
            instrument()

    def metrics(self) -> dict[str, Any]:
        """The extension's metrics by name."""
        data = self.reader.get_metrics_data()
        return {
            metric.name: metric
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            if scope.scope.name == "flask_idempotency"
            for metric in scope.metrics
        }

    def points(self, name: str) -> Points:
        """The points of one of them, by their attributes."""
        metric = self.metrics().get(name)
        return {tuple(sorted(one.attributes.items())): one for one in metric.data.data_points} if metric else {}

    def numbers(self, name: str) -> dict[tuple[tuple[str, Any], ...], Any]:
        """The values of those that have one."""
        return {attributes: one.value for attributes, one in self.points(name).items()}

    def attributes(self) -> list[dict[str, Any]]:
        """What each span says of its attempt."""
        return [
            {name: one for name, one in (span.attributes or {}).items() if name.startswith("idempotency")}
            for span in self.spans.get_finished_spans()
            if span.name != "inner"
        ]


@pytest.fixture
def make(sqlite_url: str, order: str) -> Iterator[Callable[..., Traced]]:
    """A function that makes a traced shop, instrumented before or after the telemetry."""
    made: list[Traced] = []

    def build(**config: Any) -> Traced:
        made.append(Traced(make_shop(sqlite_url, **config), order))
        return made[-1]

    yield build
    for one in made:
        one.meters.shutdown()
        one.tracers.shutdown()
        close(one.shop.app)


@pytest.fixture
def traced(make: Callable[..., Traced]) -> Traced:
    """One with the default configuration."""
    return make()


def at(**labels: str) -> tuple[tuple[str, str], ...]:
    """The attributes that stand for labels."""
    return tuple(sorted((observing.ATTRIBUTES[name], one) for name, one in labels.items()))


@pytest.mark.scenario(70, 72)
def test_counters(traced: Traced) -> None:
    """Requests are counted by outcome, rejections and unguarded views by reason, with the endpoint and nothing else."""
    shop, key = traced.shop, new_key()
    shop.app.post("/optional", endpoint="optional")(shop.idempotency.optional(lambda: "optional"))
    for amount in (1, 1, 1, 2):
        shop.charge(key, amount)
    shop.charge("short")
    shop.client.post("/optional")
    expected = {"executed": 1, "replayed": 2, "mismatch": 1, "rejected": 1}
    assert {
        **{at(outcome=outcome, endpoint="create_charge"): count for outcome, count in expected.items()},
        at(outcome="unguarded", endpoint="optional"): 1,
    } == traced.numbers("idempotency.requests")
    assert {at(reason="key-invalid", endpoint="create_charge"): 1} == traced.numbers("idempotency.rejections")
    assert {at(reason="no-key", endpoint="optional"): 1} == traced.numbers("idempotency.unguarded")


def test_histograms(traced: Traced) -> None:
    """Times are in seconds, in buckets that the extension proposes."""
    shop, key = traced.shop, new_key()
    shop.charge(key)
    shop.shift(100)
    shop.charge(key)
    age = traced.points("idempotency.replay.age")[at(endpoint="create_charge")]
    assert (1, observing.AGES) == (age.count, tuple(age.explicit_bounds))
    assert 100 <= age.sum < 130
    duration = traced.points("idempotency.execution.duration")[at(endpoint="create_charge")]
    assert (1, observing.DURATIONS) == (duration.count, tuple(duration.explicit_bounds))


def test_what_is_looked_at(traced: Traced) -> None:
    """Claims of the process and what the store holds are read when the metrics are exported."""
    shop = traced.shop
    entered, go = threading.Event(), threading.Event()

    @shop.app.post("/x")
    @shop.idempotency.required
    def view() -> str:
        entered.set()
        assert go.wait(20)
        return "x"

    shop.charge(new_key())
    shop.shift(90_000)
    first = background(send, shop, new_key())
    assert entered.wait(20)
    assert {(): 1} == traced.numbers("idempotency.claims.in_progress")
    shop.shift(40)
    expected = {"completed": 1, "in_progress": 1, "held": 0, "released": 0}
    assert {at(status=one): count for one, count in expected.items()} == traced.numbers("idempotency.keys")
    assert {(): 1} == traced.numbers("idempotency.claims.stale") == traced.numbers("idempotency.keys.expired")
    assert {(): 1} == traced.numbers("idempotency.store.up")
    go.set()
    first.result(20)
    assert {(): 0} == traced.numbers("idempotency.claims.in_progress")
    with shop.app.app_context():
        shop.idempotency.prune()
    assert {(): 1} == traced.numbers("idempotency.keys.pruned")


def test_a_store_that_can_not_be_asked(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    """An export goes on without the store's numbers, and one of them says so."""
    traced.shop.execute(sa.text("DROP TABLE idempotency_keys"))
    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        assert {(): 0} == traced.numbers("idempotency.store.up")
        assert {"idempotency.keys", "idempotency.claims.stale"}.isdisjoint(traced.metrics())
    assert 1 == sum(one.startswith("The store can't be asked for metrics") for one in caplog.messages)


def test_names_units_and_kinds(traced: Traced) -> None:
    """Every figure that the docs list is an instrument under its name, with its unit and its meaning."""
    shop, key = traced.shop, new_key()
    shop.app.post("/optional", endpoint="optional")(shop.idempotency.optional(lambda: "optional"))
    for _ in range(2):
        shop.charge(key)
    shop.charge("short")
    shop.client.post("/optional")
    with shop.app.app_context():
        shop.idempotency.prune()
    found = {name: (metric.unit, metric.description) for name, metric in traced.metrics().items()}
    assert {one.opentelemetry: (one.unit, one.meaning) for one in observing.FIGURES} == found


@pytest.mark.scenario(71)
def test_spans(traced: Traced) -> None:
    """A request's span says whether it is a replay, and what became of it as far as that is known by its end."""
    shop, key = traced.shop, new_key()
    shop.app.post("/optional", endpoint="optional")(shop.idempotency.optional(lambda: "optional"))
    for amount in (1, 1, 2):
        shop.charge(key, amount)
    shop.charge("short")
    shop.client.post("/optional")
    shop.client.get("/none")
    no = {"idempotency.replay": False, "idempotency.takeover": False}
    assert [
        no,
        {"idempotency.replay": True, "idempotency.takeover": False, "idempotency.outcome": "replayed"},
        {**no, "idempotency.outcome": "mismatch"},
        {"idempotency.outcome": "rejected"},
        {"idempotency.outcome": "unguarded"},
        {},
    ] == traced.attributes()


def test_a_takeover_on_its_span(traced: Traced) -> None:
    """The span of a request that took another's claim over says so."""
    shop, key, dying = traced.shop, new_key(), [True]

    @shop.app.post("/x")
    @shop.idempotency.required
    def view() -> str:
        if dying.pop() if dying else False:
            raise SystemExit
        return "x"

    with pytest.raises(SystemExit):
        send(shop, key)
    shop.shift(40)
    send(shop, key)
    assert {"idempotency.replay": False, "idempotency.takeover": True} == traced.attributes()[-1]


def test_the_requests_span_and_no_other(traced: Traced) -> None:
    """A guard within a span of the app's own marks the request's span; an inner request marks its own alone."""
    shop, tracer, key = traced.shop, traced.tracers.get_tracer("shop"), new_key()

    def within(view: Callable[[], Response]) -> Callable[[], Response]:
        def traced_view() -> Response:
            with tracer.start_as_current_span("inner"):
                return view()

        return traced_view

    @shop.app.post("/x")
    @within
    @shop.idempotency.required
    def view() -> Any:
        return "x"

    @shop.app.post("/outer")
    def outer() -> str:
        for _ in range(int(request.headers["Times"])):
            shop.charge(key)
        return "outer"

    send(shop, (again := new_key()))
    send(shop, again)
    assert [None, "replayed"] == [one.get("idempotency.outcome") for one in traced.attributes()]
    inner = [one for one in traced.spans.get_finished_spans() if one.name == "inner"]
    assert [{}, {}] == [dict(one.attributes or {}) for one in inner]
    traced.spans.clear()
    shop.client.post("/outer", headers={"Times": "2"})
    assert [False, True, None] == [one.get("idempotency.replay") for one in traced.attributes()]
    assert {} == traced.attributes()[-1]


def test_an_atomic_view(make: Callable[..., Traced]) -> None:
    """An atomic view's requests are counted and marked as others are."""
    traced = make(atomic=True)
    key = new_key()
    for _ in range(2):
        traced.shop.charge(key)
    counted = traced.numbers("idempotency.requests")
    assert {"executed": 1, "replayed": 1} == {dict(one)["idempotency.outcome"]: count for one, count in counted.items()}
    assert [False, True] == [one["idempotency.replay"] for one in traced.attributes()]


def test_no_span_and_no_provider(sqlite_url: str) -> None:
    """Without tracing and without a provider the app answers as ever."""
    shop = make_shop(sqlite_url)
    IdempotencyTelemetry(shop.app)
    key = new_key()
    assert [201, 201] == [shop.charge(key).status_code for _ in range(2)]
    assert get_state(shop.app).complete
    close(shop.app)


def test_nothing_of_the_key_or_scope(traced: Traced) -> None:
    """Neither key nor scope is in an attribute of a span or a metric."""
    shop, key = traced.shop, new_key()
    for _ in range(2):
        shop.charge(key, tenant="a-secret-tenant")
    told = repr([dict(one.attributes or {}) for one in traced.spans.get_finished_spans()]) + repr(traced.metrics())
    assert "idempotency.replay" in told
    assert key not in told
    assert "a-secret-tenant" not in told
