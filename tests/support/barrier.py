"""Threads that start at the same moment, and threads whose outcome is asked for later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def background(function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
    """Call ``function`` in a daemon thread of its own; ``.result(timeout)`` returns its value or raises its exception.

    A pool's threads would be joined when the interpreter ends; a daemon thread that hangs fails its own test only.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"background-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return future


def together(n: int, function: Callable[[int], T], *, timeout: float = 30.0) -> list[T]:
    """Call ``function(0)`` … ``function(n - 1)`` in ``n`` threads that leave one barrier together.

    Returns the results in the order of the numbers. If calls raised, the first of those exceptions is raised here;
    a call that takes longer than ``timeout`` raises ``TimeoutError``.
    """
    barrier = threading.Barrier(n)

    def call(number: int) -> T:
        barrier.wait(timeout)
        return function(number)

    futures = [background(call, number) for number in range(n)]
    return [future.result(timeout) for future in futures]
