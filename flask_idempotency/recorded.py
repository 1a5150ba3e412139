"""The record: an answer as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A body that lies in the body store: the name of its object, its size in bytes, and its SHA-256 in hexadecimal.

    ``sealed``: what lies there is encrypted, and its size and digest are those of what lies there.
    """

    name: str
    size: int
    digest: str
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """One answer, as it is stored and as it is replayed.

    ``reason`` is a status text of the app's own, ``None`` for the standard one. ``body`` is an :class:`Elsewhere`
    where it is too large for the table, and ``None`` where the key is completed but its answer could not be kept;
    then there are no headers either.
    """

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | Elsewhere | None = None
    reason: str | None = None

    @property
    def available(self) -> bool:
        """Whether there is an answer to replay."""
        return self.body is not None

    def without_answer(self) -> Recorded:
        """What completes the key where the answer itself can't be kept: its status alone."""
        return Recorded(self.status)
