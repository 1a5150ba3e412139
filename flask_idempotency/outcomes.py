"""Settling by hand what the extension can't decide: keys that are held, and claims whose holder is gone.

Each is one compare-and-swap on the fencing token that was seen: a key that moved in between is left as it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from flask import Response, has_request_context

from .answer import Answer
from .claim import Status, Stored
from .errors import KeyNotFound, RecordRefused, SettleError, WriterHeld
from .recorded import Elsewhere, Recorded
from .scope import as_text, fits
from .sealing import KEYED, sealed
from .signals import logger, worded
from .state import AppState


def settle(state: AppState, scope: object, key: object, response: Response, *, force: bool = False) -> None:
    """Record an answer for a key: every retry gets it from now on, for the app's retention.

    :param scope: in its stored form, as ``idempotency.current.scope`` and the log have it.
    :param force: also for a claim whose lease is alive; its holder will record nothing.
    :raises KeyNotFound: there is no such key.
    :raises SettleError: it has an answer, or its claim is alive and force is off, or it changed meanwhile; or the
        response can't be kept.
    :raises StoreError: the store, or the body store, can't answer.
    """
    bodies, token = state.settings.body_store, secrets.token_hex(16)
    sink = None if bodies is None else partial(bodies.sink, token)
    response.autocorrect_location_header = False  # whoever settles has not the address that the client asked
    # A response class of the app's own may look at a request for what it adds.
    with nullcontext() if has_request_context() else state.app.test_request_context():
        answer = Answer(response, state.policy, keep=True, sink=sink)
        answer.read()
    recorded = answer.recorded()
    if answer.trouble is not None:
        raise answer.trouble
    if not recorded.available:
        raise SettleError(f"The response can't be kept: {answer.why}.")
    try:
        _settle(state, scope, key, recorded, token, force)
    except (SettleError, RecordRefused, WriterHeld):
        answer.drop()  # after any other failure the row may refer to its body
        raise


def _settle(state: AppState, scope: object, key: object, recorded: Recorded, token: str, force: bool) -> None:
    stored = _found(state, scope, key)
    if stored.status is Status.COMPLETED:
        raise SettleError("The key has a recorded answer, which is not replaced. Release it with force to drop that.")
    _refuse_alive(state, stored, force)
    if state.settings.encryption_keys is not None:
        recorded = sealed(state.settings.encryption_keys, recorded, stored.scope, stored.key)
    elif stored.fingerprint_version >= KEYED:
        raise SettleError("The answer has to be encrypted, as the fingerprint is: set IDEMPOTENCY_ENCRYPTION_KEYS.")
    with _telling_of_pending_work():
        settled = state.store.settle(stored, recorded, state.policy.retention, token, force)
    if not settled:
        raise SettleError(_MOVED)
    _log("recorded", stored, force)


def release(state: AppState, scope: object, key: object, *, force: bool = False) -> None:
    """Make a key claimable: the next retry runs the view.

    :param scope: in its stored form.
    :param force: also for a claim whose lease is alive, and for a key with a recorded answer, which is dropped.
    :raises KeyNotFound: there is no such key.
    :raises SettleError: its claim is alive or it has an answer, and force is off, or it changed meanwhile.
    :raises StoreError: the store can't answer.
    """
    stored = _found(state, scope, key)
    if stored.status is Status.RELEASED:
        return  # claimable already
    if stored.status is Status.COMPLETED and not force:
        raise SettleError(
            "The key has a recorded answer. Released, it would run the view again: force it if that is what you want."
        )
    _refuse_alive(state, stored, force)
    with _telling_of_pending_work():
        freed = state.store.free(stored, state.policy.retention, secrets.token_hex(16), force)
    if not freed:
        raise SettleError(_MOVED)
    body = stored.recorded.body if stored.recorded else None
    if isinstance(body, Elsewhere) and state.settings.body_store is not None:
        state.settings.body_store.discard(body.name)  # after the row has let go of it
    _log("released", stored, force)


_MOVED = "The key changed while it was looked at. Look at it again."


def _found(state: AppState, scope: object, key: object) -> Stored:
    where, what = as_text(scope), as_text(key, "A key is a text")
    state.prepare()
    stored = None
    # What no row can hold is in none of them.
    if where and what and fits(where) and fits(what):
        with _telling_of_pending_work():
            stored = state.store.find(where, what)
    if stored is None or stored.expired:
        raise KeyNotFound(
            "There is no such key in this scope. Both are given as they are stored: see the fields scope and key of "
            "the log records."
        )
    return stored


@contextmanager
def _telling_of_pending_work() -> Iterator[None]:
    """What a store says about hooks and guarded views is not what the caller has to do here."""
    try:
        yield
    except WriterHeld as error:
        raise WriterHeld(
            "The app has uncommitted writes in this very thread, and SQLite has one writer. Commit or roll them back "
            "before a key is settled or released."
        ) from error


def _refuse_alive(state: AppState, stored: Stored, force: bool) -> None:
    # Nothing renews a claim in SQLite's memory, which is this process's alone: whoever it holds, lives.
    alive = not stored.stale or (not state.store.separate and state.lifecycle.heartbeat.holds(stored.token))
    if stored.status is Status.IN_PROGRESS and alive and not force:
        raise SettleError(
            f"The key's claim is alive: its holder gave a sign of life {stored.age_seconds:.1f} s ago, and may still "
            "be running the view. Wait for its end or its lease's; with force the view may run twice at once."
        )


def _log(outcome: str, stored: Stored, force: bool) -> None:
    values = {
        "key": stored.key,
        "scope": stored.scope,
        "method": stored.method,
        "path": stored.path,
        "outcome": outcome,
        "was": stored.status.value,
        "forced": force,
        "age_seconds": stored.age_seconds,
    }
    logger.warning("idempotency.settle %s", worded(values), extra={"event": "idempotency.settle", **values})
