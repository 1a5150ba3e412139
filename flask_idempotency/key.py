"""The key: what the client sends to name one logical operation."""

from __future__ import annotations

import hashlib
from typing import Final, cast

from .errors import KeyInvalid

#: The width of the column, and the longest key that a header may carry. Stripe's limit is the same.
MAX_LENGTH: Final = 255

#: How a key that can't be stored as it is begins in the table.
HASHED: Final = "~hash:"


def parse_header(value: str, min_length: int = 8) -> str:
    """The key in a header's value.

    The value is either a Structured Field string (RFC 9651, section 3.3.3), as the HTTP working group's
    Idempotency-Key draft has it, or the bare key, as most clients send it. Both spell the same key.
    Parameters behind a quoted key are ignored. A bare key holds no comma: a server that receives the
    header twice joins the two with one.

    :param value: the header's value as WSGI gives it.
    :param min_length: the fewest characters of a key; the most are 255.
    :raises KeyInvalid: the value is empty, a list, or not 8–255 printable ASCII characters.
    """
    text = value.strip(" \t")
    if not text:
        raise KeyInvalid("The idempotency key is empty. Send one value per operation, a UUID for example.")
    key = _quoted(text) if text.startswith('"') else _bare(text)
    if not min_length <= len(key) <= MAX_LENGTH:
        raise KeyInvalid(
            f"The idempotency key has {len(key)} characters. Send a key of {min_length} to {MAX_LENGTH} characters."
        )
    return storable(key)


def storable(key: str) -> str:
    """The form in which a key is stored: the key itself, or a hash of one that is long or not printable ASCII.

    A key that looks like such a hash is hashed too, so that no two keys ever share a stored form.
    """
    if key and len(key) <= MAX_LENGTH and _printable(key) and not key.startswith(HASHED):
        return key
    return HASHED + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _quoted(text: str) -> str:
    import http_sf  # most clients send bare keys

    try:
        # An item: a tuple of its value and its parameters.
        value, _parameters = cast("tuple[str, object]", http_sf.parse(text.encode("latin-1"), tltype="item"))
    except ValueError as error:
        raise KeyInvalid(
            "The idempotency key is not a valid quoted string. Send exactly one string in double quotes, or the bare "
            "key."
        ) from error
    return str(value)


def _bare(text: str) -> str:
    if "," in text:
        raise KeyInvalid(
            "The idempotency key holds a comma, as two headers do when they are joined. Send exactly one key, "
            "and put it in double quotes if the comma belongs to it."
        )
    if not _printable(text):
        raise KeyInvalid("The idempotency key holds a character that is not printable ASCII. Send a UUID, for example.")
    return text


def _printable(text: str) -> bool:
    return text.isascii() and text.isprintable()
