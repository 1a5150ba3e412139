"""Bodies that are too large for the table: one object each, in a place that fsspec can reach.

An object is written once, before the key is completed, and never changed. Its name begins with the fencing token of
the claim that it was written under, so that a claim in progress, and a record, can be seen to need it; nothing of the
client's is part of it. Bodies are stored as they are, unless the app has encryption keys.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from datetime import datetime, timezone
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from .errors import BodyLost, BodyStoreError
from .keyring import Keyring
from .recorded import Elsewhere
from .sealed_bodies import BodySealer, opened_body

#: What is sent to an object store at a time, and so held in memory while a body is written: the least that S3 takes
#: for a part of an upload.
PART: Final = 5 * 1024 * 1024

#: What is read at a time. Two of these are in memory while a body is replayed.
RANGE: Final = 1024 * 1024

#: Two letters at least: one alone is a drive on Windows.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):(?://)?(.+)", re.IGNORECASE | re.DOTALL)
_NAME = re.compile(r"([0-9a-f]{16,64})-[0-9a-f]{16}\.body")

#: Where file systems say when an object was written last.
_TIMES: Final = ("mtime", "LastModified", "last_modified", "updated", "created")

_WANTED: Final = "it must be the URL of a folder with its scheme, file:/srv/bodies or s3://bucket/bodies for example"

logger: Final = logging.getLogger("flask_idempotency")


def token_of(name: str) -> str | None:
    """The fencing token in the name of an object; ``None`` where the name is none of ours."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None


class BodyStore:
    """A folder, bucket or prefix for large bodies. It belongs to one table of keys alone.

    :param url: with its scheme. It may hold secrets, and is shown nowhere.
    :raises ValueError: it is no such URL, or what it takes is not installed. Nothing is opened.
    """

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url.strip())
        if match is None:
            raise ValueError(_WANTED)
        if "::" in url:
            raise ValueError("it must name one file system, not a chain of several (::)")
        self.scheme = match[1].lower()
        if self.scheme in ("file", "local") and not os.path.isabs(match[2]):
            raise ValueError("it must be an absolute path, since all processes have to find the same folder")
        # Not every file system of fsspec's takes a URL without the slashes for one of its own.
        self._url = f"{self.scheme}://{match[2]}"
        self._secrets = _secrets(self._url)
        self._keys: Keyring | None = None
        _assert_available(self.scheme)

    def __repr__(self) -> str:
        return f"<BodyStore {self.scheme}:>"

    def sealing(self, keys: Keyring) -> BodyStore:
        """The same, whose bodies are sealed from now on."""
        other = copy(self)
        other._keys = keys
        return other

    def sink(self, token: str) -> Sink:
        """A place for one body, written under the claim with that fencing token. Nothing is opened yet."""
        name = f"{token}-{secrets.token_hex(8)}.body"
        return Sink(self, name, None if self._keys is None else BodySealer(self._keys, name))

    def check(self, body: Elsewhere) -> None:
        """Read a body once, and see that it is the one that was recorded.

        :raises BodyLost: it is gone, or is another one.
        :raises BodyStoreError: it can't be read right now.
        """
        for _ in self.chunks(body):
            pass

    def chunks(self, body: Elsewhere) -> Iterator[bytes]:
        """A body, piece by piece. The last piece comes only if all of it is what was recorded.

        Each piece is a read of its own: nothing stays open, whoever stops half-way.

        :raises BodyLost: it is gone, or is another one.
        :raises BodyStoreError: it can't be read right now, or the key that it is sealed with is not there.
        """
        stored = self._stored(body)
        return opened_body(self._keys, body.name, stored) if body.sealed else stored

    def _stored(self, body: Elsewhere) -> Iterator[bytes]:
        """A body as it lies there."""
        digest = hashlib.sha256()
        before = b""
        with self._telling_of_loss(body.name):
            files, path = self._at(body.name)
            if files.info(path)["size"] != body.size:
                raise BodyLost(f"The body {body.name} has another size than was recorded.")
            for start in range(0, body.size, RANGE):
                if before:
                    yield before
                before = files.cat_file(path, start=start, end=min(start + RANGE, body.size))
                digest.update(before)
        if digest.hexdigest() != body.digest:
            raise BodyLost(f"The body {body.name} is not what was recorded.")
        yield before

    def delete(self, name: str) -> None:
        """Delete an object; one that is gone already will do.

        :raises BodyStoreError: it can't be deleted right now.
        """
        with self._explaining(), suppress(FileNotFoundError):
            files, path = self._at(name)
            files.rm_file(path)

    def discard(self, name: str) -> None:
        """Delete an object that nothing refers to. A failure is logged: it is an orphan then, for the sweep to find."""
        try:
            self.delete(name)
        except BodyStoreError as error:
            logger.error(
                "The body %s could not be deleted. flask idempotency prune --body-store deletes it later. %s",
                name,
                error,
            )

    def listed(self, age: float) -> Iterator[str]:
        """The names of all objects of ours that were written at least ``age`` seconds ago, by this host's clock.

        :raises BodyStoreError: they can't be listed right now.
        """
        with self._explaining():
            files, root = self._root()
            # File systems remember what they listed; others may have written since.
            files.invalidate_cache()
            try:
                entries = files.ls(root, detail=True)
            except FileNotFoundError:
                return  # nothing was ever written
            finally:
                files.invalidate_cache()
            before = time.time() - age
            found = [(entry["name"].rpartition("/")[2], entry) for entry in entries if entry["type"] == "file"]
            names = [name for name, entry in found if token_of(name) and _written(files, entry) <= before]
        yield from names

    # Parts

    def _root(self) -> tuple[Any, str]:
        """The file system of this process and thread, from fsspec's own cache, and the folder in it."""
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        files, root = url_to_fs(self._url)
        return files, root.rstrip("/")

    def _at(self, name: str) -> tuple[Any, str]:
        files, root = self._root()
        return files, f"{root}/{name}"

    def _make_root(self) -> None:
        files, root = self._root()
        if self.scheme in ("file", "local"):
            os.makedirs(root, mode=0o700, exist_ok=True)  # bodies are for nobody else to read
        else:
            files.makedirs(root, exist_ok=True)

    def _sync_root(self) -> None:
        """Put a new name in a folder on the disk, as the file behind it: after a power failure it may be missing."""
        if self.scheme not in ("file", "local") or not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
            return
        folder = os.open(self._root()[1], os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF):  # some file systems sync no folders, and say so thus
                raise
        finally:
            os.close(folder)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Any exception of a file system's as one of ours, without what is secret in the URL."""
        try:
            yield
        except BodyStoreError:
            raise
        except Exception as error:
            text = str(error)
            for secret in self._secrets:
                text = text.replace(secret, "***")
            # Not chained: a traceback would show what was taken out here.
            raise BodyStoreError(
                f"The body store (IDEMPOTENCY_BODY_STORE, {self.scheme}:) failed: {type(error).__name__}: {text}"
            ) from None

    @contextmanager
    def _telling_of_loss(self, name: str) -> Iterator[None]:
        lost: BodyLost | None = None
        with self._explaining():
            try:
                yield
            except FileNotFoundError:
                lost = BodyLost(f"The body {name} is not in the body store.")
            except BodyLost as error:
                lost = error
        if lost is not None:
            raise lost


