"""Signals and log records: which event happens when, with which fields, and that listeners change nothing."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from werkzeug.test import TestResponse

from flask_idempotency import signals
from tests.support.apps import Shop, events, new_key
from tests.support.barrier import background
from tests.support.doings import drop, equip, mend

BASE = {"key", "scope", "method", "path", "endpoint"}

#: What is promised of events: the level and the fields beside ``BASE``. Of a pruning there are these alone.
PROMISED = """
| event | signal | fields beside key, scope, method, path, endpoint |
| --- | --- | --- |
| `idempotency.execute` (debug) | `executed` | status, duration, attempts |
| `idempotency.replay` (info) | `replayed` | original_status, age_seconds |
| `idempotency.conflict` (info) | `conflicted` | age_seconds, waited |
| `idempotency.mismatch` (warning) | `mismatched` | original_path, age_seconds |
| `idempotency.reject` (info) | `rejected` | reason |
| `idempotency.release` (info) | `released` | status or exception |
| `idempotency.takeover` (warning) | `taken_over` | age_seconds, attempts |
| `idempotency.lost` (error) | `claim_lost` | |
| `idempotency.record_failed` (error) | `record_failed` | exception |
| `idempotency.prune` (info) | `pruned` | deleted, batches, duration |
| `idempotency.hold` (error) | `held` | status or exception, seen, remedy |
| `idempotency.unguarded` (info) | `unguarded` | reason, user_agent |
"""
ROWS = re.findall(r"^\| `(\S+)` \((\w+)\) \| `(\w+)` \|(.*)\|$", PROMISED, re.M)
EVENTS = {one.signal.name: one for one in vars(signals).values() if isinstance(one, signals.Event)}


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[logging.LogRecord]]]:
    """A function that returns the extension's log records of events."""
    with caplog.at_level(logging.DEBUG, "flask_idempotency"):
        yield lambda: [one for one in caplog.records if hasattr(one, "event")]


def send(shop: Shop, key: str | None, path: str = "/x", **options: Any) -> TestResponse:
    """A request of the tenant ``acme``."""
    headers = {"X-Tenant": "acme", **({} if key is None else {"Idempotency-Key": key}), **options.pop("headers", {})}
    return shop.client.post(path, headers=headers, **options)


# What leads to which event: functions that make it happen once with a key, and return its own fields.


def executed(shop: Shop, key: str) -> dict[str, Any]:
    """A first run."""
    send(shop, key, json={})
    return {"status": 201, "duration": float, "attempts": 1}


def replayed(shop: Shop, key: str) -> dict[str, Any]:
    """A retry a minute later."""
    send(shop, key, json={})
    shop.shift(60)
    send(shop, key, json={})
    return {"original_status": 201, "age_seconds": (60, 90)}


def conflicted(shop: Shop, key: str) -> dict[str, Any]:
    """A duplicate ten seconds after the holder's sign of life."""
    with pytest.raises(SystemExit):
        send(shop, key, json={}, headers={"Do": "die"})
    shop.shift(10)
    send(shop, key, json={})
    return {"age_seconds": (10, 29), "waited": 0.0}


def conflicted_for_good(shop: Shop, key: str) -> dict[str, Any]:
    """A duplicate of a held key."""
    send(shop, key, json={})
    shop.execute(sa.update(shop.table).values(status="held"))
    shop.shift(10)
    send(shop, key, json={})
    return {"age_seconds": (10, 40), "waited": 0.0}


def mismatched(shop: Shop, key: str) -> dict[str, Any]:
    """Another request, on another route."""
    shop.charge(key)
    shop.shift(10)
    send(shop, key, json={})
    return {"original_path": "/charges", "age_seconds": (10, 40)}


def rejected_without_key(shop: Shop, key: str) -> dict[str, Any]:
    """No key."""
    send(shop, None)
    return {"reason": "key-missing", "key": None, "scope": None}


def rejected_key(shop: Shop, key: str) -> dict[str, Any]:
    """No valid key."""
    send(shop, "short")
    return {"reason": "key-invalid", "key": None, "scope": None}


def rejected_caller(shop: Shop, key: str) -> dict[str, Any]:
    """No caller."""
    shop.idempotency.loader = lambda: None
    send(shop, key)
    return {"reason": "scope-missing", "scope": None}


def rejected_store(shop: Shop, key: str) -> dict[str, Any]:
    """No store."""
    drop(shop)
    send(shop, key)
    return {"reason": "store-unavailable"}


