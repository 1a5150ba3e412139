"""Prometheus' metrics: what each request adds to which number, with labels of which there are few."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask, Response, request
from prometheus_client import CollectorRegistry, generate_latest
from psycopg.errors import SerializationFailure

from flask_idempotency import signals
from flask_idempotency.contrib import observing
from flask_idempotency.contrib.prometheus import IdempotencyMetrics
from flask_idempotency.errors import ConfigurationError
from flask_idempotency.heartbeat import heartbeat
from flask_idempotency.state import get_state
from tests.support.apps import Shop, new_key, send, until
from tests.support.barrier import background
from tests.support.doings import drop, equip, mend
from tests.support.metrics import Samples, samples, value
from tests.support.skips import needs

REQUESTS, STORE = "idempotency_requests_total", ("idempotency_store_up", "idempotency_keys", "idempotency_stale_claims")


class Counted:
    """A shop with metrics in a registry of its own, and what a scrape of it says."""

    def __init__(self, shop: Shop, **options: Any) -> None:
        self.shop = equip(shop)
        self.registry = CollectorRegistry()
        self.metrics = IdempotencyMetrics(shop.app, registry=self.registry, **options)

    def scrape(self) -> Samples:
        return samples(generate_latest(self.registry).decode())

    def requests(self) -> dict[tuple[str, str], float]:
        """How many requests there were, by outcome and endpoint; without zeros."""
        found = {name: count for name, count in self.scrape().items() if name[0] == REQUESTS and count}
        return {(dict(labels)["outcome"], dict(labels)["endpoint"]): count for (_, labels), count in found.items()}


@pytest.fixture
def counted(light: Shop) -> Iterator[Counted]:
    """A shop with metrics, whose store is asked at each scrape."""
    yield Counted(light, max_age=0)
    mend([light])


def test_every_event_of_a_request_is_an_outcome() -> None:
    """Each signal but that of pruning has an outcome of its own."""
    sent = {one.signal for one in vars(signals).values() if isinstance(one, signals.Event)} - {signals.pruned}
    assert sent == set(observing.OUTCOMES)
    assert len(sent) == len(set(observing.OUTCOMES.values()))
    assert set(observing.OUTCOMES.values()) > observing.BESIDE


def executed_and_replayed(shop: Shop, key: str) -> None:
    """A first run and two retries."""
    for _ in range(3):
        send(shop, key, json={})


def mismatched(shop: Shop, key: str) -> None:
    """Another body under the key."""
    send(shop, key, json={})
    send(shop, key, json={"amount": 1})


def conflicted_and_taken_over(shop: Shop, key: str) -> None:
    """A holder that died, a duplicate of it, and a retry after its lease."""
    with pytest.raises(SystemExit):
        send(shop, key, json={}, headers={"Do": "die"})
    send(shop, key, json={})
    shop.shift(40)
    send(shop, key, json={})


def rejected(shop: Shop, key: str) -> None:
    """An invalid key."""
    send(shop, "short")


def released(shop: Shop, key: str) -> None:
    """An answer that asks for another try."""
    send(shop, key, headers={"Do": "429"})


def held(shop: Shop, key: str) -> None:
    """A commit, and then a failure."""
    send(shop, key, headers={"Do": "commit"})


def lost(shop: Shop, key: str) -> None:
    """A holder that was taken over answers."""
    entered, go = shop.app.config["EVENTS"] = threading.Event(), threading.Event()
    first = background(send, shop, key, json={}, headers={"Do": "wait"})
    assert entered.wait(20)
    shop.shift(40)
    send(shop, key, json={})
    go.set()
    first.result(20)


def record_failed(shop: Shop, key: str) -> None:
    """The store goes away before the answer is recorded."""
    send(shop, key, headers={"Do": "drop"})


def unguarded(shop: Shop, key: str) -> None:
    """A view without a key, where one is optional."""
    shop.client.post("/optional")


def unguarded_without_store(shop: Shop, key: str) -> None:
    """A view runs without the store."""
    drop(shop)
    send(shop, key, "/unguarded")


@pytest.mark.parametrize(
    ("happening", "outcomes"),
    [
        (executed_and_replayed, {("executed", "x"): 1, ("replayed", "x"): 2}),
        (mismatched, {("executed", "x"): 1, ("mismatch", "x"): 1}),
        (conflicted_and_taken_over, {("conflict", "x"): 1, ("takeover", "x"): 1, ("executed", "x"): 1}),
        (rejected, {("rejected", "x"): 1}),
        (released, {("released", "x"): 1}),
        (held, {("held", "x"): 1}),
        (lost, {("takeover", "x"): 1, ("executed", "x"): 1, ("lost", "x"): 1}),
        (record_failed, {("record_failed", "x"): 1}),
        (unguarded, {("unguarded", "optional"): 1}),
        (unguarded_without_store, {("record_failed", "unguarded"): 1, ("unguarded", "unguarded"): 1}),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
@pytest.mark.scenario(72)
def test_requests_by_outcome(
    counted: Counted, happening: Callable[[Shop, str], None], outcomes: dict[tuple[str, str], float]
) -> None:
    """Each request is counted under what became of it, and under its view's endpoint."""
    happening(counted.shop, new_key())
    assert outcomes == counted.requests()


