"""Content codings: a retry is never sent one that it refuses (RFC 9110, sections 8.4 and 12.5.3).

Everything is undone piece by piece, so that a large body can pass from a store to the client in flat memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Final, Protocol

from werkzeug.datastructures import Accept
from werkzeug.http import parse_accept_header, parse_set_header

from .recorded import Elsewhere, Recorded
from .signals import logger

#: How many bytes are taken in, and about how many are given out, at a time: a few bytes may stand for gigabytes.
PIECE: Final = 64 * 1024

#: The largest plain body that is put together in memory. What is larger is undone anew while it goes out: a megabyte in
#: the table may stand for a gigabyte.
SMALL: Final = 1024 * 1024

#: Headers that describe the coded bytes, and are wrong once the coding is undone (digests: RFC 9530, section 3, and
#: its predecessors).
_OF_THE_CODED: Final = frozenset({"content-encoding", "content-md5", "content-digest", "repr-digest", "digest"})

_Headers = tuple[tuple[str, str], ...]

#: A body: gives it from its beginning each time it is called.
Pieces = Callable[[], Iterator[bytes]]


class Undecodable(Exception):
    """The bytes are not what their coding says: damaged, cut short or followed by others; or nobody here knows it."""


def choose(recorded: Recorded, accept_encoding: str | None) -> tuple[str, ...] | None:
    """Which codings to undo for a request, by the headers alone.

    :param accept_encoding: the request's header; several lines of it joined by commas.
    :return: codings in the order in which they were applied, for `undo`; none of them: send the record as it is.
        ``None``: there is no form of it that the request accepts and that can be made here.

    What was never coded goes to everybody, as the app sends it; a hook around the extension may still code it.
    A request without ``Accept-Encoding`` refuses nothing. Where the first answer's coding was chosen by that
    header (its ``Vary`` says so), such a request gets the plain form all the same, if it can be had.
    """
    codings = _codings(recorded)
    if not codings:
        return ()
    if accept_encoding is None:
        return codings if _was_chosen(recorded) and _can_undo(recorded, codings) else ()
    weights = _weights(accept_encoding)
    if all(_accepted(weights, one) for one in codings):
        return ()
    # What has no coding is accepted unless it is named, or meant by a "*", with a weight of zero.
    refuses_plain = weights.get("identity", weights.get("*", 1)) == 0
    return None if refuses_plain or not _can_undo(recorded, codings) else codings


def suited(recorded: Recorded, accept_encoding: str | None) -> tuple[Recorded, Pieces | None] | None:
    """A record whose body is at hand, in a form that the request accepts; ``None`` where there is no such form.

    Beside it, where the body is over `SMALL` in that form: what gives it in pieces, each time it is called. The body in
    the record is the coded one then.
    """
    codings = choose(recorded, accept_encoding)
    if not codings:
        return (recorded, None) if codings is not None else None
    assert not isinstance(recorded.body, Elsewhere)
    coded = [recorded.body or b""]
    pieces: list[bytes] = []
    size = 0
    try:
        for piece in undo(coded, codings):
            size += len(piece)
            pieces.append(piece)
            if size > SMALL:
                pieces.clear()
    except Undecodable:
        return (recorded, None) if accept_encoding is None else None
    plain = replace(recorded, headers=plain_headers(recorded.headers, size))
    if size > SMALL:
        return plain, lambda: undo(coded, codings)
    return replace(plain, body=b"".join(pieces)), None


def plain_headers(headers: _Headers, size: int | None) -> _Headers:
    """Headers as they are once the coding is undone.

    :param size: of the plain body, in bytes; ``None`` where it is not known, so that no length is said.
    """
    kept = ((name, value) for name, value in headers if name.lower() not in _OF_THE_CODED)
    return tuple(
        _of_the_plain(name, value, size) for name, value in kept if size is not None or name.lower() != "content-length"
    )


def undo(chunks: Iterable[bytes], codings: tuple[str, ...]) -> Iterator[bytes]:
    """The plain bytes, in pieces of about `PIECE` bytes whatever the chunks are. No bytes at all stay none.

    :param codings: in the order in which they were applied; the last is undone first.
    :raises Undecodable: while it is read, so that bytes before the damage may have been given out.
    """
    for coding in reversed(codings):
        kind = _kind(coding)
        if kind is None:
            raise Undecodable(f"The content coding {coding} is unknown here.")
        chunks = _undone(chunks, kind)
    yield from chunks


def _codings(recorded: Recorded) -> tuple[str, ...]:
    listed = (one.strip().lower() for value in _values(recorded, "content-encoding") for one in value.split(","))
    return tuple(one for one in listed if one and one != "identity")


def _values(recorded: Recorded, wanted: str) -> list[str]:
    return [value for name, value in recorded.headers if name.lower() == wanted]


def _was_chosen(recorded: Recorded) -> bool:
    return any("accept-encoding" in parse_set_header(value) for value in _values(recorded, "vary"))


def _weights(accept_encoding: str) -> dict[str, float]:
    """By name. Of a name that comes twice the lower weight counts: the plain form is never wrong to send."""
    weights: dict[str, float] = {}
    for name, weight in parse_accept_header(accept_encoding, Accept):
        name = _canonical(name)
        weights[name] = min(weight, weights.get(name, weight))
    return weights


def _accepted(weights: dict[str, float], coding: str) -> bool:
    return weights.get(_canonical(coding), weights.get("*", 0)) > 0


def _canonical(coding: str) -> str:
    name = coding.lower()
    return {"x-gzip": "gzip", "x-compress": "compress"}.get(name, name)  # two old names (section 8.4.1)


def _can_undo(recorded: Recorded, codings: tuple[str, ...]) -> bool:
    # A part of a coded body (206) is no coded body.
    return recorded.status != 206 and all(_kind(one) is not None for one in codings)


def _of_the_plain(name: str, value: str, size: int | None) -> tuple[str, str]:
    if name.lower() == "content-length":
        return name, str(size)
    # A strong ETag names exact bytes, and these are others now (RFC 9110, section 8.8.1).
    return (name, "W/" + value) if name.lower() == "etag" and value.startswith('"') else (name, value)


class _Decoder(Protocol):
    """What undoes one coded body, or one frame of it: the interface of Python's own ``compression.zstd``."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


