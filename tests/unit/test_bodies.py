"""The body store by itself: its URL, what it writes, reads, lists and deletes, and what it says of failures."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from flask_idempotency.bodies import RANGE, BodyStore, token_of
from flask_idempotency.errors import BodyLost, BodyStoreError
from flask_idempotency.recorded import Elsewhere
from tests.support.bodies import UNRELIABLE, Unreliable, make_older, names, place

TOKEN = "0123456789abcdef" * 2
#: Three reads, the last of them short.
LARGE = secrets.token_bytes(2 * RANGE + 17)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A body store's URL, where nothing is yet: a folder, and a place in this process."""
    if request.param == "file":
        yield f"file:{tmp_path}/new/bodies"
    else:
        yield f"memory:{tmp_path.name}-{secrets.token_hex(4)}"
        MemoryFileSystem.store.clear()


@pytest.fixture
def store(url: str) -> BodyStore:
    """A body store in which nothing is."""
    return BodyStore(url)


def put(store: BodyStore, body: bytes, token: str = TOKEN) -> Elsewhere:
    sink = store.sink(token)
    for start in range(0, len(body), 100_000):
        sink.write(body[start : start + 100_000])
    return sink.finish()


def test_a_body_comes_back(store: BodyStore) -> None:
    """What was written in pieces comes back whole, in pieces of bounded size; the name begins with the token."""
    body = put(store, LARGE)
    assert (len(LARGE), hashlib.sha256(LARGE).hexdigest()) == (body.size, body.digest)
    assert TOKEN == token_of(body.name)
    chunks = list(store.chunks(body))
    assert [RANGE, RANGE, 17] == [len(chunk) for chunk in chunks]
    assert LARGE == b"".join(chunks)
    store.check(body)


def test_an_empty_body(store: BodyStore) -> None:
    """Nothing at all is a body too."""
    assert b"" == b"".join(store.chunks(put(store, b"")))


def test_readers_at_once(store: BodyStore) -> None:
    """Two readers of one body, piece by piece in turn, each get all of it."""
    body = put(store, LARGE)
    pairs = list(zip(store.chunks(body), store.chunks(body), strict=True))
    assert [LARGE, LARGE] == [b"".join(pieces) for pieces in zip(*pairs, strict=True)]


def test_bodies_of_one_claim(store: BodyStore) -> None:
    """No two bodies have one name, so that none is ever written over."""
    assert put(store, b"one").name != put(store, b"two").name


def test_a_body_that_is_gone(store: BodyStore) -> None:
    """A missing object is a lost body; to delete it again is no error."""
    body = put(store, LARGE)
    store.delete(body.name)
    store.delete(body.name)
    with pytest.raises(BodyLost, match=body.name):
        store.check(body)


@pytest.mark.parametrize("change", ["longer", "shorter", "first byte", "last byte"])
def test_a_body_that_was_changed(store: BodyStore, change: str) -> None:
    """A body of another size or digest is lost, and its last piece is never given out."""
    body = put(store, LARGE)
    files, path = place(store, body.name)
    other = {
        "longer": LARGE + b"x",
        "shorter": LARGE[:-1],
        "first byte": bytes([LARGE[0] ^ 1]) + LARGE[1:],
        "last byte": LARGE[:-1] + bytes([LARGE[-1] ^ 1]),
    }[change]
    files.pipe_file(path, other)
    received: list[bytes] = []
    with pytest.raises(BodyLost, match=body.name):
        received.extend(store.chunks(body))
    assert sum(map(len, received)) < body.size - 16


def test_a_body_that_is_cut_while_it_is_read(store: BodyStore) -> None:
    """A body that loses its end between two pieces breaks off."""
    body = put(store, LARGE)
    chunks = store.chunks(body)
    next(chunks)
    files, path = place(store, body.name)
    files.pipe_file(path, LARGE[:RANGE])
    with pytest.raises(BodyLost, match="not what was recorded"):
        list(chunks)


