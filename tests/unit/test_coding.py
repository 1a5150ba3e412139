"""Which form of a record a request can be sent."""

from __future__ import annotations

import functools
import gzip
import importlib
import sys
import tracemalloc
import types
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import brotli
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flask_idempotency import coding as codings
from flask_idempotency.coding import PIECE, SMALL, Undecodable, choose, plain_headers, undo
from flask_idempotency.recorded import Recorded
from tests.support.skips import missing

#: Python's own from 3.14 on.
ZSTD_MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
BROTLI = ["brotli", "brotlicffi"]
ZSTD = [ZSTD_MODULE, "zstandard"]
zstd: Any = importlib.import_module(ZSTD_MODULE)

#: A frame that says nothing (RFC 8878, section 3.1.2).
SKIPPABLE = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"..."

MANY = 16 * 1024 * 1024
PLAIN = b"plain text, " * 20


def coded(body: bytes, *headers: tuple[str, str]) -> Recorded:
    """A record of these bytes."""
    return Recorded(201, headers, body, "Made It")


def suited(recorded: Recorded, accepts: str | None) -> Recorded | None:
    """A small record in a form that the request accepts."""
    found = codings.suited(recorded, accepts)
    assert found is None or found[1] is None
    return found and found[0]


def raw_deflate(data: bytes) -> bytes:
    """Without the zlib wrapper, as some servers send "deflate"."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": functools.partial(brotli.compress, quality=5),
    "zstd": zstd.compress,
}


@contextmanager
def fresh_libraries() -> Iterator[None]:
    """Libraries are looked for anew within it, and after it."""
    codings._kind.cache_clear()
    try:
        yield
    finally:
        codings._kind.cache_clear()


@pytest.fixture(params=[0, 1])
def libraries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Once the library of each coding that is looked for first, and once the other one alone."""
    for names in (BROTLI, ZSTD):
        for name in names[: request.param]:
            monkeypatch.setitem(sys.modules, name, None)
        try:
            importlib.import_module(names[request.param])
        except ImportError:
            missing(f"{names[request.param]} is not installed here")
    with fresh_libraries():
        yield


GZIPPED = coded(gzip.compress(PLAIN), ("Content-Encoding", "gzip"))


@pytest.mark.parametrize("accepts", [None, "", "gzip", "identity;q=0", "*;q=0", "nonsense;;q=x"])
@pytest.mark.parametrize("headers", [(), (("Content-Encoding", ""),), (("Content-Encoding", "Identity"),)])
def test_a_record_without_a_coding_suits_everybody(headers: tuple[tuple[str, str], ...], accepts: str | None) -> None:
    """What was never coded is sent as it is."""
    recorded = coded(PLAIN, *headers)
    assert recorded is suited(recorded, accepts)


@pytest.mark.parametrize(
    "accepts",
    [
        "gzip",
        "GZip",
        "x-gzip",
        "X-GZIP;q=0.1",
        "deflate, gzip;q=0.001",
        "*",
        "*;q=0.5, br",
        "gzip, *;q=0",
        "x, gzip",
        "identity, gzip;q=0.1",
        "identity;q=0, gzip",
        ",, gzip ,",
    ],
)
def test_a_coding_that_is_accepted(accepts: str) -> None:
    """A request that accepts the recorded coding gets the record itself."""
    assert GZIPPED is suited(GZIPPED, accepts)


@pytest.mark.parametrize(
    "accepts",
    [
        "",
        " ",
        "br",
        "gzip;q=0",
        "GZIP; Q=0.000",
        "identity",
        "gzip;q=0.0, *",
        "gzip;q=0, identity",
        "x-gzip;q=0",
        "gzip, x-gzip;q=0",
        "gzip;q=0, gzip",
        "gzip;q=2",
        "gzi",
        "*;q=0, identity;q=0.5",
    ],
)
def test_a_coding_that_is_refused(accepts: str) -> None:
    """A request that refuses the coding gets the plain form."""
    plain = suited(GZIPPED, accepts)
    assert coded(PLAIN) == plain


@pytest.mark.parametrize("accepts", ["identity;q=0", "br, identity;q=0", "IDENTITY;q=0.0", "*;q=0", "br;q=1, *;q=0"])
def test_a_request_that_refuses_the_plain_form_too(accepts: str) -> None:
    """Where coding and plain form are both refused there is nothing to send."""
    assert suited(GZIPPED, accepts) is None


@pytest.mark.parametrize("accepts", ["*;q=0, identity", "*;q=0, identity;q=0.1"])
def test_the_plain_form_named_before_the_rest(accepts: str) -> None:
    """The weight of a "*" does not count for the plain form where that is named itself."""
    assert coded(PLAIN) == suited(GZIPPED, accepts)


