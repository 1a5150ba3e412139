"""Answers over ``MAX_BODY`` with a body store: kept there, replayed from there, and gone with their keys."""

from __future__ import annotations

import contextlib
import gc
import gzip
import io
import itertools
import logging
import secrets
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Response, send_file
from fsspec.implementations.local import LocalFileOpener
from fsspec.implementations.memory import MemoryFileSystem
from werkzeug.test import TestResponse, create_environ

from flask_idempotency.bodies import BodyStore
from flask_idempotency.errors import BodyLost, BodyStoreError, ConfigurationError, KeyNotFound, SettleError
from flask_idempotency.state import get_state
from tests.support.apps import (
    Shop,
    answering,
    assert_replayed,
    close,
    events,
    guard,
    make_shop,
    new_key,
    row_of,
    send,
    until,
)
from tests.support.bodies import UNRELIABLE, Unreliable, names, place
from tests.support.proxy import CuttingProxy

PROBLEM = "urn:problem-type:idempotency:"
LIMIT = 1000
LARGE = secrets.token_bytes(5 * LIMIT)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty body store."""
    yield f"file:{tmp_path}/bodies" if request.param == "file" else f"memory:{tmp_path.name}"
    MemoryFileSystem.store.clear()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[str]:
    """The URL of an empty body store, for behaviour in which its kind has no part."""
    yield f"memory:{tmp_path.name}"
    MemoryFileSystem.store.clear()


@pytest.fixture
def unreliable() -> Iterator[type[Unreliable]]:
    """A body store under ``UNRELIABLE``, some of whose calls fail once they are told to."""
    yield Unreliable
    for left in (Unreliable.failing, Unreliable.store, Unreliable.calls):
        left.clear()


def bodies(shop: Shop) -> BodyStore:
    """The shop's body store."""
    store = get_state(shop.app).settings.body_store
    assert store is not None
    return store


def limited(shop: Shop, answer: Callable[[], Any], **options: Any) -> str:
    """Guard a view at /x that gives this answer, of which little is kept in the row; returns a key."""
    return answering(shop, answer, **{"max_body": LIMIT, **options})


def ask(shop: Shop, key: str, **options: Any) -> TestResponse:
    """A request whose answer is read to its end."""
    return send(shop, key, buffered=True, **options)


def call(shop: Shop, key: str) -> Any:
    """The WSGI iterable itself, as a server gets it."""
    environ = create_environ("/x", method="POST", headers={"X-Tenant": "acme", "Idempotency-Key": key})
    return shop.app.wsgi_app(environ, lambda *_: lambda data: None)


def pieces(body: bytes = LARGE, size: int = 700) -> Iterator[bytes]:
    """A body in pieces, of which no one alone is over the limit."""
    for start in range(0, len(body), size):
        yield body[start : start + size]


def assert_unavailable(shop: Shop, key: str, status: int = 201, runs: int = 1) -> None:
    """A retry gets to know the first answer's status, nothing runs, and nothing is left in the body store."""
    retry = ask(shop, key)
    assert (409, PROBLEM + "record-unavailable") == (retry.status_code, retry.json["type"])
    assert status == retry.json["original_status"]
    assert (runs, ["completed"]) == (len(shop.runs), [row["status"] for row in shop.rows()])


def assert_told(record: logging.LogRecord, key: str) -> None:
    """The line says whose answer it is, in its text and its fields, what the trouble is, and what to do about it."""
    fields = vars(record)
    assert (logging.ERROR, "acme", key, "/x") == (record.levelno, fields["scope"], fields["key"], fields["endpoint"])
    assert ("body" in fields["exception"], key in record.getMessage()) == (True, True)
    assert "IDEMPOTENCY_BODY_STORE" in fields["remedy"] or "body store" in fields["remedy"]


KINDS: dict[str, Callable[[Path], Any]] = {
    "bytes": lambda path: (LARGE, 201),
    "text": lambda path: ("ü" * LIMIT, 201, {"Content-Type": "text/plain; charset=utf-8"}),
    "pieces": lambda path: Response(list(pieces()), 201),
    "generator": lambda path: Response(pieces(), 201),
    "one piece": lambda path: Response(iter([LARGE]), 201),
    "with a length": lambda path: Response(pieces(), 201, {"Content-Length": str(len(LARGE))}),
    "file": lambda path: send_file(path, mimetype="text/csv"),
    "file in memory": lambda path: send_file(io.BytesIO(LARGE), mimetype="text/csv"),
    "an error": lambda path: (LARGE, 400),
}


