"""A guarded view at ``/do`` that does one thing after the other, and what its clients get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from werkzeug.test import TestResponse

from tests.support.apps import Shop
from tests.support.charges import charge

PROBLEM = "urn:problem-type:idempotency:"


class Broken(Exception):
    """What views and hooks fail with."""


def guard(shop: Shop, *views: Callable[[], Any], **options: Any) -> None:
    """Guard a view at ``/do`` that does these in turn, the last one ever after; ``runs`` counts."""

    @shop.app.post("/do", endpoint="do")
    @shop.idempotency.required(**options)
    def do() -> Any:
        shop.runs.append("run")
        return views[min(len(shop.runs), len(views)) - 1]()


def send(shop: Shop, key: str, **options: Any) -> TestResponse:
    """Ask for it as the tenant ``acme``."""
    headers = {"X-Tenant": "acme", "Idempotency-Key": key, **options.pop("headers", {})}
    return shop.client.post("/do", headers=headers, buffered=True, **options)


def commit(shop: Shop, amount: int = 1) -> None:
    """Commit a small charge through the app's session."""
    charge(shop, amount)


def commit_and_fail(shop: Shop) -> Callable[[], Any]:
    """A view's doing: it commits, and then raises."""

    def do() -> Any:
        commit(shop)
        raise Broken

    return do


def fine() -> Any:
    """A view's doing: it answers."""
    return "fine", 201


def statuses(shop: Shop) -> list[str]:
    """The statuses of all stored keys."""
    return [row["status"] for row in shop.rows()]


def refusal(answer: TestResponse) -> tuple[int, str, bool]:
    """An answer's status, the last part of its problem's type, and whether it asks for another try."""
    assert answer.json is not None
    return answer.status_code, answer.json["type"].removeprefix(PROBLEM), "Retry-After" in answer.headers


def assert_held(shop: Shop, key: str, runs: int = 1) -> None:
    """Retries get 409, outcome unknown, and are not told to try again; the view does not run."""
    for _ in range(2):
        assert (409, "outcome-unknown", False) == refusal(send(shop, key))
    assert (runs, ["held"]) == (len(shop.runs), statuses(shop))


def assert_free(shop: Shop, key: str) -> None:
    """Nothing is stored, and the retry runs at once."""
    assert (["run"], []) == (shop.runs, shop.rows())
    assert (201, "fine") == ((retry := send(shop, key)).status_code, retry.text)
    assert 2 == len(shop.runs)
