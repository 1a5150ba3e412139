"""Beside OpenTelemetry's Flask instrumentation: each attempt has a span of its own, whichever was set up first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import flask
import pytest
from flask import Flask, Response, stream_with_context
from opentelemetry import trace
from opentelemetry.instrumentation.flask import FlaskInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from flask_idempotency import signals
from tests.neighbours import five
from tests.neighbours.five import BEFORE_COMMIT, Work, by_tenant, case_of, the_five
from tests.support.apps import Shop, assert_replayed, new_key, send

Beside = Callable[..., tuple[Shop, Work]]


@pytest.fixture
def spans() -> InMemorySpanExporter:
    """Keeps the spans that have ended."""
    return InMemorySpanExporter()


@pytest.fixture
def provider(spans: InMemorySpanExporter) -> TracerProvider:
    """Where spans come from; this test's own, since the process's can be set only once."""
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(spans))
    return made


@pytest.fixture(params=["before", "after", "everywhere"])
def guarded(
    request: pytest.FixtureRequest, beside: Beside, provider: TracerProvider, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Shop, Work]]:
    """A shop with a guarded view, instrumented before or after the extension, or as every app of the process."""

    def instrument(app: Flask) -> None:
        FlaskInstrumentor().instrument_app(app, tracer_provider=provider)

    everywhere = FlaskInstrumentor() if request.param == "everywhere" else None
    if everywhere is not None:
        everywhere.instrument(tracer_provider=provider)
        monkeypatch.setattr(five, "Flask", flask.Flask)  # as an app's module would find it now
    try:
        shop, work = beside(**({} if everywhere else {request.param: [instrument]}))
        by_tenant(shop)
        shop.app.post("/charges")(shop.idempotency.required(work.asked))
        yield shop, work
    finally:
        if everywhere is not None:
            everywhere.uninstrument()


def outcomes(spans: InMemorySpanExporter) -> list[tuple[int, StatusCode]]:
    """The status code of each request, and what its span says of it."""
    return [(int((one.attributes or {})["http.status_code"]), one.status.status_code) for one in ended(spans)]  # type: ignore[arg-type]


def ended(spans: InMemorySpanExporter) -> tuple[ReadableSpan, ...]:
    return spans.get_finished_spans()


def test_the_five(guarded: tuple[Shop, Work], spans: InMemorySpanExporter) -> None:
    """The five hold, and every request ends one span; only the view's errors are errors there."""
    the_five(case_of(*guarded))
    seen = outcomes(spans)
    assert {(201, StatusCode.UNSET), (401, StatusCode.UNSET), (409, StatusCode.UNSET), (422, StatusCode.UNSET)} == {
        one for one in seen if one[0] < 500
    }
    assert [(500, StatusCode.ERROR)] * 2 == [one for one in seen if one[0] >= 500]
    assert {"POST /charges"} == {one.name for one in ended(spans)}
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_span_for_each_attempt(guarded: tuple[Shop, Work], spans: InMemorySpanExporter) -> None:
    """Each attempt belongs to the trace that its own traceparent names, which is no part of what the request means."""
    shop, _ = guarded
    seen: list[int] = []

    @shop.app.post("/x")
    @shop.idempotency.required
    def view() -> str:
        seen.append(trace.get_current_span().get_span_context().span_id)
        return "x"

    key, traces = new_key(), [f"{number:032x}" for number in (1, 2)]
    first, again = (
        send(shop, key, headers={"traceparent": f"00-{one}-{'0' * 15}1-01", "tracestate": f"a={one[-1]}"})
        for one in traces
    )
    assert_replayed(again, first)
    assert traces == [f"{one.get_span_context().trace_id:032x}" for one in ended(spans)]
    assert seen == [ended(spans)[0].get_span_context().span_id]


def test_streams(guarded: tuple[Shop, Work], spans: InMemorySpanExporter) -> None:
    """A stream's span ends, on the first answer and on the replay, and the context is left as it was."""
    shop, _ = guarded

    @shop.app.post("/x")
    @shop.idempotency.required
    def view() -> Response:
        def parts() -> Iterator[bytes]:
            yield b"a"
            yield b"b"

        return Response(stream_with_context(parts()), status=201)

    key = new_key()
    first = send(shop, key, buffered=True)
    assert (201, b"ab") == (first.status_code, first.data)
    assert_replayed(send(shop, key, buffered=True), first)
    assert [(201, StatusCode.UNSET)] * 2 == outcomes(spans)
    assert not trace.get_current_span().get_span_context().is_valid


def test_an_exception_that_escapes(guarded: tuple[Shop, Work], spans: InMemorySpanExporter) -> None:
    """An exception that Flask lets out, as in tests, is in its span; the key is released, and the retry runs."""
    shop, work = guarded
    shop.app.testing = True
    case = case_of(shop, work)
    key = new_key()
    work.fail(BEFORE_COMMIT)
    with pytest.raises(five.Broken):
        case.good(key, 100)
    assert [False, True] == [case.good(key, 100).replayed for _ in range(2)]
    assert [StatusCode.ERROR, StatusCode.UNSET, StatusCode.UNSET] == [one.status.status_code for one in ended(spans)]


def test_attributes_of_the_attempt(guarded: tuple[Shop, Work], spans: InMemorySpanExporter) -> None:
    """A hook and receivers can put on the span what became of the request, in words of which there are few."""
    shop, work = guarded

    def note(outcome: str) -> Callable[..., None]:
        return lambda *_, **__: trace.get_current_span().set_attribute("idempotency.outcome", outcome)

    kinds = {"replay": signals.replayed, "mismatch": signals.mismatched, "reject": signals.rejected}
    receivers = {kind: note(kind) for kind in kinds}
    for kind, signal in kinds.items():
        signal.connect(receivers[kind], sender=shop.app)

    @shop.app.after_request
    def attempt(response: Response) -> Response:
        current = shop.idempotency.current
        if current is not None:
            trace.get_current_span().set_attribute("idempotency.takeover", current.takeover)
        return response

    case = case_of(shop, work)
    key = new_key()
    for send_one, amount in ((case.good, 1), (case.good, 1), (case.good, 2), (case.refused[0], 1)):
        send_one(key, amount)
    seen: list[dict[str, Any]] = [dict(one.attributes or {}) for one in ended(spans)]
    assert [None, "replay", "mismatch", "reject"] == [one.get("idempotency.outcome") for one in seen]
    assert [False, False, False, None] == [one.get("idempotency.takeover") for one in seen]