@pytest.mark.scenario(38, 39)
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_answer(make_light: Callable[..., Shop], url: str, tmp_path: Path, kind: str) -> None:
    """However it is made, the first client gets all of it, the retries the same from the body store, after one run."""
    path = tmp_path / "large"
    path.write_bytes(LARGE)
    shop = make_light(body_store=url)
    key = limited(shop, lambda: KINDS[kind](path))
    first = ask(shop, key)
    assert len(first.data) > LIMIT
    for _ in range(2):
        retry = ask(shop, key)
        assert_replayed(retry, first)
        assert first.headers.get("Content-Length") == retry.headers.get("Content-Length")
        assert first.headers["Content-Type"] == retry.headers["Content-Type"]
    (row,) = shop.rows()
    assert (1, None) == (len(shop.runs), row["response_body"])
    (name,) = names(bodies(shop))
    assert name.startswith(row["fencing_token"])


@pytest.mark.scenario(39)
@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT, LIMIT + 1])
@pytest.mark.parametrize("streamed", [True, False])
def test_the_limit(make_light: Callable[..., Shop], memory: str, size: int, streamed: bool) -> None:
    """A body of up to the limit is kept in the table, as ever, and nothing of it in the body store."""
    shop = make_light(body_store=memory)
    key = limited(shop, lambda: Response(pieces(LARGE[:size]) if streamed else LARGE[:size]))
    first = ask(shop, key)
    assert_replayed(ask(shop, key), first)
    assert LARGE[:size] == first.data
    assert (size > LIMIT, size > LIMIT) == (bool(names(bodies(shop))), shop.rows()[0]["response_body"] is None)


def test_a_stream_is_replayed_when_it_has_passed(make_light: Callable[..., Shop], url: str) -> None:
    """A retry during a large stream gets 409, and once its last piece is out, before the server is done, the replay."""
    shop = make_light(body_store=url)
    key = limited(shop, lambda: Response(pieces()))
    answer = call(shop, key)
    received = [next(answer) for _ in range(5)]
    assert PROBLEM + "in-flight" == ask(shop, key).json["type"]
    received += list(answer)
    assert LARGE == b"".join(received) == ask(shop, key).data
    answer.close()
    assert (1, 1) == (len(shop.runs), len(names(bodies(shop))))


@pytest.mark.scenario(40)
@pytest.mark.parametrize("read", [0, 1, 4])
def test_the_client_goes_away(make_light: Callable[..., Shop], url: str, read: int) -> None:
    """However little of a large stream the client waited for, all of it is recorded for its retry."""
    shop = make_light(body_store=url)
    key = limited(shop, lambda: Response(pieces()))
    answer = call(shop, key)
    for _ in range(read):
        next(answer)
    answer.close()
    retry = ask(shop, key)
    assert (LARGE, "true", 1) == (retry.data, retry.headers["Idempotent-Replay"], len(shop.runs))


@pytest.mark.scenario(40)
def test_a_stream_that_nobody_can_wait_for(make_light: Callable[..., Shop], url: str) -> None:
    """A stream without end is taken in for no longer than the lease once its client has gone; nothing of it stays."""
    shop = make_light(body_store=url)

    def endless() -> Iterator[bytes]:
        while True:
            time.sleep(0.01)
            yield LARGE[:700]

    key = limited(shop, lambda: Response(endless(), 201), lock_timeout=0.2)
    answer = call(shop, key)
    next(answer)
    answer.close()  # or never, if nothing ended it
    assert_unavailable(shop, key)
    assert set() == names(bodies(shop))


@pytest.mark.scenario(40)
@pytest.mark.parametrize("before", [0, 1, 4])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_stream_that_breaks_off(make_light: Callable[..., Shop], url: str, before: int, leaves: bool) -> None:
    """A generator that raises leaves the key completed without a body, and nothing in the body store."""
    shop = make_light(body_store=url)

    def failing() -> Iterator[bytes]:
        yield from itertools.islice(pieces(), before)
        raise ZeroDivisionError

    key = limited(shop, lambda: Response(failing(), 201))
    answer = call(shop, key)
    if not leaves:
        with pytest.raises(ZeroDivisionError):
            list(answer)
    answer.close()
    assert_unavailable(shop, key)
    assert set() == names(bodies(shop))


