"""JSON pointers among the options are checked where they are written."""

from __future__ import annotations

import pytest

from flask_idempotency.config import read_keywords
from flask_idempotency.errors import OptionError


def test_pointers() -> None:
    """Members to leave out are names or RFC 6901 pointers."""
    assert {"fingerprint": ("at", "/client/time")} == read_keywords("required", {"fingerprint": ["at", "/client/time"]})


def test_a_pointer_that_is_none() -> None:
    """A stray tilde in a pointer is an error at the decorator, not in every request."""
    with pytest.raises(OptionError, match="no JSON pointer"):
        read_keywords("required", {"fingerprint": ["/client~time"]})
