"""Content codings: who takes which. Flask-Compress is in tests/neighbours/test_compress.py."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from flask import Response, request
from werkzeug.test import TestResponse, create_environ

from tests.support.apps import Shop, new_key

UNAVAILABLE = "urn:problem-type:idempotency:record-unavailable"
TEXT = b"a text that is worth compressing, " * 100


def post(shop: Shop, key: str, accepts: str | None) -> TestResponse:
    """Ask for the text, with or without an Accept-Encoding."""
    headers = {"X-Tenant": "acme", "Idempotency-Key": key}
    if accepts is not None:
        headers["Accept-Encoding"] = accepts
    return shop.client.post("/text", headers=headers, buffered=True)


def decoded(response: TestResponse) -> bytes:
    """The body as the client reads it."""
    coding = response.headers.get("Content-Encoding")
    undo: dict[str | None, Callable[[bytes], bytes]] = {
        None: bytes,
        "gzip": gzip.decompress,
        "deflate": zlib.decompress,
    }
    return undo[coding](response.data)


@pytest.fixture
def coded(light: Shop) -> list[str]:
    """Makes the view of the light shop answer in gzip to those who take it; the list grows with each run."""
    runs: list[str] = []

    @light.app.post("/text")
    @light.idempotency.required
    def text() -> Response:
        runs.append("run")
        response = Response(TEXT, 201, headers={"ETag": '"v1"', "Vary": "Accept-Encoding"})
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            response.set_data(gzip.compress(TEXT))
            response.headers["Content-Encoding"] = "gzip"
        return response

    return runs


@pytest.mark.scenario(44)
@pytest.mark.parametrize(
    ("accepts", "coding"),
    [
        ("gzip", "gzip"),
        ("br, gzip;q=0.1", "gzip"),
        ("*", "gzip"),
        ("GZIP", "gzip"),
        ("br", None),
        ("identity", None),
        ("", None),
        ("gzip;q=0", None),
        ("gzip;q=0, *", None),
        (None, None),
    ],
)
def test_a_retry_gets_what_it_takes(light: Shop, coded: list[str], accepts: str | None, coding: str | None) -> None:
    """A retry gets the recorded coding if it takes it, and else the plain text, described as what it is."""
    key = new_key()
    first, retry = post(light, key, "gzip"), post(light, key, accepts)
    assert (201, coding, TEXT) == (retry.status_code, retry.headers.get("Content-Encoding"), decoded(retry))
    assert str(len(retry.data)) == retry.headers["Content-Length"]
    assert ('"v1"' if coding else 'W/"v1"') == retry.headers["ETag"]
    assert (["run"], "true") == (coded, retry.headers["Idempotent-Replay"])
    assert first.data == post(light, key, "gzip").data


@pytest.mark.scenario(44)
@pytest.mark.parametrize("accepts", ["br, identity;q=0", "*;q=0", "br, *;q=0"])
def test_a_retry_that_takes_neither(light: Shop, coded: list[str], accepts: str) -> None:
    """A retry that refuses the plain text too gets 409 with the first status, and the record is unharmed."""
    key = new_key()
    post(light, key, "gzip")
    retry = post(light, key, accepts)
    assert (409, UNAVAILABLE, 201) == (retry.status_code, retry.json["type"], retry.json["original_status"])
    assert (["run"], TEXT) == (coded, decoded(post(light, key, "gzip")))


@pytest.mark.scenario(44)
@pytest.mark.parametrize("accepts", [None, "gzip", "br"])
def test_a_plain_record_serves_everybody(light: Shop, coded: list[str], accepts: str | None) -> None:
    """A plain answer is replayed as it is, whatever the retry would also take."""
    key = new_key()
    first, retry = post(light, key, "identity"), post(light, key, accepts)
    assert (first.data, None) == (retry.data, retry.headers.get("Content-Encoding"))
    assert ('"v1"', ["run"]) == (retry.headers["ETag"], coded)


@pytest.mark.scenario(44)
@pytest.mark.parametrize(("coding", "body"), [("compress", b"\x1f\x9d\x90t\xca"), ("gzip", b"no gzip at all")])
def test_a_coding_that_can_not_be_undone(light: Shop, coding: str, body: bytes) -> None:
    """A coding unknown here, or broken, is never sent to a retry that refuses it: it gets 409."""

    @light.app.post("/text")
    @light.idempotency.required
    def text() -> Response:
        return Response(body, 201, headers={"Content-Encoding": coding})

    key = new_key()
    first, same, other = (post(light, key, accepts) for accepts in (coding, coding, "deflate"))
    assert (first.data, "true") == (same.data, same.headers["Idempotent-Replay"])
    assert (409, UNAVAILABLE, 201) == (other.status_code, other.json["type"], other.json["original_status"])
    # Who names no codings refuses none.
    assert body == post(light, key, None).data


@pytest.mark.scenario(44)
@pytest.mark.parametrize("atomic", [True, False])
def test_a_plain_form_larger_than_memory(light: Shop, atomic: bool) -> None:
    """A small coded answer that stands for a large one is undone piece by piece, with its length, time and again."""
    size = 64 * 1024 * 1024
    body = gzip.compress(bytes(size), 1)

    @light.app.post("/text")
    @light.idempotency.required(atomic=atomic)
    def text() -> Response:
        return Response(body, 201, headers={"Content-Encoding": "gzip", "Vary": "Accept-Encoding"})

    key = new_key()
    assert body == post(light, key, "gzip").data
    headers = {"X-Tenant": "acme", "Idempotency-Key": key, "Accept-Encoding": "identity"}
    started: list[dict[str, str]] = []
    tracemalloc.start()
    for _ in range(2):
        answer = light.app.wsgi_app(
            create_environ("/text", method="POST", headers=headers), lambda status, sent: started.append(dict(sent))
        )
        assert size == sum(map(len, answer))
        answer.close()  # type: ignore[attr-defined]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [str(size)] * 2 == [one["Content-Length"] for one in started]
    assert ["true"] * 2 == [one["Idempotent-Replay"] for one in started]
    assert 8 * 1024 * 1024 > peak
