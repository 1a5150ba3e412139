"""``IDEMPOTENCY_COUNT_REPLAYS``: what is counted, when it is written, and what counting never does."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from flask import Flask

import flask_idempotency
from flask_idempotency import Idempotency, counting
from flask_idempotency.counting import Counting, write_counts
from flask_idempotency.errors import ConfigurationError, StoreError
from flask_idempotency.state import get_state
from flask_idempotency.store.base import Store
from tests.support.apps import Shop, close, make_shop, new_key, row_of, statements, until

Make = Callable[..., Shop]
NAMES = ("replays", "conflicts", "mismatches", "early_replays", "late_replays")


@pytest.fixture(autouse=True)
def nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background thread writes when a test says so."""
    monkeypatch.setattr(counting, "INTERVAL", 0.02)
    monkeypatch.setattr(Counting, "_start", lambda self: None)


def counts(shop: Shop, key: str) -> tuple[int | None, ...]:
    row = row_of(shop, key)
    return tuple(row[name] for name in NAMES)


def counting_of(shop: Shop) -> Counting:
    found = get_state(shop.app).counting
    assert found is not None
    return found


def test_what_is_counted(make: Make) -> None:
    """Replays by their age, conflicts and mismatches are added to the key's row, and first runs are not."""
    shop = make(count_replays=True)
    key, busy = new_key(), new_key()

    @shop.app.post("/slow")
    @shop.idempotency.required
    def slow() -> str:
        headers = {"X-Tenant": "acme", "Idempotency-Key": busy}
        assert 409 == shop.client.post("/slow", headers=headers).status_code
        return "done"

    shop.client.post("/slow", headers={"X-Tenant": "acme", "Idempotency-Key": busy})
    for seconds in (0, 10, 30):
        shop.charge(key)
        shop.charge(key) if seconds == 0 else None
        shop.shift(seconds)
    shop.shift(60)
    shop.charge(key)
    shop.charge(key, amount=900)
    assert (None,) * 5 == counts(shop, key)
    write_counts(shop.app)
    assert (4, 0, 1, 2, 1) == counts(shop, key)
    assert (0, 1, 0, 0, 0) == counts(shop, busy)
    write_counts(shop.app)
    assert (4, 0, 1, 2, 1) == counts(shop, key)


def test_a_replay_never_writes(make: Make) -> None:
    """A replay's own thread sends one statement with the option as without it."""
    sent = []
    for shop in (make(), make(count_replays=True)):
        key = new_key()
        shop.charge(key)
        with statements() as seen:
            shop.charge(key)
        sent.append(len(seen))
    assert sent[0] == sent[1]


