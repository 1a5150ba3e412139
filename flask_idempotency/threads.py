"""Threads in the background, and whether they run at all."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Callable
from typing import Final

#: uWSGI's options that let threads run; the others imply the first.
_SWITCHES: Final = ("enable-threads", "threads", "gevent", "asyncio")

#: Since this version of uWSGI they run without any, and can't be switched off.
_ALWAYS: Final = (2, 0, 27)

logger: Final = logging.getLogger("flask_idempotency")


class Chores:
    """A thread that does one thing after another. They are put in by one thread at a time."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[Callable[[], object]] | None = None

    def put(self, chore: Callable[[], object]) -> None:
        """Have it done soon."""
        todo = self._todo
        if todo is None:
            # Made on first need, and of the module's class as it is now: gevent may have patched the process since
            # this was imported (gunicorn --preload), and to wait on a queue from before would stop all greenlets.
            todo = queue.SimpleQueue()
            name = "flask-idempotency-chores"
            threading.Thread(target=self._run, args=(todo,), name=name, daemon=True).start()
            self._todo = todo
        todo.put(chore)

    def _run(self, todo: queue.SimpleQueue[Callable[[], object]]) -> None:
        while True:
            chore = todo.get()
            try:
                chore()
            except (Exception, SystemExit):  # the latter from a receiver of a signal
                logger.exception("A chore in the background failed.")


def threads_run() -> bool:
    """Whether a thread goes on running between requests. Under uWSGI before 2.0.27 it does only with
    ``enable-threads``.
    """
    uwsgi = sys.modules.get("uwsgi")
    if uwsgi is None or tuple(getattr(uwsgi, "version_info", ())[:3]) >= _ALWAYS:
        return True
    # Names and values are bytes or texts, by version and by where they come from; a bare option is True.
    options = {_text(name): _text(value).lower() for name, value in getattr(uwsgi, "opt", {}).items()}
    return any(options.get(name, "false") not in ("false", "off", "no", "0") for name in _SWITCHES)


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