@pytest.mark.scenario(72)
def test_each_time_protection_was_off(counted: Counted, caplog: pytest.LogCaptureFixture) -> None:
    """A view that runs without the store is a count by reason, a warning, an error and two signals."""
    seen: list[str] = []

    def receive(sender: Any, **_: Any) -> None:
        seen.append("unguarded")

    with signals.unguarded.connected_to(receive, sender=counted.shop.app):
        unguarded_without_store(counted.shop, new_key())
    labels = {"reason": "store-unavailable", "endpoint": "unguarded"}
    assert 1 == value(counted.scrape(), "idempotency_unguarded_total", **labels)
    assert ["unguarded"] == seen
    levels = {one.event: one.levelname for one in caplog.records if hasattr(one, "event")}
    assert {"idempotency.record_failed": "ERROR", "idempotency.unguarded": "WARNING"} == levels


def test_reasons_have_counters_of_their_own(counted: Counted) -> None:
    """Rejections and unguarded runs are counted by reason as well."""
    shop = counted.shop
    send(shop, "short")
    shop.client.post("/x")
    shop.client.post("/x")
    shop.client.post("/optional")
    found = counted.scrape()
    by_reason = {"key-invalid": 1, "key-missing": 2, "scope-missing": 0}
    for reason, count in by_reason.items():
        assert count == value(found, "idempotency_rejections_total", reason=reason, endpoint="x")
    assert 1 == value(found, "idempotency_unguarded_total", reason="no-key", endpoint="optional")


def test_work_that_is_undone(counted: Counted) -> None:
    """In atomic mode an undone run is a release, and the request is what comes of it then: another run, or a 503."""
    shop, busy = counted.shop, [True]

    def view() -> str:
        if busy.pop() if busy else False:
            raise sa.exc.OperationalError("UPDATE", {}, SerializationFailure())
        return "ran"

    for name, retries in (("once", 0), ("again", 1)):
        guarded = shop.idempotency.required(atomic=True, atomic_retries=retries)(view)
        shop.app.add_url_rule(f"/{name}", name, guarded, methods=["POST"])
    assert 503 == send(shop, new_key(), "/once").status_code
    busy.append(True)
    assert 200 == send(shop, new_key(), "/again").status_code
    assert {
        ("released", "once"): 1,
        ("rejected", "once"): 1,
        ("released", "again"): 1,
        ("executed", "again"): 1,
    } == counted.requests()


