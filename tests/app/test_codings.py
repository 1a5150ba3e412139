"""Content codings: who takes which, and a compressing extension before and after this one."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from flask import Response, request
from flask_compress import Compress
from werkzeug.test import TestResponse

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


@pytest.fixture(params=["before", "after"])
def compressing(request: pytest.FixtureRequest, light: Shop) -> Shop:
    """A shop with Flask-Compress, initialised before and after the extension; its view counts in ``runs``."""
    light.app.config["COMPRESS_ALGORITHM"] = ["gzip", "deflate"]
    light.app.config["COMPRESS_ALGORITHM_STREAMING"] = ["gzip", "deflate"]
    Compress(light.app)
    if request.param == "before":
        hooks = light.app.after_request_funcs[None]
        hooks.insert(0, hooks.pop())
    return light


def answer_with(shop: Shop, body: Callable[[], Any]) -> None:
    """Guard a view at /text that answers with ``body()``."""

    @shop.app.post("/text")
    @shop.idempotency.required
    def text() -> Response:
        shop.runs.append("run")
        return Response(body(), 201, headers={"ETag": '"v1"'}, mimetype="text/plain")


@pytest.mark.scenario(44)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "accepts", [("gzip", None), (None, "gzip"), ("gzip", "deflate"), ("gzip", "gzip"), (None, None)]
)
def test_flask_compress(compressing: Shop, accepts: tuple[str | None, ...], streamed: bool) -> None:
    """First client and retries can read their answers, whatever codings they take; nothing is compressed twice."""
    answer_with(compressing, lambda: iter([TEXT[:1000], TEXT[1000:]]) if streamed else TEXT)
    key = new_key()
    answers = [(one, post(compressing, key, one)) for one in (*accepts, *accepts)]
    for taken, answer in answers:
        assert (201, TEXT) == (answer.status_code, decoded(answer))
        assert answer.headers.get("Content-Encoding") in (None, taken)
        assert str(len(answer.data)) == answer.headers.get("Content-Length", str(len(answer.data)))
        assert 1 == len(answer.headers.getlist("Vary"))
    assert [None, "true", "true", "true"] == [one.headers.get("Idempotent-Replay") for _, one in answers]
    assert ["run"] == compressing.runs
