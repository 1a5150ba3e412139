"""What holds of the extension's own answers below every API toolkit, whose error handling they pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import request
from sqlalchemy.schema import DropTable
from werkzeug.test import TestResponse

from tests.neighbours.five import Work
from tests.support.apps import Shop, new_key

MEMBERS = ("type", "title", "status", "detail", "error")

#: In which of these an app runs decides, in Flask and in some toolkits, what is made of an exception.
MODES = pytest.mark.parametrize(
    "mode", [{}, {"TESTING": True}, {"DEBUG": True}], ids=["production", "testing", "debug"]
)


class Nesting:
    """A view that sends its own request again while it runs, once, when it was told to.

    :ivar inner: what the request within got.
    """

    def __init__(self, work: Work) -> None:
        """Take what the view does beside that."""
        self.work = work
        self.inner: TestResponse | None = None
        self.asks: Callable[[], TestResponse] | None = None

    def __call__(self, amount: int) -> dict[str, int]:
        """Do the work; before it, send what is to be sent."""
        asks, self.asks = self.asks, None
        if asks is not None:
            self.inner = asks()
        return self.work(amount)


def post(shop: Shop, key: str | None, amount: Any = 100, tenant: str | None = "acme", path: str = "/charges") -> Any:
    """A request for a charge, with or without a key and a tenant."""
    headers = ({"Idempotency-Key": key} if key else {}) | ({"X-Tenant": tenant} if tenant else {})
    return shop.client.post(path, json={"amount": amount}, headers=headers)


def problems_come_through(shop: Shop, view: Nesting, media_type: str = "application/problem+json") -> None:
    """Each answer of the extension's keeps its status, its members, ``Retry-After`` and ``WWW-Authenticate``.

    :param media_type: what the toolkit makes the answer's media type.
    """
    assert view.asks is None
    key = new_key()
    assert 201 == post(shop, key).status_code
    _is(post(shop, None), 400, "key-missing", media_type)
    _is(post(shop, "short"), 400, "key-invalid", media_type)
    _is(post(shop, key, 900), 422, "key-reused", media_type)
    refused = post(shop, new_key(), tenant=None)
    _is(refused, 401, "scope-missing", media_type)
    assert "WWW-Authenticate" in refused.headers
    key = new_key()
    view.asks = lambda: post(shop, key)
    assert 201 == post(shop, key).status_code
    assert view.inner is not None
    _is(view.inner, 409, "in-flight", media_type)
    assert "2" == view.inner.headers["Retry-After"]
    shop.execute(DropTable(shop.table))
    away = post(shop, new_key())
    _is(away, 503, "store-unavailable", media_type)
    assert "2" == away.headers["Retry-After"]


def refused_before_the_guard(shop: Shop, work: Work, amount: Any, status: int) -> None:
    """What the toolkit itself refuses, an argument say, touches no claim: the key serves the request put right."""
    key = new_key()
    before = work.runs, shop.rows()
    answer = post(shop, key, amount)
    assert status == answer.status_code, answer.text
    assert before == (work.runs, shop.rows())
    assert 201 == post(shop, key).status_code
    assert work.runs == before[0] + 1


def amount_asked() -> int:
    """What the request's JSON says, for toolkits that leave that to the view."""
    return int(request.get_json()["amount"])


def _is(answer: TestResponse, status: int, kind: str, media_type: str) -> None:
    assert (status, media_type) == (answer.status_code, answer.content_type), answer.text
    assert f"urn:problem-type:idempotency:{kind}" == answer.json["type"]
    assert set(MEMBERS) <= answer.json.keys()
    assert (status, answer.json["detail"]) == (answer.json["status"], answer.json["error"])
