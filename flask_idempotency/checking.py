"""What is not as it should be around the app's keys: its configuration, its server's time-outs, its store."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from .routes import find_problems
from .state import AppState
from .store.survey import Finding
from .threads import threads_run

#: The clock that is off by a part of the lease makes times in logs misleading where they matter; nothing goes by it.
PART_OF_LEASE: Final = 3

_TIMEOUT: Final = re.compile(r"(?:--timeout|-t)(?:=|$)(?P<value>.*)")


@dataclass(frozen=True)
class Checked:
    """What a check came to.

    :ivar findings: what is wrong.
    :ivar notes: what is only to be known.
    """

    findings: list[Finding]
    notes: list[Finding]


def check(state: AppState, worker_timeout: float | None = None, environ: Mapping[str, str] = os.environ) -> Checked:
    """Look at everything.

    :param worker_timeout: seconds after which the server ends a worker; taken from ``GUNICORN_CMD_ARGS`` if left out.
    :raises StoreError: the store can't answer.
    """
    found = [*_app(state), *_threads(), *_timeouts(state, worker_timeout, environ)]
    if state.problem is None:
        found += _store(state)
    return Checked([one for one in found if not one.information], [one for one in found if one.information])


def _app(state: AppState) -> Iterator[Finding]:
    """What the first request would raise."""
    if not state.settings.enabled:
        yield Finding("IDEMPOTENCY_ENABLED is off: nothing is guarded.", "Set it to true.", "not-enabled")
        return
    for endpoint, error in find_problems(state):
        yield Finding(str(error), f"The app serves no request until this is mended ({endpoint}).", "app")
    state.prepare()
    if state.problem is not None:
        yield Finding(str(state.problem), "The app serves no request until this is mended.", "app")


def _threads() -> Iterator[Finding]:
    if not threads_run():
        yield Finding(
            "Threads run only now and then in this server, so that claims may not be renewed.",
            "Start uWSGI with --enable-threads.",
            "threads",
        )


def _timeouts(state: AppState, given: float | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    """A lease that ends before the server gives a blocked worker up lets a retry run beside it.

    To be known, and no fault: a view that is only slow is renewed all along.
    """
    timeout = gunicorn_timeout(environ.get("GUNICORN_CMD_ARGS", "")) if given is None else given
    lease = state.policy.lock_timeout
    if timeout is not None and (timeout == 0 or timeout > lease):
        after = "never" if timeout == 0 else f"after {timeout:g} s only"
        yield Finding(
            f"The lease (IDEMPOTENCY_LOCK_TIMEOUT) is {lease:g} s, and the server ends a worker that is blocked "
            f"{after}: a view that keeps its whole process from renewing can be taken over while it still runs.",
            "Where views block like that, make the lease at least as long as the worker's time-out.",
            "lease-below-timeout",
            information=True,
        )


def gunicorn_timeout(arguments: str) -> float | None:
    """The worker's time-out in gunicorn's arguments, in seconds; ``None`` where they have none that can be read."""
    try:
        words = shlex.split(arguments)
    except ValueError:
        return None
    found = None
    for place, word in enumerate(words):
        following = "".join(words[place + 1 : place + 2])
        match = _TIMEOUT.fullmatch(word)
        text = (match["value"] or following) if match else word[2:] if re.fullmatch(r"-t[0-9]+", word) else ""
        if text.isdecimal():
            found = float(text)
    return found


def _store(state: AppState) -> Iterator[Finding]:
    look = getattr(state.store, "check", None)
    if not callable(look):
        yield Finding(
            f"The store ({type(state.store).__name__}) has no check(), and was not looked at.",
            "See flask_idempotency.store.survey.Survey.",
            "store-unchecked",
            information=True,
        )
        return
    for one in look():
        counted = one.code == "older-shape" and state.settings.count_replays
        apart = one.code == "clocks-apart" and one.seconds > state.policy.lock_timeout / PART_OF_LEASE
        yield Finding(one.problem, one.remedy, one.code, False, one.seconds) if counted or apart else one
