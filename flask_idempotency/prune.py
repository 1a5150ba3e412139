"""Deleting what is past its retention, batch by batch, and the bodies in the body store that belong to no key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from . import signals
from .bodies import BodyStore, token_of
from .errors import ConfigurationError
from .state import AppState
from .store.base import Store

#: How old a body has to be, in seconds, before it can be an orphan. Longer than hosts' clocks differ, and than an
#: atomic view takes from writing its answer's body to the commit that shows the row.
ORPHAN_AGE: Final = 3600.0


@dataclass(frozen=True)
class Pruned:
    """What a run has done. ``duration`` is in seconds; a dry run counts and deletes nothing.

    ``orphans`` are bodies in the body store that belonged to no key.
    """

    deleted: int
    batches: int
    duration: float
    dry_run: bool = False
    orphans: int = 0


def prune(
    state: AppState,
    *,
    batch_size: int,
    max_batches: int | None = None,
    pause: float = 0.0,
    dry_run: bool = False,
    body_store: bool = False,
    progress: Callable[[int], None] = lambda deleted: None,
) -> Pruned:
    """Delete until a batch comes out short, each batch a transaction of its own.

    A run that is stopped between two batches has lost nothing; two at once share the work.

    :param pause: seconds between two batches.
    :param body_store: then also delete what lies in the body store and belongs to no key.
    :param progress: called with the number of deleted keys after each batch.
    :raises ValueError: a number is out of range.
    :raises StoreError: the store or the body store can't be reached, or the table is missing.
    :raises ConfigurationError: the app's database can't be had, or there is no body store.
    """
    if batch_size < 1 or (max_batches is not None and max_batches < 1) or pause < 0:
        raise ValueError("batch_size and max_batches must be 1 or more, pause 0 or more.")
    bodies = state.settings.body_store
    if body_store and bodies is None:
        raise ConfigurationError("IDEMPOTENCY_BODY_STORE is not set, so there is no body store to look through.")
    begun = time.monotonic()
    state.prepare()
    if state.problem is not None:
        raise state.problem
    deleted = batches = orphans = 0
    if dry_run:
        deleted = state.store.prunable()
    else:
        for count in _batches(state.store, bodies, batch_size, max_batches, pause):
            deleted, batches = deleted + count, batches + (count > 0)
            progress(count)
    if body_store and bodies is not None:
        orphans = sweep(bodies, state.store, dry_run=dry_run)
    done = Pruned(deleted, batches, time.monotonic() - begun, dry_run, orphans)
    if not dry_run:
        told = {"deleted": done.deleted, "batches": done.batches, "duration": done.duration}
        signals.emit(signals.PRUNE, state.app, told)
    return done


def _batches(
    store: Store, bodies: BodyStore | None, batch_size: int, max_batches: int | None, pause: float
) -> Iterator[int]:
    """How many keys each batch has deleted."""
    done = 0
    while max_batches is None or done < max_batches:
        batch = store.prune(batch_size, bodies=bodies is not None)
        # The rows first: a crash in between leaves bodies that a sweep finds, and no row without its body.
        if bodies is not None:
            for name in batch.bodies:
                bodies.discard(name)
        done += batch.count > 0
        yield batch.count
        if batch.count < batch_size:
            return
        time.sleep(pause)


def sweep(bodies: BodyStore, store: Store, *, dry_run: bool = False) -> int:
    """Delete the bodies that belong to no key of the store; returns how many there were.

    They are listed first, and then the keys are read: a body whose key is completed in between is found by the one as
    by the other. One that is about to be written is too young. Two sweeps at once delete the same ones, which is no
    error; a body whose claim is taken over, or whose row is pruned, meanwhile, is left to the next sweep.

    :raises StoreError: the store or the body store can't answer. What is deleted by then was an orphan.
    """
    found: dict[str, list[str]] = {}
    for name in bodies.listed(ORPHAN_AGE):
        found.setdefault(token_of(name) or "", []).append(name)
    for token in store.tokens_in_use() if found else ():
        found.pop(token, None)
    orphans = [name for names in found.values() for name in names]
    for name in () if dry_run else orphans:
        bodies.delete(name)
    return len(orphans)