def test_the_thread_writes_and_ends(make_light: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that never keeps the process alive writes by itself, ends with nothing to do, and begins anew."""
    monkeypatch.undo()
    monkeypatch.setattr(counting, "INTERVAL", 0.02)
    shop = make_light(count_replays=True)
    key = new_key()
    shop.charge(key)
    for number in (1, 2):
        shop.charge(key)
        threads = [one for one in threading.enumerate() if one.name == "flask-idempotency-counting"]
        assert all(one.daemon for one in threads)
        until(lambda number=number: counts(shop, key)[0] == number)
        until(lambda: counting_of(shop)._thread is None)


def test_an_outage_is_said_once(make_light: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Requests go on while nothing can be written; what was counted is kept for some tries, and then dropped."""
    shop = make_light(count_replays=True)
    key = new_key()
    shop.charge(key)
    one, count = counting_of(shop), shop.app.extensions["idempotency"].store.count
    failing: list[object] = []

    def fail(counted: object) -> None:
        failing.append(counted)
        raise StoreError("down")

    one._store.count = fail
    assert 201 == shop.charge(key).status_code
    one._write_quietly()
    assert 201 == shop.charge(key).status_code
    one._write_quietly()
    one._store.count = count
    assert 1 == caplog.text.count("Counts of replays can't be written: down")
    one._write_quietly()
    assert 2 == counts(shop, key)[0]
    one._store.count = fail
    shop.charge(key)
    for _ in range(counting.TRIES):
        one._write_quietly()
    assert (2, {}) == (caplog.text.count("can't be written"), one._gathered)


def test_what_fails_half_way(make_light: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before a failure is not written again."""
    monkeypatch.setattr(counting, "AT_ONCE", 1)
    shop = make_light(count_replays=True)
    keys = [new_key() for _ in range(3)]
    for key in keys * 2:
        shop.charge(key)
    one = counting_of(shop)
    count, calls = one._store.count, []

    def fail_second(counted: object) -> None:
        calls.append(counted)
        if len(calls) == 2:
            raise StoreError("down")
        count(counted)

    one._store.count = fail_second
    with pytest.raises(StoreError):
        write_counts(shop.app)
    assert 2 == write_counts(shop.app)
    assert [1, 1, 1] == [counts(shop, key)[0] for key in keys]


def test_memory_is_bounded(
    make_light: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Past a number of keys further ones are not counted, which is said once; those that are there go on."""
    monkeypatch.setattr(counting, "MOST_KEYS", 2)
    shop = make_light(count_replays=True)
    keys = [new_key() for _ in range(4)]
    for key in keys * 3:
        shop.charge(key)
    assert 1 == caplog.text.count("wait for being counted")
    write_counts(shop.app)
    assert [2, 2, None, None] == [counts(shop, key)[0] for key in keys]


@pytest.mark.parametrize("served", [False, True])
def test_an_app_goes(sqlite_url: str, served: bool) -> None:
    """Counting keeps no app alive, whether or not it has served a request: factories make many, in tests say."""

    def made() -> weakref.ref[Flask]:
        shop = make_shop(sqlite_url, count_replays=True)
        if served:
            shop.charge(new_key())
        close(shop.app)
        return weakref.ref(shop.app)

    app = made()
    gc.collect()
    assert app() is None


def test_in_memory_counts_are_written_on_demand() -> None:
    """On SQLite in memory no thread comes between the app's own work; the function writes."""
    shop = make_shop("sqlite://", count_replays=True)
    key = new_key()
    shop.charge(key)
    shop.charge(key)
    assert not counting_of(shop)._store.separate
    write_counts(shop.app)
    assert 1 == counts(shop, key)[0]


@pytest.mark.parametrize(("option", "method"), [("COUNT_REPLAYS", "count"), ("MAX_LIVE_KEYS", "kept")])
def test_a_store_that_can_not(light: Shop, option: str, method: str) -> None:
    """A store that lacks what the option needs is an error at start that names both."""
    members = {name: lambda self, *rest: None for name in dir(Store) if not name.startswith("_")}
    app = Flask("other")
    app.config.update({"IDEMPOTENCY_STORE": type("Half", (), members)(), f"IDEMPOTENCY_{option}": "1"})
    with pytest.raises(ConfigurationError, match=rf"^IDEMPOTENCY_{option} needs a store that has {method}\(\)"):
        Idempotency(app)


FORKING = """
import os, sys
from flask_idempotency import counting
from flask_idempotency.state import get_state
from tests.support.apps import make_shop

counting.INTERVAL = 60.0
shop = make_shop(sys.argv[1], count_replays=True)
shop.charge("key-00000001")
shop.charge("key-00000001")
child = os.fork()
shop.charge("key-00000001")
if child:
    assert 0 == os.waitpid(child, 0)[1]
"""


def test_forks_and_exits(make_light: Make, sqlite_url: str) -> None:
    """A child writes its own counts and not its parent's, and both write at their exit, which waits for no thread."""
    shop = make_light()
    root = str(Path(flask_idempotency.__file__).parents[1])
    environ = {**os.environ, "PYTHONPATH": root}
    # Python 3.12 and later warn of a fork beside threads.
    command = [sys.executable, "-Wignore:This process:DeprecationWarning", "-c", FORKING, sqlite_url]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert (0, "") == (done.returncode, done.stderr)
    assert 3 == counts(shop, "key-00000001")[0]


PATCHED_LATE = """
import sys
from flask_idempotency import counting
from tests.support.apps import make_shop

counting.INTERVAL = 0.05
shop = make_shop(sys.argv[1], count_replays=True)
import gevent
from gevent import monkey
monkey.patch_all()
shop.charge("key-00000001")

def replay():
    for _ in range(5):
        shop.charge("key-00000001")
        gevent.sleep(0.01)

gevent.joinall([gevent.spawn(replay) for _ in range(4)])
with gevent.Timeout(10):
    while shop.rows()[0]["replays"] != 20:
        gevent.sleep(0.05)
"""


def test_greenlets(make_light: Make, sqlite_url: str) -> None:
    """Where gevent patches the process after the app was made (--preload), greenlets count, and one writes."""
    pytest.importorskip("gevent")
    make_light()
    environ = {**os.environ, "PYTHONPATH": str(Path(flask_idempotency.__file__).parents[1])}
    command = [sys.executable, "-c", PATCHED_LATE, sqlite_url]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert 0 == done.returncode, done.stderr
