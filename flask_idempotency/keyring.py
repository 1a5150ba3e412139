"""The app's encryption keys: what they are made of, and what is encrypted with them.

AES-256-GCM, with a key for each message. ``cryptography`` is imported when there are keys, and not before.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
from collections.abc import Sequence
from typing import Any, Final

KEY, SALT, NONCE, TAG = 32, 16, 12, 16

#: Of a key's id, in bytes: enough to tell an app's keys apart.
ID: Final = 4

_WANTED: Final = (
    "it must be a list of keys, or one string with commas between them, each 32 random bytes in URL-safe Base64, as "
    "cryptography.fernet.Fernet.generate_key() makes them. The value is not shown, since it is secret"
)
#: What an operator reads where a key is missing.
GONE: Final = (
    "{what} was sealed with the encryption key {id}, which is not among IDEMPOTENCY_ENCRYPTION_KEYS. Put that key "
    "back, behind the first one, until what was sealed with it is past its retention. Until then the view does not "
    "run for it. If the key is lost, so is what it sealed: look up what was done, and release the idempotency key by "
    "force to let the next retry run the view; one with steps has to be deleted for that (flask idempotency delete)."
)


class Key:
    """The keys that are made of one encryption key, one for each use."""

    def __init__(self, secret: bytes) -> None:
        self.id = _derived(secret, b"id", ID).hex()
        self.answers = _derived(secret, b"answers")
        self.steps = _derived(secret, b"steps")
        self.bodies = _derived(secret, b"bodies")
        self.fingerprints = _derived(secret, b"fingerprints")


class Keyring:
    """The app's encryption keys. The first one seals; all of them open.

    :raises ValueError: there is none, or one is none, or ``cryptography`` is not installed.
    """

    def __init__(self, keys: Sequence[str | bytes]) -> None:
        secrets = [_secret(one) for one in keys]
        if not secrets:
            raise ValueError(f"there is no key in it; None stands for no encryption. Else {_WANTED}")
        _assert_available()
        made = [Key(one) for one in secrets]
        self._first = made[0]
        self._known = {one.id: one for one in reversed(made)}
        if len(self._known) < len(set(secrets)):
            raise ValueError("two of the keys have the same id: make another one")

    def __repr__(self) -> str:
        return f"<Keyring {' '.join(self._known)}>"

    @property
    def first(self) -> Key:
        """The one that seals."""
        return self._first

    def find(self, id: str) -> Key | None:
        """The one with that id."""
        return self._known.get(id)


def encrypted(key: bytes, plain: bytes, bound: list[Any]) -> bytes:
    """One message, which is bound to a place: nowhere else can it be decrypted."""
    # A key for each message, made with 128 random bits: random nonces of 96 bits under one key alone would have to
    # end after 2^32 messages (NIST SP 800-38D, section 8.3), which a busy app has sent in some weeks.
    salt, nonce = os.urandom(SALT), os.urandom(NONCE)
    sealed: bytes = _message_cipher(key, salt).encrypt(nonce, plain, json.dumps(bound).encode())
    return salt + nonce + sealed


def decrypted(key: bytes, blob: bytes, bound: list[Any]) -> bytes | None:
    """What was encrypted; ``None`` where it is not that any more, or not here."""
    from cryptography.exceptions import InvalidTag

    if len(blob) < SALT + NONCE + TAG:
        return None
    salt, nonce = blob[:SALT], blob[SALT : SALT + NONCE]
    try:
        plain: bytes = _message_cipher(key, salt).decrypt(nonce, blob[SALT + NONCE :], json.dumps(bound).encode())
    except InvalidTag:
        return None
    return plain


def _message_cipher(key: bytes, salt: bytes) -> Any:
    return aes(hmac.digest(key, salt, "sha256"))


def aes(key: bytes) -> Any:
    """AES-GCM under a key."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _derived(secret: bytes, use: bytes, length: int = KEY) -> bytes:
    """A key for one use. Who has it learns nothing of the secret, nor of the other keys (HKDF, RFC 5869)."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), length, None, b"flask-idempotency: " + use).derive(secret)


def _secret(key: str | bytes) -> bytes:
    try:
        text = key.encode("ascii") if isinstance(key, str) else key
        secret = base64.b64decode(text.strip(), altchars=b"-_", validate=True)
    except ValueError:
        raise ValueError(_WANTED) from None
    if len(secret) != KEY:
        raise ValueError(_WANTED)
    return secret


def _assert_available() -> None:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: F401 - only whether it is there
    except ImportError:
        raise ValueError(
            "it needs cryptography, which is not installed: pip install Flask-Idempotency[encryption]"
        ) from None