@pytest.mark.scenario(70)
def test_labels_are_bounded(counted: Counted) -> None:
    """No key, scope or path becomes a label, whatever clients send; an endpoint that the app has not is none."""
    shop = counted.shop
    shop.idempotency.loader = lambda: f"scope-{new_key()}"
    shop.client.get("/nothing")
    before = set(counted.scrape())
    for number in range(3):
        send(shop, new_key(), f"/x/{number}")
    after = counted.scrape()
    histograms = {name for name in after if name[0].startswith(("idempotency_replay_age", "idempotency_execution"))}
    assert set(after) - before == {one for one in histograms if ("endpoint", "x") in one[1]}
    assert 3 == value(after, REQUESTS, outcome="executed", endpoint="x")
    fields = {"key": "k", "scope": "s", "method": "POST", "path": "/raw/7", "endpoint": "/raw/7"}
    signals.emit(signals.RELEASE, shop.app, {**fields, "status": 429})
    signals.emit(signals.RELEASE, shop.app, {**fields, "endpoint": None, "status": 429})
    assert 2 == value(counted.scrape(), REQUESTS, outcome="released", endpoint="other")
    assert {"outcome", "endpoint", "reason", "status", "le"} == {
        name for _, labels in counted.scrape() for name, _ in labels
    }


def test_counters_begin_at_zero(counted: Counted) -> None:
    """Once the app serves, each guarded view has all of its counters, so that their first event is an increase."""
    assert {} == {name: one for name, one in counted.scrape().items() if name[0] == REQUESTS}
    counted.shop.client.get("/nothing")
    found = {dict(labels)["endpoint"]: one for (name, labels), one in counted.scrape().items() if name == REQUESTS}
    assert {"x": 0, "optional": 0, "unguarded": 0, "create_charge": 0} == found
    for outcome in observing.OUTCOMES.values():
        assert 0 == value(counted.scrape(), REQUESTS, outcome=outcome, endpoint="x")


def test_times(counted: Counted) -> None:
    """The age of a replayed record and the time of an execution are in histograms of seconds."""
    shop, key = counted.shop, new_key()
    send(shop, key)
    shop.shift(100)
    send(shop, key)
    found = counted.scrape()
    below = [value(found, "idempotency_replay_age_seconds_bucket", endpoint="x", le=edge) for edge in ("60.0", "300.0")]
    assert [0, 1] == below
    assert 100 <= (value(found, "idempotency_replay_age_seconds_sum", endpoint="x") or 0) < 130
    assert 1 == value(found, "idempotency_execution_seconds_count", endpoint="x")
    assert 0 < (value(found, "idempotency_execution_seconds_sum", endpoint="x") or 0) < 20


def test_claims_in_progress(counted: Counted) -> None:
    """While a view runs its claim is counted; neither when it has ended nor when it is left to its lease."""
    shop, key = counted.shop, new_key()
    entered, go = shop.app.config["EVENTS"] = threading.Event(), threading.Event()
    assert 0 == value(counted.scrape(), "idempotency_claims_in_progress")
    first = background(send, shop, key, headers={"Do": "wait"})
    assert entered.wait(20)
    assert 1 == value(counted.scrape(), "idempotency_claims_in_progress")
    go.set()
    first.result(20)
    assert 0 == value(counted.scrape(), "idempotency_claims_in_progress")
    with pytest.raises(SystemExit):
        send(shop, new_key(), headers={"Do": "die"})
    assert 0 == value(counted.scrape(), "idempotency_claims_in_progress")


def test_a_claim_is_counted_until_its_answer_is_written(counted: Counted) -> None:
    """An answer that could not be recorded keeps its claim in progress, and the claim is gone when it is written."""
    shop, key = counted.shop, new_key()
    send(shop, key, headers={"Do": "drop"})
    assert 1 == value(counted.scrape(), "idempotency_claims_in_progress")
    with shop.app.app_context():
        shop.db.create_all()
    store = get_state(shop.app).store
    until(lambda: heartbeat.postponed(store, "acme", key) is None and not heartbeat._live)
    until(lambda: 0 == value(counted.scrape(), "idempotency_claims_in_progress"))


