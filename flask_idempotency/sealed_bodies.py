"""Bodies in the body store, sealed piece by piece, so that memory stays flat."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

from .errors import BodyLost, BodyStoreError
from .keyring import GONE, ID, NONCE, SALT, TAG, Key, Keyring, aes

#: How much of a body is sealed at a time, in bytes: what is in memory of it beside the piece that came last.
PIECE: Final = 64 * 1024

#: The form, and then the id and the salt, before the first piece of a body.
_FORM: Final = b"\x01"
_HEAD: Final = len(_FORM) + ID + SALT


class BodySealer:
    """Seals a body piece by piece, under a key of its own, which its object's name is bound into.

    Each piece carries its number, and the last one that it is the last: pieces can be neither moved, nor left out, nor
    cut off.
    """

    def __init__(self, keys: Keyring, name: str) -> None:
        salt = os.urandom(SALT)
        self._cipher = _body_cipher(keys.first, salt, name)
        self._head = _FORM + bytes.fromhex(keys.first.id) + salt
        self._held = bytearray()
        self._number = 0

    def add(self, chunk: bytes) -> Iterator[bytes]:
        """Take in the next of the body; gives what is sealed by now. The last piece is held until more comes."""
        for start in range(0, len(chunk), PIECE):
            part = chunk[start : start + PIECE]
            room = PIECE - len(self._held)
            self._held += part[:room]
            if len(part) > room:
                yield self._sealed(last=False)
                self._held += part[room:]

    def end(self) -> bytes:
        """The last of it."""
        return self._sealed(last=True)

    def _sealed(self, *, last: bool) -> bytes:
        nonce, bound = _numbered(self._number, last)
        piece: bytes = self._head + self._cipher.encrypt(nonce, bytes(self._held), bound)
        self._head = b""
        self._held.clear()
        self._number += 1
        return piece


def opened_body(keys: Keyring | None, name: str, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """A sealed body, piece by piece, of what lies in the body store under that name.

    :raises BodyLost: it is not what was sealed under that name.
    :raises BodyStoreError: its encryption key is not there.
    """
    held = bytearray()
    cipher: Any = None
    number = 0
    for chunk in chunks:
        held += chunk
        if cipher is None and len(held) >= _HEAD:
            cipher = _cipher_of(keys, name, bytes(held[:_HEAD]))
            del held[:_HEAD]
        # One of them is held back: it may be the last, which is another thing.
        while cipher is not None and len(held) > PIECE + TAG:
            yield _opened_piece(cipher, name, number, bytes(held[: PIECE + TAG]), last=False)
            del held[: PIECE + TAG]
            number += 1
    if cipher is None:
        raise BodyLost(f"The body {name} is cut off.")
    yield _opened_piece(cipher, name, number, bytes(held), last=True)


def _cipher_of(keys: Keyring | None, name: str, head: bytes) -> Any:
    id = head[len(_FORM) : len(_FORM) + ID].hex()
    if head[: len(_FORM)] != _FORM:
        raise BodyLost(f"The body {name} is not sealed as it should be.")
    key = None if keys is None else keys.find(id)
    if key is None:
        raise BodyStoreError(GONE.format(what=f"The body {name}", id=id))
    return _body_cipher(key, head[-SALT:], name)


def _opened_piece(cipher: Any, name: str, number: int, piece: bytes, *, last: bool) -> bytes:
    from cryptography.exceptions import InvalidTag

    nonce, bound = _numbered(number, last)
    try:
        plain: bytes = cipher.decrypt(nonce, piece, bound)
    except InvalidTag:
        raise BodyLost(f"The body {name} is not what was sealed under that name.") from None
    return plain


def _body_cipher(key: Key, salt: bytes, name: str) -> Any:
    return aes(hmac.digest(key.bodies, salt + name.encode(), "sha256"))


def _numbered(number: int, last: bool) -> tuple[bytes, bytes]:
    """The nonce of a piece, and what is bound to it. The key serves one body alone, so numbers never come again."""
    return number.to_bytes(NONCE, "big"), b"last" if last else b"more"
