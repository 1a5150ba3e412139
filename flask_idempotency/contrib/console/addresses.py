"""Scopes and keys as parts of addresses. A scope may hold anything: slashes, percent signs, any script."""

from __future__ import annotations

import base64

from ...scope import fits


def packed(text: str) -> str:
    """A text as one segment of a path, of letters, digits, ``-`` and ``_`` alone."""
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode("ascii")


def unpacked(segment: str) -> str | None:
    """The text again; ``None`` where the segment is of no text that a row can hold."""
    try:
        padded = segment.encode("ascii") + b"=" * (-len(segment) % 4)
        text = base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except ValueError:  # no ASCII, no base64, no UTF-8
        return None
    # One text, one address.
    return text if text and fits(text) and packed(text) == segment else None
