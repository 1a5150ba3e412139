"""The example's shop API, on every engine and driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask
from werkzeug.test import TestResponse

from examples.payments import create_app
from examples.payments.auth import hash_token, issue_token
from examples.payments.extensions import db
from examples.payments.models import ApiCredential
from examples.payments.provider import DECLINED_CARD
from tests.support.apps import close, new_key
from tests.support.barrier import together

CHARGE = {"amount": 4200, "currency": "EUR", "card": "card-4242"}


class Client:
    """One caller with its token."""

    def __init__(self, app: Flask, token: str) -> None:
        self.app = app
        self.token = token

    def get(self, path: str) -> TestResponse:
        """Ask for something."""
        return self.app.test_client().get(path, headers={"Authorization": f"Bearer {self.token}"})

    def post(self, path: str, body: Any, key: str | None = None) -> TestResponse:
        """Ask for money to be moved."""
        headers = {"Authorization": f"Bearer {self.token}"}
        if key is not None:
            headers["Idempotency-Key"] = key
        return self.app.test_client().post(path, json=body, headers=headers)

    def charges(self) -> list[dict[str, Any]]:
        """What the ledger holds of this tenant."""
        found: list[dict[str, Any]] = self.get("/charges").get_json()["charges"]
        return found


def issued(app: Flask, tenant: str) -> Client:
    """A client with a new token of a tenant."""
    with app.app_context():
        return Client(app, issue_token(tenant))


@pytest.fixture
def example(database_url: str) -> Iterator[Flask]:
    """The example's app on a fresh database, with a provider that takes no time."""
    app = create_app({"SQLALCHEMY_DATABASE_URI": database_url, "PROVIDER_DELAY": 0})
    with app.app_context():
        db.create_all()
    yield app
    close(app)


@pytest.fixture
def acme(example: Flask) -> Client:
    """A client of the tenant acme."""
    return issued(example, "acme")


def test_charge_and_replay(acme: Client) -> None:
    """A charge that is retried is one charge, and the retry gets its answer with the marker."""
    key = new_key()
    first = acme.post("/charges", CHARGE, key)
    retry = acme.post("/charges", CHARGE, key)
    assert (201, 201) == (first.status_code, retry.status_code)
    assert first.data == retry.data
    assert first.headers["Location"] == retry.headers["Location"]
    assert "Idempotent-Replay" not in first.headers
    assert "true" == retry.headers["Idempotent-Replay"]
    assert [first.get_json()] == acme.charges()
    assert first.get_json() == acme.get(first.headers["Location"]).get_json()


def test_other_amount(acme: Client) -> None:
    """The key of a charge with another amount is refused by the extension's own problem document."""
    key = new_key()
    acme.post("/charges", CHARGE, key)
    other = acme.post("/charges", {**CHARGE, "amount": 9900}, key)
    assert 422 == other.status_code
    assert "application/problem+json" == other.content_type
    assert "urn:problem-type:idempotency:key-reused" == other.get_json()["type"]
    assert 1 == len(acme.charges())


def test_no_key(acme: Client) -> None:
    """A charge without a key is refused, and so is a refund."""
    for path in ("/charges", "/charges/1/refunds"):
        answer = acme.post(path, CHARGE)
        assert 400 == answer.status_code
        assert "urn:problem-type:idempotency:key-missing" == answer.get_json()["type"]
    assert [] == acme.charges()


def test_refund(acme: Client) -> None:
    """A refund that is retried is one refund, and the charge knows of it."""
    charge = acme.post("/charges", CHARGE, new_key()).get_json()
    path, key = f"/charges/{charge['id']}/refunds", new_key()
    first = acme.post(path, {"amount": 1200}, key)
    retry = acme.post(path, {"amount": 1200}, key)
    assert (201, 201, "true") == (first.status_code, retry.status_code, retry.headers["Idempotent-Replay"])
    assert first.data == retry.data
    assert [first.get_json()] == acme.get(path).get_json()["refunds"]
    assert [{**charge, "refunded": 1200}] == acme.charges()


def test_refunds_within_the_charge(acme: Client) -> None:
    """Refunds can't exceed their charge, together or at once."""
    charge = acme.post("/charges", CHARGE, new_key()).get_json()
    path = f"/charges/{charge['id']}/refunds"
    answers = together(4, lambda _: acme.post(path, {"amount": 2000}, new_key()))
    assert [201, 201, 422, 422] == sorted(one.status_code for one in answers)
    assert 201 == acme.post(path, {"amount": 200}, new_key()).status_code
    refused = acme.post(path, {"amount": 1}, new_key())
    assert (422, "about:blank") == (refused.status_code, refused.get_json()["type"])
    assert 4200 == acme.charges()[0]["refunded"]
    assert [2000, 2000, 200] == [one["amount"] for one in acme.get(path).get_json()["refunds"]]


