"""What the extension asks of a store. Each method is one decision, made by the store in one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..claim import Asking, Claim, Stored
from ..errors import RecordRefused
from ..recorded import Recorded

__all__ = ["Deleted", "RecordRefused", "Store"]


@dataclass(frozen=True, slots=True)
class Deleted:
    """What one batch of pruning came to: how many keys and, if asked, the names of their bodies elsewhere."""

    count: int
    bodies: tuple[str, ...] = ()


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
        """Give the claim up with nothing recorded. False: the claim was lost.

        A key that has steps or a secret's id stays, as ``released``, with both of them and its ``attempts``:
        claimable at once, by the same fingerprint only. Any other is new again.
        """

    def hold(self, claim: Claim) -> bool:
        """Leave the key to a person, as ``held``: never taken over, expired or pruned. False: the claim was lost.

        Its holder may repeat this, and can do nothing else with it from then on.
        """

    def resume(self, claim: Claim) -> Mapping[str, str] | None:
        """Prove that the claim holds, by a sign of life; returns what :meth:`keep_steps` stored last, this attempt or
        an earlier one. ``None``: the claim was lost.

        :raises RowUnreadable: what is stored is corrupt.
        """

    def keep_steps(self, claim: Claim, steps: Mapping[str, str]) -> bool:
        """Store the results of all steps so far in the place of those stored before, and renew the claim. False: it
        was lost.

        :param steps: texts by the steps' names, JSON or sealed; they come back character for character.
        :raises RecordRefused: the store can't hold them; what was stored before is still there.
        """

    def note_secret(self, claim: Claim, secret_id: str) -> str | None:
        """Note which secret the key's derived keys are made with, and renew the claim. The first to be noted stays.

        Returns the one that is noted, of at most 64 characters; ``None``: the claim was lost.
        """

    def renew(self, claims: Sequence[Claim]) -> set[str]:
        """A sign of life for all of them, in few statements; returns the tokens that still hold."""

    def find(self, scope: str, key: str) -> Stored | None:
        """What is stored under a key, without claiming anything."""

    def settle(self, stored: Stored, recorded: Recorded, retention: float, token: str, force: bool = False) -> bool:
        """Record an answer for a key that nobody works on, by a compare-and-swap on what was seen of it.

        Granted where, by the store's clock at that moment, it is held, released, or in progress past its lease
        whatever its ``stale_policy``; with ``force``, while the claim is alive, too. Never over a record.

        :param stored: what :meth:`find` gave: token and status must still be the same.
        :param retention: how long the answer is kept, in seconds from now.
        :param token: a new fencing token, so that a holder who was still at work can record nothing over it.
        :raises RecordRefused: the store can't hold this answer.
        :returns: False: the key has changed since, or is alive and force is off.
        """

    def free(self, stored: Stored, retention: float, token: str, force: bool = False) -> bool:
        """Make a key claimable again, by a compare-and-swap on what was seen of it.

        Granted where it is held, or in progress past its lease whatever its ``stale_policy``; with ``force``, while
        the claim is alive, and over a record, which is dropped, too. A key that has steps or a secret's id stays,
        as after :meth:`release`; any other is new again. One that is released is claimable already: False.

        :param stored: what :meth:`find` gave: token and status must still be the same.
        :param retention: how long a key that stays is kept, in seconds from now.
        :param token: a new fencing token, for a key that stays.
        :returns: False: the key has changed since, or is alive or recorded and force is off.
        """

    def prunable(self) -> int:
        """How many keys :meth:`prune` would delete now."""

    def prune(self, batch_size: int, bodies: bool = False) -> Deleted:
        """Delete at most ``batch_size`` keys that are past their retention, in a transaction of its own.

        Never one whose claim is alive, and never one that waits for a person: held, or past its lease
        under ``stale_policy`` ``reject``.

        :param bodies: whether to name the bodies that the keys had elsewhere. The caller deletes them, once the keys
            are gone. Not asked for where there is no body store, so that it need not cost anything there.
        """

    def tokens_in_use(self) -> Iterator[str]:
        """The fencing tokens of all keys that may need a body elsewhere, in no order.

        Of keys that are not completed: a body may be on its way. Of records with a body elsewhere. A key that has
        one of these tokens from before the call to its end, whatever becomes of it meanwhile, is among them.
        """
