"""Sealing: what is recorded is encrypted before a store gets it, and opened for a replay.

Stores see an answer as ever: with a status, a header under a name that no header can have, and bytes. What is sealed
is bound to its place, so that nobody who can write to the table can move it to another key: an answer to scope, key,
status and, if it lies elsewhere, its body's object; a step's result to scope, key and the step's name.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import re
from dataclasses import replace
from typing import Any, Final

from .errors import RowUnreadable
from .keyring import GONE, ID, Key, Keyring, decrypted, encrypted
from .recorded import Elsewhere, Recorded

#: The one header of a sealed answer. No header can have this name. Its value: the form (1), the id of the encryption
#: key and, where the body is elsewhere, what is sealed, in Base64.
SEALED: Final = ":sealed"

#: Added to the version of a fingerprint that is keyed. A release or an app that has no keys does not know such a
#: version, and answers 503 rather than taking one fingerprint for another.
KEYED: Final = 1000

_TEXT: Final = re.compile(r"1 ([0-9a-f]{8})(?: ([A-Za-z0-9+/=]+))?")

_ALTERED: Final = (
    "{what} can't be opened, though its encryption key {id} is there: it was changed, or belongs to another place. It "
    "is left as it is, and the view does not run for it. Look up what was done, then settle the idempotency key, or "
    "release it by force."
)
_UNSEALED: Final = (
    "A stored answer is not sealed, though its fingerprint is keyed: it was put in by somebody who lacks the "
    "encryption keys. It is left as it is, and the view does not run for it. Look up what was done, then release the "
    "idempotency key by force."
)


# Fingerprints


def fingerprinted(keys: Keyring | None, digest: str, version: int, like: str) -> str:
    """A fingerprint under an encryption key, so that nobody without the key can try what a request may have been.

    64 hexadecimal digits: the key's id, and 224 bits of an HMAC-SHA256.

    :param version: of the digest; what is stored beside the result is higher by `KEYED`.
    :param like: a stored one, to be made with the same key; empty: with the first.
    :raises RowUnreadable: that key is not there.
    """
    id = like[: 2 * ID]
    key = None if keys is None else (keys.find(id) if like else keys.first)
    if key is None:
        raise RowUnreadable(GONE.format(what="A stored fingerprint", id=id))
    return key.id + hmac.digest(key.fingerprints, f"{version}\n{digest}".encode(), "sha256")[:28].hex()


# Answers


def sealed(keys: Keyring, recorded: Recorded, scope: str, key: str) -> Recorded:
    """A record that only its own scope and key can open. Of what has no answer, the status is all there is."""
    if recorded.body is None:
        return recorded
    apart = isinstance(recorded.body, Elsewhere) and recorded.body.sealed
    head = json.dumps([recorded.headers, recorded.reason, apart]).encode()
    body = b"" if isinstance(recorded.body, Elsewhere) else recorded.body
    plain = len(head).to_bytes(4, "big") + head + body
    blob = encrypted(keys.first.answers, plain, _place(recorded, scope, key))
    mark = f"1 {keys.first.id}"
    if isinstance(recorded.body, Elsewhere):
        return Recorded(recorded.status, ((SEALED, f"{mark} {_as_text(blob)}"),), recorded.body)
    return Recorded(recorded.status, ((SEALED, mark),), blob)


def is_sealed(recorded: Recorded) -> bool:
    """Whether it has to be opened before it means anything."""
    return bool(recorded.headers) and recorded.headers[0][0] == SEALED


def opened(keys: Keyring | None, recorded: Recorded, scope: str, key: str, version: int = 0) -> Recorded:
    """The record as it was made; one that is not sealed as it is.

    :param version: of the fingerprint beside it. Under a keyed one, what is not sealed is not taken for an answer.
    :raises RowUnreadable: its encryption key is not there, or it was changed, put in, or moved here from another key.
    """
    if not is_sealed(recorded):
        if version >= KEYED and recorded.available:
            raise RowUnreadable(_UNSEALED)
        return recorded
    what = "A stored answer"
    own, blob = _parsed(keys, recorded.headers[0][1], what)
    if not isinstance(recorded.body, Elsewhere):
        blob = recorded.body or b""
    plain = decrypted(own.answers, blob, _place(recorded, scope, key))
    if plain is None:
        raise RowUnreadable(_ALTERED.format(what=what, id=own.id))
    end = 4 + int.from_bytes(plain[:4], "big")
    headers, reason, apart = json.loads(plain[4:end])
    body: bytes | Elsewhere = plain[end:]
    if isinstance(recorded.body, Elsewhere):
        body = replace(recorded.body, sealed=apart)
    return Recorded(recorded.status, tuple((name, value) for name, value in headers), body, reason)


def _place(recorded: Recorded, scope: str, key: str) -> list[Any]:
    body = recorded.body
    where = [body.name, body.size, body.digest] if isinstance(body, Elsewhere) else None
    return ["answer", scope, key, recorded.status, where]


# Results of steps


def sealed_step(keys: Keyring | None, text: str, scope: str, key: str, name: str) -> str:
    """A step's result as it is stored. What is sealed is no JSON, so that it can't be a result of its own."""
    if keys is None:
        return text
    blob = encrypted(keys.first.steps, text.encode(), ["step", scope, key, name])
    return f"{SEALED} 1 {keys.first.id} {_as_text(blob)}"


def opened_step(keys: Keyring | None, text: str, scope: str, key: str, name: str) -> str:
    """The JSON text of a step's result, as it was made; one that is not sealed as it is.

    :raises RowUnreadable: its encryption key is not there, or it was changed, or moved here from another step.
    """
    if not text.startswith(SEALED):
        return text
    what = f"The result of the step {name!r}"
    own, blob = _parsed(keys, text[len(SEALED) + 1 :], what)
    plain = decrypted(own.steps, blob, ["step", scope, key, name])
    if plain is None:
        raise RowUnreadable(_ALTERED.format(what=what, id=own.id))
    return plain.decode()


# Parts


def _parsed(keys: Keyring | None, text: str, what: str) -> tuple[Key, bytes]:
    found = _TEXT.fullmatch(text)
    if found is None:
        raise RowUnreadable(f"{what} is not sealed as it should be: it is corrupt, or of a later release.")
    key = None if keys is None else keys.find(found[1])
    if key is None:
        raise RowUnreadable(GONE.format(what=what, id=found[1]))
    try:
        return key, base64.b64decode(found[2] or "", validate=True)
    except binascii.Error:
        raise RowUnreadable(_ALTERED.format(what=what, id=key.id)) from None


def _as_text(blob: bytes) -> str:
    return base64.b64encode(blob).decode()
