"""Atomic mode: the view's work in ``db.session`` and the record in one transaction.

The transaction is committed when all of the answer is made, after the last ``after_request`` function, and before any
byte of it leaves. Until then nothing of either is visible; a process that dies at any line leaves nothing of either.
What fails is rolled back, so that no outcome is ever unknown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flask import Response, current_app, has_request_context, request
from flask.globals import request_ctx

from . import body, errors, signals
from .answer import gather
from .attempt import Attempt
from .failing import handled, overwrite, respond
from .fate import Fate
from .lifecycle import Granted, Replay
from .lifecycle import Request as Asked
from .slot import current, slot_of
from .store import failures
from .unit import Unit


class AtomicAttempt(Attempt):
    """An attempt whose claim is a transaction's secret until that commits."""

    def __init__(self, *args: Any, unit: Unit, retries: int) -> None:
        super().__init__(*args)
        self._unit = unit
        self._retries = retries
        self._after_commit: list[Callable[[], Any]] = []
        self._asked: Asked | None = None
        self._undone = False
        self._idle = threading.Condition(self._lock)
        self._registered = len(_after_this_request())
        self._read = body.read_so_far(request)
        self._request = request._get_current_object()  # type: ignore[attr-defined]

    def _forget_run(self) -> None:
        """What an undone run has registered with ``after_this_request`` and read, the next one does again."""
        slot_of(request.environ).runs += 1
        del _after_this_request()[self._registered :]
        body.unread(request, self._read)

    def _ask(self, asked: Asked) -> Granted | Replay:
        self._asked = asked
        try:
            outcome = self._lifecycle.begin(asked, self._unit)
        except BaseException:
            self._unit.undo()
            raise
        if isinstance(outcome, Replay):
            self._unit.undo()
        return outcome

    def _keep(self) -> None:
        # No lease to renew: the transaction ends with its process.
        self._unit.bind()

    def _its_steps(self) -> Any:
        raise errors.StepError(
            "Steps and derived keys belong to the default mode: in an atomic view nothing is kept of an attempt that "
            "fails, so that no later one could go on from there. Call other systems in a view without atomic=True."
        )

    def _answered(self, response: Response) -> None:
        trouble = gather(response, self._policy.max_body)
        if trouble is not None:
            self._raised = StreamNotWhole(trouble)
            overwrite(response, handled(self._raised))
        super()._answered(response)

    def _settle_unwrapped(self, response: Response) -> None:
        pass  # concluded by the signal that the answer is made

    def _unconcluded(self) -> None:
        answer, raised = self._answer, self._raised
        self._settle()
        # Flask sends out its own 500, and says nothing, where a hook fails on that one as well.
        if raised is None or (answer is not None and answer.status < 500):
            raise RuntimeError(_UNFINISHED)

    def _end(self) -> None:
        """Leave nothing of the work; of the answer only where a 5xx is to be the key's from now on."""
        self._unit.undo()
        if self._fate is not Fate.RECORD or not self._recorded_alone():
            self._fate = Fate.RELEASE
        self.settled()

    def _leave_view(self) -> None:
        super()._leave_view()
        with self._idle:
            self._idle.notify_all()

    def _abandoned(self) -> None:
        self._unit.undo()

    # The end of the request

    def _conclude(self, response: Response) -> Response:
        """Commit, or roll back, by the answer; returns what goes out: ``response``, or what it has to be replaced by.

        :raises errors.Undone: nothing is left, and the view may be run again.
        """
        with self._idle:
            # A decorator may have answered while the view goes on in another thread. Its work is part of the
            # transaction, and what it did after that would be part of nothing: so it is waited for.
            self._idle.wait_for(lambda: not self._views)
            if not self._running:
                return response
            self._settled = True
        self._duration = time.monotonic() - self._begun
        escaped = self._raised
        if response.status_code >= 500 and isinstance(escaped, Exception) and failures.is_conflict(escaped):
            # From a function that ran after the view: its work is part of the transaction, too.
            self._undo(escaped)
            raise failures.undone(escaped) from escaped
        # Functions registered before the extension may have made another answer of the one that is to be recorded.
        recorded = response.status_code if self._answer is None else self._answer.status
        if recorded < 500 <= response.status_code:
            self._fate = Fate.RELEASE
        if self._fate is not Fate.RECORD and response.status_code < 400:
            error = ReleasedSuccess(_RELEASED)
            self._undo(error)
            return respond(error)
        if self._fate is not Fate.RECORD or recorded >= 500:
            self._end()
            return response
        try:
            return self._commit(response)
        except errors.Undone as error:
            self._undo(error)
            raise
        except Exception as error:
            self._undo(error)
            return respond(self._explained(error))
        except BaseException:
            self._abandoned()
            raise

    def _commit(self, response: Response) -> Response:
        granted, unit = self._granted, self._unit
        assert granted is not None
        try:
            kept = unit.finish(granted.claim, granted.asking, self._recorded(), self._retention, self.failed)
        except errors.CommitUnknown:
            if not self._known_to_be_committed(granted):
                raise
            kept = True
        if not kept:
            self._undo(Overtaken())
            return respond(self._overtaken(granted))
        self.settled()
        for function in self._after_commit:
            call(function)
        return response

    def _known_to_be_committed(self, granted: Granted) -> bool:
        """Carried out or not, the table tells; unless that is out of reach as well."""
        with suppress(errors.StoreError):
            return self._unit.committed(granted.asking)
        return False

    def _recorded_alone(self) -> bool:
        granted = self._granted
        assert granted is not None
        try:
            kept = self._unit.record_alone(granted.asking, self._recorded(), self._retention, self.failed)
        except Exception as error:
            self.failed(error)
            if isinstance(error, errors.CommitUnknown):
                return False
            kept = False
        if not kept:
            self._drop()
        return kept

    def _undo(self, error: Exception) -> None:
        self._unit.undo()
        # What was perhaps committed may refer to its body; if it does not, the sweep finds it.
        if not isinstance(error, errors.CommitUnknown):
            self._drop()
        told, self._undone = self._undone, True
        self._fate, self._raised, self._answer = Fate.RELEASE, error, None
        if not told:
            self.settled()

    def _overtaken(self, granted: Granted) -> errors.IdempotencyError:
        """Another request, in the default mode or on another route, has the key: its answer is the key's."""
        stored = self._lifecycle.store.find(granted.asking.scope, granted.asking.key)
        age = 0.0 if stored is None else stored.age_seconds
        assert self._asked is not None
        if stored is not None and stored.fingerprint != self._asked.fingerprint(
            stored.fingerprint_version, stored.fingerprint
        ):
            self._emit(signals.MISMATCH, original_path=stored.path, age_seconds=age)
            return errors.KeyReused(status=self._policy.mismatch_status)
        self._emit(signals.CONFLICT, age_seconds=age, waited=0.0)
        return errors.InFlight(retry_after=self._policy.retry_after)

    def _explained(self, error: Exception) -> Exception:
        """As the client gets it: 503 where doing it again may help."""
        if not isinstance(error, errors.StoreError) and not failures.is_conflict(error):
            return error
        unknown = isinstance(error, errors.CommitUnknown)
        # SQLAlchemy's own text quotes the statement with its values: a request's, or the answer.
        why = error if isinstance(error, errors.StoreError) else failures.cause(error)
        signals.logger.error("An atomic view's work %s: %s", _WHAT[unknown], why)
        self._emit(signals.REJECT, reason=errors.StoreUnavailable.slug)
        detail = _UNKNOWN if unknown else _UNDONE
        return errors.StoreUnavailable(detail, retry_after=self._policy.retry_after)

    # In the view

    def _again(self, error: Exception) -> bool:
        """Whether what escaped the view is a serialization failure; then nothing of it is left, and it may run again.

        :raises StoreUnavailable: it is one, and may not.
        """
        if not self._running or not failures.is_conflict(error):
            return False
        with self._lock:
            self._settled = True
        self._undo(error)
        if self._retries > 0:
            self._forget_run()
            return True
        raise self._explained(error) from error


