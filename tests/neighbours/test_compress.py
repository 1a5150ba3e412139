"""Beside Flask-Compress, initialised before the extension and after it: whoever retries can read the answer."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from typing import Any

import brotli
import pytest
from flask import Response, send_file
from flask_compress import Compress
from werkzeug.test import TestResponse

from tests.neighbours.five import Work, by_tenant, case_of, sender, the_five
from tests.support.apps import Shop, new_key

zstd: Any = import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")

Beside = Callable[..., tuple[Shop, Work]]

TEXT = b"a text that is worth compressing, " * 100
CODINGS = ["zstd", "br", "gzip", "deflate"]
UNDO: dict[str | None, Callable[[bytes], bytes]] = {
    None: bytes,
    "zstd": zstd.decompress,
    "br": brotli.decompress,
    "gzip": gzip.decompress,
    "deflate": zlib.decompress,
}

#: What a client takes, and the coding that Flask-Compress then chooses.
CHOSEN = {
    None: None,
    "": None,
    "identity": None,
    "compress": None,
    "zstd": "zstd",
    "br": "br",
    "gzip": "gzip",
    "deflate": "deflate",
    "gzip, deflate, br, zstd": "zstd",
    "br;q=0.5, gzip;q=0": "br",
    "*": "zstd",
    "gzip, identity;q=0": "gzip",
}

orders = pytest.mark.parametrize("order", ["before", "after"])


def with_compress(beside: Beside, order: str, **config: Any) -> tuple[Shop, Work]:
    """A shop with Flask-Compress on one side of the extension."""
    given: dict[str, Any] = {"COMPRESS_ALGORITHM": CODINGS, "COMPRESS_ALGORITHM_STREAMING": CODINGS, **config}
    shop, work = beside(**{order: [Compress]}, **given)
    by_tenant(shop)
    return shop, work


def post(shop: Shop, key: str, accepts: str | None) -> TestResponse:
    """Ask for the text, with or without an Accept-Encoding."""
    headers = {"X-Tenant": "acme", "Idempotency-Key": key}
    if accepts is not None:
        headers["Accept-Encoding"] = accepts
    return shop.client.post("/text", headers=headers, buffered=True)


def ready() -> Response:
    """The text as it is."""
    return Response(TEXT, mimetype="text/plain", headers={"ETag": '"v1"', "Vary": "Cookie"})


def streamed() -> Response:
    """The text in two pieces."""
    return Response(iter([TEXT[:1000], TEXT[1000:]]), mimetype="text/plain", headers={"ETag": '"v1"'})


def sent_file() -> Response:
    """The text as a file. In memory: Flask-Compress leaves it to the garbage collector to close one on disk."""
    return send_file(BytesIO(TEXT), mimetype="text/plain", etag="v1")


@pytest.mark.scenario(44)
@orders
@pytest.mark.parametrize("kind", ["ready", "streamed", "file"])
def test_every_pair_of_clients(beside: Beside, order: str, kind: str) -> None:
    """Whatever the first client took, each retry gets the text, once coded in what it takes, or not at all."""
    shop, _ = with_compress(beside, order)

    @shop.app.post("/text")
    @shop.idempotency.required
    def text() -> Response:
        shop.runs.append(kind)
        return {"ready": ready, "streamed": streamed, "file": sent_file}[kind]()

    for first_takes, recorded in CHOSEN.items():
        key = new_key()
        check(post(shop, key, first_takes), recorded, replayed=False)
        for takes, chosen in CHOSEN.items():
            answer = post(shop, key, takes)
            if order == "before":
                check(answer, chosen)  # the plain text is recorded, and coded afresh for each
            elif recorded in (None, *taken(takes)):
                check(answer, recorded)
            elif takes == "gzip, identity;q=0":
                assert (409, 200) == (answer.status_code, answer.json["original_status"])
            else:
                check(answer, None)
    assert len(CHOSEN) == len(shop.runs)


def taken(takes: str | None) -> list[str]:
    """The codings that a client takes."""
    listed = [one.strip() for one in (takes or "").split(",")]
    return CODINGS if takes == "*" else [one.partition(";")[0] for one in listed if not one.endswith(";q=0")]


def check(answer: TestResponse, coding: str | None, *, replayed: bool = True) -> None:
    """Assert that an answer is the text, in a coding, and described as what it is."""
    assert 200 == answer.status_code
    assert ([coding] if coding else []) == answer.headers.getlist("Content-Encoding")
    assert TEXT == UNDO[coding](answer.data)
    assert [str(len(answer.data))] * ("Content-Length" in answer.headers) == answer.headers.getlist("Content-Length")
    assert ("true" if replayed else None) == answer.headers.get("Idempotent-Replay")
    [vary] = answer.headers.getlist("Vary")
    assert "Accept-Encoding" in vary
    # One strong ETag never stands for two different rows of bytes: it ends in their coding, or is a weak one.
    etag, weak = answer.get_etag()
    assert weak or coding is None or (etag or "").endswith(f":{coding}")
    assert weak or coding is not None or ":" not in (etag or "")


@pytest.mark.scenario(44)
@pytest.mark.parametrize("where", ["above", "below"])
def test_one_view_alone(beside: Beside, where: str) -> None:
    """A view whose answers are compressed by a decorator above the guard or below it is as readable."""
    compress = Compress()
    shop, _ = beside(before=[compress.init_app], COMPRESS_REGISTER=False, COMPRESS_ALGORITHM=CODINGS)
    by_tenant(shop)

    def text() -> Response:
        shop.runs.append(1)
        return ready()

    decorators = [shop.idempotency.required, compress.compressed()]
    for decorator in decorators if where == "above" else reversed(decorators):
        text = decorator(text)
    shop.app.post("/text")(text)
    key = new_key()
    check(post(shop, key, "br"), "br", replayed=False)
    for takes, coding in (("br", "br"), ("gzip", None), (None, None), ("*", "br")):
        check(post(shop, key, takes), coding)
    assert [1] == shop.runs


@pytest.mark.scenario(44)
@orders
def test_several_lines(beside: Beside, order: str) -> None:
    """An Accept-Encoding of several lines is one list."""
    shop, _ = with_compress(beside, order)
    shop.app.post("/text")(shop.idempotency.required(ready))
    key = new_key()
    headers = [
        ("X-Tenant", "acme"),
        ("Idempotency-Key", key),
        ("Accept-Encoding", "compress"),
        ("Accept-Encoding", "br"),
    ]
    check(shop.client.post("/text", headers=headers), "br", replayed=False)
    check(shop.client.post("/text", headers=headers), "br")


@orders
@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
def test_the_five(beside: Beside, order: str, atomic: bool) -> None:
    """The five hold with every answer compressed."""
    shop, work = with_compress(beside, order, COMPRESS_MIN_SIZE=0)
    shop.app.post("/charges")(shop.idempotency.required(atomic=atomic)(work.asked))
    good, other = ({"X-Tenant": tenant, "Accept-Encoding": "br"} for tenant in ("acme", "emca"))
    senders = {"good": sender(shop.app, good), "other": sender(shop.app, other)}
    assert ["br"] == senders["good"](new_key(), 1).header("Content-Encoding")
    the_five(case_of(shop, work, atomic=atomic, **senders))
