"""Deleting what is past its retention, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from . import signals
from .state import AppState


@dataclass(frozen=True)
class Pruned:
    """What a run has done. ``duration`` is in seconds; a dry run counts and deletes nothing."""

    deleted: int
    batches: int
    duration: float
    dry_run: bool = False


def prune(
    state: AppState,
    *,
    batch_size: int,
    max_batches: int | None = None,
    pause: float = 0.0,
    dry_run: bool = False,
    progress: Callable[[int], None] = lambda deleted: None,
) -> Pruned:
    """Delete until a batch comes out short, each batch a transaction of its own.

    A run that is stopped between two batches has lost nothing; two at once share the work.

    :param pause: seconds between two batches.
    :param progress: called with the number of deleted keys after each batch.
    :raises ValueError: a number is out of range.
    :raises StoreError: the store can't be reached, or its table is missing.
    :raises ConfigurationError: the app's database can't be had.
    """
    if batch_size < 1 or (max_batches is not None and max_batches < 1) or pause < 0:
        raise ValueError("batch_size and max_batches must be 1 or more, pause 0 or more.")
    begun = time.monotonic()
    state.prepare()
    if state.problem is not None:
        raise state.problem
    if dry_run:
        return Pruned(state.store.prunable(), 0, time.monotonic() - begun, dry_run=True)
    deleted = batches = 0
    while max_batches is None or batches < max_batches:
        count = state.store.prune(batch_size)
        deleted, batches = deleted + count, batches + (count > 0)
        progress(count)
        if count < batch_size:
            break
        time.sleep(pause)
    done = Pruned(deleted, batches, time.monotonic() - begun)
    signals.emit(
        signals.PRUNE, state.app, {"deleted": done.deleted, "batches": done.batches, "duration": done.duration}
    )
    return done