def rejected_record(shop: Shop, key: str) -> dict[str, Any]:
    """No answer that was kept."""
    send(shop, key, json={})
    shop.execute(sa.update(shop.table).values(response_body=None, response_headers=sa.null()))
    send(shop, key, json={})
    return {"reason": "record-unavailable"}


def released_by_status(shop: Shop, key: str) -> dict[str, Any]:
    """An answer that asks for another try."""
    send(shop, key, headers={"Do": "429"})
    return {"status": 429}


def released_by_error(shop: Shop, key: str) -> dict[str, Any]:
    """An exception that escapes."""
    shop.app.testing = True
    with pytest.raises(ZeroDivisionError):
        send(shop, key, headers={"Do": "raise"})
    return {"exception": "ZeroDivisionError"}


def held(shop: Shop, key: str) -> dict[str, Any]:
    """A commit, and then an answer that says nothing of it."""
    send(shop, key, headers={"Do": "commit"})
    return {"status": 503, "seen": "INSERT INTO charge", "remedy": signals.REMEDY}


def held_by_error(shop: Shop, key: str) -> dict[str, Any]:
    """A commit, and then an exception that escapes."""
    shop.app.testing = True
    with pytest.raises(ZeroDivisionError):
        send(shop, key, headers={"Do": "commit and raise"})
    return {"exception": "ZeroDivisionError", "seen": "INSERT INTO charge", "remedy": signals.REMEDY}


def taken_over(shop: Shop, key: str) -> dict[str, Any]:
    """A retry after the lease of a holder that died."""
    with pytest.raises(SystemExit):
        send(shop, key, json={}, headers={"Do": "die"})
    shop.shift(40)
    send(shop, key, json={})
    return {"age_seconds": (40, 70), "attempts": 2}


def claim_lost(shop: Shop, key: str) -> dict[str, Any]:
    """A holder that was taken over answers."""
    entered, go = shop.app.config["EVENTS"] = threading.Event(), threading.Event()
    first = background(send, shop, key, json={}, headers={"Do": "wait"})
    assert entered.wait(20)
    shop.shift(40)
    assert "ran" == send(shop, key, json={}).text
    go.set()
    assert "waited" == first.result(20).text
    assert "ran" == send(shop, key, json={}).text
    return {}


def record_failed(shop: Shop, key: str) -> dict[str, Any]:
    """The store goes away before the answer is recorded."""
    send(shop, key, json={}, headers={"Do": "drop"})
    return {"exception": str}


def record_failed_unguarded(shop: Shop, key: str) -> dict[str, Any]:
    """A view runs without the store."""
    drop(shop)
    send(shop, key, "/unguarded")
    return {"exception": str, "path": "/unguarded", "endpoint": "unguarded"}


def unguarded_without_key(shop: Shop, key: str) -> dict[str, Any]:
    """A request without a key where one is optional."""
    send(shop, None, "/optional", headers={"User-Agent": "till/1.0 (shop 7)", "Authorization": "Bearer s3cret"})
    own = {"key": None, "scope": None, "path": "/optional", "endpoint": "optional"}
    return {"reason": "no-key", "user_agent": "till/1.0 (shop 7)", **own}


def pruned(shop: Shop, key: str) -> dict[str, Any]:
    """Records past their retention are deleted."""
    send(shop, key, json={})
    shop.shift(90_000)
    with shop.app.app_context():
        shop.idempotency.prune()
    return {"deleted": 1, "batches": 1, "duration": float}


HAPPENINGS = [
    executed,
    replayed,
    conflicted,
    conflicted_for_good,
    mismatched,
    rejected_without_key,
    rejected_key,
    rejected_caller,
    rejected_store,
    rejected_record,
    released_by_status,
    released_by_error,
    held,
    held_by_error,
    taken_over,
    claim_lost,
    record_failed,
    record_failed_unguarded,
    unguarded_without_key,
    pruned,
]


def signal_of(happening: Callable[..., Any]) -> str:
    """The name of the signal: its function's name, or the beginning of it."""
    return max((name for name in EVENTS if happening.__name__.startswith(name)), key=len)


@pytest.fixture
def make_shop(make_light: Callable[..., Shop]) -> Iterator[Callable[[], Shop]]:
    """A function that makes shops with a guarded view ``/x`` that does what the header ``Do`` says."""
    shops: list[Shop] = []

    def make() -> Shop:
        shops.append(equip(make_light()))
        return shops[-1]

    yield make
    mend(shops)


