"""Pruning with a body store: bodies go with their keys, and those that belong to no key are found."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Response
from fsspec.implementations.memory import MemoryFileSystem

from flask_idempotency.bodies import BodyStore
from flask_idempotency.errors import BodyStoreError, ConfigurationError, StoreError
from flask_idempotency.prune import Pruned, sweep
from flask_idempotency.state import get_state
from tests.support.apps import Shop, command, guard, new_key, send
from tests.support.barrier import together
from tests.support.bodies import UNRELIABLE, Unreliable, make_older, names, place

LARGE = b"x" * 5000
OLD = 3700


@pytest.fixture(params=["file", "memory"])
def make(request: pytest.FixtureRequest, make_light: Callable[..., Shop], tmp_path: Path) -> Iterator[Any]:
    """As ``make_light``, with a body store, and a guarded view at /x whose answer lies there."""
    url = f"file:{tmp_path}/bodies" if request.param == "file" else f"memory:{tmp_path.name}"
    yield lambda **config: large(make_light(**{"body_store": url, **config}))
    MemoryFileSystem.store.clear()


@pytest.fixture
def shop(make: Callable[..., Shop]) -> Shop:
    """A shop with a body store."""
    return make()


@pytest.fixture
def unreliable(make_light: Callable[..., Shop]) -> Iterator[Shop]:
    """A shop with a body store some of whose calls fail once they are told to."""
    yield large(make_light(body_store=UNRELIABLE))
    Unreliable.failing.clear()
    Unreliable.store.clear()


def large(shop: Shop) -> Shop:
    """The shop, with a guarded view at /x whose answer is too large for the table."""

    def view() -> Any:
        shop.runs.append("run")
        return LARGE

    guard(shop, view, max_body=1000)
    return shop


def bodies(shop: Shop) -> BodyStore:
    store = get_state(shop.app).settings.body_store
    assert store is not None
    return store


def left_over(shop: Shop, token: str | None = None, age: float = OLD) -> str:
    """An object of ours to which no row refers, unless a claim has that token; its name."""
    sink = bodies(shop).sink(token or secrets.token_hex(16))
    sink.write(b"left over")
    name = sink.finish().name
    make_older(bodies(shop), name, age)
    return name


def prune(shop: Shop, **options: Any) -> Pruned:
    with shop.app.app_context():
        return shop.idempotency.prune(**options)


def run(shop: Shop, *words: str) -> tuple[int, str]:
    """The command's exit status and output."""
    return command(shop.app, "prune", *words)


@pytest.mark.scenario(39, 61)
def test_bodies_go_with_their_keys(shop: Shop) -> None:
    """Pruning deletes the bodies of the keys that it deletes, and no others."""
    for _ in range(3):
        send(shop, new_key())
    shop.shift(90_000)
    send(shop, kept := new_key())
    assert (3, 0) == ((done := prune(shop, batch_size=2)).deleted, done.orphans)
    (row,) = shop.rows()
    (name,) = names(bodies(shop))
    assert (kept, True) == (row["key"], name.startswith(row["fencing_token"]))
    assert LARGE == send(shop, kept, buffered=True).data


def test_a_dry_run_deletes_no_body(shop: Shop) -> None:
    """A dry run counts keys and orphans, and leaves both."""
    send(shop, new_key())
    shop.shift(90_000)
    orphan = left_over(shop)
    done = prune(shop, dry_run=True, body_store=True)
    assert (1, 1, True) == (done.deleted, done.orphans, done.dry_run)
    assert (2, True) == (len(names(bodies(shop))), orphan in names(bodies(shop)))


@pytest.mark.scenario(61)
def test_orphans_are_found(shop: Shop) -> None:
    """What is old and belongs to no key goes; what a record or a claim may need, what is young or not ours, stays."""
    send(shop, new_key())
    (recorded,) = names(bodies(shop))
    make_older(bodies(shop), recorded, OLD)
    running: list[str] = []

    def view() -> Any:
        running.append(left_over(shop, shop.idempotency.current._granted.claim.token))
        assert 1 == prune(shop, body_store=True).orphans
        return "small"

    # Without another request before it, which Flask would not allow.
    shop.app.view_functions["/x"] = shop.idempotency.required(view)
    orphan, young = left_over(shop), left_over(shop, age=3500)
    files, theirs = place(bodies(shop), "report.csv")
    files.pipe_file(theirs, b"theirs")
    make_older(bodies(shop), "report.csv", OLD)
    send(shop, new_key())
    assert {recorded, young, *running} == names(bodies(shop))
    assert orphan not in names(bodies(shop))
    assert files.exists(theirs)
    # The claim has ended with a small answer: nothing needs what was written under it.
    assert 1 == prune(shop, body_store=True).orphans
    assert {recorded, young} == names(bodies(shop))
    assert (0, 0) == ((done := prune(shop, body_store=True)).orphans, done.deleted)


