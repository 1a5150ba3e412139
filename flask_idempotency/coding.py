"""Content codings: a retry is never sent one that it refuses (RFC 9110, section 12.5.3)."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from werkzeug.datastructures import Accept
from werkzeug.http import parse_accept_header, parse_set_header

from .recorded import Recorded

#: Headers that describe the coded bytes, and are wrong once the coding is undone (digests: RFC 9530, section 3, and
#: its predecessors).
_OF_THE_CODED: Final = frozenset({"content-encoding", "content-md5", "content-digest", "repr-digest", "digest"})


def suited(recorded: Recorded, accept_encoding: str | None) -> Recorded | None:
    """The record in a coding that the request accepts; ``None`` where there is no such form of it.

    A request without ``Accept-Encoding`` refuses nothing. Where the first answer's coding was chosen by that
    header (its ``Vary`` says so), such a request gets the plain form all the same, if it can be had.
    """
    codings = [one.strip().lower() for value in _values(recorded, "content-encoding") for one in value.split(",")]
    codings = [one for one in codings if one and one != "identity"]
    if not codings:
        return recorded
    if accept_encoding is None:
        chosen = any("accept-encoding" in parse_set_header(value) for value in _values(recorded, "vary"))
        return (_plain(recorded, codings) if chosen else None) or recorded
    accepted = parse_accept_header(accept_encoding, Accept)
    if all(_quality(accepted, one) > 0 for one in codings):
        return recorded
    return None if _refuses_plain(accepted) else _plain(recorded, codings)


def _refuses_plain(accepted: Accept) -> bool:
    # What has no coding is accepted unless it is named, or meant by a "*", with a weight of zero.
    weights = {name.lower(): quality for name, quality in accepted}
    return weights.get("identity", weights.get("*", 1)) == 0


def _quality(accepted: Accept, coding: str) -> float:
    names = {coding, coding.removeprefix("x-")}
    named = [quality for name, quality in accepted if name.lower() in names]
    return max(named) if named else max((quality for name, quality in accepted if name == "*"), default=0)


def _values(recorded: Recorded, wanted: str) -> list[str]:
    return [value for name, value in recorded.headers if name.lower() == wanted]


def _plain(recorded: Recorded, codings: list[str]) -> Recorded | None:
    body = recorded.body or b""
    try:
        for coding in reversed(codings):
            body = _DECODERS[coding](body)
    except (KeyError, OSError, EOFError, zlib.error):
        return None
    headers = [(name, value) for name, value in recorded.headers if name.lower() not in _OF_THE_CODED]
    return replace(recorded, headers=tuple(_of_the_plain(*header, len(body)) for header in headers), body=body)


def _of_the_plain(name: str, value: str, length: int) -> tuple[str, str]:
    if name.lower() == "content-length":
        return name, str(length)
    # A strong ETag names exact bytes, and these are others now (RFC 9110, section 8.8.1).
    return (name, "W/" + value) if name.lower() == "etag" and value.startswith('"') else (name, value)


def _inflate(body: bytes) -> bytes:
    try:
        return zlib.decompress(body)
    except zlib.error:
        return zlib.decompress(body, -zlib.MAX_WBITS)  # sent without the zlib wrapper, as some servers do


_DECODERS: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "gzip": gzip.decompress,
    "x-gzip": gzip.decompress,
    "deflate": _inflate,
}
