"""What the tests of a store ask for, and how they look at what they got."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from ..claim import Asking, Claim, Stored
from ..recorded import Recorded
from ..store.base import Store

T = TypeVar("T")

#: How many callers race for one key.
RIVALS = 8
ANSWER = Recorded(201, (("Content-Type", "application/json"), ("Location", "/charges/1")), b'{"id": 1}')


def ask(**changes: Any) -> Asking:
    """A request for a claim, with a token of its own; any field can be given."""
    asking = Asking(
        scope="tenant-1",
        key="key-00000001",
        method="POST",
        path="/charges",
        fingerprint="0123456789abcdef" * 4,
        fingerprint_version=1,
        token=secrets.token_hex(16),
        retention=86400.0,
        lock_timeout=30.0,
    )
    return replace(asking, **changes)


def claimed(store: Store, asking: Asking) -> Claim:
    """The claim that must be granted."""
    found = store.claim(asking)
    assert isinstance(found, Claim), f"no claim was granted, but {found} found"
    return found


def stored(store: Store, asking: Asking) -> Stored:
    """What must be there under the key, found by asking for a claim."""
    found = store.claim(replace(asking, token=secrets.token_hex(16)))
    assert isinstance(found, Stored), f"a claim was granted: {found}"
    return found


def race(function: Callable[[int], T], rivals: int = RIVALS) -> list[T]:
    """Call ``function`` in that many threads, which start at once."""
    barrier = threading.Barrier(rivals)

    def call(number: int) -> T:
        barrier.wait(10)
        return function(number)

    with ThreadPoolExecutor(rivals) as pool:
        return list(pool.map(call, range(rivals)))


class Shifting:
    """Tests in which time passes."""

    def shift(self, store: Any, seconds: float) -> None:
        """Make everything stored older by so many seconds."""
        raise NotImplementedError
