"""The three classics, by name, on every engine and driver."""

from __future__ import annotations

import pytest

from tests.support.apps import Shop, new_key
from tests.support.barrier import together

pytestmark = pytest.mark.each_driver


def test_sequential_replay(shop: Shop) -> None:
    """A retry gets the same status and body with the replay marker, and there is one row."""
    key = new_key()
    first = shop.charge(key)
    retry = shop.charge(key)
    assert (201, first.data) == (retry.status_code, retry.data)
    assert "Idempotent-Replay" not in first.headers
    assert "true" == retry.headers["Idempotent-Replay"]
    assert 1 == shop.charges() == len(shop.runs) == len(shop.rows())


def test_same_key_with_another_payload(shop: Shop) -> None:
    """The same key with another amount is refused, and there is one row."""
    key = new_key()
    shop.charge(key, amount=100)
    other = shop.charge(key, amount=900)
    assert 422 == other.status_code
    assert "urn:problem-type:idempotency:key-reused" == other.json["type"]
    assert 1 == shop.charges() == len(shop.runs) == len(shop.rows())


@pytest.mark.scenario(1)
def test_five_concurrent_identical_requests(shop: Shop) -> None:
    """Five identical requests at once make one row; whoever does not get the answer gets 409 with Retry-After."""
    key = new_key()
    answers = together(5, lambda _: shop.charge(key))
    assert {201} <= {one.status_code for one in answers} <= {201, 409}
    assert all("Retry-After" in one.headers for one in answers if one.status_code == 409)
    assert 1 == shop.charges() == len(shop.runs) == len(shop.rows())
