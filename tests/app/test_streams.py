"""Answers that are made while they go out: recorded when they have passed, whatever becomes of the client."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Response, abort, request, send_file, stream_with_context
from werkzeug.test import TestResponse, create_environ

from flask_idempotency.heartbeat import heartbeat
from tests.support.apps import Shop, events, guard, new_key, send

IN_FLIGHT = "urn:problem-type:idempotency:in-flight"
UNAVAILABLE = "urn:problem-type:idempotency:record-unavailable"


class Stream:
    """A guarded view at /stream that answers with what ``generate`` yields; counts its runs."""

    def __init__(self, shop: Shop, generate: Callable[[], Iterator[Any]], **response: Any) -> None:
        self.shop = shop
        self.key = new_key()
        self.runs = 0

        @shop.app.post("/stream")
        @shop.idempotency.required
        def stream() -> Response:
            self.runs += 1
            return Response(generate(), **{"status": 201, **response})

    def post(self, **options: Any) -> TestResponse:
        """Send the request. Without ``buffered``, only the first chunk is read for now."""
        headers = {"X-Tenant": "acme", "Idempotency-Key": self.key, **options.pop("headers", {})}
        return self.shop.client.post("/stream", headers=headers, **options)

    def call(self) -> Any:
        """The WSGI iterable itself, as a server gets it."""
        environ = create_environ("/stream", method="POST", headers={"X-Tenant": "acme", "Idempotency-Key": self.key})
        return self.shop.app.wsgi_app(environ, lambda *_: lambda data: None)

    def assert_unavailable(self) -> None:
        """A retry gets to know the first answer's status, and nothing runs."""
        runs = self.runs
        retry = self.post(buffered=True)
        assert (409, UNAVAILABLE, 201) == (retry.status_code, retry.json["type"], retry.json["original_status"])
        assert runs == self.runs
        assert ["completed"] == [row["status"] for row in self.shop.rows()]


def ten() -> Iterator[str]:
    for number in range(10):
        yield f"{number},"


def assert_left_to_its_lease(shop: Shop) -> None:
    """The claim is neither recorded nor released, and nobody renews it any more."""
    (row,) = shop.rows()
    assert ("in_progress", False) == (row["status"], heartbeat.holds(row["fencing_token"]))


def put_first(shop: Shop, hook: Callable[[Response], Response]) -> None:
    """Register an after_request function as if that had been done before the extension's init_app."""
    shop.app.after_request_funcs[None].insert(0, hook)


@pytest.mark.scenario(38)
def test_a_stream_is_recorded_when_it_has_passed(light: Shop) -> None:
    """A retry during the stream gets 409, and once the last chunk is out, the replay, before the server is done."""
    stream = Stream(light, ten)
    answer = stream.call()
    chunks = [next(answer), next(answer)]
    retry = stream.post(buffered=True)
    assert (409, IN_FLIGHT) == (retry.status_code, retry.json["type"])
    chunks += list(answer)
    assert "".join(ten()).encode() == b"".join(chunks) == stream.post(buffered=True).data
    answer.close()
    assert (1, 1) == (stream.runs, len(light.rows()))


@pytest.mark.scenario(40)
@pytest.mark.parametrize("read", [0, 1, 4, 10])
def test_the_client_goes_away(light: Shop, read: int) -> None:
    """However little of a stream the client waited for, all of it is recorded for its retry."""
    ended = []

    def generate() -> Iterator[str]:
        try:
            yield from ten()
            ended.append("whole")
        finally:
            ended.append("closed")

    stream = Stream(light, generate)
    answer = stream.call()
    for _ in range(read):
        next(answer)
    answer.close()
    retry = stream.post(buffered=True)
    assert (201, "".join(ten()), "true") == (retry.status_code, retry.text, retry.headers["Idempotent-Replay"])
    assert (1, ["whole", "closed"]) == (stream.runs, ended)


