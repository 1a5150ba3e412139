"""Answers that nobody reads to the end, as test clients do, and clients that look at the status alone."""

from __future__ import annotations

from typing import Any

import pytest
from flask import abort

from tests.support.apps import Shop, new_key


def raise_error() -> Any:
    raise RuntimeError("as asked")


def hold_back() -> Any:
    abort(404)


@pytest.mark.parametrize(("view", "status", "runs"), [(raise_error, 500, 2), (hold_back, 404, 1)])
def test_http_exceptions_are_settled_before_they_are_read(light: Shop, view: Any, status: int, runs: int) -> None:
    """What Flask makes of an exception is settled at once: the retry runs, or replays, though nobody read the body."""
    ran = []

    @light.app.post("/work")
    @light.idempotency.required
    def work() -> Any:
        ran.append(1)
        return view()

    headers = {"X-Tenant": "acme", "Idempotency-Key": new_key()}
    unread = [light.client.post("/work", headers=headers, buffered=False) for _ in range(2)]
    assert [status, status] == [one.status_code for one in unread]
    assert runs == len(ran)
    for one in unread:
        one.close()
