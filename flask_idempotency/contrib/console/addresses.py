"""Scopes and keys as parts of addresses. A scope may hold anything: slashes, percent signs, any script."""

from __future__ import annotations

import base64


def packed(text: str) -> str:
    """A text as one segment of a path, of letters, digits, ``-`` and ``_`` alone."""
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode("ascii")


def unpacked(segment: str) -> str | None:
    """The text again; ``None`` where the segment is of none."""
    try:
        text = base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4)).decode()
    except ValueError:  # no ASCII, no base64, no UTF-8
        return None
    # One text, one address: what the decoder passes over is none.
    return text if text and packed(text) == segment else None
