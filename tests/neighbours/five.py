"""The five things that hold beside every neighbour, looked at from the wire.

A first run, a replay, a mismatch, refused credentials, and an error in the view. A test builds an app with the real
package (:func:`build`), lets its view do :class:`Work`, says in a :class:`Case` who may call it and who may not, and
calls :func:`the_five`. Each of the five has keys of its own, so that they can be called one by one, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency
from flask_idempotency.policy import NEVER_RECORDED
from tests.support.apps import Shop, new_key

MARKER = "idempotent-replay"

#: Where a view fails.
BEFORE_COMMIT, AFTER_COMMIT = "before the commit", "after the commit"

SetUp = Callable[[Flask], object]


class Answer(NamedTuple):
    """An answer as it came over the wire, whichever client took it."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> list[str]:
        """All values of a header."""
        return [value for known, value in self.headers if known.lower() == name.lower()]

    @property
    def replayed(self) -> bool:
        """Whether it has the replay marker."""
        return ["true"] == self.header(MARKER)

    @property
    def problem(self) -> str:
        """What the ``type`` of a problem document ends in; empty for any other answer."""
        try:
            document = json.loads(self.body)
        except ValueError:
            return ""
        return str(document.get("type", "")).rpartition(":")[2] if isinstance(document, dict) else ""


def answer_of(response: TestResponse) -> Answer:
    """The answer that a test client got."""
    return Answer(response.status_code, list(response.headers), response.data)


#: One caller's request: takes the key and the amount, the one thing that the body says.
Send = Callable[[str, int], Answer]


@dataclass
class Case:
    """An app with a neighbour, as the five see it.

    :ivar runs: how often the view ran so far.
    :ivar fail: lets the next run fail, ``BEFORE_COMMIT`` or ``AFTER_COMMIT``.
    :ivar rows: all rows of the table of keys.
    :ivar good: a caller who may.
    :ivar other: a caller who may, and is somebody else.
    :ivar refused: callers whom the app turns away.
    :ivar refusals: the statuses it does that with.
    :ivar fresh: names of headers that are made afresh for each answer, in lower case. All others are recorded.
    :ivar atomic: what a view commits before it fails is rolled back.
    """

    runs: Callable[[], int]
    fail: Callable[[str], None]
    rows: Callable[[], list[Any]]
    good: Send
    other: Send
    refused: Sequence[Send]
    refusals: frozenset[int] = frozenset({401, 403})
    status: int = 201
    fresh: frozenset[str] = frozenset()
    atomic: bool = False


def the_five(case: Case) -> None:
    """All five, one after the other."""
    for thing in (first_run, replay, mismatch, refused_credentials, error_in_the_view):
        thing(case)


def first_run(case: Case) -> Answer:
    """The view runs once, and its answer goes out without the marker."""
    return _runs(case, case.good, new_key(), 100)


def replay(case: Case) -> None:
    """A retry gets the same status, headers and bytes, and the marker; the view does not run."""
    key = new_key()
    first = _runs(case, case.good, key, 100)
    for _ in range(2):
        _replays(case, case.good, key, first)


def mismatch(case: Case) -> None:
    """Another body under the key is refused and does not run; the first one's record is unharmed."""
    key = new_key()
    first = _runs(case, case.good, key, 100)
    before = case.runs()
    answer = case.good(key, 900)
    assert (422, "key-reused", False) == (answer.status, answer.problem, answer.replayed), answer
    assert before == case.runs()
    _replays(case, case.good, key, first)


def refused_credentials(case: Case) -> None:
    """Whom the app turns away gets its own answer, touches no claim and sees no record; nor does another caller."""
    key, unused = new_key(), new_key()
    first = _runs(case, case.good, key, 100)
    before = case.runs(), case.rows()
    for send in case.refused:
        for sent in (key, unused):
            answer = send(sent, 100)
            assert answer.status in case.refusals, answer
            assert not answer.replayed
            assert first.body not in answer.body
    assert before == (case.runs(), case.rows())
    _replays(case, case.good, key, first)
    _runs(case, case.good, unused, 100)
    others = _runs(case, case.other, key, 100)
    assert others.body != first.body
    _replays(case, case.other, key, others)
    _replays(case, case.good, key, first)


def error_in_the_view(case: Case) -> None:
    """What fails before it has committed runs again; what fails after is held, since nobody knows how far it came."""
    key = new_key()
    _fails(case, key, BEFORE_COMMIT)
    first = _runs(case, case.good, key, 100)
    _replays(case, case.good, key, first)
    key = new_key()
    _fails(case, key, AFTER_COMMIT)
    if case.atomic:
        _runs(case, case.good, key, 100)
        return
    before = case.runs()
    answer = case.good(key, 100)
    assert (409, "outcome-unknown", False) == (answer.status, answer.problem, answer.replayed), answer
    assert before == case.runs()


