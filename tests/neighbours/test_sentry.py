"""Beside Sentry: what fails is reported once, what is refused or replayed is not, and the body serves both."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sentry_sdk
from flask import Response, request, stream_with_context
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from flask_idempotency import signals
from tests.neighbours.five import AFTER_COMMIT, BEFORE_COMMIT, Broken, Work, by_tenant, case_of, the_five
from tests.support.apps import Shop, assert_replayed, new_key, send

Beside = Callable[..., tuple[Shop, Work]]


class Kept(Transport):
    """Keeps what would be sent, by its kind: ``event`` for errors and messages, ``transaction`` for traces."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[tuple[str, dict[str, Any]]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self.items += [(item.type, item.payload.json) for item in envelope.items]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """What is of that kind."""
        return [payload for found, payload in self.items if found == kind]

    @property
    def exceptions(self) -> list[list[str]]:
        """The types of the exceptions of each event that has some."""
        return [
            [one["type"] for one in event["exception"]["values"]] for event in self.of("event") if "exception" in event
        ]

    @property
    def messages(self) -> list[str]:
        """What was logged as an error: Sentry groups events by these, the messages without their arguments."""
        return [event["logentry"]["message"] for event in self.of("event") if "logentry" in event]


@pytest.fixture
def kept() -> Iterator[Kept]:
    """Sentry with its default integrations, Flask's among them, and a transport that keeps everything."""
    transport = Kept()
    yield transport
    sentry_sdk.get_global_scope().set_client(None)


def build(beside: Beside, kept: Kept, order: str) -> tuple[Shop, Work]:
    """A shop with a guarded view, Sentry set up before or after the extension."""

    def set_up(_: object) -> None:
        dsn = "http://public@127.0.0.1:9/1"
        sentry_sdk.init(dsn=dsn, transport=kept, traces_sample_rate=1.0, max_request_body_size="always")

    shop, work = beside(**{order: [set_up]})
    by_tenant(shop)
    shop.app.post("/charges")(shop.idempotency.required(work.asked))
    return shop, work


@pytest.fixture
def guarded(beside: Beside, kept: Kept) -> tuple[Shop, Work]:
    """The shop with Sentry set up first, as its documentation has it."""
    return build(beside, kept, "before")


def test_the_five(beside: Beside, kept: Kept, order: str) -> None:
    """The five hold. Both errors of the view are reported, once each; a refusal or a replay is none."""
    the_five(case_of(*build(beside, kept, order)))
    assert [["Broken"]] * 2 == kept.exceptions
    assert {"application/json"} == {event["request"]["headers"]["Content-Type"] for event in kept.of("event")}
    assert ["idempotency.hold %s"] == kept.messages
    statuses = {one["contexts"]["response"]["status_code"] for one in kept.of("transaction")}
    assert {201, 401, 409, 422, 500} == statuses


def test_what_is_reported_of_a_request(guarded: tuple[Shop, Work], kept: Kept) -> None:
    """An error's report has the request's body, which the extension has read before; its tags name no key or scope."""
    shop, work = guarded
    case = case_of(shop, work)
    key = new_key()
    for where in (BEFORE_COMMIT, AFTER_COMMIT):
        work.fail(where)
        assert 500 == case.good(key, 100).status
    assert [{"amount": 100}] * 3 == [one["request"]["data"] for one in kept.of("event")]
    tags = str([one.get("tags") for _, one in kept.items])
    assert not [one for one in (key, "acme", shop.rows()[0]["request_fingerprint"]) if one in tags]


def test_a_body_that_sentry_reads_first(guarded: tuple[Shop, Work], kept: Kept) -> None:
    """A message that a hook sends has the body in it; the fingerprint and the view's own reading stay what they are."""
    shop, _ = guarded

    @shop.app.before_request
    def tell() -> None:
        sentry_sdk.capture_message("asked")

    @shop.app.post("/x")
    @shop.idempotency.required
    def view() -> list[Any]:
        file = request.files.get("file")
        return [request.form or request.get_data().decode(), file.read().decode() if file else ""]

    def multipart(content: bytes) -> dict[str, Any]:
        return {"data": {"name": "a", "file": (io.BytesIO(content), "a.txt")}}

    bodies: list[tuple[Callable[..., dict[str, Any]], list[Any]]] = [
        (lambda part: {"data": part, "content_type": "application/json"}, ["1", ""]),
        (lambda part: {"data": part, "content_type": "text/plain"}, ["1", ""]),
        (lambda part: {"data": {"name": part.decode()}}, [{"name": "1"}, ""]),
        (multipart, [{"name": "a"}, "1"]),
    ]
    for make, seen in bodies:
        key = new_key()
        first, again, other = (send(shop, key, **make(part)) for part in (b"1", b"1", b"2"))
        assert (200, seen) == (first.status_code, first.get_json())
        assert_replayed(again, first)
        assert 422 == other.status_code
    told = [one["request"].get("data") for one in kept.of("event") if one.get("message") == "asked"]
    assert [1, 1, 2] == told[:3]
    assert 12 == len(told)


def test_streams(beside: Beside, kept: Kept, order: str) -> None:
    """A stream that breaks off is reported; one that passes is recorded whole, and its trace ends with it."""
    shop, _ = build(beside, kept, order)

    @shop.app.post("/x")
    @shop.idempotency.required
    def view() -> Response:
        def parts() -> Iterator[bytes]:
            yield b"a"
            if "X-Break" in request.headers:
                raise Broken
            yield b"b"

        return Response(stream_with_context(parts()), status=201)

    key = new_key()
    first = send(shop, key, buffered=True)
    assert (201, b"ab") == (first.status_code, first.data)
    assert_replayed(send(shop, key, buffered=True), first)
    assert 2 == len(kept.of("transaction"))
    assert [] == kept.of("event")
    with pytest.raises(Broken):
        send(shop, key := new_key(), headers={"X-Break": "1"}, buffered=True)
    assert 409 == send(shop, key).status_code
    assert [["Broken"]] == kept.exceptions
    assert ["idempotency.record_failed %s"] == kept.messages


def test_an_error_at_the_commit(guarded: tuple[Shop, Work], kept: Kept) -> None:
    """What fails when an atomic view has answered, and takes its answer's place, is reported once as well."""
    shop, work = guarded

    @shop.app.post("/x")
    @shop.idempotency.required(atomic=True)
    def view() -> Any:
        current = shop.idempotency.current
        assert current is not None
        current.release()
        return work(1)

    assert 500 == send(shop, new_key()).status_code
    assert [["ReleasedSuccess"]] == kept.exceptions


def test_a_tag_from_a_signal(guarded: tuple[Shop, Work], kept: Kept) -> None:
    """A receiver can tag the request's trace by what became of it, until the request ends."""
    shop, work = guarded

    def tag(sender: Any, **_: Any) -> None:
        sentry_sdk.set_tag("idempotency", "replay")

    with signals.replayed.connected_to(tag, sender=shop.app):
        case = case_of(shop, work)
        key = new_key()
        assert [False, True] == [case.good(key, 100).replayed for _ in range(2)]
    assert [None, "replay"] == [one["tags"].get("idempotency") for one in kept.of("transaction")]
