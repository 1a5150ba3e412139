"""Which form of a record a request can be sent."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flask_idempotency.coding import suited
from flask_idempotency.recorded import Recorded

PLAIN = b"plain text, " * 20


def coded(body: bytes, *headers: tuple[str, str]) -> Recorded:
    """A record of these bytes."""
    return Recorded(201, headers, body, "Made It")


def raw_deflate(data: bytes) -> bytes:
    """Without the zlib wrapper, as some servers send "deflate"."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


GZIPPED = coded(gzip.compress(PLAIN), ("Content-Encoding", "gzip"))


@pytest.mark.parametrize("accepts", [None, "", "gzip", "identity;q=0", "*;q=0", "nonsense;;q=x"])
@pytest.mark.parametrize("headers", [(), (("Content-Encoding", ""),), (("Content-Encoding", "Identity"),)])
def test_a_record_without_a_coding_suits_everybody(headers: tuple[tuple[str, str], ...], accepts: str | None) -> None:
    """What was never coded is sent as it is."""
    recorded = coded(PLAIN, *headers)
    assert recorded is suited(recorded, accepts)


@pytest.mark.parametrize(
    "accepts", ["gzip", "GZip", "deflate, gzip;q=0.001", "*", "*;q=0.5, br", "gzip, *;q=0", "x, gzip"]
)
def test_a_coding_that_is_accepted(accepts: str) -> None:
    """A request that accepts the recorded coding gets the record itself."""
    assert GZIPPED is suited(GZIPPED, accepts)


@pytest.mark.parametrize(
    "accepts", ["", "br", "gzip;q=0", "identity", "gzip;q=0.0, *", "gzip;q=0, identity", "x-gzip;q=0"]
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
    unknown = coded(b"?", ("Content-Encoding", "br"), *vary)
    assert unknown is suited(unknown, None)


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(PLAIN)),
        ("x-gzip", gzip.compress(PLAIN)),
        ("GZIP", gzip.compress(PLAIN)),
        ("gzip", gzip.compress(PLAIN[:50]) + gzip.compress(PLAIN[50:])),
        ("deflate", zlib.compress(PLAIN)),
        ("deflate", raw_deflate(PLAIN)),
        ("deflate, gzip", gzip.compress(zlib.compress(PLAIN))),
        ("deflate,,identity , gzip", gzip.compress(zlib.compress(PLAIN))),
    ],
)
def test_codings_that_can_be_undone(coding: str, body: bytes) -> None:
    """Gzip and deflate are undone, in any spelling and in the reverse order of their making."""
    assert coded(PLAIN) == suited(coded(body, ("Content-Encoding", coding)), "identity")


def test_codings_in_several_headers() -> None:
    """Codings may be listed in several headers."""
    headers = (("Content-Encoding", "deflate"), ("content-encoding", "gzip"))
    recorded = coded(gzip.compress(zlib.compress(PLAIN)), *headers)
    assert coded(PLAIN) == suited(recorded, "identity")
    assert recorded is suited(recorded, "gzip, deflate")


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip", "deflate", "gzip, br", "compress"])
@pytest.mark.parametrize("body", [b"", b"no such coding", gzip.compress(PLAIN)[:-9], gzip.compress(PLAIN) + b"tail"])
def test_codings_that_can_not_be_undone(coding: str, body: bytes) -> None:
    """A coding that is unknown, or not what it says, has no plain form."""
    recorded = coded(body, ("Content-Encoding", coding))
    plain = suited(recorded, "identity")
    # Python takes no bytes at all for a gzip file of no members.
    assert plain is None or (coding, body) == ("gzip", b"")


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