def _runs(case: Case, send: Send, key: str, amount: int) -> Answer:
    before = case.runs()
    answer = send(key, amount)
    assert case.status == answer.status, answer
    assert [] == answer.header(MARKER)
    assert before + 1 == case.runs()
    return answer


def _replays(case: Case, send: Send, key: str, first: Answer) -> None:
    before = case.runs()
    answer = send(key, 100)
    assert (first.status, first.body) == (answer.status, answer.body), answer
    assert answer.replayed
    assert _recorded(case, first) == _recorded(case, answer)
    assert before == case.runs()


def _recorded(case: Case, answer: Answer) -> list[tuple[str, str]]:
    unlike = NEVER_RECORDED | case.fresh | {MARKER}
    return [(name, value) for name, value in answer.headers if name.lower() not in unlike]


def _fails(case: Case, key: str, where: str) -> None:
    before = case.runs()
    case.fail(where)
    answer = case.good(key, 100)
    assert answer.status >= 500, answer
    assert before + 1 == case.runs()


class Broken(Exception):
    """What a view fails with."""


class Work:
    """What a view does: it commits a charge, and fails once where it was told to.

    :ivar runs: how often it was done.
    """

    def __init__(self, db: Any, charge: Any) -> None:
        """Take what has the ``session``, and a model with an ``amount``."""
        self.db = db
        self.charge = charge
        self.runs = 0
        self._fails: str | None = None

    def fail(self, where: str) -> None:
        """Let the next run fail there."""
        self._fails = where

    def __call__(self, amount: int) -> dict[str, int]:
        """Do it, and return what the view answers: different for each run."""
        self.runs += 1
        fails, self._fails = self._fails, None
        if fails == BEFORE_COMMIT:
            raise Broken
        self.db.session.add(self.charge(amount=amount))
        self.db.session.commit()
        if fails == AFTER_COMMIT:
            raise Broken
        return {"run": self.runs, "amount": amount}

    def asked(self) -> tuple[dict[str, int], int]:
        """A view that does it with what the request's JSON says."""
        return self(request.get_json()["amount"]), 201


def build(url: str, *, before: Iterable[SetUp] = (), after: Iterable[SetUp] = (), **config: Any) -> tuple[Shop, Work]:
    """An app without routes on a database, and the work for its views.

    :param before: sets up neighbours before the extension.
    :param after: sets up neighbours after it.
    :param config: keys of the app's configuration, in full.
    """
    app = Flask("neighbours")
    app.config.update(SQLALCHEMY_DATABASE_URI=url, SECRET_KEY="a secret of tests, with more than 32 bytes", **config)
    for set_up in before:
        set_up(app)
    db = SQLAlchemy(app)
    idempotency = Idempotency(app, db)
    for set_up in after:
        set_up(app)

    class Charge(db.Model):  # type: ignore[name-defined]
        id = sa.Column(sa.Integer, primary_key=True)
        amount = sa.Column(sa.Integer, nullable=False)

    shop = Shop(app, idempotency, db, Charge)
    with app.app_context():
        db.create_all()
    return shop, Work(db, Charge)


def sender(app: Flask, headers: dict[str, str] | None = None, path: str = "/charges", **options: Any) -> Send:
    """A caller with these headers, and a client without cookies for each request.

    :param options: what else a test client's ``open`` takes.
    """

    def send(key: str, amount: int) -> Answer:
        sent = {"Idempotency-Key": key, **(headers or {})}
        return answer_of(app.test_client().post(path, json={"amount": amount}, headers=sent, **options))

    return send


def case_of(shop: Shop, work: Work, **parts: Any) -> Case:
    """A case of an app from :func:`build`.

    :param parts: what differs from the callers of :func:`by_tenant`.
    """
    app = shop.app
    callers = {
        "good": sender(app, {"X-Tenant": "acme"}),
        "other": sender(app, {"X-Tenant": "emca"}),
        "refused": [sender(app)],
    }
    return Case(runs=lambda: work.runs, fail=work.fail, rows=shop.rows, **{**callers, **parts})


def by_tenant(shop: Shop) -> None:
    """For neighbours that know no callers: the header ``X-Tenant`` is the scope, and without it the answer is 401."""
    shop.idempotency.scope_loader(lambda: request.headers.get("X-Tenant"))