@pytest.mark.scenario(38, 40)
@pytest.mark.parametrize("whole", [True, False])
def test_a_stream_that_works_with_the_database(shop: Shop, whole: bool) -> None:
    """A stream in the request's context that goes on committing is recorded, and the app's work is all there."""

    def generate() -> Iterator[str]:
        for amount in (1, 2, 3):
            shop.db.session.add(shop.Charge(amount=amount))
            yield f"{request.args['name']} {amount};"
            shop.db.session.commit()

    stream = Stream(shop, lambda: stream_with_context(generate()))
    answer = stream.post(query_string={"name": "charge"}, buffered=whole)
    answer.close()
    retry = stream.post(query_string={"name": "charge"}, buffered=True)
    assert (201, "charge 1;charge 2;charge 3;") == (retry.status_code, retry.text)
    assert (3, 1) == (shop.charges(), stream.runs)


@pytest.mark.scenario(39)
def test_a_stream_over_the_limit(make_light: Callable[..., Shop]) -> None:
    """The client gets all of a stream that is too large; retries get 409 from the moment when that is known."""
    shop = make_light(max_body=1000)
    stream = Stream(shop, lambda: itertools.repeat(b"x" * 100, 20))
    answer = stream.call()
    received = b"".join(itertools.islice(answer, 10))
    assert IN_FLIGHT == stream.post().json["type"]
    received += next(answer)
    stream.assert_unavailable()
    assert b"x" * 2000 == received + b"".join(answer)
    answer.close()
    stream.assert_unavailable()


@pytest.mark.scenario(39, 40)
def test_the_client_goes_away_from_a_stream_over_the_limit(make_light: Callable[..., Shop]) -> None:
    """A stream that nobody waits for is read no further than the limit, and closed."""
    shop = make_light(max_body=1000)
    made = []

    def generate() -> Iterator[bytes]:
        try:
            for number in itertools.count():
                made.append(number)
                yield b"x" * 100
        finally:
            made.append("closed")

    stream = Stream(shop, generate)
    stream.post().close()
    assert [*range(11), "closed"] == made
    stream.assert_unavailable()


@pytest.mark.scenario(40)
@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_stream_that_breaks_off(light: Shop, before: int, leaves: bool) -> None:
    """A generator that raises leaves the key completed without an answer, whether or not the client still reads."""

    def generate() -> Iterator[str]:
        yield from itertools.islice(ten(), before)
        raise ZeroDivisionError

    stream = Stream(light, generate)
    answer = stream.call()
    if leaves:
        answer.close()
    else:
        with pytest.raises(ZeroDivisionError):
            list(answer)
        answer.close()
    stream.assert_unavailable()


@pytest.mark.scenario(38)
def test_a_stream_of_a_known_length(light: Shop) -> None:
    """Where a stream's length is announced, a client that has read so much gets the replay at once, and a server that
    stops there loses nothing: it need not ask for more, nor close.
    """
    stream = Stream(light, ten, headers={"Content-Length": "20"})
    answer = stream.call()
    chunks = [next(answer) for _ in range(9)]
    assert (409, IN_FLIGHT) == ((retry := stream.post(buffered=True)).status_code, retry.json["type"])
    chunks.append(next(answer))
    retry = stream.post(buffered=True)
    assert (201, b"".join(chunks), "true") == (retry.status_code, retry.data, retry.headers["Idempotent-Replay"])
    assert [] == list(answer)
    assert 1 == stream.runs


@pytest.mark.parametrize("length", [1, 2, 4, 20])
@pytest.mark.parametrize("fails", [True, False])
def test_a_stream_of_another_length_than_announced(light: Shop, length: int, fails: bool) -> None:
    """What follows after the announced length goes out in its turn, be it more of the stream or an exception."""

    def generate() -> Iterator[str]:
        yield from ten()
        if fails:
            raise ZeroDivisionError

    stream = Stream(light, generate, headers={"Content-Length": str(length)})
    answer = stream.call()
    assert "".join(ten()).encode() == b"".join(itertools.islice(answer, 10))
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        assert [] == list(answer)
    answer.close()
    if fails:
        stream.assert_unavailable()
    else:
        assert "".join(ten()) == stream.post(buffered=True).text