@pytest.fixture
def shop(make_shop: Callable[[], Shop]) -> Shop:
    """One of them."""
    return make_shop()


def test_every_signal_is_tried() -> None:
    """There is a happening for each signal below."""
    assert set(EVENTS) == set(map(signal_of, HAPPENINGS)) == {row[2] for row in ROWS}


def fields_of(signal: str) -> list[set[str]]:
    """The fields that are promised of an event: one set for each of its forms."""
    (promised,) = [row[3].strip() for row in ROWS if row[2] == signal]
    forms: list[set[str]] = [set() if signal == "pruned" else set(BASE)]
    for field in promised.split(", ") if promised else ():
        forms = [form | {one} for form in forms for one in field.split(" or ")]
    return forms


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_is_promised_of_an_event(
    make_shop: Callable[[], Shop], logged: Callable[[], list[logging.LogRecord]], row: tuple[str, str, str, str]
) -> None:
    """Each row of the table holds: the record's name and level, and its fields, in record, message and signal."""
    name, level, signal, _ = row
    forms = []
    for happening in (one for one in HAPPENINGS if signal_of(one) == signal):
        shop, before = make_shop(), len(logged())
        with events(shop.app) as seen:
            happening(shop, new_key())
        ((fields,),) = [[fields for one, fields in seen if one == signal]]
        (record,) = [one for one in logged()[before:] if one.event == name]  # type: ignore[attr-defined]
        assert ("flask_idempotency", level) == (record.name, record.levelname.lower())
        assert fields == {field: vars(record)[field] for field in fields}
        parts = [f"{field}={spelled(one)}" for field, one in fields.items()]
        assert " ".join([name, *parts]) == record.getMessage()
        forms.append(set(fields))
    assert all(form in fields_of(signal) for form in forms)
    assert all(form in forms for form in fields_of(signal))


def spelled(value: Any) -> str:
    """A value in a message: as it is, or quoted as JSON has it where a line or a field could be forged with it."""
    text = str(value)
    return text if re.fullmatch(r"[!#-<>-~]+", text) else json.dumps(text)


@pytest.mark.parametrize("happening", HAPPENINGS, ids=lambda one: one.__name__)
@pytest.mark.scenario(68, 71)
def test_events(
    shop: Shop, logged: Callable[[], list[logging.LogRecord]], happening: Callable[[Shop, str], dict[str, Any]]
) -> None:
    """Each event happens once, with the contract's fields and values, in the signal and in the log record alike."""
    name, key = signal_of(happening), new_key()
    with events(shop.app) as seen:
        own = happening(shop, key)
    expected = {"key": key, "scope": "acme", "method": "POST", "path": "/x", "endpoint": "x"} | own
    if name == "pruned":
        expected = own
    (fields,) = [fields for one, fields in seen if one == name]
    assert set(expected) == set(fields)
    for field, value in expected.items():
        if isinstance(value, type):
            assert isinstance(fields[field], value)
        elif isinstance(value, tuple):
            assert value[0] <= fields[field] < value[1]
        else:
            assert value == fields[field]
    (record,) = [one for one in logged() if one.event == EVENTS[name].name]  # type: ignore[attr-defined]
    assert ("flask_idempotency", EVENTS[name].level) == (record.name, record.levelno)
    assert fields.items() <= vars(record).items()
    message = record.getMessage()
    assert message.startswith(f"{EVENTS[name].name} ")
    assert all(f"{field}=" in message for field in fields)
    assert "\n" not in message


@pytest.mark.parametrize("happening", HAPPENINGS, ids=lambda one: one.__name__)
def test_a_signal_is_one_record(
    shop: Shop, logged: Callable[[], list[logging.LogRecord]], happening: Callable[[Shop, str], dict[str, Any]]
) -> None:
    """The signals and the log records are the same events in the same order."""
    with events(shop.app) as seen:
        happening(shop, new_key())
    names = [EVENTS[name].name for name, _ in seen]
    assert names == [one.event for one in logged()]  # type: ignore[attr-defined]
    assert len(names) >= 1


@pytest.mark.parametrize("happening", HAPPENINGS, ids=lambda one: one.__name__)
def test_receivers_that_raise(
    make_shop: Callable[[], Shop], caplog: pytest.LogCaptureFixture, happening: Callable[[Shop, str], dict[str, Any]]
) -> None:
    """Receivers of all signals that raise are logged, and change neither the answers nor what is stored."""

    def broken(sender: Any, **_: Any) -> None:
        raise ZeroDivisionError("a receiver")

    quiet = outcome(make_shop(), happening)
    shop = make_shop()
    for event in EVENTS.values():
        event.signal.connect(broken, sender=shop.app)
    try:
        loud = outcome(shop, happening)
    finally:
        for event in EVENTS.values():
            event.signal.disconnect(broken, sender=shop.app)
    assert quiet == loud
    assert f"A receiver of the signal {signal_of(happening)} failed." in caplog.messages


