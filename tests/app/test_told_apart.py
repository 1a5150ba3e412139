"""The app has a 409 and a 422 of its own: a client tells them from the extension's by ``type``."""

from __future__ import annotations

import pytest
from flask import Response, abort, jsonify, request
from werkzeug.test import TestResponse

from flask_idempotency import errors
from tests.support.apps import Shop, new_key

BASE = errors.PROBLEM_BASE
OWN = "https://shop.example.com/problems/out-of-stock"


@pytest.fixture
def shop(light: Shop) -> Shop:
    """An app whose view refuses with problem documents of its own, with a plain text, and by ``abort``."""

    @light.app.post("/orders")
    @light.idempotency.required
    def create_order() -> tuple[Response, int, dict[str, str]] | tuple[str, int] | tuple[Response, int]:
        status, form = request.get_json()["status"], request.get_json()["form"]
        if form == "problem":
            return jsonify(type=OWN, status=status), status, {"Content-Type": "application/problem+json"}
        if form == "json":
            return jsonify(error="out of stock"), status
        return abort(status)

    return light


def order(shop: Shop, key: str, status: int, form: str) -> TestResponse:
    headers = {"X-Tenant": "acme", "Idempotency-Key": key}
    return shop.client.post("/orders", json={"status": status, "form": form}, headers=headers)


def kind(answer: TestResponse) -> str | None:
    """What a client looks at."""
    document = answer.get_json(silent=True)
    return document.get("type") if isinstance(document, dict) else None


@pytest.mark.scenario(69)
@pytest.mark.parametrize("form", ["problem", "json", "abort"])
@pytest.mark.parametrize("status", [409, 422])
def test_refusals_are_told_apart(shop: Shop, status: int, form: str) -> None:
    """The app's own refusals, and their replays, never have a type of the extension's; the extension's always do."""
    key, other = new_key(), new_key()
    answers = [order(shop, key, status, form) for _ in range(2)]
    assert [status, status] == [answer.status_code for answer in answers]
    assert {OWN if form == "problem" else None} == {kind(answer) for answer in answers}
    # A 422 is recorded, and a 409 asks for another try.
    assert [None, "true" if status == 422 else None] == [one.headers.get("Idempotent-Replay") for one in answers]
    shop.charge(other)
    ours = order(shop, other, status, form)
    assert (422, f"{BASE}key-reused") == (ours.status_code, kind(ours))
