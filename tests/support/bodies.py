"""Body stores for tests, and what else is known of the objects in them."""

from __future__ import annotations

import os
import threading
import time
from datetime import datetime, timezone
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from flask_idempotency.bodies import BodyStore

#: With all that can be secret in one.
UNRELIABLE = "unreliable://user:s3cret%20word@host/bodies?sig=t0ken"


class Unreliable(MemoryFileSystem):
    """A file system in this process's memory, some of whose calls fail, with its URL in what they say."""

    protocol = "unreliable"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    #: The names of the calls that fail.
    failing: ClassVar[set[str]] = set()
    #: The calls so far, and the threads that made them.
    calls: ClassVar[list[tuple[str, int]]] = []

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/bodies" if "://" in str(path) else str(path).rstrip("/")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._work("open")
        file = super()._open(path, mode, **options)
        write, close = file.write, file.close

        def failing_write(data: bytes) -> int:
            self._work("write")
            return int(write(data))

        def failing_close() -> None:
            self._work("close")
            close()

        file.write, file.close = failing_write, failing_close
        return file

    def ls(self, path: str, *args: Any, **options: Any) -> Any:
        """The folder's entries."""
        self._work("ls")
        return super().ls(path, *args, **options)

    def info(self, path: str, **options: Any) -> Any:
        """One entry."""
        self._work("info")
        return super().info(path, **options)

    def cat_file(self, path: str, *args: Any, **options: Any) -> Any:
        """A part of an object."""
        self._work("cat")
        return super().cat_file(path, *args, **options)

    def rm_file(self, path: str) -> None:
        """Delete an object."""
        self._work("rm")
        super()._rm(path)

    def _work(self, call: str) -> None:
        self.calls.append((call, threading.get_ident()))
        if call in self.failing:
            raise ConnectionError(f"no route to {UNRELIABLE} as user, with the word s3cret word")


fsspec.register_implementation("unreliable", Unreliable, clobber=True)


def names(store: BodyStore) -> set[str]:
    """The objects that are in a body store now."""
    return set(store.listed(-3600))


def place(store: BodyStore, name: str) -> tuple[Any, str]:
    """The file system, and the object's path in it, as somebody else finds them."""
    files, root = fsspec.core.url_to_fs(store._url)
    return files, f"{root}/{name}"


def make_older(store: BodyStore, name: str, seconds: float) -> None:
    """Let an object have been written so many seconds earlier."""
    files, path = place(store, name)
    then = time.time() - seconds
    if store.scheme == "file":
        os.utime(path, (then, then))
    else:
        files.store[path].created = datetime.fromtimestamp(then, timezone.utc)