def test_a_chunk_that_is_none(light: Shop) -> None:
    """A generator that yields what no server can send leaves the key completed without an answer."""
    stream = Stream(light, lambda: iter(["a", 5, "b"]))
    answer = stream.call()
    with pytest.raises(TypeError):
        list(answer)
    answer.close()
    stream.assert_unavailable()


@pytest.mark.scenario(40)
def test_a_clean_up_that_raises(make_light: Callable[..., Shop]) -> None:
    """A generator whose clean-up fails when it is closed has run all the same: it never runs again."""
    shop = make_light(max_body=10)

    def generate() -> Iterator[bytes]:
        try:
            yield from itertools.repeat(b"x" * 6)
        finally:
            raise ZeroDivisionError

    stream = Stream(shop, generate)
    answer = stream.post()
    with pytest.raises(ZeroDivisionError):
        answer.close()
    shop.shift(3600)
    stream.assert_unavailable()


@pytest.mark.scenario(40)
@pytest.mark.parametrize("chunk", [b"", b"x"])
def test_an_endless_stream(make_light: Callable[..., Shop], chunk: bytes) -> None:
    """A stream that does not end holds nobody up for longer than the lease once its client has gone."""
    shop = make_light(lock_timeout=0.3)
    made: list[None] = []
    stream = Stream(shop, lambda: iter(lambda: made.append(time.sleep(0.01)) or chunk, None))
    answer = stream.call()
    next(answer)
    answer.close()  # or never, if nothing ended it
    assert len(made) > 1
    stream.assert_unavailable()


@pytest.mark.scenario(40)
def test_an_event_stream(light: Shop) -> None:
    """Events are not waited for once the client has gone; a stream of them that ends is recorded as any other."""
    made = []

    def generate() -> Iterator[str]:
        for number in range(3):
            made.append(number)
            yield f"data: {number}\n\n"

    stream = Stream(light, generate, content_type="text/event-stream; charset=utf-8")
    stream.post().close()
    assert [0] == made
    stream.assert_unavailable()
    stream.key = new_key()
    first, retry = stream.post(buffered=True), stream.post(buffered=True)
    assert (first.data, 2) == (retry.data, stream.runs)


@pytest.mark.scenario(40, 66)
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_crash_in_a_stream(light: Shop, kind: type[BaseException], leaves: bool) -> None:
    """An exception that is no Exception is a crash: 409 until the lease is over, then one takeover."""
    crashes = [True]

    def generate() -> Iterator[str]:
        yield "a"
        if crashes:
            crashes.clear()
            raise kind
        yield "b"

    stream = Stream(light, generate)
    answer = stream.call()
    next(answer)
    with pytest.raises(kind):
        answer.close() if leaves else next(answer)
    answer.close()
    assert IN_FLIGHT == stream.post().json["type"]
    assert_left_to_its_lease(light)
    light.shift(31)
    with events(light.app) as seen:
        assert "ab" == stream.post(buffered=True).text
    assert ["taken_over", "executed"] == [name for name, _ in seen]
    assert ("true", 2) == (stream.post().headers["Idempotent-Replay"], stream.runs)


@pytest.mark.scenario(40, 66)
def test_a_crash_that_a_hook_hides(light: Shop) -> None:
    """A crash stays one, also where a hook around the stream keeps it from the server."""

    def hide(response: Response) -> Response:
        source = response.iter_encoded()

        def quiet() -> Iterator[bytes]:
            with contextlib.suppress(BaseException):
                yield from source

        response.response = quiet()
        return response

    def generate() -> Iterator[str]:
        yield "a"
        raise SystemExit

    put_first(light, hide)
    stream = Stream(light, generate)
    assert "a" == stream.post(buffered=True).text
    assert_left_to_its_lease(light)
    light.shift(31)
    assert "a" == stream.post(buffered=True).text
    assert 2 == stream.runs