def _after_this_request() -> list[Any]:
    """Flask's own list, which it has no public name for."""
    functions: list[Any] = getattr(request_ctx, "_after_request_functions", [])
    return functions


class StreamNotWhole(RuntimeError):
    """An atomic view's stream is larger than can be kept, or ended too early."""


class ReleasedSuccess(RuntimeError):
    """An atomic view answered with a status below 400, and asked to record nothing."""


class Overtaken(Exception):
    """Another request has got the key meanwhile."""


_UNFINISHED = (
    "The answer of an atomic view is about to leave, and Flask never said that it was finished (request_finished), so "
    "that nothing was committed. Does the app's class replace finalize_request()?"
)
_UNDONE = (
    "The request could not be completed right now, and nothing of it was carried out. Send the same request with the "
    "same key again after the number of seconds in Retry-After."
)
_WHAT = {False: "was not committed", True: "may have been committed or not"}
_UNKNOWN = (
    "Whether the request was carried out could not be learned right now. Send the same request with the same key again "
    "after the number of seconds in Retry-After: it is carried out once at most."
)
_RELEASED = (
    "An atomic view answered below 400 and asked to release the key. Its work would be lost under an answer that says "
    "it was done: all of it was rolled back. Answer with an error, or let the answer be recorded."
)


def conclude(response: Response) -> None:
    """Commit or roll back the atomic view of this request, if there is one, and make ``response`` what goes out."""
    attempt = _attempt()
    if attempt is not None and attempt._undone and response.status_code < 400:
        # Somebody above the guard has made a success of its 503.
        overwrite(response, respond(errors.StoreUnavailable(_UNDONE, retry_after=attempt._policy.retry_after)))
    while attempt is not None and attempt._running:
        try:
            other = attempt._conclude(response)
        except errors.Undone as error:
            other = _run_again(attempt) if attempt._retries > 0 else respond(attempt._explained(error))
        if other is not response:
            overwrite(response, other)
        attempt = _attempt()