def test_no_accept_encoding() -> None:
    """A request that names no codings refuses none; it gets the plain form where the header chose the coding."""
    assert GZIPPED is suited(GZIPPED, None)
    vary = (("Vary", "Cookie"), ("vary", "Origin, ACCEPT-encoding"))
    assert coded(PLAIN, *vary) == suited(coded(gzip.compress(PLAIN), ("Content-Encoding", "gzip"), *vary), None)
    unknown = coded(b"?", ("Content-Encoding", "compress"), *vary)
    assert unknown is suited(unknown, None)


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(PLAIN)),
        ("x-gzip", gzip.compress(PLAIN)),
        ("GZIP", gzip.compress(PLAIN)),
        ("gzip", gzip.compress(PLAIN[:50]) + gzip.compress(b"") + gzip.compress(PLAIN[50:])),
        ("deflate", zlib.compress(PLAIN)),
        ("deflate", zlib.compress(PLAIN, wbits=9)),
        ("deflate", raw_deflate(PLAIN)),
        # Its first byte alone could be that of a wrapper: a stored block whose unused bits are not zero.
        ("deflate", b"\x08\xf0\x00\x0f\xff" + PLAIN + b"\x03\x00"),
        ("br", brotli.compress(PLAIN)),
        ("zstd", zstd.compress(PLAIN)),
        ("zstd", zstd.compress(PLAIN[:50]) + SKIPPABLE + zstd.compress(b"") + zstd.compress(PLAIN[50:])),
        ("deflate, gzip", gzip.compress(zlib.compress(PLAIN))),
        ("zstd, br, deflate, gzip", gzip.compress(zlib.compress(brotli.compress(zstd.compress(PLAIN))))),
        ("deflate,,identity , gzip", gzip.compress(zlib.compress(PLAIN))),
    ],
)
def test_codings_that_can_be_undone(coding: str, body: bytes, libraries: None) -> None:
    """Codings are undone in any spelling, in the reverse order of their making, whichever library undoes them."""
    assert coded(PLAIN) == suited(coded(body, ("Content-Encoding", coding)), "identity")


def test_codings_in_several_headers() -> None:
    """Codings may be listed in several headers."""
    headers = (("Content-Encoding", "deflate"), ("content-encoding", "gzip"))
    recorded = coded(gzip.compress(zlib.compress(PLAIN)), *headers)
    assert coded(PLAIN) == suited(recorded, "identity")
    assert recorded is suited(recorded, "gzip, deflate")
    assert ("deflate", "gzip") == choose(recorded, "gzip")


@pytest.mark.parametrize("coding", [*ENCODERS, "gzip, br", "br, gzip", "compress", "x-br", "aes128gcm"])
@pytest.mark.parametrize("damage", ["other", "short", "long", "changed"])
def test_codings_that_can_not_be_undone(coding: str, damage: str, libraries: None) -> None:
    """A coding that is unknown, or not what it says, has no plain form."""
    body = functools.reduce(lambda data, one: ENCODERS.get(one, bytes)(data), coding.split(", "), PLAIN)
    damaged = {
        "other": b"no such coding",
        "short": body[:-1],
        "long": body + b"tail",
        "changed": bytes([body[0] ^ 0x55]) + body[1:],
    }
    recorded = coded(damaged[damage], ("Content-Encoding", coding))
    assert suited(recorded, "identity") is None
    assert recorded is suited(recorded, coding)
    assert recorded is suited(recorded, None)
    vary = coded(damaged[damage], ("Content-Encoding", coding), ("Vary", "Accept-Encoding"))
    assert vary is suited(vary, None)


@pytest.mark.parametrize("coding", ["deflate", "br"])
def test_two_bodies_in_one(coding: str, libraries: None) -> None:
    """Only gzip and zstd have bodies of several members: of others, a second one is trailing garbage."""
    with pytest.raises(Undecodable):
        list(undo([ENCODERS[coding](PLAIN)] * 2, (coding,)))


@pytest.mark.parametrize("coding", ENCODERS)
def test_nothing_at_all(coding: str, libraries: None) -> None:
    """An answer without a body, a 204 say, has nothing to undo."""
    assert coded(b"") == suited(coded(b"", ("Content-Encoding", coding)), "identity")


def test_a_part_of_a_coded_body() -> None:
    """A part is of no use to who refuses its coding: it can't be undone by itself."""
    headers = (("Content-Encoding", "gzip"), ("Content-Range", "bytes 0-99/100"), ("Vary", "Accept-Encoding"))
    part = Recorded(206, headers, gzip.compress(PLAIN))
    assert (None, (), ()) == (choose(part, "br"), choose(part, "gzip"), choose(part, None))