def test_a_counter_of_claims_that_raises(light: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """What is told of a claim's begin and raises is logged, and the request goes on."""

    def broken() -> None:
        raise ZeroDivisionError

    get_state(light.app).lifecycle.counters.append(broken)
    assert 201 == light.charge(new_key()).status_code
    assert "A counter of claims failed." in caplog.messages


def test_what_the_store_holds(counted: Counted) -> None:
    """Keys by status, claims past their lease and keys past their retention are those of the store."""
    shop = counted.shop
    keys = [new_key() for _ in range(4)]
    for key in keys[:2]:
        send(shop, key)
    send(shop, keys[2], headers={"Do": "commit"})
    shop.shift(90_000)
    with pytest.raises(SystemExit):
        send(shop, keys[3], headers={"Do": "die"})
    found = counted.scrape()
    by_status = {"completed": 2, "held": 1, "in_progress": 1, "released": 0}
    assert by_status == {one: value(found, "idempotency_keys", status=one) for one in by_status}
    assert 1 == value(found, "idempotency_store_up")
    assert 2 == value(found, "idempotency_expired_keys")
    assert 0 == value(found, "idempotency_stale_claims")
    shop.shift(40)
    assert 1 == value(counted.scrape(), "idempotency_stale_claims")


def test_pruned_keys(counted: Counted) -> None:
    """Keys that this process deletes are counted."""
    shop = counted.shop
    for _ in range(3):
        send(shop, new_key())
    shop.shift(90_000)
    with shop.app.app_context():
        shop.idempotency.prune(batch_size=2)
    found = counted.scrape()
    assert 3 == value(found, "idempotency_pruned_keys_total")
    assert 0 == value(found, "idempotency_keys", status="completed")


def test_a_store_that_can_not_be_asked(counted: Counted, caplog: pytest.LogCaptureFixture) -> None:
    """A scrape goes on without the store's numbers, says so in a gauge, and logs it once until the store is back."""
    drop(counted.shop)
    for _ in range(2):
        found = counted.scrape()
        assert 0 == value(found, "idempotency_store_up")
        assert {"idempotency_store_up"} == {name for name, _ in found if name.startswith(STORE)}
    (said,) = [one for one in caplog.messages if one.startswith("The store can't be asked for metrics")]
    assert "idempotency_keys" in said
    with counted.shop.app.app_context():
        counted.shop.db.create_all()
    assert 1 == value(counted.scrape(), "idempotency_store_up")
    drop(counted.shop)
    counted.scrape()
    assert 2 == sum(one.startswith("The store can't be asked for metrics") for one in caplog.messages)


def test_the_store_is_asked_now_and_then(light: Shop) -> None:
    """Within ``max_age`` a scrape gets the last answer, and the store is asked again after it."""
    counted = Counted(light, max_age=60)
    assert 0 == value(counted.scrape(), "idempotency_keys", status="completed")
    send(light, new_key())
    assert 0 == value(counted.scrape(), "idempotency_keys", status="completed")
    at, known = counted.metrics.surveyor._known
    counted.metrics.surveyor._known = at - 60, known
    assert 1 == value(counted.scrape(), "idempotency_keys", status="completed")


def test_a_store_that_hangs(light: Shop) -> None:
    """While one scrape waits for the store, others do not: they get the last answer, and later that there is none."""
    counted = Counted(light, max_age=60)
    surveyor = counted.metrics.surveyor
    assert 1 == value(counted.scrape(), "idempotency_store_up")
    surveyor._known = time.monotonic() - 61, surveyor._known[1]
    with surveyor._asking:  # as the one that waits has it
        assert 1 == value(background(counted.scrape).result(20), "idempotency_store_up")
        surveyor._known = time.monotonic() - 121, surveyor._known[1]
        assert 0 == value(background(counted.scrape).result(20), "idempotency_store_up")
    assert 1 == value(counted.scrape(), "idempotency_store_up")


def test_without_asking_the_store(light: Shop) -> None:
    """With ``store=False`` nothing of the store is in a scrape, and counters are as ever."""
    counted = Counted(light, store=False)
    send(light, new_key())
    found = counted.scrape()
    assert 1 == value(found, REQUESTS, outcome="executed", endpoint="x")
    assert set() == {name for name, _ in found if name.startswith(STORE)}


def test_several_apps(make_light: Callable[..., Shop]) -> None:
    """Metrics of several apps add up, and a table that they share is asked once."""
    shops = [equip(make_light()) for _ in range(2)]
    registry = CollectorRegistry()
    metrics = IdempotencyMetrics(registry=registry)
    for shop in shops:
        metrics.init_app(shop.app)
        send(shop, new_key())
    found = samples(generate_latest(registry).decode())
    assert 2 == value(found, REQUESTS, outcome="executed", endpoint="x")
    assert 2 == value(found, "idempotency_keys", status="completed")


def test_mistakes_of_set_up(light: Shop) -> None:
    """Metrics on an app without the extension, twice on one app, or twice in one registry are refused."""
    registry = CollectorRegistry()
    with pytest.raises(ConfigurationError, match="not initialised on the app 'bare'"):
        IdempotencyMetrics(Flask("bare"), registry=CollectorRegistry())
    metrics = IdempotencyMetrics(light.app, registry=registry)
    with pytest.raises(ConfigurationError, match="already"):
        metrics.init_app(light.app)
    with pytest.raises(ValueError, match="Duplicated"):
        IdempotencyMetrics(registry=registry)


@pytest.mark.parametrize(
    ("module", "name", "package"),
    [
        ("prometheus", "IdempotencyMetrics", "prometheus_client"),
        ("opentelemetry", "IdempotencyTelemetry", "opentelemetry.metrics"),
    ],
)
def test_without_the_package(module: str, name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is missing, the error names the extra; importing the module needs none."""
    for one in (package.partition(".")[0], package):
        monkeypatch.setitem(sys.modules, one, None)
    spec = importlib.util.find_spec(f"flask_idempotency.contrib.{module}")
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    with pytest.raises(ConfigurationError) as raised:
        getattr(fresh, name)()
    expected = f"flask_idempotency.contrib.{module} needs {package}: pip install 'Flask-Idempotency[{module}]'."
    assert expected == str(raised.value)


def test_setting_up_opens_no_connection(light: Shop) -> None:
    """The store is asked when the metrics are scraped, and not before."""
    asked: list[str] = []
    get_state(light.app).store.stats = lambda: asked.append("asked")  # type: ignore[attr-defined]
    registry = CollectorRegistry()
    IdempotencyMetrics(light.app, registry=registry)
    assert [] == asked


def test_a_disabled_app(make_light: Callable[..., Shop]) -> None:
    """Where nothing is guarded, a scrape has no counters and asks no store."""
    registry = CollectorRegistry()
    shop = make_light(enabled=False)
    IdempotencyMetrics(shop.app, registry=registry)
    shop.charge(new_key())
    found = {name for name, _ in samples(generate_latest(registry).decode()) if not name.endswith("_created")}
    assert {"idempotency_claims_in_progress", "idempotency_pruned_keys_total"} == found


def test_the_view(counted: Counted) -> None:
    """The view answers a scrape in the form that Prometheus asks for."""
    shop = counted.shop
    shop.app.add_url_rule("/metrics", "metrics", counted.metrics.view)
    send(shop, new_key())
    plain = shop.client.get("/metrics")
    assert plain.content_type.startswith("text/plain; version=")
    assert 1 == value(samples(plain.text), REQUESTS, outcome="executed", endpoint="x")
    other = shop.client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert other.content_type.startswith("application/openmetrics-text; version=")
    assert other.text.endswith("# EOF\n")


def test_the_exposition_keeps_the_conventions(counted: Counted) -> None:
    """Prometheus' own tool finds no fault with names, units and help of what is emitted."""
    promtool = needs("promtool")
    executed_and_replayed(counted.shop, new_key())
    text = generate_latest(counted.registry)
    assert all(f"# HELP {one.prometheus} {one.meaning}".encode() in text for one in observing.FIGURES)
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=50, check=False)
    assert (0, b"") == (done.returncode, done.stdout + done.stderr)


@pytest.mark.scenario(71)
def test_business_metrics_count_once(light: Shop) -> None:
    """What an app counts of its own is counted once if it looks at ``current.replay``, and clients see the header."""
    charged: list[float] = []

    @light.app.after_request
    def count(response: Response) -> Response:
        attempt = light.idempotency.current
        if response.status_code == 201 and attempt is not None and not attempt.replay:
            charged.append(request.get_json()["amount"])
        return response

    key = new_key()
    answers = [light.charge(key, 100) for _ in range(3)]
    assert [100] == charged
    assert [None, "true", "true"] == [one.headers.get("Idempotent-Replay") for one in answers]
