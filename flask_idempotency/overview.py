"""What people ask of an app's keys, and how a scope's are erased: what the command line and a console show."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Final, cast

from . import sealing, signals
from .bodies import BodyStore
from .endpoints import Endpoints
from .errors import BodyStoreError, ConfigurationError, KeyNotFound
from .recorded import Recorded
from .scope import fits
from .state import AppState
from .store.survey import Counts, Detail, Filters, Summary, Survey, Tally

#: The endpoint of keys whose path belongs to none that the app has now.
NONE: Final = "(none)"

#: Keys that are read, or erased, at a time.
PAGE: Final = 1_000
BATCH: Final = 5_000

#: What overviews ask of a store. Erasing is asked of it apart, where something is erased.
_ASKED: Final = ("stats", "tally", "listed", "detail")


class SurveyMissing(ConfigurationError):
    """The app's store does not have the methods that overviews are made of."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The keys of one endpoint, or of one scope. ``retried``: how many of them were asked for again."""

    name: str
    keys: int
    retried: int
    counts: Counts

    @property
    def vain(self) -> int:
        """How many requests came for a key that had been used."""
        return self.counts.replays + self.counts.conflicts + self.counts.mismatches


@dataclass(frozen=True, slots=True)
class Erased:
    """What an erasure has done. ``duration`` is in seconds.

    ``bodies`` were deleted from the body store; ``left`` are those that could not be, and belong to no key any more.
    """

    deleted: int
    bodies: int
    left: int
    duration: float


def survey_of(state: AppState, *more: str) -> Survey:
    """The app's store, which can be looked over.

    :param more: methods that it is to have beside those that read.
    :raises SurveyMissing: it can't be looked over.
    :raises ConfigurationError: the app's database can't be had.
    """
    state.prepare()
    if state.problem is not None:
        raise state.problem
    missing = [name for name in (*_ASKED, *more) if not callable(getattr(state.store, name, None))]
    if missing:
        raise SurveyMissing(
            f"The app's store, {type(state.store).__name__}, can't be looked over: it lacks {', '.join(missing)}. See "
            "flask_idempotency.store.survey.Survey."
        )
    return cast(Survey, state.store)


def older(state: AppState) -> bool:
    """Whether the store has found its table to be of an older shape, in which no counts are kept."""
    return bool(getattr(state.store, "older", False))


def ranked(state: AppState, by: str) -> list[Rank]:
    """Endpoints, or scopes, with their keys: first those for whose used keys most requests came.

    :param by: ``endpoint`` or ``scope``.
    :raises ConfigurationError: the store can't be looked over.
    :raises StoreError: the store can't answer.
    """
    tallies = survey_of(state).tally("scope" if by == "scope" else "path")
    found = _by_scope(tallies) if by == "scope" else _by_endpoint(state, tallies)
    return sorted(found, key=lambda one: (-one.vain, -one.keys, one.name))


def walked(state: AppState, filters: Filters, limit: int) -> Iterator[Summary]:
    """Keys as they are listed, those stored last first, page by page.

    :raises ConfigurationError: the store can't be looked over.
    :raises StoreError: the store can't answer.
    """
    survey, before = survey_of(state), None
    while limit > 0:
        page = survey.listed(filters, min(limit, PAGE), before)
        yield from page
        if len(page) < min(limit, PAGE):
            return
        limit, before = limit - len(page), page[-1].id


def found(state: AppState, scope: str, key: str) -> Detail:
    """All that is stored of one key, past its retention or not.

    :raises KeyNotFound: there is no such key.
    :raises RowUnreadable: the row is corrupt.
    :raises ConfigurationError: the store can't be looked over.
    :raises StoreError: the store can't answer.
    """
    survey = survey_of(state)
    # What no row can hold is in none of them.
    detail = survey.detail(scope, key) if fits(scope) and fits(key) else None
    if detail is None:
        raise KeyNotFound(
            "There is no such key in this scope. Both are given as they are stored: see flask idempotency list, or the "
            "fields scope and key of the log records."
        )
    return detail


