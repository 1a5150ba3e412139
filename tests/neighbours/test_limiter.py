"""Beside Flask-Limiter: what it turns away touches no claim, and replays can be let through without cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Blueprint, Response, request
from flask_limiter import Limiter

from tests.neighbours.five import Work, by_tenant, case_of, sender, the_five
from tests.neighbours.views import add_view
from tests.support.apps import Shop, new_key

Beside = Callable[..., tuple[Shop, Work]]

HEADERS = frozenset({"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "retry-after"})


def limiter(**options: Any) -> Limiter:
    """A limiter by tenant that says in headers what is left."""
    return Limiter(
        lambda: request.headers.get("X-Tenant", "nobody"), storage_uri="memory://", headers_enabled=True, **options
    )


def app_with(beside: Beside, order: str, by: Limiter, **decorators: Any) -> tuple[Shop, Work]:
    shop, work = beside(**{order: [by.init_app]})
    by_tenant(shop)
    add_view(shop, work, **decorators)
    return shop, work


def charge(shop: Shop, key: str) -> tuple[int, bool]:
    """Status and marker of a request of the one tenant."""
    answer = sender(shop.app, {"X-Tenant": "acme"})(key, 100)
    return answer.status, answer.replayed


RAN, REPLAYED, TURNED_AWAY = (201, False), (201, True), (429, False)


@pytest.mark.parametrize("place", ["default", "above", "below"])
def test_the_five(beside: Beside, order: str, place: str) -> None:
    """The five hold in either order, with a default limit, and with a decorator on either side of the guard."""
    by = limiter(default_limits=["1000/day"])
    decorators = {} if place == "default" else {place: [by.limit("100/hour")]}
    shop, work = app_with(beside, order, by, **decorators)
    the_five(case_of(shop, work, fresh=HEADERS if order == "before" else frozenset()))


@pytest.mark.parametrize("place", ["default", "above"])
@pytest.mark.scenario(50)
def test_turned_away_before_the_guard(beside: Beside, order: str, place: str) -> None:
    """A request over the limit touches no claim, whether its key is new or known; a retry later finds all as it was."""
    by = limiter(default_limits=["2/day"] if place == "default" else None)
    shop, work = app_with(beside, order, by, above=[] if place == "default" else [by.limit("2/day")])
    known, new = new_key(), new_key()
    assert [RAN, REPLAYED] == [charge(shop, known) for _ in range(2)]
    before = shop.rows()
    assert [TURNED_AWAY] * 2 == [charge(shop, key) for key in (known, new)]
    assert (before, 1) == (shop.rows(), work.runs)
    by.reset()
    assert [REPLAYED, RAN] == [charge(shop, key) for key in (known, new)]


@pytest.mark.scenario(41)
def test_a_limit_below_the_guard_is_for_runs_alone(beside: Beside, order: str) -> None:
    """Below the guard a limit counts runs: replays pass when it is used up, and what it refuses can be retried."""
    by = limiter(default_limits=["1/day"])
    shop, work = app_with(beside, order, by, below=[by.limit("2/day")])
    keys = [new_key() for _ in range(3)]
    assert [RAN, RAN, TURNED_AWAY] == [charge(shop, key) for key in keys]
    assert [REPLAYED] * 4 == [charge(shop, key) for key in keys[:2] * 2]
    assert keys[:2] == [row["key"] for row in shop.rows()]
    by.reset()
    assert [RAN, REPLAYED] == [charge(shop, keys[2]) for _ in range(2)]
    assert 3 == work.runs


@pytest.mark.parametrize("place", ["default", "above"])
def test_replays_that_cost_nothing(beside: Beside, order: str, place: str) -> None:
    """With deduct_when replays are not counted; who has used up the limit waits for the replay as well."""
    shops: list[Shop] = []

    def no_replay(response: Response) -> bool:
        attempt = shops[0].idempotency.current
        return attempt is None or not attempt.replay

    if place == "default":
        by = limiter(default_limits=["2/day"], default_limits_deduct_when=no_replay)
        shop, work = app_with(beside, order, by)
    else:
        by = limiter()
        shop, work = app_with(beside, order, by, above=[by.limit("2/day", deduct_when=no_replay)])
    shops.append(shop)
    keys = [new_key() for _ in range(3)]
    assert [RAN, REPLAYED, REPLAYED, REPLAYED] == [charge(shop, keys[0]) for _ in range(4)]
    assert RAN == charge(shop, keys[1])
    assert [TURNED_AWAY] * 3 == [charge(shop, key) for key in keys]
    assert 2 == work.runs


def test_what_the_headers_of_a_replay_say(beside: Beside, order: str) -> None:
    """Set up before the extension, the limiter tells a replay what is left now; after it, what was left then."""
    by = limiter(default_limits=["9/day"])
    shop, _ = app_with(beside, order, by)
    send, key = sender(shop.app, {"X-Tenant": "acme"}), new_key()
    left = [send(key, 100).header("X-RateLimit-Remaining") for _ in range(3)]
    assert ([["8"], ["7"], ["6"]] if order == "before" else [["8"]] * 3) == left


@pytest.mark.scenario(49)
def test_a_view_that_fails_counts(beside: Beside, order: str) -> None:
    """A view that raised is released and counted: the retry runs, and the limit holds."""
    by = limiter(default_limits=["2/day"])
    shop, work = app_with(beside, order, by)
    key = new_key()
    work.fail("before the commit")
    assert [(500, False), RAN, TURNED_AWAY] == [charge(shop, key) for _ in range(3)]


def test_a_limited_blueprint(beside: Beside, order: str) -> None:
    """The limit of a protected blueprint is looked at before the guard, too."""
    by = limiter()
    shop, work = beside(**{order: [by.init_app]})
    by_tenant(shop)
    api = Blueprint("api", __name__)
    by.limit("2/day")(api)
    shop.idempotency.protect(api)
    api.post("/charges")(work.asked)
    shop.app.register_blueprint(api)
    key = new_key()
    assert [RAN, REPLAYED, TURNED_AWAY] == [charge(shop, key) for _ in range(3)]
    assert 1 == len(shop.rows())
