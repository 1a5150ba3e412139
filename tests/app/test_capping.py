"""``IDEMPOTENCY_MAX_LIVE_KEYS``: who is refused past the cap, for how long, and who never is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotency import capping
from flask_idempotency.capping import Cap
from flask_idempotency.errors import StoreError
from flask_idempotency.state import get_state
from flask_idempotency.store.survey import Kept
from tests.support.apps import Shop, assert_replayed, events, guard, make_shop, new_key, send, statements
from tests.support.barrier import together
from tests.support.guarded import refusal

Make = Callable[..., Shop]
REFUSED = (429, "too-many-keys", True)


def cap_of(shop: Shop) -> Cap:
    found = get_state(shop.app).cap
    assert found is not None
    return found


def fill(shop: Shop, count: int, tenant: str = "acme") -> list[str]:
    """So many keys of a tenant, recorded."""
    keys = [new_key() for _ in range(count)]
    for key in keys:
        assert 201 == shop.charge(key, tenant=tenant).status_code
    return keys


@pytest.mark.parametrize("atomic", [False, True])
def test_past_the_cap(make: Make, atomic: bool) -> None:
    """A new key past the cap is refused with 429 and an event, nothing is stored, and other scopes go on; replays and
    mismatches of keys that are there are answered as ever.
    """
    shop = make(max_live_keys=3, atomic=atomic)
    keys = fill(shop, 3)
    with events(shop.app) as seen:
        answer = shop.charge(new_key())
    assert REFUSED == refusal(answer)
    ((name, fields),) = seen
    assert ("rejected", "too-many-keys", "acme") == (name, fields["reason"], fields["scope"])
    assert "true" == shop.charge(keys[0]).headers["Idempotent-Replay"]
    assert (422, "key-reused", False) == refusal(shop.charge(keys[1], amount=7))
    assert (3, 3) == (len(shop.runs), len(shop.rows()))
    fill(shop, 1, tenant="other")


def test_keys_that_are_there_go_on(make: Make) -> None:
    """At the cap conflicts get 409, and released and stale keys are taken over: none of them is a key more."""
    shop = make(max_live_keys=1)
    key = new_key()

    def view() -> Any:
        shop.idempotency.step("one", lambda: 1)
        shop.runs.append("run")
        if len(shop.runs) == 1:
            assert (409, "in-flight", True) == refusal(send(shop, key))
            assert REFUSED == refusal(send(shop, new_key()))
        return ("later", 503) if len(shop.runs) == 1 else ("done", 201)

    guard(shop, view, on_error="release")
    assert 503 == send(shop, key).status_code
    assert ["released"] == [row["status"] for row in shop.rows()]
    assert REFUSED == refusal(send(shop, new_key()))
    assert 201 == send(shop, key).status_code
    shop.execute(sa.text("UPDATE idempotency_keys SET status = 'in_progress'"))
    shop.shift(31)
    assert 201 == send(shop, key).status_code
    assert [3] == [row["attempts"] for row in shop.rows()]


def test_a_place_is_free_at_once(make: Make) -> None:
    """Retry-After says when the first key ends; past that its place is free, pruned or not, and the key is new."""
    shop = make(max_live_keys=2, retention=2)
    first = fill(shop, 1)[0]
    shop.shift(1)
    fill(shop, 1)
    answer = shop.charge(new_key())
    assert (REFUSED, "2") == (refusal(answer), answer.headers["Retry-After"])
    until = time.monotonic() + 1.05
    while shop.charge(key := new_key()).status_code == 429:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert (429, 429) == (shop.charge(first).status_code, shop.charge(new_key()).status_code)
    shop.shift(1.3)
    cap_of(shop).forget()
    assert 201 == shop.charge(first).status_code
    assert_replayed(shop.charge(key), shop.charge(key))


def test_retry_after_is_honest(make: Make) -> None:
    """It is the time until the first key ends, rounded up, and at least IDEMPOTENCY_RETRY_AFTER."""
    shop = make(max_live_keys=2, retention=500, retry_after=7)
    fill(shop, 1)
    shop.shift(100)
    fill(shop, 1)
    assert 395 <= int(shop.charge(new_key()).headers["Retry-After"]) <= 400
    shop.shift(398)
    cap_of(shop).forget()
    assert "7" == shop.charge(new_key()).headers["Retry-After"]


def test_without_the_option_nothing_is_asked(make: Make) -> None:
    """A request sends the same statements as ever without the option, and with it, far from the cap, after a first."""
    sent = []
    for shop in (make(), make(max_live_keys=1_000)):
        fill(shop, 1)
        with statements() as seen:
            fill(shop, 3)
        sent.append(len([one for one in seen if "idempotency_keys" in one]))
    assert sent[0] == sent[1]


def test_one_process_overshoots_by_what_runs_at_once(make_light: Make) -> None:
    """Of simultaneous requests only those that passed the count at the same moment are too many."""
    shop = make_light(max_live_keys=10, pool_size=4)
    fill(shop, 8)
    answers = together(6, lambda _: shop.charge(new_key()).status_code)
    assert {201, 429} >= set(answers)
    assert 10 <= len(shop.rows()) <= 8 + 6
    assert 429 == shop.charge(new_key()).status_code


def test_processes_overshoot_by_a_twentieth_each(sqlite_url: str) -> None:
    """Of several processes over one table, each gives away no more than a twentieth of what it counted last."""
    cap, count = 200, 4
    shops = [make_shop(sqlite_url, max_live_keys=cap, retention=3600) for _ in range(count)]
    shop = shops[0]
    fill(shop, cap // 2)
    for one in shops:
        fill(one, 1)  # each has counted now, and knows of a hundred places
    rest = [one.charge(new_key()).status_code for one in reversed(shops) for _ in range(cap)]
    assert 429 in rest
    assert cap <= len(shop.rows()) <= cap + count * cap // 2 // capping.PART


class Counted:
    """A store whose counts are known."""

    def __init__(self) -> None:
        self.looks = 0
        self.kept_now = Kept(0, 0.0)

    def kept(self, scope: str, limit: int) -> Kept:
        self.looks += 1
        return self.kept_now

    def find(self, scope: str, key: str) -> None:
        return None


def test_how_often_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far from the cap a count is good for many claims and a minute; near, for seconds; of the last twenty for one."""
    now = [1000.0]
    monkeypatch.setattr(capping.time, "monotonic", lambda: now[0])
    store = Counted()
    cap = Cap(store, 1_000)

    def looks(claims: int = 0, seconds: float = 0.0) -> int:
        before = store.looks
        for _ in range(claims):
            cap.claimed("acme")
        now[0] += seconds
        cap.full("acme", "key")
        return store.looks - before

    assert [1, 0, 0, 1] == [looks(), looks(49), looks(0, 59), looks(1)]
    assert [0, 1] == [looks(0, 59), looks(0, 61)]
    store.kept_now = Kept(600, 0.0)
    assert [1, 0, 1] == [looks(0, 61), looks(0, 4), looks(0, 5)]
    store.kept_now = Kept(985, 0.0)
    assert [1, 1, 1] == [looks(20), looks(1), looks(1)]
    store.kept_now = Kept(1_000, 0.4)
    assert [1, 0, 1] == [looks(0, 5), looks(0, 0.3), looks(0, 0.2)]
    store.kept_now = Kept(1_000, 500.0)
    assert [1, 0, 1] == [looks(0, 1), looks(0, 0.9), looks(0, 0.2)]


def test_scopes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: the scope that was not seen for longest is counted anew when it comes again."""
    monkeypatch.setattr(capping, "MOST_SCOPES", 2)
    store = Counted()
    cap = Cap(store, 10)
    for scope in ("a", "b", "a", "c", "a"):
        cap.full(scope, "key")
    assert (3, ["c", "a"]) == (store.looks, list(cap._scopes))


def test_a_count_that_fails(make_light: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that can't count is a store that can't answer: 503, and the view does not run."""
    shop = make_light(max_live_keys=2)

    def fail(scope: str, limit: int) -> Kept:
        raise StoreError("down")

    monkeypatch.setattr(get_state(shop.app).store, "kept", fail)
    assert (503, "store-unavailable", True) == refusal(shop.charge(new_key()))
    assert ([], []) == (shop.runs, shop.rows())