@pytest.mark.scenario(41)
@pytest.mark.parametrize("how", ["status", "release", "record"])
def test_a_stream_that_is_released(make_light: Callable[..., Shop], how: str) -> None:
    """What is released is so before its first byte leaves, and passes to the client as it is."""
    shop = make_light(on_error="release", **({"record": lambda response: False} if how == "record" else {}))
    made = []

    def generate() -> Iterator[str]:
        for one in ten():
            made.append(one)
            yield one

    def view() -> Iterator[str]:
        if how == "release":
            assert shop.idempotency.current is not None
            shop.idempotency.current.release()
        return generate()

    stream = Stream(shop, view, status=503 if how == "status" else 201)
    answer = stream.call()
    assert [] == shop.rows()
    next(answer)
    answer.close()
    assert ["0,"] == made
    assert "".join(ten()) == stream.post(buffered=True).text
    assert (2, []) == (stream.runs, shop.rows())


@pytest.mark.scenario(44)
def test_a_hook_that_compresses_a_stream(light: Shop) -> None:
    """A hook around the extension compresses first answer and replay alike; the record is what the view gave."""

    def compress(response: Response) -> Response:
        packer, source = zlib.compressobj(), response.iter_encoded()
        if "deflate" in request.headers.get("Accept-Encoding", ""):
            response.headers["Content-Encoding"] = "deflate"
            response.headers.pop("Content-Length", None)
            response.response = (packer.compress(one) if one else packer.flush() for one in (*source, b""))
        return response

    put_first(light, compress)
    stream = Stream(light, ten)
    coded = [stream.post(headers={"Accept-Encoding": "deflate"}, buffered=True) for _ in range(2)]
    assert ["".join(ten())] * 2 == [zlib.decompress(one.data).decode() for one in coded]
    assert "".join(ten()) == stream.post(buffered=True).text
    assert 1 == stream.runs


@pytest.mark.scenario(40)
@pytest.mark.parametrize("read", ["nothing", "some", "all", "closes"])
def test_a_hook_that_replaces_a_stream(light: Shop, read: str) -> None:
    """A hook around the extension may take the stream's place: what the view answered is recorded whole."""

    def replace(response: Response) -> Response:
        if request.headers.get("X-Replace"):
            if read == "some":
                next(response.iter_encoded())
            elif read == "all":
                response.get_data()
            elif read == "closes":
                response.close()
            return Response("replaced", 406)
        return response

    put_first(light, replace)
    stream = Stream(light, ten)
    first = stream.post(headers={"X-Replace": "1"}, buffered=True)
    assert (406, "replaced") == (first.status_code, first.text)
    retry = stream.post(buffered=True)
    assert (201, "".join(ten()), 1) == (retry.status_code, retry.text, stream.runs)


@pytest.mark.scenario(38)
def test_a_hook_that_is_part_of_the_record(light: Shop) -> None:
    """What a hook registered later makes of a stream is recorded as it made it."""

    @light.app.after_request
    def upper(response: Response) -> Response:
        response.response = (one.replace(b",", b";") for one in response.iter_encoded())
        response.headers["X-Upper"] = "yes"
        return response

    stream = Stream(light, ten)
    first, retry = stream.post(buffered=True), stream.post(buffered=True)
    assert "".join(ten()).replace(",", ";") == first.text == retry.text
    assert ["yes"] == retry.headers.getlist("X-Upper")


@pytest.mark.scenario(42)
@pytest.mark.parametrize("position", ["before", "after"])
def test_a_hook_that_raises_over_a_stream(light: Shop, position: str) -> None:
    """A hook that fails makes a 500 of the stream's answer: it is released, and the retry runs."""
    fails = [True]

    def fail(response: Response) -> Response:
        if fails and response.status_code == 201:
            fails.clear()
            raise ZeroDivisionError
        return response

    put_first(light, fail) if position == "before" else light.app.after_request(fail)
    stream = Stream(light, ten)
    assert 500 == stream.post(buffered=True).status_code
    assert [] == light.rows()
    assert ("".join(ten()), 2) == (stream.post(buffered=True).text, stream.runs)


def test_an_aborted_answer_is_no_stream(light: Shop) -> None:
    """The answer of an abort is settled at once, though nobody reads its body."""

    def view() -> Iterator[str]:
        abort(410)

    stream = Stream(light, view)
    assert 410 == stream.post().status_code
    assert ["completed"] == [row["status"] for row in light.rows()]


