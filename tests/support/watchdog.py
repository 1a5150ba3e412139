"""Ends the servers of a test run that was killed before it could end them itself.

Fixtures stop what they started. A run that ends by SIGKILL, or by pytest-timeout's ``os._exit``, runs no fixture any
more; this module's child process then sees its standard input close, kills what is still on its list, and ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

_lock = threading.Lock()
_pipe = -1
_owner = 0


def _tell(line: str) -> None:
    global _pipe, _owner
    with _lock:
        if _owner != os.getpid():  # not started yet, or this is a fork of the process that started it
            reading, _pipe = os.pipe()
            silence = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (1, 2)]
            actions = [(os.POSIX_SPAWN_DUP2, reading, 0), *silence]
            os.posix_spawn(sys.executable, [sys.executable, __file__], os.environ, file_actions=actions)
            os.close(reading)
            _owner = os.getpid()
        os.write(_pipe, f"{line}\n".encode())


def watch(pid: int, directory: Path, *, postmaster: bool = False) -> None:
    """End a server and delete its directory if this process ends before :func:`forget` is called.

    The process group of ``pid`` is killed; a postmaster is told to shut down at once, since it has more to clear up.
    """
    _tell(f"{'postmaster' if postmaster else 'group'} {pid} {directory}")


def forget(pid: int) -> None:
    """Take a process that was stopped off the list."""
    _tell(f"forget {pid}")


def _end(kind: str, pid: int, directory: str) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if kind == "group":
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGQUIT)
            for _ in range(50):
                time.sleep(0.1)
                os.kill(pid, 0)  # raises once it is gone
    shutil.rmtree(directory, ignore_errors=True)


def _watch() -> None:
    os.setsid()  # out of reach of the terminal's Ctrl-C and of kills of the process group
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listed: dict[str, tuple[str, str]] = {}
    for line in sys.stdin:
        kind, pid, *directory = line.rstrip("\n").split(" ", 2)
        if directory:
            listed[pid] = (kind, directory[0])
        else:
            listed.pop(pid, None)
    for pid, (kind, folder) in listed.items():
        _end(kind, int(pid), folder)


if __name__ == "__main__":
    _watch()