@pytest.mark.scenario(61)
def test_what_a_crash_leaves_is_an_orphan_in_the_end(shop: Shop) -> None:
    """A body whose process died before the record stays while its claim is there, and goes after the takeover."""

    def die() -> Response:
        def stream() -> Iterator[bytes]:
            yield LARGE
            raise SystemExit

        return Response(stream())

    view = shop.app.view_functions["/x"]
    shop.app.view_functions["/x"] = shop.idempotency.required(max_body=1000)(die)
    key = new_key()
    with pytest.raises(SystemExit):
        send(shop, key, buffered=True)
    (left,) = names(bodies(shop))
    make_older(bodies(shop), left, OLD)
    shop.shift(3600)
    assert 0 == prune(shop, body_store=True).orphans
    shop.app.view_functions["/x"] = view
    assert LARGE == send(shop, key).data
    assert 1 == prune(shop, body_store=True).orphans
    assert left not in names(bodies(shop))
    assert LARGE == send(shop, key, buffered=True).data


class Completing:
    """The shop's store, in which something happens between the listing and the reading of the keys."""

    def __init__(self, shop: Shop, what: Callable[[], object]) -> None:
        self._store = get_state(shop.app).store
        self._what = what

    def tokens_in_use(self) -> Iterator[str]:
        """What happens, and then the tokens."""
        self._what()
        return self._store.tokens_in_use()


def test_a_sweep_beside_a_record(shop: Shop) -> None:
    """A body that is written and recorded while the sweep is between its two lists is needed, and stays."""
    left_over(shop)
    store: Any = Completing(shop, lambda: send(shop, new_key()))
    assert 1 == sweep(bodies(shop), store)
    (name,) = names(bodies(shop))
    assert name.startswith(shop.rows()[0]["fencing_token"])


def test_sweeps_at_once(shop: Shop) -> None:
    """Two sweeps delete the same orphans, and neither fails where the other was quicker."""
    for _ in range(20):
        left_over(shop)
    together(2, lambda _: prune(shop, body_store=True))
    assert set() == names(bodies(shop))


def test_the_command(make: Callable[..., Shop]) -> None:
    """``--body-store`` says how many bodies it deleted, or would delete, in words and as JSON."""
    shop = make()
    left_over(shop)
    left_over(shop)
    status, output = run(shop, "--body-store", "--dry-run")
    assert (0, "Would prune 0 keys. Would delete 2 bodies of no key.\n") == (status, output)
    assert "bodies" not in run(shop)[1]
    assert 2 == json.loads(run(shop, "--body-store", "--dry-run", "--json")[1])["orphans"]
    status, output = run(shop, "--body-store")
    assert (0, True) == (status, output.endswith(" s. Deleted 2 bodies of no key.\n"))
    assert run(shop, "--body-store")[1].endswith(" Deleted 0 bodies of no key.\n")


def test_without_a_body_store(make_light: Callable[..., Shop]) -> None:
    """Asked to look through a body store that is not there, the command fails and names the option."""
    shop = make_light()
    assert (1, True) == ((done := run(shop, "--body-store"))[0], "IDEMPOTENCY_BODY_STORE" in done[1])
    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_BODY_STORE"):
        prune(shop, body_store=True)


def test_a_body_store_that_is_configured_no_more(shop: Shop, make_light: Callable[..., Shop]) -> None:
    """Keys are pruned all the same, and their bodies stay until a sweep with the body store."""
    send(shop, new_key())
    (name,) = names(bodies(shop))
    make_older(bodies(shop), name, OLD)
    shop.shift(90_000)
    assert 1 == prune(make_light()).deleted
    assert {name} == names(bodies(shop))
    assert 1 == prune(shop, body_store=True).orphans


def test_a_body_store_that_can_not_be_reached(unreliable: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Keys are pruned and the bodies left to the sweep, which fails with exit status 1 until it can do its work."""
    send(unreliable, new_key())
    unreliable.shift(90_000)
    (name,) = names(bodies(unreliable))
    make_older(bodies(unreliable), name, OLD)
    for call in ("rm", "ls"):
        Unreliable.failing.add(call)
        status, output = run(unreliable, "--body-store")
        assert (1, True, False) == (status, "ConnectionError" in output, "s3cret" in output + caplog.text)
    assert [] == unreliable.rows()
    assert f"The body {name} could not be deleted" in caplog.text
    with pytest.raises(BodyStoreError):
        prune(unreliable, body_store=True)
    Unreliable.failing.clear()
    assert 1 == prune(unreliable, body_store=True).orphans
    assert set() == names(bodies(unreliable))


def test_a_table_that_can_not_be_read(shop: Shop) -> None:
    """Where the keys can't be read nothing is an orphan."""
    name = left_over(shop)

    def fail() -> None:
        raise StoreError("gone")

    store: Any = Completing(shop, fail)
    with pytest.raises(StoreError):
        sweep(bodies(shop), store)
    assert {name} == names(bodies(shop))