@pytest.mark.parametrize("coding", ENCODERS)
@given(body=st.binary(max_size=3000), size=st.integers(1, 300))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_of_any_size(libraries: None, coding: str, body: bytes, size: int) -> None:
    """However the coded bytes are cut, the plain ones come out; with one byte less they are undecodable."""
    sent = ENCODERS[coding](body)
    pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
    plain = list(undo([b"", *pieces, b""], (coding,)))
    assert body == b"".join(plain)
    assert b"" not in plain
    for cut in {len(sent) - 1, len(sent) // 2} - {0}:
        with pytest.raises(Undecodable):
            list(undo([sent[:cut]], (coding,)))


@pytest.mark.parametrize("coding", [*ENCODERS, "gzip, gzip"])
def test_a_few_bytes_that_stand_for_many(coding: str, libraries: None) -> None:
    """What comes out comes in bounded pieces, and nothing of it is kept."""
    codings = tuple(coding.split(", "))
    sent = functools.reduce(lambda data, one: ENCODERS[one](data), codings, bytes(MANY))
    tracemalloc.start()
    try:
        sizes = [len(piece) for piece in undo(iter([sent]), codings)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert MANY == sum(sizes)
    # Some libraries give more than they are asked for, `zstandard` up to half a megabyte.
    assert max(sizes) < 10 * PIECE
    assert peak < 40 * PIECE < MANY


@pytest.mark.parametrize(("coding", "names"), [("br", BROTLI), ("zstd", ZSTD)])
def test_no_library(
    coding: str, names: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a library there is no plain form, and the log says once which extra brings one."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    with fresh_libraries():
        recorded = coded(ENCODERS[coding](PLAIN), ("Content-Encoding", coding), ("Vary", "Accept-Encoding"))
        assert [recorded, None, None, recorded] == [suited(recorded, one) for one in (coding, "", "gzip", None)]
        with pytest.raises(Undecodable):
            list(undo([recorded.body or b""], (coding,)))
    [said] = caplog.records
    assert ("WARNING", True, True) == (
        said.levelname,
        f"coding {coding} " in said.getMessage(),
        "Flask-Idempotency[codings]" in said.getMessage(),
    )


def test_a_library_that_has_no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A brotli from before 1.2, which can't be told how much to give out, is as good as none."""
    old = types.ModuleType("brotli")
    old.Decompressor = type("Decompressor", (), {"process": bytes})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "brotli", old)
    recorded = coded(brotli.compress(PLAIN), ("Content-Encoding", "br"))
    with fresh_libraries():
        assert coded(PLAIN) == suited(recorded, "")  # brotlicffi is there
        monkeypatch.setitem(sys.modules, "brotlicffi", None)
    with fresh_libraries():
        assert suited(recorded, "") is None


def test_headers_without_a_length() -> None:
    """Where the size of the plain form is not known, no length is said."""
    headers = (("Content-Length", "9"), ("Content-Encoding", "br"), ("ETag", '"a"'), ("X", "1"))
    assert (("ETag", 'W/"a"'), ("X", "1")) == plain_headers(headers, None)
    assert (("Content-Length", "0"), ("ETag", 'W/"a"'), ("X", "1")) == plain_headers(headers, 0)


def test_headers_of_the_plain_form() -> None:
    """What describes the coded bytes is gone or put right; all else keeps its place, name and repetition."""
    gone = [("Content-Encoding", "gzip"), ("Content-MD5", "x"), ("content-digest", "x"), ("Repr-Digest", "x")]
    before = [("X-A", "1"), ("ETag", '"v1"'), ("x-a", "2"), ("Content-Length", "99"), ("Content-Type", "text/plain")]
    after = [("X-A", "1"), ("ETag", 'W/"v1"'), ("x-a", "2"), ("Content-Length", "240"), ("Content-Type", "text/plain")]
    assert coded(PLAIN, *after) == suited(coded(gzip.compress(PLAIN), *gone, *before, ("Digest", "x")), "identity")


def test_a_weak_etag_stays_as_it_is() -> None:
    """A weak ETag names the plain form too."""
    etag = ("ETag", 'W/"v1"')
    assert coded(PLAIN, etag) == suited(coded(gzip.compress(PLAIN), etag, ("Content-Encoding", "gzip")), "")


@given(st.text(alphabet='gzipbr*;q=0.1, -identyx"\\', max_size=40), st.binary(max_size=100))
def test_any_header_has_an_answer(accepts: str, body: bytes) -> None:
    """Whatever a request says, it gets the record, its plain form or nothing, and no error."""
    recorded = coded(gzip.compress(body), ("Content-Encoding", "gzip"))
    assert suited(recorded, accepts) in (recorded, coded(body), None)


@pytest.mark.parametrize("more", [0, 1])
def test_a_few_bytes_for_many(more: int) -> None:
    """A plain form over the limit is never together in memory: it comes piece by piece, as often as it is asked for."""
    body = gzip.compress(bytes(SMALL + more))
    found = codings.suited(coded(body, ("Content-Encoding", "gzip"), ("Content-Length", str(len(body)))), "identity")
    assert found is not None
    recorded, pieces = found
    assert (("Content-Length", str(SMALL + more)),) == recorded.headers
    assert (pieces is None) == (more == 0)
    for _ in range(2):
        assert SMALL + more == sum(map(len, pieces() if pieces is not None else [recorded.body or b""]))