def test_a_stream_behind_a_status_without_a_body(light: Shop) -> None:
    """A stream that never starts, behind a 204, is an empty answer."""
    started = []

    def generate() -> Iterator[str]:
        started.append(True)
        yield "never sent"

    stream = Stream(light, generate, status=204)
    for _ in range(2):
        answer = stream.post(buffered=True)
        assert (204, b"") == (answer.status_code, answer.data)
    assert ([], 1) == (started, stream.runs)


@pytest.mark.parametrize("read", [0, 2, 10])
def test_a_stream_outside_of_a_server(light: Shop, read: int) -> None:
    """In a bare request context, where no WSGI server is, a stream is recorded whole when its answer is closed."""
    stream = Stream(light, ten)
    headers = {"X-Tenant": "acme", "Idempotency-Key": stream.key}
    with light.app.test_request_context("/stream", method="POST", headers=headers):
        response = light.app.full_dispatch_request()
        list(itertools.islice(response.response, read))
        response.close()
    retry = stream.post(buffered=True)
    assert (201, "".join(ten()), 1) == (retry.status_code, retry.text, stream.runs)


def test_a_crash_outside_of_a_server(light: Shop) -> None:
    """In a bare request context too, a crash in a stream leaves the claim to its lease."""

    def generate() -> Iterator[str]:
        yield "a"
        raise SystemExit

    stream = Stream(light, generate)
    headers = {"X-Tenant": "acme", "Idempotency-Key": stream.key}
    with light.app.test_request_context("/stream", method="POST", headers=headers):
        response = light.app.full_dispatch_request()
        with pytest.raises(SystemExit):
            list(response.response)
        response.close()
    assert_left_to_its_lease(light)
    assert IN_FLIGHT == stream.post().json["type"]


class Reluctant(bytes):
    """Bytes of which no copy can be made."""

    def __bytes__(self) -> bytes:
        raise MemoryError


@pytest.mark.parametrize("chunk", [{"row": 1}, ["1,100\n"], [3], 5], ids=repr)
@pytest.mark.parametrize("leaves", [True, False])
def test_a_chunk_of_no_bytes(light: Shop, chunk: Any, leaves: bool) -> None:
    """What has a length, or could be made bytes of, is no piece of an answer: the key has none, whole or in part."""
    stream = Stream(light, lambda: iter(["a", chunk, "b"]))
    answer = stream.call()
    with (
        contextlib.nullcontext()
        if leaves
        else pytest.raises(TypeError, match=f"one of them is of {type(chunk).__name__}")
    ):
        [] if leaves else list(answer)
    answer.close()
    stream.assert_unavailable()


@pytest.mark.parametrize("atomic", [True, False])
def test_a_ready_answer_of_no_bytes(light: Shop, make_atomic: Callable[..., Shop], atomic: bool) -> None:
    """An answer that is there and is none is an error of the view's, and no lease decides about it."""
    shop = make_atomic() if atomic else light
    guard(shop, lambda: Response(["a", {"row": 1}], 201), atomic=atomic)
    key = new_key()
    assert [500, 500] == [send(shop, key, buffered=True).status_code for _ in range(2)]
    assert [] == shop.rows()


def test_a_piece_that_can_not_be_copied(light: Shop) -> None:
    """Where the extension's own copy fails, the client gets its answer, and no part of it is recorded as the whole."""
    stream = Stream(light, lambda: iter([b"a", Reluctant(b"b"), b"c"]))
    answer = stream.call()
    with events(light.app) as seen:
        assert b"abc" == b"".join(answer)
    answer.close()
    assert "MemoryError" in dict(seen)["record_failed"]["exception"]
    stream.assert_unavailable()


