"""One guarded request's attempt: what ``idempotency.current`` is, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flask import Flask, Response
from werkzeug.exceptions import InternalServerError

from . import signals
from .answer import Answer, AnswerNotKept, Restored
from .bodies import BodyStore, Sink
from .changes import Changes
from .config import read_duration
from .errors import RecordRefused
from .fate import Fate, fate_of
from .keyring import Keyring
from .lifecycle import Granted, Lifecycle, Replay
from .lifecycle import Request as Asked
from .policy import Policy
from .recorded import Recorded
from .redaction import NO_BODY_STORE, redacted
from .sealing import sealed
from .slot import emitting, own_environ
from .stepping import Stepping
from .store.failures import cause


class Attempt(Stepping):
    """What is known of this attempt at an operation, and what its view can ask for.

    :ivar key: the key, in its stored form.
    :ivar scope: the scope, in its stored form.
    :ivar fingerprint: the request's fingerprint, 64 hexadecimal digits; keyed, where there are encryption keys.
    :ivar replay: whether this request is answered from the record, the view not run.
    :ivar takeover: whether this attempt took over another's claim, whose lease had run out.
    :ivar attempts: how many attempts at the same operation held a claim before this one.
    """

    def __init__(
        self,
        app: Flask,
        lifecycle: Lifecycle,
        policy: Policy,
        bodies: BodyStore | None,
        keys: Keyring | None,
        fingerprint: str,
        fields: Mapping[str, Any],
    ) -> None:
        self.key: str = fields["key"]
        self.scope: str = fields["scope"]
        self.fingerprint = fingerprint
        self.replay = False
        self.takeover = False
        self.attempts = 0
        self._app = app
        self._lifecycle = lifecycle
        self._policy = policy
        # What lies in the body store can't be edited any more.
        self._bodies = None if policy.redact is not None else bodies
        self._keys = keys
        self._fields = fields
        self._retention = policy.retention
        self._released = False
        self._granted: Granted | None = None
        self._record: Replay | None = None
        #: On a replay of a body that lies elsewhere: gives it anew for each response that is made of the record.
        self._chunks: Callable[[], Iterator[bytes]] | None = None
        #: On a replay: the answer as it left the guard.
        self._restored: Restored | None = None
        self._answer: Answer | None = None
        self._fate = Fate(policy.on_error)
        #: What the request has committed to the app's databases since the claim.
        self._changes = Changes()
        self._raised: BaseException | None = None
        #: How many guarded views are running, of which one may have called the other.
        self._views = 0
        self._lock = threading.Lock()
        #: The end of a request whose view still runs: what is known of it is settled when the view returns.
        self._late: Callable[[], None] | None = None
        #: Nobody read the answer to its end, or closed it.
        self._forgotten = False
        self._settled = False
        self._lost = False
        self._begun = 0.0
        self._duration = 0.0

    def release(self) -> None:
        """Record nothing, whatever the answer's status: the next retry runs the view."""
        self._released = True

    @property
    def retention(self) -> float:
        """How long this record alone is kept, in seconds. Takes a ``timedelta`` or seconds.

        :raises OptionError: set to anything else, or to nothing.
        """
        return self._retention

    @retention.setter
    def retention(self, value: Any) -> None:
        self._retention = read_duration("idempotency.current.retention", value)

    # What follows is the extension's own.

    def _grant(self, granted: Granted) -> None:
        """From here on a claim is held. Known to the slot first: whatever ends the request ends the claim."""
        self._granted = granted
        self._begun = time.monotonic()
        self.attempts = granted.claim.attempts - 1
        self.takeover = granted.over is not None
        self._keep()
        if granted.over is not None:
            over = granted.over
            self._emit(signals.TAKEOVER, age_seconds=over.age_seconds, attempts=granted.claim.attempts)

    def _ask(self, asked: Asked) -> Granted | Replay:
        """Ask for the claim, and get it or the record."""
        return self._lifecycle.begin(asked)

    def _keep(self) -> None:
        """Keep the claim alive while the view runs."""
        if self._granted is not None:
            self._lifecycle.keep(self._granted, self)

    def _replay(self, replay: Replay, chunks: Callable[[], Iterator[bytes]] | None = None) -> None:
        self.replay = True
        self._chunks = chunks
        self._record = replay
        age = replay.stored.age_seconds
        self._emit(signals.REPLAY, original_status=replay.recorded.status, age_seconds=age)

    @property
    def _running(self) -> bool:
        """Whether a claim is held that is still to be settled."""
        return self._granted is not None and not self._settled

    def _answered(self, response: Response) -> None:
        """Take down what goes out. Called again where an error handler made another answer; the last counts."""
        first = self._answer is None
        if self._answer is not None:
            self._answer.spoil()  # nobody will record it: what the body store has of it goes
        try:
            failed = self._raised is not None or not first
            fate = Fate.RELEASE if self._released else fate_of(response, self._policy, failed)
        except Exception as error:
            self._fate = Fate.RECORD
            self._answer = Answer(response, self._policy, keep=True)
            self._answer.spoil()
            self.failed(error)
        else:
            self._fate = fate
            # What a stream commits while it passes counts as well.
            watch = fate is Fate.AUTO
            sink = None if self._bodies is None else self._sink
            self._answer = Answer(response, self._policy, keep=fate is Fate.RECORD, watch=watch, sink=sink)

    def _sink(self) -> Sink:
        assert self._bodies is not None
        assert self._granted is not None
        return self._bodies.sink(self._granted.claim.token)

    def _settle(self, escaped: Exception | None = None) -> None:
        """End the claim by what is known of the answer. Does nothing a second time.

        Where a decorator has answered while the view goes on in another thread, the claim lasts as long as the view.
        """
        with self._lock:
            if not self._running:
                return
            if self._views:
                self._late = lambda: self._settle(escaped)
                return
            self._settled = True
        self._duration = time.monotonic() - self._begun
        if escaped is not None:
            if self._answer is not None:
                self._answer.spoil()
            self._raised, self._answer = escaped, None
            self._fate = Fate.RELEASE if self._released else Fate(self._policy.on_error)
        elif self._answer is None:
            self._fate = Fate.AUTO  # no answer was seen and no exception: there is nothing to record
        try:
            self._end()
        except Exception as error:
            # The answer is made; nothing that goes wrong here may take it from the client.
            self._abandoned()
            signals.logger.exception("Settling a claim failed; its lease decides.")
            self.failed(error)
        except BaseException:
            self._abandoned()
            raise

    def _end(self) -> None:
        """Record, release or hold, as the answer's fate is."""
        granted = self._granted
        assert granted is not None
        self._decide()
        if self._fate is Fate.RECORD:
            self._lifecycle.finish(granted, self._recorded(), self._retention, self)
            if self._lost:  # found out, or heard of, while the body was being written
                self._drop()
        elif self._fate is Fate.HOLD:
            self._lifecycle.hold(granted, self)
        else:
            self._lifecycle.release(granted, self)

    def _decide(self) -> None:
        """Now, at the end of the request, it is certain what was committed."""
        if self._fate is Fate.AUTO:
            self._fate = Fate.HOLD if self._changes.committed else Fate.RELEASE

    def _recorded(self) -> Recorded:
        """The record, as it is stored. Of an exception that no error handler saw: the server's own 500."""
        if self._answer is None:
            error = InternalServerError()
            response = self._app.response_class(error.get_body(), error.code, error.get_headers())
            self._answer = Answer(response, self._policy, keep=True)
        recorded = self._answer.recorded()
        if self._answer.trouble is not None:
            self.failed(AnswerNotKept(str(self._answer.trouble)))
        elif not recorded.available and not self._answer.spoiled:
            self.failed(AnswerNotKept(self._answer.why + (NO_BODY_STORE if self._policy.redact else "")))
        if self._policy.redact is not None and recorded.available:
            recorded = self._redacted(recorded)
        return recorded if self._keys is None else self._sealed(self._keys, recorded)

    def _sealed(self, keys: Keyring, recorded: Recorded) -> Recorded:
        """For its place alone; its status, where that failed: left to its lease, the view would run again."""
        try:
            return sealed(keys, recorded, self.scope, self.key)
        except Exception as error:  # a body over 2 GiB, or too large for what memory there is
            self._drop()
            self.failed(error)
            return recorded.without_answer()

    def _redacted(self, recorded: Recorded) -> Recorded:
        """What the app makes of it; its status alone, where that failed: better no answer than an unedited one."""
        try:
            return redacted(recorded, self._policy, self._app)
        except Exception as error:
            self.failed(error)
            return recorded.without_answer()

    def _abandoned(self) -> None:
        if self._granted is not None:
            self._lifecycle.abandon(self._granted)

    def _enter_view(self) -> None:
        with self._lock:
            self._views += 1

    def _leave_view(self) -> None:
        with self._lock:
            self._views -= 1
            late = self._late if self._views == 0 else None
        if late is not None:
            late()

    def _give_up(self) -> None:
        """Nobody will say how the stream ended: end the claim without its answer, from the garbage collector."""
        with self._lock:
            if not self._running or self._answer is None or self._granted is None:
                return
            self._settled = True
        self._decide()
        # Nothing here may wait for the body store.
        self._answer.spoil(now=False)
        self._forgotten = True
        recorded = self._answer.recorded() if self._fate is Fate.RECORD else None
        self._lifecycle.end_later(self._granted, recorded, self._retention, self, held=self._fate is Fate.HOLD)

    def _again(self, error: Exception) -> bool:
        """Whether the view is to be run again after what escaped it."""
        return False

    def _unconcluded(self) -> None:
        """The answer is made, and goes out."""
        self._settle()

    def _settle_unwrapped(self, response: Response) -> None:
        """Settle where no WSGI wrapper will: at once, or when the stream is closed."""
        if self._answer is not None and self._answer.tee is not None:
            response.call_on_close(self._settle_stream)
        else:
            self._settle()

    def _settle_stream(self) -> None:
        """Settle by a stream that has been closed."""
        if self._answer is not None and self._answer.tee is not None and self._answer.tee.crashed:
            self._abandon()
        else:
            self._settle()

    def _abandon(self) -> None:
        """A crash: what the view did is unknown, so lease and ``IDEMPOTENCY_STALE`` decide."""
        if self._running and self._granted is not None:
            self._settled = True
            self._abandoned()

    def settled(self) -> None:
        """Tell that the claim has ended as it should."""
        answer, granted = self._answer, self._granted
        if self._fate is Fate.RECORD and answer is not None and granted is not None:
            if self._forgotten:
                answer.drop()
                self.failed(AnswerNotKept("a stream that nobody read to its end or closed"))
            attempts = granted.claim.attempts
            self._emit(signals.EXECUTE, status=answer.status, duration=self._duration, attempts=attempts)
            return
        raised = "unknown" if self._raised is None else type(self._raised).__name__
        how = {"exception": raised} if answer is None else {"status": answer.status}
        if self._fate is Fate.HOLD:
            self._emit(signals.HOLD, **how, seen=self._changes.seen or "on_error='hold'", remedy=signals.REMEDY)
        else:
            self._emit(signals.RELEASE, **how)

    def lost(self) -> None:
        """Tell that the claim was taken over while this attempt believed to hold it."""
        self._settled = self._lost = True
        self._drop()
        self._emit(signals.LOST)

    def failed(self, error: Exception) -> None:
        """Tell that the answer could not be recorded as it should."""
        if isinstance(error, RecordRefused):
            self._drop()
        self._emit(signals.RECORD_FAILED, exception=cause(error))

    def _drop(self) -> None:
        """No row refers to the answer's body, nor will one."""
        if self._answer is not None:
            self._answer.drop()

    def _emit(self, event: signals.Event, **values: Any) -> None:
        if not signals.is_heard(event):
            return
        before = emitting.set((self, own_environ()))
        try:
            signals.emit(event, self._app, {**self._fields, **values})
        finally:
            emitting.reset(before)
