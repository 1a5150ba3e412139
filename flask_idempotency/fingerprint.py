"""The fingerprint: one digest for every spelling of a request, different digests for different requests.

A stored fingerprint is compared by the version that made it, so no version in :data:`VERSIONS` may ever give
another digest than it does today.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import SEEK_END
from itertools import chain
from typing import BinaryIO
from urllib.parse import unquote_to_bytes

from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from .canonical import canonical_json, canonical_value, utf8

#: The version that new fingerprints are made by.
CURRENT_VERSION = 1

#: Parts of a multipart form that is compared by its meaning; a form of more goes by its bytes. Four times what Flask
#: accepts by default (``MAX_FORM_PARTS``), it keeps what a hostile form costs to a megabyte and a good half second.
MAX_PARTS = 4_000

# Bytes read from a stream at a time (so that hashing, not the loop around it, takes the time), and bytes that the
# multipart decoder may hold: preamble, epilogue and each part's headers, a few hundred bytes in real forms.
_CHUNK, _MAX_HELD = 64 * 1024, 256 * 1024


class UnknownVersion(LookupError):
    """A fingerprint was asked for by a version that this release can't compute."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form that the app has parsed already, taken as parsed.

    :ivar fields: name and value, in order.
    :ivar files: name, file name, content type and content (a seekable stream; its position is restored), in order.
    """

    fields: Sequence[tuple[str, str]]
    files: Sequence[tuple[str, str | None, str | None, BinaryIO]] = ()


@dataclass(frozen=True, slots=True)
class Value:
    """What an app's callable gave in place of the body, and so of its type and coding.

    :ivar value: ``bytes``, ``str``, ``None``, ``bool``, a finite ``int``, ``float`` or ``Decimal``, or lists, tuples
        and dicts (with ``str`` keys) of these, up to MAX_DEPTH levels. Compared as JSON: a tuple is a list, equal
        numbers are equal, and a ``float`` is the decimal number that Python writes it as.
    """

    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The parts of a request that give it its meaning.

    :ivar path: mount point and path, without the raw query string, which is ``query``.
    :ivar content_type: the raw header, as is ``content_encoding``; empty if there is none.
    :ivar body: a seekable stream, read from its start and rewound to it; or what stands for the body.
    :ivar leave_out: what does not count in JSON, see :func:`pointer_tokens`; an array's element keeps its place.
    :ivar max_form_memory_size: bytes, or ``None``: a longer urlencoded form goes by its bytes and is never held whole.
    """

    method: str
    path: str
    query: bytes
    content_type: str = ""
    content_encoding: str = ""
    body: BinaryIO | Form | Value
    leave_out: tuple[str, ...] = ()
    max_form_memory_size: int | None = 500_000


def fingerprint(message: Message, version: int = CURRENT_VERSION) -> str:
    """The message's SHA-256 by one version's rules: 64 lower-case hex digits.

    :raises UnknownVersion: this release does not know the version.
    :raises TypeError: a :class:`Value` holds what it can't.
    :raises ValueError: an entry of ``leave_out`` is no valid pointer.
    """
    if version not in VERSIONS:
        raise UnknownVersion(f"This release computes fingerprints of versions {sorted(VERSIONS)}, not of {version}.")
    return VERSIONS[version](message)


def pointer_tokens(pointer: str) -> tuple[str, ...]:
    """The names that lead to a part of a JSON document: a top-level member's, or those of an RFC 6901 pointer ("/…").

    :raises ValueError: in a pointer, a ``~`` is followed by neither ``0`` nor ``1``.
    """
    if not pointer.startswith("/"):
        return (pointer,)
    if re.search("~(?![01])", pointer):
        raise ValueError(f"{pointer!r} is no JSON pointer: inside a name, write '~' as '~0' and '/' as '~1'.")
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in pointer[1:].split("/"))


def _version_1(message: Message) -> str:
    start = (b"1", utf8(message.method), utf8(message.path), _by_name(_split_pairs(message.query)))
    return sha256(_frame(*start, *_body(message))).hexdigest()


#: Every version that a stored fingerprint may have, and the function that computes its hex digits.
VERSIONS: dict[int, Callable[[Message], str]] = {1: _version_1}


def _frame(*parts: bytes) -> bytes:
    """The parts, each after its length: no byte can move from one into the next unseen."""
    return b"".join([b"%d:%b" % (len(part), part) for part in parts])


