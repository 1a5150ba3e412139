"""Encryption keys for tests, and what can be read in a table of keys without them."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.apps import Shop

pytest.importorskip("cryptography")


def encryption_key() -> str:
    """A new encryption key, as ``Fernet.generate_key()`` makes one."""
    return base64.urlsafe_b64encode(os.urandom(32)).decode()


def as_stored(shop: Shop) -> bytes:
    """All that is in the table of keys and, for a file, in the database's files."""
    found = [json.dumps(row, default=_plain).encode() for row in shop.rows()]
    found += [row["response_body"] or b"" for row in shop.rows()]
    with shop.app.app_context():
        file = shop.db.engine.url.database if shop.db.engine.dialect.name == "sqlite" else None
    if file:
        found += [path.read_bytes() for path in Path(file).parent.glob(Path(file).name + "*")]
    return b"\n".join(found)


def _plain(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