@pytest.mark.scenario(40)
@pytest.mark.parametrize("mimetype", ["text/event-stream", "multipart/x-mixed-replace"])
@pytest.mark.parametrize("stored", [True, False])
def test_events_without_end(make_light: Callable[..., Shop], memory: str, stored: bool, mimetype: str) -> None:
    """Events fill neither memory nor body store: past the limit the key is completed without a body, and they go on."""
    shop = make_light(body_store=memory if stored else None)
    key = limited(shop, lambda: Response(itertools.repeat(b"data: x\n\n"), 201, mimetype=mimetype))
    answer = call(shop, key)
    received = b"".join(itertools.islice(answer, 100))
    assert PROBLEM + "in-flight" == ask(shop, key).json["type"]
    received += b"".join(itertools.islice(answer, 100))
    assert b"data: x\n\n" * 200 == received
    assert_unavailable(shop, key)
    tracemalloc.start()
    for _ in itertools.islice(answer, 5_000):
        pass
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    answer.close()
    assert {} == MemoryFileSystem.store


def test_memory_stays_flat(make_light: Callable[..., Shop], tmp_path: Path) -> None:
    """Neither a streamed answer of 64 MiB nor its replay is ever in memory as a whole."""
    shop = make_light(body_store=f"file:{tmp_path}/bodies")
    chunk, count = secrets.token_bytes(2**20), 64
    key = limited(shop, lambda: Response(itertools.repeat(chunk, count)), max_body=2**20)
    sizes, peaks = [], []
    for _ in range(2):
        tracemalloc.start()
        answer = call(shop, key)
        sizes.append(sum(map(len, answer)))
        answer.close()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert [count * 2**20] * 2 == sizes
    assert max(peaks) < 8 * 2**20
    assert ["run"] == shop.runs


# Without the body store's help


def test_a_url_that_is_empty(make_light: Callable[..., Shop]) -> None:
    """An empty text, which is what an environment variable without a value is, means that there is no body store."""
    assert get_state(make_light(body_store="").app).settings.body_store is None


@pytest.mark.parametrize("given", ["/mnt/large", "fiel:/srv/bodies", "s3://key:s3cret@bucket/bodies"])
def test_a_url_that_will_not_do(make_light: Callable[..., Shop], given: str) -> None:
    """A wrong URL, and a package that is missing, are errors of init_app, which name the option and not the URL."""
    with pytest.raises(ConfigurationError, match=r"^IDEMPOTENCY_BODY_STORE: ") as caught:
        make_light(body_store=given)
    assert given not in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("call", ["open", "write", "close"])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_body_that_can_not_be_written(
    make_light: Callable[..., Shop],
    unreliable: type[Unreliable],
    caplog: pytest.LogCaptureFixture,
    call: str,
    streamed: bool,
) -> None:
    """The client gets its answer, the key is completed without the body, which is told with the reason."""
    shop = make_light(body_store=UNRELIABLE)
    key = limited(shop, lambda: Response(pieces() if streamed else LARGE, 201))
    unreliable.failing.add(call)
    with events(shop.app) as seen:
        first = ask(shop, key)
    assert (201, LARGE) == (first.status_code, first.data)
    assert ["record_failed", "executed"] == [name for name, _ in seen]
    assert "ConnectionError: no route to ***" in seen[0][1]["exception"]
    assert not {"s3cret", "t0ken"} & set(caplog.text.replace("=", " ").split())
    unreliable.failing.clear()
    assert_unavailable(shop, key)
    assert set() == names(bodies(shop))


def test_a_body_that_can_not_be_deleted_either(
    make_light: Callable[..., Shop], unreliable: type[Unreliable], caplog: pytest.LogCaptureFixture
) -> None:
    """What is left of a body after a failure belongs to no key: the log says who deletes it."""
    shop = make_light(body_store=UNRELIABLE)
    key = limited(shop, lambda: Response(pieces(), 201))
    unreliable.failing.update(("close", "rm"))
    assert LARGE == ask(shop, key).data
    unreliable.failing.clear()
    assert_unavailable(shop, key)
    assert 1 == len(names(bodies(shop)))
    assert "prune --body-store" in caplog.text