@dataclass(frozen=True)
class _Kind:
    """How a coding is undone; with ``frames`` a body may be several, one after the other."""

    decoder: Callable[[], _Decoder]
    error: type[Exception]
    frames: bool = False


def _undone(chunks: Iterable[bytes], kind: _Kind) -> Iterator[bytes]:
    decoder: _Decoder | None = None
    try:
        for data in _pieces(chunks):
            while data:
                if decoder is None or (decoder.eof and kind.frames):
                    decoder = kind.decoder()
                elif decoder.eof:
                    raise Undecodable("Other bytes follow the coded ones.")
                yield from _drained(decoder, data)
                data = decoder.unused_data if decoder.eof else b""
    except kind.error as error:
        raise Undecodable(f"The bytes are not in their content coding: {error}") from error
    if decoder is not None and not decoder.eof:
        raise Undecodable("The coded bytes end too early.")


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        for start in range(0, len(chunk), PIECE):
            yield chunk[start : start + PIECE]


def _drained(decoder: _Decoder, data: bytes) -> Iterator[bytes]:
    """What comes out of it, until it asks for more or has come to its end."""
    while True:
        plain = decoder.decompress(data, PIECE)
        if plain:
            yield plain
        if decoder.eof or decoder.needs_input:
            return
        data = b""


class _Inflating:
    """A gzip member, or a body in deflate: `zlib` with what it can't take in yet kept for the next call."""

    def __init__(self, wbits: int) -> None:
        self._inflater = zlib.decompressobj(wbits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inflater.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflater.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        plain = self._inflater.decompress(self._inflater.unconsumed_tail + data, max_length)
        self.needs_input = len(plain) < max_length  # otherwise there may be more of it inside
        return plain


class _Deflate(_Inflating):
    """Deflate with its zlib wrapper, or without, as some servers send it. The first two bytes tell (RFC 1950)."""

    def __init__(self) -> None:
        super().__init__(zlib.MAX_WBITS)
        self._head: bytes | None = b""

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        if self._head is not None:
            data = self._head + data
            if len(data) < 2:
                self._head = data
                return b""
            self._head = None
            if data[0] & 0x0F != 8 or int.from_bytes(data[:2], "big") % 31:
                self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        return super().decompress(data, max_length)


class _Brotli:
    """A body in brotli, undone by `brotli` or `brotlicffi`. They raise where other bytes follow it."""

    unused_data = b""

    def __init__(self, library: Any) -> None:
        self._decompressor = library.Decompressor()
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return bool(self._decompressor.is_finished())

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        plain = bytes(self._decompressor.process(data, output_buffer_limit=max_length))
        # It may accept more and have more to give, too: only less than it was allowed says that there is no more.
        self.needs_input = len(plain) < max_length and self._decompressor.can_accept_more_data()
        return plain


class _Zstandard:
    """A zstd frame, undone by the package `zstandard`, which can't be told how much to give out.

    A block of 4 bytes may stand for 128 KiB (RFC 8878, section 3.1.1.2), so few bytes are put in at a time.
    """

    _STEP: Final = 16

    def __init__(self, library: Any) -> None:
        self._decompressor = library.ZstdDecompressor().decompressobj()
        self._data, self._at = b"", 0

    @property
    def eof(self) -> bool:
        return bool(self._decompressor.eof)

    @property
    def needs_input(self) -> bool:
        return self._at >= len(self._data)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._decompressor.unused_data) + self._data[self._at :]

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        if data:
            self._data, self._at = data, 0
        plain = bytearray()
        while not (self.eof or self.needs_input) and len(plain) < max_length:
            plain += self._decompressor.decompress(self._data[self._at : self._at + self._STEP])
            self._at += self._STEP
        return bytes(plain)


@lru_cache(maxsize=64)
def _kind(coding: str) -> _Kind | None:
    """How to undo it here. Looked for once: where a library is missing, that is said once, too."""
    coding = _canonical(coding)
    if coding == "gzip":
        return _Kind(partial(_Inflating, 16 + zlib.MAX_WBITS), zlib.error, frames=True)
    if coding == "deflate":
        return _Kind(_Deflate, zlib.error)
    find = {"br": _brotli, "zstd": _zstd}.get(coding)
    kind = find() if find is not None else None
    if find is not None and kind is None:
        logger.warning(
            "Retries that refuse the content coding %s can't be given the recorded answer: no library is installed "
            "here that undoes it. Install Flask-Idempotency[codings].",
            coding,
        )
    return kind


def _brotli() -> _Kind | None:
    for library in _installed("brotli", "brotlicffi"):
        # Before 1.2 there is no bound on what a few bytes may become.
        if hasattr(library.Decompressor, "can_accept_more_data"):
            return _Kind(partial(_Brotli, library), library.error)
    return None


def _zstd() -> _Kind | None:
    for library in _installed("compression.zstd", "backports.zstd", "zstandard"):
        foreign = library.__name__ == "zstandard"
        return _Kind(partial(_Zstandard, library) if foreign else library.ZstdDecompressor, library.ZstdError, True)
    return None


def _installed(*names: str) -> Iterator[Any]:
    for name in names:
        try:
            yield import_module(name)
        except ImportError:
            continue