def test_a_body_and_its_name_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its name may be recorded the file is put on the disk, and then the folder that has the name."""
    synced: list[str] = []
    fsync = os.fsync

    def noting(number: int) -> None:
        fsync(number)
        synced.append("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file")

    monkeypatch.setattr(os, "fsync", noting)
    put(BodyStore(f"file:{tmp_path}/bodies"), LARGE)
    assert ["file", "folder"] == synced


def test_a_sink_that_is_given_up(store: BodyStore) -> None:
    """What was written is deleted, whether or not the body was ended; a sink that nothing went into leaves nothing."""
    unused, begun, ended = (store.sink(TOKEN) for _ in range(3))
    unused.discard()
    begun.write(b"half")
    begun.discard()
    ended.write(b"whole")
    ended.finish()
    assert 1 == len(names(store))
    ended.discard()
    assert set() == names(store)


def test_what_is_listed(store: BodyStore) -> None:
    """Listed are the objects of ours of a certain age: no others, no folders, and nothing where nothing was written."""
    assert [] == list(store.listed(0))
    young, old = put(store, b"young"), put(store, b"old")
    make_older(store, old.name, 3700)
    for name in ("report.csv", f"{TOKEN}.body", f"{TOKEN}-xyz.body", f"x{old.name}"):
        files, path = place(store, name)
        files.pipe_file(path, b"theirs")
        make_older(store, name, 3700)
    files.makedirs(place(store, f"{TOKEN}-{'0' * 16}.body")[1])
    assert [old.name] == list(store.listed(3600))
    assert {young.name, old.name} == names(store)


def test_files_are_their_owners(tmp_path: Path) -> None:
    """A folder that is made here can't be entered by other users: bodies are as readable as they were sent."""
    put(BodyStore(f"file:{tmp_path}/bodies"), b"secret")
    assert 0o700 == stat.S_IMODE((tmp_path / "bodies").stat().st_mode)


@pytest.fixture
def failing() -> Iterator[BodyStore]:
    """A body store that can't be reached, whose URL holds secrets."""
    Unreliable.failing.update(("open", "ls", "info", "cat", "rm"))
    yield BodyStore(UNRELIABLE)
    Unreliable.failing.clear()
    Unreliable.store.clear()


def test_failures_show_no_secret(failing: BodyStore, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a file system says becomes one error of ours, with what is secret in the URL taken out."""
    body = Elsewhere(f"{TOKEN}-0123456789abcdef.body", 3, "0" * 64)
    sink = failing.sink(TOKEN)
    calls = (
        lambda: sink.write(b"x"),
        lambda: failing.sink(TOKEN).finish(),
        lambda: failing.check(body),
        lambda: failing.delete(body.name),
        lambda: list(failing.listed(0)),
    )
    for call in calls:
        with pytest.raises(BodyStoreError, match=r"unreliable:.*ConnectionError: no route to") as caught:
            call()
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
        assert not any(secret in str(caught.value) for secret in ("s3cret", "t0ken"))
    failing.discard(body.name)
    (record,) = caplog.records
    assert body.name in record.getMessage()
    assert "prune --body-store" in record.getMessage()
    assert "s3cret" not in caplog.text + repr(failing)


@pytest.mark.parametrize("given", ["bodies", "/srv/bodies", "C:\\bodies", "memory:", "", "  ", ":x", "//host/x"])
def test_a_url_without_a_scheme(given: str) -> None:
    """A path alone could mean anything: the error says what a URL looks like."""
    with pytest.raises(ValueError, match="file:/srv/bodies"):
        BodyStore(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("fiel:/srv/bodies", "no file system fiel:"),
        ("file:bodies", "absolute path"),
        ("file://bodies", "absolute path"),
        ("simplecache::s3://bucket/bodies", "chain"),
        ("s3://key:s3cret-s3cret@bucket", "s3: is not installed.* s3fs"),
        ("gs://bucket", "gs: is not installed.* gcsfs"),
        ("az://container/x", "az: is not installed.* adlfs"),
    ],
)
def test_a_url_that_will_not_do(given: str, said: str) -> None:
    """What can't work is said when the app starts, with the package that is missing, and without the URL."""
    with pytest.raises(ValueError, match=said) as caught:
        BodyStore(given)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("given", ["memory:bodies", "MEMORY:bodies", "memory://bodies", " memory:bodies "])
def test_spellings_of_a_url(given: str) -> None:
    """With the slashes or without them, it is the same place."""
    assert "memory://bodies" == BodyStore(given)._url


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fsspec is missing, the error names the extra."""
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match=r"pip install Flask-Idempotency\[bodies\]"):
        BodyStore("memory:bodies")


def test_ages_of_any_kind(store: BodyStore) -> None:
    """File systems tell times as numbers, as moments with a zone and without, or when they are asked; all mean one."""
    from flask_idempotency.bodies import _written

    body = put(store, b"x")
    files, path = place(store, body.name)
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    for entry in (
        {"mtime": moment.timestamp()},
        {"LastModified": moment},
        {"last_modified": moment.replace(tzinfo=None)},
        {"updated": "2026", "created": moment},
    ):
        assert moment.timestamp() == _written(files, entry)
    assert abs(time.time() - _written(files, {"name": path})) < 60
