"""The example with a payment provider, in default mode and in atomic mode, on every engine and driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from flask import Flask
from werkzeug.test import TestResponse

from examples.provider import create_app, outbox
from examples.provider.extensions import db
from examples.provider.models import Charge, Message
from examples.provider.provider import Provider, Service
from tests.support.apps import close, new_key

PATHS = {"/charges": 201, "/orders": 202}


class Unreliable(Provider):
    """A provider that does its part, and whose answers get lost for some time.

    :ivar lost: how many answers are still to be lost.
    """

    lost = 0

    def charge(self, amount: int, key: str) -> str:
        """As the provider does; then, perhaps, the connection breaks."""
        reference = super().charge(amount, key)
        if self.lost:
            self.lost -= 1
            raise OSError("the connection broke")
        return reference


@pytest.fixture
def service() -> Iterator[Service]:
    """The provider's own side."""
    found = Service()
    yield found
    found.stop()


@pytest.fixture
def example(database_url: str, service: Service) -> Iterator[Flask]:
    """The example's app on a fresh database."""
    app = create_app({"SQLALCHEMY_DATABASE_URI": database_url, "PROVIDER_URL": service.url})
    app.extensions["provider"] = Unreliable(service.url)
    with app.app_context():
        db.create_all()
    yield app
    close(app)


def post(app: Flask, path: str, key: str | None, amount: object = 4200) -> TestResponse:
    """Ask for money to be taken."""
    headers = {"Authorization": "Bearer token-of-acme"}
    if key is not None:
        headers["Idempotency-Key"] = key
    return app.test_client().post(path, json={"amount": amount}, headers=headers)


def booked(app: Flask) -> tuple[list[str | None], int]:
    """The references of all charges, and how many messages wait in the outbox."""
    with app.app_context():
        references = db.session.scalars(sa.select(Charge.reference).order_by(Charge.id)).all()
        return list(references), db.session.scalar(sa.select(sa.func.count()).select_from(Message)) or 0


@pytest.mark.parametrize(("path", "status"), [*PATHS.items()])
def test_charge_and_replay(example: Flask, service: Service, path: str, status: int) -> None:
    """In either mode a charge that is retried is one charge, and the money is taken once."""
    key = new_key()
    first, retry = post(example, path, key), post(example, path, key)
    assert (status, status, "true") == (first.status_code, retry.status_code, retry.headers.get("Idempotent-Replay"))
    assert first.data == retry.data
    assert [4200] == list(service.payments.values())
    ((reference,), waiting) = booked(example)
    assert (True, 0) == (str(reference).startswith("pay_"), waiting)


@pytest.mark.parametrize("path", [*PATHS])
def test_what_is_refused(example: Flask, service: Service, path: str) -> None:
    """Without a key, or with an amount that is none, nothing is booked and nobody is asked."""
    assert [400, 400] == [post(example, path, None).status_code, post(example, path, new_key(), "42").status_code]
    assert (([], 0), []) == (booked(example), service.asked)


def test_default_mode_without_an_answer(example: Flask, service: Service) -> None:
    """A step whose answer gets lost is a 500; the retry runs at once, with the same key."""
    key = new_key()
    example.extensions["provider"].lost = 1
    assert [500, 201] == [post(example, "/charges", key).status_code for _ in range(2)]
    assert (2, 1, 1) == (len(service.asked), len(set(service.asked)), len(service.payments))
    assert 1 == len(booked(example)[0])


def test_default_mode_after_a_committed_attempt(example: Flask, service: Service) -> None:
    """An attempt that finds the charge of one that died after its commit answers with that, and books no other."""
    key = new_key()
    first = post(example, "/charges", key)
    with example.app_context():
        # What a process leaves that dies after its commit: the claim, its step, and a lease that runs out.
        table = db.metadata.tables["idempotency_keys"]
        db.session.execute(sa.update(table).values(status="released", response_status=None, completed_at=None))
        db.session.commit()
    second = post(example, "/charges", key)
    assert (201, first.json, None) == (second.status_code, second.json, second.headers.get("Idempotent-Replay"))
    assert (1, 1) == (len(booked(example)[0]), len(service.asked))


def test_atomic_mode_without_an_answer(example: Flask, service: Service) -> None:
    """A provider that does not answer changes nothing for the client; the outbox keeps the message and its key."""
    key = new_key()
    example.extensions["provider"].lost = 1
    assert [202, 202] == [post(example, "/orders", key).status_code for _ in range(2)]
    assert ([None], 1) == booked(example)
    done = example.test_cli_runner().invoke(args=["deliver"])
    assert (0, "Delivered 1.\n") == (done.exit_code, done.output)
    assert (2, 1, 1) == (len(service.asked), len(set(service.asked)), len(service.payments))
    assert (1, 0) == (len(booked(example)[0]), booked(example)[1])
    with example.app_context():
        assert 0 == outbox.deliver()
