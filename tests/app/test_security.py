"""What SECURITY.md claims, where no other test holds it."""

from __future__ import annotations

from collections.abc import Callable

from flask_idempotency.state import get_state
from tests.support.apps import Shop, new_key, statements


def test_another_callers_key_costs_what_a_new_one_costs(shop: Shop) -> None:
    """Whether another caller has used a key can't be told: the same statements are sent as for one that nobody has."""
    used, free = new_key(), new_key()
    shop.charge(new_key(), tenant="other")  # what is sent once only
    assert 201 == shop.charge(used, tenant="victim").status_code
    sent = []
    for key in (used, free, used):
        with statements() as seen:
            answer = shop.charge(key, tenant="other")
        sent.append((answer.status_code, "Idempotent-Replay" in answer.headers, list(seen)))
    assert sent[0] == sent[1]
    assert len(sent[0][2]) > 1
    # Within the caller's own scope a replay is told apart, as its header says.
    assert (True, False) == (sent[2][1], sent[2][2] == sent[0][2])


def test_what_is_stored_is_no_part_of_a_statement(make: Callable[..., Shop]) -> None:
    """A key, a scope and a path that look like SQL are stored as they are, and stand in no statement's text."""
    shop = make()
    key, scope = "x'; DROP TABLE idempotency_keys; --", "o'); DELETE FROM idempotency_keys; --"
    with statements() as seen:
        answer = shop.client.post(
            "/charges?a='; DROP TABLE idempotency_keys; --",
            json={"amount": 1},
            headers={"Idempotency-Key": f'"{key}"', "X-Tenant": scope},
        )
        stored = get_state(shop.app).store.find(scope, key)
    assert (201, True) == (answer.status_code, stored is not None)
    assert [(scope, key)] == [(row["scope"], row["key"]) for row in shop.rows()]
    assert [] == [one for one in seen if "DROP" in one or "DELETE" in one]
