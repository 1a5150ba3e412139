"""What a forked child must not take over from its parent, also where Python is not told of the fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

_forgetting: Final[list[Callable[[], None]]] = []
#: Taken only in a child that has not forgotten yet, so that no fork of a process that serves finds it taken.
_lock: Final = threading.Lock()
_pid = os.getpid()


def in_child(forget: Callable[[], None]) -> None:
    """Have ``forget`` called in each forked child, before anything else of the extension runs there."""
    _forgetting.append(forget)


def notice() -> None:
    """Forget what is the parent's, if this process was forked since the last time.

    uWSGI forks its workers by itself, after the app is loaded, and without ``py-call-uwsgi-fork-hooks`` it calls none
    of the functions that ``os.register_at_fork`` registers.
    """
    if os.getpid() != _pid:
        with _lock:
            if os.getpid() != _pid:  # of several threads at once, one forgets, and the others wait until it has
                _forget()


def _forget() -> None:
    global _pid
    for forget in _forgetting:
        forget()
    _pid = os.getpid()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget)
