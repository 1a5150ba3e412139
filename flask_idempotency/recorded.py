"""The record: an answer as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recorded:
    """One answer, as it is stored and as it is replayed.

    ``reason`` is a status text of the app's own, ``None`` for the standard one. ``body`` is ``None``
    where the key is completed but its answer could not be kept; then there are no headers either.
    """

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    reason: str | None = None

    @property
    def available(self) -> bool:
        """Whether there is an answer to replay."""
        return self.body is not None

    def without_answer(self) -> Recorded:
        """What completes the key where the answer itself can't be kept: its status alone."""
        return Recorded(self.status)
