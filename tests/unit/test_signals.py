"""Events: one log record and one signal each."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import Any

import pytest
from blinker import NamedSignal
from flask import Flask

import flask_idempotency
from flask_idempotency import signals

EVENTS = {name: one for name, one in vars(signals).items() if isinstance(one, signals.Event)}
FIELDS = {"key": "key-0001", "scope": "acme", "method": "POST", "path": "/charges", "endpoint": "create"}


def test_the_table_of_events() -> None:
    """Each event has the name, the level and the signal of the contract."""
    expected = {
        "idempotency.execute": ("DEBUG", "executed"),
        "idempotency.replay": ("INFO", "replayed"),
        "idempotency.conflict": ("INFO", "conflicted"),
        "idempotency.mismatch": ("WARNING", "mismatched"),
        "idempotency.reject": ("INFO", "rejected"),
        "idempotency.release": ("INFO", "released"),
        "idempotency.hold": ("ERROR", "held"),
        "idempotency.takeover": ("WARNING", "taken_over"),
        "idempotency.lost": ("ERROR", "claim_lost"),
        "idempotency.record_failed": ("ERROR", "record_failed"),
        "idempotency.unguarded": ("INFO", "unguarded"),
        "idempotency.prune": ("INFO", "pruned"),
    }
    assert expected == {one.name: (logging.getLevelName(one.level), one.signal.name) for one in EVENTS.values()}


def test_signals_are_found_by_their_names() -> None:
    """Each event's signal is an attribute of the module under its own name, and there is no other."""
    found = {name: one for name, one in vars(signals).items() if isinstance(one, NamedSignal)}
    assert found == {one.signal.name: one.signal for one in EVENTS.values()}


def test_every_event_is_emitted() -> None:
    """The list of events and the package's code agree: each is named where something happens, and none is missing."""
    used = set()
    for path in Path(flask_idempotency.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "signals":
                used.add(node.attr)
    assert set(EVENTS) <= used
    assert {one for one in used if isinstance(getattr(signals, one), signals.Event)} <= set(EVENTS)


@pytest.mark.parametrize("event", EVENTS.values(), ids=lambda event: event.name)
def test_an_event_is_a_record_and_a_signal(event: signals.Event, caplog: pytest.LogCaptureFixture) -> None:
    """The fields are in the record's message as name=value, in its attributes, and in what receivers get."""
    app, seen = Flask("shop"), []

    def receive(sender: Any, **fields: Any) -> None:
        seen.append((sender, fields))

    with event.signal.connected_to(receive, sender=app), caplog.at_level(logging.DEBUG, "flask_idempotency"):
        signals.emit(event, app, {**FIELDS, "status": 201})
    assert [(app, {**FIELDS, "status": 201})] == seen
    (record,) = caplog.records
    assert ("flask_idempotency", event.level) == (record.name, record.levelno)
    assert f"{event.name} key=key-0001 scope=acme method=POST path=/charges endpoint=create status=201" == (
        record.getMessage()
    )
    assert {"event": event.name, **FIELDS, "status": 201}.items() <= vars(record).items()


def test_only_receivers_of_the_app_are_called() -> None:
    """A receiver that is connected for another app hears nothing; one for all apps does."""
    app, other, seen = Flask("a"), Flask("b"), []

    def for_other(sender: Any, **_: Any) -> None:
        seen.append("other")

    def for_all(sender: Any, **_: Any) -> None:
        seen.append("all")

    with signals.replayed.connected_to(for_other, sender=other), signals.replayed.connected_to(for_all):
        signals.emit(signals.REPLAY, app, FIELDS)
    assert ["all"] == seen


def test_a_quiet_logger_costs_no_record(caplog: pytest.LogCaptureFixture) -> None:
    """Below the logger's level only the signal is sent."""
    app, seen = Flask("shop"), []

    def receive(sender: Any, **_: Any) -> None:
        seen.append(sender)

    with signals.executed.connected_to(receive, sender=app), caplog.at_level(logging.INFO, "flask_idempotency"):
        signals.emit(signals.EXECUTE, app, FIELDS)
    assert [app] == seen
    assert [] == caplog.records


def test_a_receiver_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A receiver's exception goes to the log, and the receivers after it are called all the same."""
    app, seen = Flask("shop"), []

    def broken(sender: Any, **_: Any) -> None:
        seen.append("broken")
        raise ValueError("a counter failed")

    def whole(sender: Any, **_: Any) -> None:
        seen.append("whole")

    for receiver in (broken, whole, broken):
        signals.released.connect(receiver, sender=app)
    with caplog.at_level(logging.ERROR, "flask_idempotency"):
        signals.emit(signals.RELEASE, app, FIELDS)
    assert ["broken", "whole"] == sorted(seen)
    (record,) = caplog.records
    assert "released" in record.getMessage()
    assert record.exc_info is not None
    assert "a counter failed" == str(record.exc_info[1])


def test_a_receiver_may_be_a_coroutine() -> None:
    """A coroutine function is run to its end, as Flask runs views and hooks."""
    app, seen = Flask("shop"), []

    async def receive(sender: Any, **fields: Any) -> None:
        seen.append(fields["key"])

    with signals.released.connected_to(receive, sender=app):
        signals.emit(signals.RELEASE, app, FIELDS)
    assert ["key-0001"] == seen


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("acme", "acme"),
        ("u1:x/y?", "u1:x/y?"),
        ("", '""'),
        ("a b", '"a b"'),
        ("a=b", '"a=b"'),
        ('a"b', '"a\\"b"'),
        ("a\nidempotency.replay key=forged", '"a\\nidempotency.replay key=forged"'),
        ("a\r\n", '"a\\r\\n"'),
        ("a\x1b[31m", '"a\\u001b[31m"'),
        ("a\x00", '"a\\u0000"'),
        ("a\x7f", '"a\\u007f"'),
        ("a\u2028b\x85", '"a\\u2028b\\u0085"'),
        ("é", '"\\u00e9"'),
        ("\ud800", '"\\ud800"'),
        ("a\\nb", "a\\nb"),
        (None, "None"),
        (1.5, "1.5"),
    ],
)
@pytest.mark.scenario(58)
def test_no_value_can_forge_a_line(value: Any, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    """A value with blanks, line breaks or control characters is quoted, so that the message stays one line."""
    with caplog.at_level(logging.INFO, "flask_idempotency"):
        signals.emit(signals.REPLAY, Flask("shop"), {**FIELDS, "scope": value})
    (message,) = caplog.messages
    assert f"idempotency.replay key=key-0001 scope={shown} method=POST path=/charges endpoint=create" == message
    assert value == caplog.records[0].scope  # type: ignore[attr-defined]
