"""What the extension asks of a store. Each method is one decision, made by the store in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..claim import Asking, Claim, Stored
from ..errors import RecordRefused
from ..recorded import Recorded

__all__ = ["RecordRefused", "Store"]


class Store(Protocol):
    """A place for keys. Methods raise :class:`~flask_idempotency.errors.StoreError` when they can't answer.

    A call whose reply is lost is repeated by the store itself, once, on a new connection: every call
    carries a fencing token, so that repeating it changes nothing.
    """

    @property
    def separate(self) -> bool:
        """Whether calls may come from another thread while the app is in the middle of its own work.

        False where the store has no connection of its own (SQLite in memory).
        """

    def claim(self, asking: Asking) -> Claim | Stored:
        """Take a key that is not there, or return what is: exactly one of any number of callers gets the claim."""

    def take(self, asking: Asking, stored: Stored) -> Claim | None:
        """Replace ``stored`` by a compare-and-swap on its token; ``None`` when somebody else was first.

        Granted where, by the store's clock at that moment, it is past its retention (then nothing of it
        is left, and ``attempts`` begins at 1 again), its lease ran out under ``stale_policy``
        ``reexecute``, or it was released (then ``attempts`` goes on). The latter two only for the stored
        fingerprint, of the stored version.
        """

    def record(self, claim: Claim, recorded: Recorded, retention: float) -> bool:
        """Store the answer, to be kept for ``retention`` seconds from now. False: the claim was lost.

        :raises RecordRefused: the store can't hold this answer; the key can still be completed without it.
        """

    def release(self, claim: Claim) -> bool:
        """Give the claim up with nothing recorded. False: the claim was lost."""

    def renew(self, claims: Sequence[Claim]) -> set[str]:
        """A sign of life for all of them in one statement; returns the tokens that still hold."""

    def find(self, scope: str, key: str) -> Stored | None:
        """What is stored under a key, without claiming anything."""

    def prunable(self) -> int:
        """How many keys :meth:`prune` would delete now."""

    def prune(self, batch_size: int) -> int:
        """Delete at most ``batch_size`` keys that are past their retention, in a transaction of its own.

        Never one whose claim is alive, and never one that waits for a person: held, or past its lease
        under ``stale_policy`` ``reject``. Returns how many were deleted.
        """
