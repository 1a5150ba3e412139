"""One request at one guard: from its header to its claim or its answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import quote

from flask import Request, Response, current_app

from . import body, caller, coding, errors, sealing, signals
from .answer import Restored, restore
from .atomic import AtomicAttempt
from .attempt import Attempt
from .capping import Cap
from .changes import ENVIRON
from .fingerprint import CURRENT_VERSION, UnknownVersion, Value
from .fingerprint import fingerprint as digest_of
from .lifecycle import Refused, Replay
from .lifecycle import Request as Asked
from .policy import Policy
from .recorded import Elsewhere, Recorded
from .slot import Slot
from .state import AppState
from .unit import in_use

if TYPE_CHECKING:
    from .guard import Guard

#: The widths of the columns.
METHOD_LENGTH: Final = 10
PATH_LENGTH: Final = 500

_NO_BODY_STORE: Final = "The answer's body {} is in a body store, and IDEMPOTENCY_BODY_STORE is not set."
_SET_IT: Final = "Set IDEMPOTENCY_BODY_STORE to what it was when the answer was recorded."
_LOST: Final = (
    "If the object was moved, or IDEMPOTENCY_BODY_STORE was changed, bring the two together. If it is gone, so is the "
    "answer: look up what was done, or release the key (flask idempotency release --force SCOPE KEY) to run it again."
)
_REACH_IT: Final = "See that the body store can be reached from here. Retries get the answer then."
_OPEN_IT: Final = (
    "Give IDEMPOTENCY_ENCRYPTION_KEYS the keys that were used within the retention, today's first. If the answer was "
    "changed or its key is lost, look up what was done, and release the key (flask idempotency release --force SCOPE "
    "KEY) to run it again."
)
_LATER: Final = (
    "The request with this key was carried out, and its answer can't be read right now. Send the same request with the "
    "same key again after the number of seconds in Retry-After: it is not carried out again."
)

#: How much of a client's name for itself is logged: libraries and browsers need less, and the rest is the client's.
USER_AGENT_LENGTH: Final = 200


class Entering:
    """One request at one guard, from its header to its claim or its answer."""

    def __init__(self, guard: Guard, state: AppState, policy: Policy, asked: Request, slot: Slot) -> None:
        self.guard = guard
        self.state = state
        self.policy = policy
        self.asked = asked
        self.slot = slot
        self.fields: dict[str, Any] = {
            "key": None,
            "scope": None,
            "method": asked.method,
            "path": asked.script_root + asked.path,
            "endpoint": asked.endpoint,
        }

    def begin(self) -> Response | None:
        """``None`` to run the view; a response that replays."""
        try:
            key = caller.find_key(self.asked, self.policy)
            if key is None and not self.guard.required:
                body.give_back(self.asked)
                self._let_through("no-key")
                return None
            if key is None:
                raise errors.KeyMissing(**self._where(f"Send it in the header {self.policy.header}. "))
            self.fields["key"] = key
            self.fields["scope"] = caller.find_scope(self.asked, self.state, self.guard, self.policy)
        except errors.IdempotencyError as error:
            self._turn_away(error)
        request = self._read()
        if in_use():
            raise errors.WorkPending(
                "A guarded request was made within an atomic view, in one context and so with the same db.session. "
                "Its work would be a part of the view's, and its record would not. Call the function itself, or make "
                "the request in an app context of its own."
            )
        attempt = self.slot.attempt = self._attempt(request)
        cap = self.state.cap
        try:
            if cap is not None:
                self._refuse_past(cap)
            outcome = attempt._ask(request)
        except Refused as refused:
            self._refuse(refused)
        except errors.StoreError as error:
            self._without_store(error)
            self.slot.unguarded = True
            self._let_through("store-unavailable", logging.WARNING)
            return None
        except errors.WorkPending as error:
            raise errors.WorkPending(f"{error} {_hooks(self.asked)}".strip()) from None
        if isinstance(outcome, Replay):
            return self._replay(attempt, outcome)
        self.asked.environ[ENVIRON] = attempt._changes
        if cap is not None and outcome.claim.attempts == 1:
            cap.claimed(self.fields["scope"])
        attempt._grant(outcome)
        return None

    def _refuse_past(self, cap: Cap) -> None:
        """Refuse a new key of a scope that has as many as it may."""
        seconds = cap.full(self.fields["scope"], self.fields["key"])
        if seconds is not None:
            self._turn_away(errors.TooManyKeys(retry_after=max(seconds, self.policy.retry_after)))

    def _attempt(self, request: Asked) -> Attempt:
        state, policy = self.state, self.policy
        bodies, keys = state.settings.body_store, state.settings.encryption_keys
        fingerprint = request.fingerprint(request.version, "")
        known = (state.app, state.lifecycle, policy, bodies, keys, fingerprint, self.fields)
        if not policy.atomic:
            return Attempt(*known)
        return AtomicAttempt(*known, unit=state.unit(), retries=policy.atomic_retries - self.slot.runs)

    def _let_through(self, reason: str, level: int = logging.INFO) -> None:
        """The view runs without a claim."""
        self.slot.passed = True
        self.slot.after_commit = [] if self.policy.atomic else None
        if self.slot.told != reason:  # by another guard of the same request
            self.slot.told = reason
            client = self.asked.headers.get("User-Agent", "")[:USER_AGENT_LENGTH]
            values = {**self.fields, "reason": reason, "user_agent": client}
            signals.emit(signals.UNGUARDED, self.state.app, values, level)

    def _where(self, hint: str) -> dict[str, Any]:
        return {"detail": f"{errors.sentences(errors.KeyMissing)} {hint.strip()}"} if self.policy.key is None else {}

    def _read(self) -> Asked:
        """The request with its fingerprint, taken once, before the view can change what it parsed."""
        own = self.policy.fingerprint
        instead = Value(caller.call(own, self.asked)) if callable(own) else None
        message = body.message(self.asked, instead, own if isinstance(own, tuple) else ())
        known: dict[int, str] = {}
        keys = self.state.settings.encryption_keys

        def by_version(version: int, like: str) -> str:
            if version >= sealing.KEYED:
                base = version - sealing.KEYED
                return sealing.fingerprinted(keys, by_version(base, ""), base, like)
            if version not in known:
                try:
                    known[version] = digest_of(message, version)
                except UnknownVersion as error:
                    raise errors.RowUnreadable(f"A stored row can't be compared with the request: {error}") from error
            return known[version]

        by_version(CURRENT_VERSION, "")
        return Asked(
            scope=self.fields["scope"],
            key=self.fields["key"],
            method=self.asked.method[:METHOD_LENGTH],
            path=for_people(self.fields["path"]),
            version=CURRENT_VERSION if keys is None else CURRENT_VERSION + sealing.KEYED,
            fingerprint=by_version,
            policy=self.policy,
        )

    def _replay(self, attempt: Attempt, replay: Replay) -> Response:
        accepted = self.asked.headers.get("Accept-Encoding")
        recorded = self._opened(replay)
        if isinstance(recorded.body, Elsewhere):
            suited, chunks = self._fetched(recorded, recorded.body, accepted)
        else:
            suited, chunks = coding.suited(recorded, accepted) or self._turn_away(_unavailable(recorded))
        attempt._replay(Replay(replay.asking, suited, replay.stored), chunks)
        made = restore(suited, current_app.response_class(), self.policy, chunks() if chunks is not None else None)
        attempt._restored = Restored(made)
        return made

    def _opened(self, replay: Replay) -> Recorded:
        stored, keys = replay.stored, self.state.settings.encryption_keys
        try:
            return sealing.opened(keys, replay.recorded, stored.scope, stored.key, stored.fingerprint_version)
        except errors.RowUnreadable as error:
            unavailable = errors.StoreUnavailable(_LATER, retry_after=self.policy.retry_after)
            self._turn_away(unavailable, exception=str(error), remedy=_OPEN_IT)

    def _fetched(
        self, recorded: Recorded, where: Elsewhere, accepted: str | None
    ) -> tuple[Recorded, coding.Pieces | None]:
        """A record whose body lies elsewhere, in a form that the request accepts, and how to get the body's bytes.

        All of it is read once before anything is sent: a body that is gone or damaged is no success that breaks off.
        """
        bodies = self.state.settings.body_store
        codings = coding.choose(recorded, accepted)
        if bodies is None:
            self._turn_away(_unavailable(recorded), exception=_NO_BODY_STORE.format(where.name), remedy=_SET_IT)
        if codings is None:
            self._turn_away(_unavailable(recorded))
        try:
            size = sum(map(len, coding.undo(bodies.chunks(where), codings)))
        except errors.BodyLost as error:
            self._turn_away(_unavailable(recorded), exception=str(error), remedy=_LOST)
        except errors.BodyStoreError as error:
            unavailable = errors.StoreUnavailable(_LATER, retry_after=self.policy.retry_after)
            self._turn_away(unavailable, exception=str(error), remedy=_REACH_IT)
        except coding.Undecodable:
            if accepted is not None:
                self._turn_away(_unavailable(recorded))
            return self._fetched(recorded, where, "*")  # it refuses nothing: as it is, then
        if codings:
            recorded = replace(recorded, headers=coding.plain_headers(recorded.headers, size))
        return recorded, lambda: self._telling_of_loss(coding.undo(bodies.chunks(where), codings))

    def _telling_of_loss(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        try:
            yield from chunks
        except (errors.BodyLost, errors.BodyStoreError) as error:
            # Between the reading before and this one. The server breaks the answer off, and the client sees that.
            values = {**self.fields, "exception": str(error), "remedy": _LOST}
            signals.logger.error("A replay broke off: %s", signals.worded(values), extra=values)
            raise

    def _refuse(self, refused: Refused) -> NoReturn:
        stored, age = refused.stored, refused.stored.age_seconds
        if refused.error is errors.KeyReused:
            self._emit(signals.MISMATCH, original_path=stored.path, age_seconds=age)
            raise self._error(errors.KeyReused, status=self.policy.mismatch_status) from None
        if refused.error is errors.RecordUnavailable:
            status = stored.recorded.status if stored.recorded else None
            self._turn_away(errors.RecordUnavailable(original_status=status))
        self._emit(signals.CONFLICT, age_seconds=age, waited=refused.waited)
        if refused.error is errors.InFlight:
            raise self._error(errors.InFlight, retry_after=self.policy.retry_after) from None
        raise self._error(refused.error) from None

    def _without_store(self, error: errors.StoreError) -> None:
        """Refuse with 503; or return, where the app chose to run unguarded then."""
        known = isinstance(error, (errors.WriterHeld, errors.RowUnreadable))
        if self.policy.on_store_error == "execute" and not known:
            self._emit(signals.RECORD_FAILED, exception=f"running unguarded: {error}")
            return
        # Its text has the cause. A traceback for each request that comes meanwhile would only bury it.
        signals.logger.error("The store can't answer, and the view is not run: %s", error)
        detail = None
        if isinstance(error, errors.WriterHeld):
            detail = f"{error} {_hooks(self.asked)}".strip()
        self._turn_away(errors.StoreUnavailable(detail, retry_after=self.policy.retry_after))

    def _turn_away(self, error: errors.IdempotencyError, **why: str) -> NoReturn:
        """Refuse the request. With ``exception`` and ``remedy`` it is an error of the server's, and logged as one."""
        values = {**self.fields, "reason": error.slug, **why}
        signals.emit(signals.REJECT, self.state.app, values, logging.ERROR if why else None)
        raise error.under(self.state.settings.problem_base) from None

    def _error(self, kind: type[errors.IdempotencyError], **how: Any) -> errors.IdempotencyError:
        return kind(base=self.state.settings.problem_base, **how)

    def _emit(self, event: signals.Event, **values: Any) -> None:
        signals.emit(event, self.state.app, {**self.fields, **values})


def _unavailable(recorded: Recorded) -> errors.RecordUnavailable:
    return errors.RecordUnavailable(original_status=recorded.status)


def for_people(path: str) -> str:
    """A path as it is kept beside a key: cut, and without what a column or a terminal can't hold."""
    if not path.isprintable():
        path = "".join(one if one.isprintable() else quote(one, errors="surrogatepass") for one in path)
    return path[:PATH_LENGTH]


def _hooks(asked: Request) -> str:
    """The functions that ran before the view, one of which left its work uncommitted."""
    functions = [
        function
        for name in (None, *asked.blueprints)
        for function in current_app.before_request_funcs.get(name, ())
        if not (getattr(function, "__module__", "") or "").startswith(__package__ or "flask_idempotency")
    ]
    names = ", ".join(f"{one.__module__}.{getattr(one, '__qualname__', one)}" for one in functions)
    return f"Functions that ran before the view: {names}." if names else ""