def recorded_of(state: AppState, detail: Detail) -> Recorded | None:
    """The recorded answer, as people may read it; ``None``: there is none.

    :raises RowUnreadable: it is encrypted, and can't be opened.
    """
    recorded, one = detail.recorded, detail.summary
    return None if recorded is None else sealing.opened(state.settings.encryption_keys, recorded, one.scope, one.key)


def steps_of(state: AppState, detail: Detail) -> dict[str, str]:
    """The results of steps by their names, as JSON texts that people may read.

    :raises RowUnreadable: one is encrypted, and can't be opened.
    """
    keys, one = state.settings.encryption_keys, detail.summary
    return {name: sealing.opened_step(keys, text, one.scope, one.key, name) for name, text in detail.steps.items()}


def erase(
    state: AppState,
    scope: str,
    key: str | None = None,
    *,
    batch_size: int = BATCH,
    progress: Callable[[int], None] = lambda deleted: None,
) -> Erased:
    """Delete all keys of a scope, whatever their status, and their bodies in the body store; batch by batch.

    A run that is stopped between two batches has lost nothing, and can be repeated. A holder whose claim is deleted
    records nothing; a key that is claimed meanwhile may be left.

    :param scope: in its stored form.
    :param key: delete this one alone; in its stored form, too.
    :param progress: called with the number of deleted keys after each batch.
    :raises KeyNotFound: there is no key in the scope, or not that one.
    :raises ConfigurationError: the store can't be looked over.
    :raises StoreError: the store can't answer. What is deleted by then stays so.
    """
    begun, survey, bodies = time.monotonic(), survey_of(state, "erase"), state.settings.body_store
    deleted = gone = left = 0
    more = fits(scope)
    while more:
        batch = survey.erase(scope, batch_size, bodies is not None, key)
        # The rows first: a crash in between leaves bodies that a sweep finds, and no row without its body.
        kept = sum(not _deleted(bodies, name) for name in batch.bodies)
        deleted, gone, left = deleted + batch.count, gone + len(batch.bodies) - kept, left + kept
        more = batch.count >= batch_size
        progress(batch.count)
    if not deleted:
        what = "There is no key in this scope. It is" if key is None else "There is no such key in this scope. Both are"
        raise KeyNotFound(f"{what} given as stored: see flask idempotency list.")
    done = Erased(deleted, gone, left, time.monotonic() - begun)
    values = {"key": key, "scope": scope, "deleted": deleted, "bodies": gone, "left": left, "duration": done.duration}
    event = {"event": "idempotency.erase", **values}
    signals.logger.warning("idempotency.erase %s", signals.worded(values), extra=event)
    return done


def _deleted(bodies: BodyStore | None, name: str) -> bool:
    if bodies is None:
        return False
    try:
        bodies.delete(name)
    except BodyStoreError as error:
        signals.logger.error("The body %s of an erased key could not be deleted. %s", name, error)
        return False
    return True


class _Sums:
    """Ranks as they add up."""

    def __init__(self) -> None:
        self._found: dict[str, Rank] = {}

    def add(self, name: str, keys: int, retried: int, counts: Counts) -> None:
        before = self._found.get(name)
        if before is not None:
            counts = Counts(*(one + more for one, more in zip(astuple(before.counts), astuple(counts), strict=True)))
            keys, retried = before.keys + keys, before.retried + retried
        self._found[name] = Rank(name, keys, retried, counts)

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._found.values())


def _by_scope(tallies: Iterator[Tally]) -> _Sums:
    sums = _Sums()
    for one in tallies:
        sums.add(str(one.scope), one.keys, one.retried, one.counts)
    return sums


def _by_endpoint(state: AppState, tallies: Iterator[Tally]) -> _Sums:
    endpoints, sums, below = Endpoints(state.app), _Sums(), _Sums()
    whole = False
    for one in tallies:
        method, path = one.method or "", one.path or ""
        endpoint, keys = endpoints.at(method, path), (one.keys, one.retried, one.counts)
        if endpoint is not None:
            whole = True
            sums.add(endpoint, *keys)
        else:
            below.add(endpoints.below(method, path) or NONE, *keys)
    # An app that is mounted somewhere else has no path of its own without that: where some are found as they stand,
    # the rest is of routes that are gone.
    for rank in below:
        sums.add(NONE if whole else rank.name, rank.keys, rank.retried, rank.counts)
    return sums