class Sink:
    """One body on its way into the store.

    Every method but :meth:`discard` raises :class:`~flask_idempotency.errors.BodyStoreError`.
    """

    def __init__(self, store: BodyStore, name: str, sealer: BodySealer | None = None) -> None:
        self._store = store
        self._name = name
        self._sealer = sealer
        self._digest = hashlib.sha256()
        self._size = 0
        self._file: Any = None

    def write(self, chunk: bytes) -> None:
        """Take in the next piece."""
        for one in (chunk,) if self._sealer is None else self._sealer.add(bytes(chunk)):
            self._put(one)

    def _put(self, chunk: bytes) -> None:
        with self._store._explaining():
            if self._file is None:
                self._file = self._opened()
            self._file.write(chunk)
        self._digest.update(chunk)
        self._size += len(chunk)

    def finish(self) -> Elsewhere:
        """End the object. What it returns may be recorded: the body is there, on the disk where it has one."""
        if self._sealer is not None:
            self._put(self._sealer.end())
        with self._store._explaining():
            if self._file is None:
                self._file = self._opened()
            _sync(self._file)
            self._file.close()
            self._store._sync_root()
        return Elsewhere(self._name, self._size, self._digest.hexdigest(), sealed=self._sealer is not None)

    def discard(self) -> None:
        """Give the body up, and delete what was written of it. Never raises."""
        if self._file is None:
            return
        # Closed before it is deleted: an object store knows the object only then. What could not be ended may be
        # there in part.
        with suppress(Exception):
            self._file.close()
        self._store.discard(self._name)

    def _opened(self) -> Any:
        files, path = self._store._at(self._name)
        try:
            return files.open(path, "wb", block_size=PART)
        except FileNotFoundError:
            # Only now: to make a folder in an object store may ask for rights that writing to it does not.
            self._store._make_root()
            return files.open(path, "wb", block_size=PART)


def _sync(file: Any) -> None:
    """Put a file on the disk before a row refers to it: a power failure must not leave the row alone."""
    try:
        number = file.fileno()
    except (OSError, AttributeError):  # no file of this machine's
        return
    file.flush()
    os.fsync(number)


def _assert_available(scheme: str) -> None:
    try:
        from fsspec import get_filesystem_class  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("it needs fsspec, which is not installed: pip install Flask-Idempotency[bodies]") from None
    try:
        get_filesystem_class(scheme)
    except ImportError as error:  # fsspec's own text names the package that is missing
        raise ValueError(f"the file system of {scheme}: is not installed. fsspec says: {error}") from None
    except ValueError:
        raise ValueError(f"fsspec knows no file system {scheme}:. {_WANTED[0].upper()}{_WANTED[1:]}") from None


def _secrets(url: str) -> list[str]:
    """What is not to be shown of a URL, the longest first: its credentials and its query."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    password = user.partition(":")[2]
    found = {url, user + at, password, unquote(password), parts.query}
    # Shorter ones would blot out half of every text.
    return sorted((one for one in found if len(one) > 3), key=len, reverse=True)


def _written(files: Any, entry: Mapping[str, Any]) -> float:
    """When an object was written last, in seconds since 1970."""
    for name in _TIMES:
        value = entry.get(name)
        if isinstance(value, (int, float)):
            return value
        if isinstance(value, datetime):
            return _seconds(value)
    return _seconds(files.modified(entry["name"]))


def _seconds(moment: datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