def _attempt() -> AtomicAttempt | None:
    """This request's, and not one that has handed its environ on to this request."""
    attempt = slot_of(request.environ).attempt
    here = request._get_current_object()  # type: ignore[attr-defined]
    return attempt if isinstance(attempt, AtomicAttempt) and attempt._request is here else None


def _run_again(attempt: AtomicAttempt) -> Response:
    """The view once more, and the ``after_request`` functions; ``before_request`` functions have done their part."""
    attempt._forget_run()
    app = current_app._get_current_object()  # type: ignore[attr-defined]
    assert request.url_rule is not None
    try:
        view = app.view_functions[request.url_rule.endpoint]
        answer = app.ensure_sync(view)(**(request.view_args or {}))
    except Exception as error:
        return respond(error)
    response: Response = app.process_response(app.make_response(answer))
    return response


def after_commit(function: Callable[[], Any]) -> None:
    """Call ``function`` after the commit; see :meth:`~flask_idempotency.Idempotency.after_commit`."""
    attempt = current()
    later = slot_of(request.environ).after_commit if has_request_context() else None
    if later is not None:
        later.append(function)
    elif isinstance(attempt, AtomicAttempt) and attempt._running:
        attempt._after_commit.append(function)
    else:
        raise RuntimeError(
            "after_commit() is for atomic views, whose work is committed after they return. Elsewhere, do it after "
            "your own db.session.commit()."
        )


def call(function: Callable[[], Any]) -> None:
    """Call what was to be called after the commit. The answer stands, whatever becomes of this."""
    try:
        current_app.ensure_sync(function)()
    except Exception:
        signals.logger.exception("A function that was to run after the commit failed.")
