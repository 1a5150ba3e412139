"""Beside Flask-Caching: what a guarded view looks up may be cached, the view itself must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask, request
from flask_caching import Cache

from tests.neighbours.five import Work, by_tenant, case_of, sender, the_five
from tests.neighbours.views import STANDINGS, add_view
from tests.support.apps import Shop, new_key

Beside = Callable[..., tuple[Shop, Work]]


class Prices:
    """A cache, and a price that a view looks up in it; ``asked`` counts how often it had to be found."""

    def __init__(self) -> None:
        self.cache = Cache(config={"CACHE_TYPE": "SimpleCache"})
        self.asked = 0

        @self.cache.memoize()
        def price(amount: int) -> int:
            self.asked += 1
            return amount * 2

        self.price = price

    def init_app(self, app: Flask) -> None:
        self.cache.init_app(app)


def not_a_read() -> bool:
    """When ``cached`` is to step aside."""
    return request.method not in ("GET", "HEAD")


def app_with(beside: Beside, order: str, prices: Prices) -> tuple[Shop, Work]:
    shop, work = beside(**{order: [prices.init_app]})
    by_tenant(shop)
    return shop, work


def test_the_five(beside: Beside, order: str) -> None:
    """The five hold in either order, with a view that looks up what is memoized."""
    prices = Prices()
    shop, work = app_with(beside, order, prices)

    def view() -> Any:
        made, status = work.asked()
        return {**made, "price": prices.price(made["amount"])}, status

    add_view(shop, work, view=view)
    the_five(case_of(shop, work))
    assert 1 == prices.asked


@pytest.mark.parametrize("standing", STANDINGS)
def test_the_five_where_reads_are_cached(beside: Beside, order: str, standing: str) -> None:
    """They hold with ``cached`` on either side of the guard where it steps aside for what is no read."""
    prices = Prices()
    shop, work = app_with(beside, order, prices)

    def view() -> Any:
        return work.asked() if request.method == "POST" else {"runs": work.runs}

    cached = prices.cache.cached(unless=not_a_read)
    decorated = shop.idempotency.required(cached(view)) if standing == "below" else None
    decorated = decorated or cached(shop.idempotency.required(view))
    shop.app.add_url_rule("/charges", "charges", decorated, methods=["GET", "POST"])
    the_five(case_of(shop, work))
    before = work.runs
    assert {"runs": before} == shop.client.get("/charges").get_json()
    assert 201 == sender(shop.app, {"X-Tenant": "acme"})(new_key(), 100).status
    assert {"runs": before} == shop.client.get("/charges").get_json()


def test_a_cached_answer_above_the_guard(beside: Beside, order: str) -> None:
    """What the documentation warns of: above the guard, ``cached`` answers everybody with the first one's answer."""
    prices = Prices()
    shop, work = app_with(beside, order, prices)
    add_view(shop, work, above=[prices.cache.cached()])
    senders = [sender(shop.app, {"X-Tenant": one} if one else None) for one in ("acme", "emca", None)]
    answers = [send(new_key(), 100) for send in senders]
    assert [(201, False, answers[0].body)] * 3 == [(one.status, one.replayed, one.body) for one in answers]
    assert (1, 1) == (work.runs, len(shop.rows()))


def test_a_cached_answer_below_the_guard(beside: Beside, order: str) -> None:
    """And below it, a second operation is not done: its own key records what the cache had."""
    prices = Prices()
    shop, work = app_with(beside, order, prices)
    add_view(shop, work, view=lambda: work.asked(), below=[prices.cache.cached()])
    send = sender(shop.app, {"X-Tenant": "acme"})
    answers = [send(new_key(), amount) for amount in (100, 200)]
    assert [answers[0].body] * 2 == [one.body for one in answers]
    assert (1, 2) == (work.runs, len(shop.rows()))


def test_a_replay_does_not_depend_on_the_cache(beside: Beside, order: str) -> None:
    """A retry gets the first answer, whatever the cache says by now."""
    prices, key = Prices(), new_key()
    shop, work = app_with(beside, order, prices)
    rates = iter([2, 3])

    @prices.cache.cached(key_prefix="rate")
    def rate() -> int:
        return next(rates)

    add_view(shop, work, view=lambda: ({"total": work.asked()[0]["amount"] * rate()}, 201))
    send = sender(shop.app, {"X-Tenant": "acme"})
    first = send(key, 100)
    with shop.app.app_context():
        prices.cache.clear()
    again, other = send(key, 100), send(new_key(), 100)
    assert (True, first.body) == (again.replayed, again.body)
    assert b"300" in other.body