@pytest.mark.parametrize("read", [0, 1, 10, 11])
@pytest.mark.parametrize("kept", [True, False])
def test_a_stream_is_closed_once(make_light: Callable[..., Shop], read: int, kept: bool) -> None:
    """The app's iterable is closed once, however much of it was read (PEP 3333)."""
    closes: list[int] = []

    class Source:
        def __init__(self) -> None:
            self.left = 10

        def __iter__(self) -> Source:
            return self

        def __next__(self) -> bytes:
            self.left -= 1
            if self.left < 0:
                raise StopIteration
            return b"x"

        def close(self) -> None:
            closes.append(self.left)

    stream = Stream(make_light(max_body=100 if kept else 3), Source)
    answer = stream.call()
    list(itertools.islice(answer, read))
    answer.close()
    assert 1 == len(closes)
    assert (201 if kept else 409) == stream.post(buffered=True).status_code


@pytest.mark.scenario(40)
@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("length", [21, 1000])
def test_a_stream_that_ends_short(light: Shop, length: int, leaves: bool) -> None:
    """A stream that ends before the length that it announces broke off, as its client sees, and the event says so."""
    stream = Stream(light, ten, headers={"Content-Length": str(length)})
    answer = stream.call()
    with events(light.app) as seen:
        assert ([] if leaves else [one.encode() for one in ten()]) == ([] if leaves else list(answer))
        answer.close()
    text = f"ended after 20 bytes, and its Content-Length announces {length}"
    assert text in dict(seen)["record_failed"]["exception"]
    stream.assert_unavailable()


def test_a_streams_statement_is_not_logged(light: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """What a statement of the view's stream was given is in no log record of the extension's, however it failed."""

    def failing() -> Iterator[str]:
        yield "first"
        light.db.session.execute(sa.text("SELECT :card FROM nowhere"), {"card": "4242424242424242"})

    guard(light, lambda: Response(stream_with_context(failing())))
    key = new_key()
    with pytest.raises(sa.exc.OperationalError, match="4242424242424242"):
        send(light, key, buffered=True)
    (record,) = [one for one in caplog.records if getattr(one, "event", "") == "idempotency.record_failed"]
    assert "OperationalError: no such table: nowhere" in vars(record)["exception"]
    assert not [one for one in caplog.records if "4242424242424242" in one.getMessage()]


@pytest.mark.scenario(40)
def test_a_file_that_shrinks(light: Shop, tmp_path: Path) -> None:
    """A file that is cut while it is sent is not recorded as what is left of it."""
    path = tmp_path / "report"
    path.write_bytes(b"r" * 100_000)
    guard(light, lambda: send_file(path, mimetype="text/csv"))
    key = new_key()
    headers = {"X-Tenant": "acme", "Idempotency-Key": key}
    answer = light.app.wsgi_app(create_environ("/x", method="POST", headers=headers), lambda *_: lambda data: None)
    received = [next(iter(answer))]
    os.truncate(path, 20_000)
    received += list(answer)
    answer.close()
    assert 100_000 > len(b"".join(received))
    assert UNAVAILABLE == send(light, key).json["type"]


def test_an_atomic_stream_that_ends_short(make_atomic: Callable[..., Shop]) -> None:
    """In an atomic view nothing of it has left yet: it is a 500, with the work rolled back."""
    shop = make_atomic()

    def view() -> Response:
        shop.db.session.add(shop.Charge(amount=1))
        return Response(ten(), 201, headers={"Content-Length": "21"})

    guard(shop, view, atomic=True)
    assert 500 == send(shop, new_key(), buffered=True).status_code
    assert ([], 0) == (shop.rows(), shop.charges())


@pytest.mark.scenario(39)
@pytest.mark.parametrize("streamed", [True, False])
def test_why_an_answer_is_not_kept(make_light: Callable[..., Shop], streamed: bool) -> None:
    """The event says how large an answer over the limit is, what the limit is, and where larger ones can go."""
    shop = make_light(max_body=10)
    guard(shop, lambda: Response(ten() if streamed else "x" * 12, 201))
    with events(shop.app) as seen:
        send(shop, new_key(), buffered=True)
    text = dict(seen)["record_failed"]["exception"]
    assert ("12 bytes" in text, "which is 10" in text, "IDEMPOTENCY_BODY_STORE" in text) == (True, True, True)
    assert streamed == ("of a stream" in text)
    assert "broke off" not in text