def _by_name(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """The pairs, sorted by name alone: what shares a name keeps its order."""
    return _frame(*chain(*sorted(pairs, key=lambda pair: pair[0]))) if pairs else b""


def _digest(stream: BinaryIO) -> bytes:
    digest = sha256()
    stream.seek(0)
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
    return digest.digest()


def _body(message: Message) -> tuple[bytes, ...]:
    """The body's parts. The first names the way it was read, so that no two ways can meet."""
    body = message.body
    media_type = message.content_type.partition(";")[0].strip(" \t").lower()
    if isinstance(body, Value):
        return b"value", canonical_value(body.value)
    if isinstance(body, Form):
        return _parsed_form(body, media_type)
    coding = message.content_encoding.strip(" \t").lower()
    coding = "" if coding == "identity" else coding
    try:
        body.seek(0)
        meaning = None if coding else _meaning(body, media_type, message)
        return meaning or (b"bytes", _full_type(message.content_type), utf8(coding), _digest(body))
    finally:
        body.seek(0)


def _meaning(stream: BinaryIO, media_type: str, message: Message) -> tuple[bytes, ...] | None:
    """The parts of a body that is what its type says; ``None`` for one that goes by its bytes."""
    leave_out = [pointer_tokens(pointer) for pointer in message.leave_out]
    try:
        if media_type == "application/json" or media_type.endswith("+json"):
            return b"json", utf8(media_type), canonical_json(stream.read(), leave_out)
        if media_type == "application/x-www-form-urlencoded":
            stream.seek(0, SEEK_END)
            limit, size = message.max_form_memory_size, stream.tell()
            stream.seek(0)
            return None if limit is not None and size > limit else (b"form", _by_name(_split_pairs(stream.read())))
        if media_type == "multipart/form-data":
            return b"parts", utf8(media_type), _by_name(_read_parts(stream, message.content_type))
    except (ValueError, RequestEntityTooLarge):
        pass
    return None


def _full_type(content_type: str) -> bytes:
    """The media type and its parameters, alike for the spellings that RFC 9110, section 8.3.1, calls equivalent."""
    media_type, _, rest = content_type.partition(";")
    parameters = []
    for piece in re.findall(r'(?:[^;"]|"(?:[^"\\]|\\.)*"?)+', rest, re.DOTALL):
        name, equals, value = re.sub(r'="([\w.+-]+)"$', r"=\1", piece.strip(" \t"), flags=re.ASCII).partition("=")
        if name or equals:
            parameters.append((name.lower(), equals + (value.lower() if name.lower() == "charset" else value)))
    parameters.sort(key=lambda parameter: parameter[0])  # names that are repeated keep their order
    return _frame(*map(utf8, [media_type.strip(" \t").lower(), *chain(*parameters)]))


def _split_pairs(data: bytes) -> list[tuple[bytes, bytes]]:
    """Names and values by the WHATWG URL standard, but as bytes: as text, invalid UTF-8 could not be told apart."""
    if not data:  # most queries
        return []
    pieces = [piece.replace(b"+", b" ").partition(b"=") for piece in data.split(b"&") if piece]
    return [(unquote_to_bytes(name), unquote_to_bytes(value)) for name, _, value in pieces]


def _part(name: str | None, content: bytes, file: tuple[str | None, str | None] | None = None) -> tuple[bytes, bytes]:
    """A part of a form (``file``: its file name and content type) as two digests: what it is called, what it holds.

    Of a fixed size, so that memory depends neither on its content nor on its headers.
    """
    name_word, *words = [b"" if word is None else b"=" + utf8(word) for word in (name, *(file or ()))]
    called, holds = _frame(b"file" if file else b"field", name_word), _frame(content, *words)
    return sha256(called).digest(), sha256(holds).digest()


def _parsed_form(form: Form, media_type: str) -> tuple[bytes, ...]:
    if media_type == "application/x-www-form-urlencoded" and not form.files:
        return b"form", _by_name([(utf8(name), utf8(value)) for name, value in form.fields])
    parts = [_part(name, sha256(utf8(value)).digest()) for name, value in form.fields]
    for name, file_name, content_type, stream in form.files:
        position = stream.tell()
        parts.append(_part(name, _digest(stream), (file_name, content_type)))
        stream.seek(position)
    return b"parts", utf8(media_type), _by_name(parts)


def _read_parts(stream: BinaryIO, content_type: str) -> list[tuple[bytes, bytes]]:
    """The parts of multipart/form-data (RFC 7578). ValueError or RequestEntityTooLarge: it goes by its bytes."""
    parts = []
    boundary = parse_options_header(content_type)[1].get("boundary", "").encode("ascii")
    if not boundary:
        raise ValueError("no boundary")
    decoder = MultipartDecoder(boundary, _MAX_HELD, max_parts=MAX_PARTS)
    for chunk in chain(iter(lambda: stream.read(_CHUNK), b""), [None]):  # the decoder takes None for the end
        decoder.receive_data(chunk)
        while not isinstance(event := decoder.next_event(), (NeedData, Epilogue)):
            if isinstance(event, (Field, File)):
                name, content, kind = event.name, sha256(), event.headers.get("content-type")
                file = (event.filename, kind) if isinstance(event, File) else None
                # The app reads such a field as Latin-1: its text counts, as in a form that is parsed already.
                latin = not file and parse_options_header(kind)[1].get("charset", "").lower() == "iso-8859-1"
            elif isinstance(event, Data):
                content.update(event.data.decode("latin-1").encode() if latin else event.data)
                if not event.more_data:
                    parts.append(_part(name, content.digest(), file))
    return parts