@pytest.mark.scenario(39)
@pytest.mark.parametrize("harm", ["gone", "changed", "cut", "not configured"])
def test_a_body_that_is_lost(
    make_light: Callable[..., Shop], memory: str, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    """A retry gets 409 with the first answer's status, never another body and never a run, and the log names it."""
    shop = make_light(body_store=memory)
    key = limited(shop, lambda: (LARGE, 201))
    ask(shop, key)
    (name,) = names(bodies(shop))
    files, path = place(bodies(shop), name)
    if harm == "gone":
        files.rm(path)
    elif harm == "not configured":
        shop = make_light()
        limited(shop, lambda: (LARGE, 201))
        shop.runs.append("run")
    else:
        files.pipe_file(path, LARGE[:-1] + (b"" if harm == "cut" else bytes([LARGE[-1] ^ 1])))
    with events(shop.app) as seen:
        assert_unavailable(shop, key)
    assert [("rejected", "record-unavailable")] == [(event, fields["reason"]) for event, fields in seen]
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert name in record.getMessage()
    assert_told(record, key)
    assert ("IDEMPOTENCY_BODY_STORE is not set" in record.getMessage()) == (harm == "not configured")


@pytest.mark.parametrize("call", ["info", "cat"])
def test_a_body_store_that_can_not_be_reached(
    make_light: Callable[..., Shop], unreliable: type[Unreliable], caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """A retry gets 503 with Retry-After, nothing runs whatever ON_STORE_ERROR says, and later it gets the replay."""
    shop = make_light(body_store=UNRELIABLE, on_store_error="execute")
    key = limited(shop, lambda: (LARGE, 201))
    first = ask(shop, key)
    unreliable.failing.add(call)
    retry = ask(shop, key)
    assert (503, PROBLEM + "store-unavailable", "2") == (
        (retry.status_code, retry.json["type"], retry.headers["Retry-After"])
    )
    assert "not carried out again" in retry.json["detail"]
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert_told(record, key)
    assert "s3cret" not in caplog.text
    unreliable.failing.clear()
    assert_replayed(ask(shop, key), first)
    assert ["run"] == shop.runs


@pytest.mark.parametrize("harm", ["changed", "gone", "unreachable"])
def test_a_body_that_is_lost_during_the_replay(
    make_light: Callable[..., Shop], unreliable: type[Unreliable], caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    """A replay whose body is harmed after it was looked at breaks off before its last piece, and the log says so."""
    shop = make_light(body_store=UNRELIABLE)
    key = limited(shop, lambda: (LARGE, 201))
    ask(shop, key)
    (name,) = names(bodies(shop))
    answer = call(shop, key)
    files, path = place(bodies(shop), name)
    if harm == "unreachable":
        unreliable.failing.add("cat")
    elif harm == "gone":
        files.rm(path)
    else:
        files.pipe_file(path, bytes(len(LARGE)))
    with pytest.raises(BodyStoreError if harm == "unreachable" else BodyLost):
        b"".join(answer)
    answer.close()
    (record,) = [one for one in caplog.records if "A replay broke off" in one.getMessage()]
    assert_told(record, key)
    assert ["run"] == shop.runs


def test_a_replay_that_nobody_reads(make_light: Callable[..., Shop], tmp_path: Path) -> None:
    """A client that leaves in the middle of a replay leaves nothing open: warnings about files would be errors."""
    shop = make_light(body_store=f"file:{tmp_path}/bodies")
    large = LARGE * 1000
    key = limited(shop, lambda: (large, 201))
    ask(shop, key)
    answer = call(shop, key)
    assert 2**20 == len(next(iter(answer)))
    answer.close()
    assert large == ask(shop, key).data


@pytest.mark.parametrize("accepts", ["identity", "gzip", "br", None, "gzip;q=0, identity;q=0"])
@pytest.mark.parametrize("vary", [True, False])
def test_a_coded_body(make_light: Callable[..., Shop], url: str, accepts: str | None, vary: bool) -> None:
    """A large coded body goes as it is to who accepts its coding, plain to others, and to who wants neither, not."""
    shop = make_light(body_store=url)
    plain = LARGE.hex().encode()
    coded = gzip.compress(plain, mtime=0)
    headers = {"Content-Encoding": "gzip", **({"Vary": "Accept-Encoding"} if vary else {})}
    key = limited(shop, lambda: (coded, 201, headers))
    assert coded == ask(shop, key, headers={"Accept-Encoding": "gzip"}).data
    given = {} if accepts is None else {"Accept-Encoding": accepts}
    retry = ask(shop, key, headers=given)
    if accepts == "gzip;q=0, identity;q=0":
        assert_unavailable_coding(retry)
        return
    as_it_is = accepts == "gzip" or (accepts is None and not vary)
    expected = coded if as_it_is else plain
    assert (201, expected, str(len(expected))) == (retry.status_code, retry.data, retry.headers["Content-Length"])
    assert ("gzip" if as_it_is else None) == retry.headers.get("Content-Encoding")


def assert_unavailable_coding(retry: TestResponse) -> None:
    """The answer of a retry that accepts no form of the record."""
    assert (409, PROBLEM + "record-unavailable", 201) == (
        (retry.status_code, retry.json["type"], retry.json["original_status"])
    )


@pytest.mark.parametrize("accepts", ["identity", None])
def test_a_coding_that_can_not_be_undone(make_light: Callable[..., Shop], memory: str, accepts: str | None) -> None:
    """Bytes that are not in the coding that they claim go to who refuses nothing, and to nobody else."""
    shop = make_light(body_store=memory)
    key = limited(shop, lambda: (LARGE, 201, {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}))
    ask(shop, key)
    retry = ask(shop, key, headers={} if accepts is None else {"Accept-Encoding": accepts})
    if accepts is None:
        assert (201, LARGE, "gzip") == (retry.status_code, retry.data, retry.headers["Content-Encoding"])
    else:
        assert_unavailable_coding(retry)


# What becomes of a body whose record is not written


def test_a_claim_that_was_lost(make_light: Callable[..., Shop], url: str) -> None:
    """Whoever was taken over, meanwhile or before, leaves no body: the record is the other one's."""
    for streamed in (True, False):
        shop = make_light(body_store=url)
        key = new_key()

        def view(shop: Shop = shop, key: str = key, streamed: bool = streamed) -> Any:
            shop.runs.append("run")
            if len(shop.runs) > 1:
                return LARGE[::-1], 201
            if not streamed:
                overtake(shop, key)
                return LARGE
            return Response(overtaken_midway(shop, key))

        guard(shop, view, max_body=LIMIT)
        assert LARGE == ask(shop, key).data
        retry = ask(shop, key)
        assert (201, LARGE[::-1], 2) == (retry.status_code, retry.data, len(shop.runs))
        row = row_of(shop, key)
        (name,) = names(bodies(shop))
        assert name.startswith(row["fencing_token"])
        bodies(shop).delete(name)


def overtake(shop: Shop, key: str) -> None:
    """Let the claim's lease be over, and another request take the key over and answer."""
    shop.shift(3600)
    assert 201 == ask(shop, key).status_code


def overtaken_midway(shop: Shop, key: str) -> Iterator[bytes]:
    """A large stream, during which another request takes the key over."""
    for number, piece in enumerate(pieces()):
        if number == 4:
            overtake(shop, key)
        yield piece


@pytest.mark.parametrize("when", ["midway", "at the end"])
def test_a_claim_that_is_known_to_be_lost(make_light: Callable[..., Shop], memory: str, when: str) -> None:
    """A stream goes on to its client when the renewal has found that the claim is lost, and stops to be stored."""
    shop = make_light(body_store=memory)
    attempts = []

    def stream() -> Iterator[bytes]:
        yield from itertools.islice(pieces(), 4)
        if when == "midway":
            attempts[0].lost()
        yield from itertools.islice(pieces(), 4, None)
        if when == "at the end":
            attempts[0].lost()

    def view() -> Response:
        attempts.append(shop.idempotency.current)
        return Response(stream())

    guard(shop, view, max_body=LIMIT)
    key = new_key()
    with events(shop.app) as seen:
        answer = call(shop, key)
        received = list(itertools.islice(answer, 4))
        assert 1 == len(names(bodies(shop)))
        received.append(next(answer))
        assert (when == "midway") == (set() == names(bodies(shop)))
        received += list(answer)
        answer.close()
    assert LARGE == b"".join(received)
    assert ["claim_lost"] == [name for name, _ in seen]
    assert set() == names(bodies(shop))


def test_a_record_that_the_database_refuses(make_light: Callable[..., Shop], memory: str, psycopg_url: str) -> None:
    """Where the row can't hold the headers, the body goes again, and the key is completed without it."""
    shop = make_shop(psycopg_url, body_store=memory)
    key = limited(shop, lambda: (LARGE, 201, {"X-Note": "a\0b"}))
    with events(shop.app) as seen:
        assert LARGE == ask(shop, key).data
    assert ["record_failed", "executed"] == [name for name, _ in seen]
    assert_unavailable(shop, key)
    assert set() == names(bodies(shop))
    close(shop.app)


def test_a_record_that_is_postponed(tcp_url: str, cutting_proxy: CuttingProxy, memory: str) -> None:
    """While the database is gone the body stays, this process replays it, and in the end the row refers to it."""
    shop = make_shop(tcp_url, engine_options={"pool_pre_ping": True}, body_store=memory, lock_timeout=2)
    key = limited(shop, lambda: cutting_proxy.go_away() or (LARGE, 201))
    with events(shop.app) as seen:
        first = ask(shop, key)
        assert_replayed(ask(shop, key), first)
        assert ["record_failed", "replayed"] == [name for name, _ in seen]
        cutting_proxy.come_back()
        until(lambda: "executed" in [name for name, _ in seen])
    assert_replayed(ask(shop, key), first)
    assert (1, LARGE) == (len(shop.runs), first.data)
    close(shop.app)


def test_a_rule_that_raises(make_light: Callable[..., Shop], memory: str) -> None:
    """Where the app's rule fails, the answer is not to be kept, and nothing is written anywhere."""

    def rule(response: Response) -> bool:
        raise ZeroDivisionError

    for streamed in (True, False):
        shop = make_light(body_store=memory)
        key = limited(shop, lambda streamed=streamed: Response(pieces() if streamed else LARGE, 201), record=rule)
        assert LARGE == ask(shop, key).data
        assert 409 == ask(shop, key).status_code
        assert set() == names(bodies(shop))


def test_an_answer_that_is_released(make_light: Callable[..., Shop], memory: str) -> None:
    """What asks for another try, or fails, is not stored however large it is."""
    shop = make_light(body_store=memory)
    guard(shop, lambda: Response(pieces(), 429), "/busy", max_body=LIMIT)
    guard(shop, lambda: Response(pieces(), 500), "/broken", max_body=LIMIT)
    for path in ("/busy", "/broken"):
        assert LARGE == send(shop, new_key(), path, buffered=True).data
    assert ([], set()) == (shop.rows(), names(bodies(shop)))


def test_a_stream_that_nobody_closes(make_light: Callable[..., Shop], unreliable: type[Unreliable]) -> None:
    """A stream that its server forgot leaves nothing in the body store, for which the garbage collector can't wait."""
    shop = make_light(body_store=UNRELIABLE)
    key = limited(shop, lambda: Response(pieces(), 201), lock_timeout=1)
    answer = call(shop, key)
    list(itertools.islice(answer, 4))
    assert 1 == len(names(bodies(shop)))
    gc.collect()  # what earlier tests have left is none of this one's
    with events(shop.app) as seen:
        unreliable.calls.clear()
        del answer
        gc.collect()
        until(lambda: "executed" in [name for name, _ in seen])
    assert ["close", "rm"] == [call for call, _ in unreliable.calls]
    assert threading.get_ident() not in {thread for _, thread in unreliable.calls}
    assert_unavailable(shop, key)
    assert set() == names(bodies(shop))


@pytest.mark.parametrize("propagates", [True, False])
def test_a_hook_that_reads_a_stream_and_raises(make_light: Callable[..., Shop], url: str, propagates: bool) -> None:
    """What it has read of an answer that nobody gets is deleted, and no file stays open."""
    shop = make_light(body_store=url)
    shop.app.config["PROPAGATE_EXCEPTIONS"] = propagates
    key = limited(shop, lambda: Response(pieces(), 201), on_error="release")
    fails = [True]

    def read(response: Response) -> Response:
        if fails and response.status_code == 201:
            fails.clear()
            assert len(LARGE) > len(b"".join(itertools.islice(response.response, 3)))
            assert 1 == len(names(bodies(shop))) or url.startswith("memory")  # known there when it is closed
            raise ZeroDivisionError
        return response

    shop.app.after_request_funcs[None].insert(0, read)
    with pytest.raises(ZeroDivisionError) if propagates else contextlib.nullcontext():
        assert 500 == ask(shop, key).status_code
    assert ([], set()) == (shop.rows(), names(bodies(shop)))
    open_files = [one for one in gc.get_objects() if type(one) is LocalFileOpener and not one.closed]
    assert [] == [one for one in open_files if one.path.startswith(url.partition(":")[2])]
    assert LARGE == ask(shop, key).data


# In one transaction with the view's work


def test_an_atomic_answer(make_atomic: Callable[..., Shop], memory: str) -> None:
    """In atomic mode the body is there before the commit, and the replay is the same."""
    shop = make_atomic(body_store=memory)

    def view() -> Any:
        shop.runs.append("run")
        shop.db.session.add(shop.Charge(amount=1))
        return LARGE, 201

    guard(shop, view, max_body=LIMIT)
    key = new_key()
    first = ask(shop, key)
    assert LARGE == first.data
    assert_replayed(ask(shop, key), first)
    assert (1, 1, 1) == (len(shop.runs), shop.charges(), len(names(bodies(shop))))


def test_an_atomic_stream_over_the_limit(make_atomic: Callable[..., Shop], memory: str) -> None:
    """It is an error as without a body store: the answer has to be made, in memory, before the commit."""
    shop = make_atomic(body_store=memory)
    key = limited(shop, lambda: Response(pieces(), 201))
    assert 500 == ask(shop, key).status_code
    assert ([], set()) == (shop.rows(), names(bodies(shop)))


def test_an_atomic_failure_that_is_recorded(make_atomic: Callable[..., Shop], memory: str) -> None:
    """A large 5xx that is to be the key's answer lies in the body store, and is replayed."""
    shop = make_atomic(body_store=memory)
    key = limited(shop, lambda: (LARGE, 503), on_error="record")
    first = ask(shop, key)
    assert (503, LARGE) == (first.status_code, first.data)
    assert_replayed(ask(shop, key), first)
    assert (1, 1) == (len(shop.runs), len(names(bodies(shop))))


@pytest.mark.parametrize("status", [201, 503])
@pytest.mark.parametrize("value", ["a\0b", "a\ud800b"], ids=["NUL", "surrogate"])
def test_an_atomic_record_that_the_database_refuses(psycopg_url: str, memory: str, status: int, value: str) -> None:
    """As in the default mode: the event tells of it, the body goes again, and the work and the key stay."""
    shop = make_shop(psycopg_url, body_store=memory, atomic=True)

    def view() -> Any:
        shop.runs.append("run")
        shop.db.session.add(shop.Charge(amount=1))
        return LARGE, status, {"X-Note": value}

    guard(shop, view, max_body=LIMIT, on_error="record")
    key = new_key()
    with events(shop.app) as seen:
        assert LARGE == ask(shop, key).data
    assert ["record_failed", "executed"] == [name for name, _ in seen]
    assert seen[0][1]["exception"].startswith("RecordRefused: ")
    assert_unavailable(shop, key, status)
    assert (set(), int(status < 500)) == (names(bodies(shop)), shop.charges())
    close(shop.app)


def test_an_atomic_failure_that_can_not_be_recorded(psycopg_url: str, memory: str) -> None:
    """Where somebody else has the key by then, the failure's body goes again, and the other one's answer stays."""
    shop = make_shop(psycopg_url, body_store=memory, atomic=True)
    key = new_key()

    def view() -> Any:
        shop.runs.append("run")
        if len(shop.runs) == 1:
            return LARGE, 201
        (row,) = shop.rows()
        shop.execute(shop.table.insert().values({**row, "id": 1000, "key": key}))
        return LARGE, 503

    guard(shop, view, max_body=LIMIT, on_error="record")
    first = ask(shop, new_key())
    before = names(bodies(shop))
    assert (503, LARGE) == ((failed := ask(shop, key)).status_code, failed.data)
    assert (2, 1, before) == (len(shop.runs), len(before), names(bodies(shop)))
    assert_replayed(ask(shop, key), first)
    close(shop.app)


@pytest.mark.parametrize("harm", ["commit fails", "somebody was first"])
def test_an_atomic_answer_that_is_undone(psycopg_url: str, memory: str, harm: str) -> None:
    """What is rolled back leaves no body, and the retry makes another."""
    shop = make_shop(psycopg_url, body_store=memory, atomic=True)
    shop.execute(sa.text("CREATE TABLE late (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    key = new_key()

    def view() -> Any:
        shop.runs.append("run")
        if len(shop.runs) == 2 and harm == "commit fails":
            shop.db.session.execute(sa.text("INSERT INTO late VALUES (1), (1)"))
        elif len(shop.runs) == 2:
            (row,) = shop.rows()
            shop.execute(shop.table.insert().values({**row, "id": 1000, "key": key}))
        return LARGE, 201

    guard(shop, view, max_body=LIMIT)
    assert LARGE == ask(shop, new_key()).data
    before = names(bodies(shop))
    assert ask(shop, key).status_code in (409, 500)
    assert (2, 1, before) == (len(shop.runs), len(before), names(bodies(shop)))
    shop.execute(shop.table.delete().where(shop.table.c.key == key))
    assert (201, LARGE) == ((answer := ask(shop, key)).status_code, answer.data)
    assert (3, True) == (len(shop.runs), before < names(bodies(shop)))
    close(shop.app)


def test_a_commit_of_which_nobody_can_tell(tcp_url: str, cutting_proxy: CuttingProxy, memory: str) -> None:
    """Where the row may be there, so has its body to be: the retry gets what was committed."""
    shop = make_shop(tcp_url, body_store=memory, atomic=True)
    key = limited(shop, lambda: (LARGE, 201))
    looks = cutting_proxy.lose_request("idempotency_keys", times=10)
    looks.left = 0

    def lose(connection: Any) -> None:
        looks.left = 10

    with shop.app.app_context():
        sa.event.listen(shop.db.engine, "commit", lose)
    reply = cutting_proxy.lose_reply("COMMIT")
    assert 503 == ask(shop, key).status_code
    looks.left = 0
    assert (True, True, 1) == (reply.happened, looks.happened, len(names(bodies(shop))))
    retry = ask(shop, key)
    assert (201, LARGE, "true") == (retry.status_code, retry.data, retry.headers["Idempotent-Replay"])
    assert ["run"] == shop.runs
    close(shop.app)


# By hand


def test_settling_with_a_large_answer(make_light: Callable[..., Shop], url: str) -> None:
    """An answer that a person records goes to the body store like any other; where it is refused, nothing stays."""
    shop = make_light(body_store=url, max_body=LIMIT)

    def die() -> Any:
        shop.runs.append("run")
        raise SystemExit

    guard(shop, die)
    key = new_key()
    with pytest.raises(SystemExit):
        ask(shop, key)
    with shop.app.app_context():
        with pytest.raises(SettleError, match="alive"):
            shop.idempotency.settle("acme", key, LARGE)
        with pytest.raises(KeyNotFound):
            shop.idempotency.settle("acme", new_key(), LARGE)
        assert set() == names(bodies(shop))
        shop.shift(3600)
        shop.idempotency.settle("acme", key, Response(pieces(), 202))
    retry = ask(shop, key)
    assert (202, LARGE, "true") == (retry.status_code, retry.data, retry.headers["Idempotent-Replay"])
    (name,) = names(bodies(shop))
    assert name.startswith(shop.rows()[0]["fencing_token"])


def test_settling_without_the_body_store(make_light: Callable[..., Shop], unreliable: type[Unreliable]) -> None:
    """Where the body can't be written, the key is left as it was, and the caller is told why."""
    shop = make_light(body_store=UNRELIABLE, max_body=LIMIT)
    unreliable.failing.add("open")
    with shop.app.app_context(), pytest.raises(BodyStoreError, match="no route"):
        shop.idempotency.settle("acme", new_key(), LARGE)
    with shop.app.app_context(), pytest.raises(SettleError, match="streams without end"):
        shop.idempotency.settle("acme", new_key(), Response(pieces(), mimetype="text/event-stream"))


def test_releasing_a_large_answer(make_light: Callable[..., Shop], url: str) -> None:
    """A record that is dropped by force takes its body with it."""
    shop = make_light(body_store=url)
    key = limited(shop, lambda: (LARGE, 201))
    ask(shop, key)
    with shop.app.app_context():
        with pytest.raises(SettleError):
            shop.idempotency.release("acme", key)
        assert 1 == len(names(bodies(shop)))
        shop.idempotency.release("acme", key, force=True)
    assert set() == names(bodies(shop))
    assert LARGE == ask(shop, key).data
    assert 2 == len(shop.runs)
