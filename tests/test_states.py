"""The picture of a key's states: what it shows is what a store does, and nothing is left out."""

from __future__ import annotations

import importlib.util
import itertools
import secrets
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flask_idempotency.claim import Status, Stored
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.testing import ANSWER, ask, claimed
from tests.store.support import opened, shift

DOCS = Path(__file__).resolve().parents[1] / "docs"
DAY = 86_400.0


@pytest.fixture(scope="module")
def states() -> types.ModuleType:
    """The module that holds the lists, and draws the picture."""
    spec = importlib.util.spec_from_file_location("docs_states", DOCS / "_ext" / "states.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def token() -> str:
    return secrets.token_hex(16)


#: All that a store can do to one key. Each gets what is stored, as well as the claim that was granted once.
CALLS: dict[str, Callable[..., object]] = {
    "claim": lambda store, asking, claim, seen: store.claim(replace(asking, token=token())),
    "take": lambda store, asking, claim, seen: seen and store.take(replace(asking, token=token()), seen),
    "record": lambda store, asking, claim, seen: store.record(claim, ANSWER, DAY),
    "release": lambda store, asking, claim, seen: store.release(claim),
    "hold": lambda store, asking, claim, seen: store.hold(claim),
    "resume": lambda store, asking, claim, seen: store.resume(claim),
    "keep_steps": lambda store, asking, claim, seen: store.keep_steps(claim, {"more": "1"}),
    "note_secret": lambda store, asking, claim, seen: store.note_secret(claim, "secret-1"),
    "renew": lambda store, asking, claim, seen: store.renew([claim]),
    "settle": lambda store, asking, claim, seen: seen and store.settle(seen, ANSWER, DAY, token()),
    "settle by force": lambda store, asking, claim, seen: seen and store.settle(seen, ANSWER, DAY, token(), force=True),
    "free": lambda store, asking, claim, seen: seen and store.free(seen, DAY, token()),
    "free by force": lambda store, asking, claim, seen: seen and store.free(seen, DAY, token(), force=True),
    "prune": lambda store, asking, claim, seen: store.prune(10),
}

#: How a key gets into each state.
WAYS: dict[str, Callable[..., object]] = {
    "in_progress": lambda store, claim: None,
    "completed": lambda store, claim: store.record(claim, ANSWER, DAY),
    "held": lambda store, claim: store.hold(claim),
    "released": lambda store, claim: store.release(claim),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLAlchemyStore]:
    """A store in a file."""
    with opened(f"sqlite:///{tmp_path / 'keys.sqlite'}") as store:
        yield store


def seen_as(found: Stored | None) -> str:
    return "(no row)" if found is None else found.status.value


def done(store: SQLAlchemyStore, name: str, way: str, steps: bool, age: float) -> tuple[str, str, str | None]:
    """Bring a key into a state, let time pass, and make one call; returns the states on both sides, and its token if
    that is a new one.
    """
    asking = ask(key=token())
    claim = claimed(store, asking)
    if steps:
        store.keep_steps(claim, {"charge": "1"})
    WAYS[way](store, claim)
    shift(store, age)
    before = store.find(asking.scope, asking.key)
    CALLS[name](store, asking, claim, before)
    after = store.find(asking.scope, asking.key)
    other = after.token if after and before and after.token != before.token else None
    store.prune(100)
    return seen_as(before), seen_as(after), other


def test_a_store_does_what_the_picture_shows(states: types.ModuleType, store: SQLAlchemyStore) -> None:
    """Every call in every state, live and late, with steps and without, leads where the table of steps says."""
    found = set()
    for name, way, steps, age in itertools.product(CALLS, WAYS, (False, True), (0, 60, 2 * DAY)):
        before, after, other = done(store, name, way, steps, age)
        if before != after or (other and name == "take"):
            found.add((before, after, name.partition(" ")[0]))
    asking = ask(key=token())
    claimed(store, asking)
    found.add(("(no row)", seen_as(store.find(asking.scope, asking.key)), "claim"))
    assert {(one.before, one.after, one.method) for one in states.STEPS} == found


def test_the_picture_shows_every_state_and_step(states: types.ModuleType) -> None:
    """The file is as it is drawn now, has a box for each status and for the key that is not there, and all arrows."""
    text = states.PICTURE.read_text()
    assert states.drawn() == text, "run .venv/bin/python docs/_ext/tables.py"
    assert {states.NONE, *(one.value for one in Status)} == set(states._BOXES)
    assert all(f">{name}</text>" in text for name in states._BOXES)
    assert {(one.before, one.after) for one in states.STEPS} == set(states._ARROWS)