def test_declined_card(acme: Client) -> None:
    """That a card was declined is an answer, which a retry gets again."""
    key, declined = new_key(), {**CHARGE, "card": DECLINED_CARD}
    first = acme.post("/charges", declined, key)
    retry = acme.post("/charges", declined, key)
    assert (402, "application/problem+json") == (first.status_code, first.content_type)
    assert (402, "true", first.data) == (retry.status_code, retry.headers["Idempotent-Replay"], retry.data)
    assert [] == acme.charges()


def test_wrong_token(acme: Client) -> None:
    """A wrong token gets 401, and does not get a replay either."""
    key = new_key()
    acme.post("/charges", CHARGE, key)
    for token in ("wrong", "", "é"):
        answer = Client(acme.app, token).post("/charges", CHARGE, key)
        assert (401, "Bearer") == (answer.status_code, answer.headers["WWW-Authenticate"].strip())
        assert "application/problem+json" == answer.content_type
        assert b"reference" not in answer.data
    assert 401 == acme.app.test_client().get("/charges").status_code
    assert 1 == len(acme.charges())


@pytest.mark.scenario(32)
def test_revoked_token(acme: Client) -> None:
    """A token that was revoked opens no replay; a new one of the same tenant does."""
    key = new_key()
    first = acme.post("/charges", CHARGE, key)
    renewed = issued(acme.app, "acme")
    with acme.app.app_context():
        db.session.execute(sa.delete(ApiCredential).where(ApiCredential.token_hash == hash_token(acme.token)))
        db.session.commit()
    assert 401 == acme.post("/charges", CHARGE, key).status_code
    retry = renewed.post("/charges", CHARGE, key)
    assert ("true", first.data) == (retry.headers["Idempotent-Replay"], retry.data)
    assert 1 == len(renewed.charges())


@pytest.mark.scenario(47)
def test_other_tenant(acme: Client) -> None:
    """Two tenants with one key make two charges, and neither can see or refund the other's."""
    globex, key = issued(acme.app, "globex"), new_key()
    ours, theirs = acme.post("/charges", CHARGE, key), globex.post("/charges", CHARGE, key)
    assert (201, 201) == (ours.status_code, theirs.status_code)
    assert "Idempotent-Replay" not in theirs.headers
    assert ([ours.get_json()], [theirs.get_json()]) == (acme.charges(), globex.charges())
    assert 404 == globex.get(ours.headers["Location"]).status_code
    refund = globex.post(f"{ours.headers['Location']}/refunds", {"amount": 1}, new_key())
    assert (404, "application/problem+json") == (refund.status_code, refund.content_type)
    assert 0 == acme.charges()[0]["refunded"]


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {**CHARGE, "amount": 0},
        {**CHARGE, "amount": "1"},
        {**CHARGE, "amount": True},
        {**CHARGE, "amount": 1e3},
        {**CHARGE, "amount": 10**30},
        {**CHARGE, "currency": "EURO"},
        {**CHARGE, "card": ""},
    ],
)
def test_wrong_body(acme: Client, body: Any) -> None:
    """A body that asks for no charge gets 400 as a problem document."""
    answer = acme.post("/charges", body, new_key())
    assert (400, "application/problem+json") == (answer.status_code, answer.content_type)
    assert {"type", "title", "status", "detail"} == set(answer.get_json())
    assert [] == acme.charges()


def test_token_command(example: Flask) -> None:
    """The command prints tokens of one tenant, which share its keys, and stores none of them."""
    first, second = (
        Client(example, example.test_cli_runner().invoke(args=["issue-token", "acme"]).output.strip()) for _ in "12"
    )
    key = new_key()
    first.post("/charges", CHARGE, key)
    assert "true" == second.post("/charges", CHARGE, key).headers["Idempotent-Replay"]
    with example.app_context():
        stored = db.session.scalars(sa.select(ApiCredential.token_hash)).all()
    assert {hash_token(first.token), hash_token(second.token)} == set(stored)


def test_environment(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment configures the app and the extension."""
    monkeypatch.setenv("FLASK_SQLALCHEMY_DATABASE_URI", sqlite_url)
    monkeypatch.setenv("FLASK_PROVIDER_DELAY", "0.25")
    monkeypatch.setenv("FLASK_IDEMPOTENCY_RETENTION", "60")
    app = create_app()
    assert 0.25 == app.config["PROVIDER_DELAY"]
    assert 60 == app.extensions["idempotency"].policy.retention
    assert sqlite_url == app.config["SQLALCHEMY_DATABASE_URI"]
    close(app)