def outcome(shop: Shop, happening: Callable[[Shop, str], dict[str, Any]]) -> Any:
    """The statuses that a happening's clients got, and what is stored for its key."""
    statuses: list[int] = []
    shop.app.after_request(lambda response: statuses.append(response.status_code) or response)
    key = new_key()
    happening(shop, key)
    with shop.app.app_context():
        if not sa.inspect(shop.db.engine).has_table("idempotency_keys"):
            return statuses, None
    return statuses, [(one["status"], one["attempts"]) for one in shop.rows() if one["key"] == key]


@pytest.mark.parametrize("happening", HAPPENINGS, ids=lambda one: one.__name__)
def test_current_in_receivers(shop: Shop, happening: Callable[[Shop, str], dict[str, Any]]) -> None:
    """In a receiver ``current`` is the attempt that the event is about, once its key and scope are known."""
    found: list[tuple[Any, Any]] = []

    def receive(sender: Any, **fields: Any) -> None:
        found.append((shop.idempotency.current, fields))

    signal = EVENTS[signal_of(happening)].signal
    with signal.connected_to(receive, sender=shop.app):
        happening(shop, new_key())
    ((attempt, fields),) = found
    if fields.get("scope") is None:
        assert attempt is None
    else:
        assert (fields["key"], fields["scope"]) == (attempt.key, attempt.scope)
        assert (signal.name == "replayed") == attempt.replay
    assert shop.idempotency.current is None


@pytest.mark.scenario(58)
def test_a_scope_can_not_forge_a_line(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """A scope, a path and a method with line breaks are quoted in every message of every event."""
    shop.idempotency.loader = lambda: "acme\nidempotency.replay key=forged\r\nx"
    shop.app.add_url_rule("/a/<rest>", "any", shop.idempotency.required(lambda rest: rest), methods=["POST"])
    key = new_key()
    with caplog.at_level(logging.DEBUG, "flask_idempotency"):
        for path in ("/a/b%0Aidempotency.replay%20key=forged", "/a/b%0d%0ac"):
            for sent in (key, key, None, "short"):
                send(shop, sent, path)
    assert 8 == len(caplog.messages)
    for message in caplog.messages:
        assert not set("\r\n") & set(message)
        assert " key=forged" not in message.replace("replay key=forged", "")
        assert 1 == message.count(" endpoint=")
    assert any('scope="acme\\nidempotency.replay key=forged\\r\\nx"' in one for one in caplog.messages)
    assert any('path="/a/b\\n' in one for one in caplog.messages)


@pytest.mark.scenario(70)
def test_labels_that_are_bounded(shop: Shop) -> None:
    """Events carry the endpoint, which is bounded, beside the path, which is not; unguarded requests send none."""
    shop.app.add_url_rule("/n/<int:number>", "n", shop.idempotency.required(lambda number: "x"), methods=["POST"])
    with events(shop.app) as seen:
        for number in range(3):
            send(shop, new_key(), f"/n/{number}")
        shop.client.get("/none")
        shop.client.post("/none")
    assert {("executed", "n")} == {(name, fields["endpoint"]) for name, fields in seen}
    assert {f"/n/{number}" for number in range(3)} == {fields["path"] for _, fields in seen}


def test_events_are_told_when_they_are_true(shop: Shop) -> None:
    """When ``executed`` is received the record is there, when ``released`` is, the key is free."""
    found: list[tuple[str, list[str]]] = []

    def receive(sender: Any, **_: Any) -> None:
        found.append(("event", [row["status"] for row in shop.rows()]))

    with (
        signals.executed.connected_to(receive, sender=shop.app),
        signals.released.connected_to(receive, sender=shop.app),
    ):
        send(shop, new_key(), headers={"Do": "429"})
        send(shop, new_key())
    assert [("event", []), ("event", ["completed"])] == found


def test_the_logger_of_the_package_is_quiet_by_default(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    """Ordinary traffic prints nothing where the app configured no logging."""
    key = new_key()
    for _ in range(2):
        send(shop, key)
    captured = capsys.readouterr()
    assert ("", "") == (captured.out, captured.err)
