"""Answers, taken down as they go out and put back on a replay."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from flask import Flask, Response, redirect
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.datastructures import Headers
from werkzeug.test import run_wsgi_app

from flask_idempotency.answer import Answer, Restored, restore
from flask_idempotency.bodies import BodyStore
from flask_idempotency.passing import Tee
from flask_idempotency.policy import NEVER_RECORDED, Policy
from flask_idempotency.recorded import Elsewhere, Recorded

ENVIRON = {"REQUEST_METHOD": "POST", "wsgi.url_scheme": "http", "HTTP_HOST": "localhost"}


def tee(stream: Any, limit: int = 100, patience: float = 10.0) -> Tee:
    """A tee over a stream of bytes."""
    return Tee(iter(stream), stream, limit, patience)


def wire(response: Response) -> tuple[str, list[tuple[str, str]], bytes]:
    """What goes over the wire: status line, headers in order, body."""
    chunks, status, headers = run_wsgi_app(response, dict(ENVIRON), buffered=True)
    return status, list(headers), b"".join(chunks)


class TestTee:
    """The stream that keeps what passes."""

    def test_it_passes_everything_on(self) -> None:
        """Chunks come out as they went in, and the body is there with the last of them, not before."""
        stream = tee([b"a", b"", b"bc"])
        assert [b"a", b"", b"bc"] == [next(stream), next(stream), next(stream)]
        assert (False, None) == (stream.complete, stream.body)
        assert [] == list(stream)
        assert (True, b"abc") == (stream.complete, stream.body)
        stream.close()
        assert (True, b"abc") == (stream.complete, stream.body)

    @pytest.mark.parametrize(("limit", "body"), [(0, None), (5, None), (6, b"abcdef"), (7, b"abcdef")])
    def test_the_limit(self, limit: int, body: bytes | None) -> None:
        """A body of just the limit is kept, a larger one is not; all of it passes."""
        stream = tee([b"ab", b"cd", b"ef"], limit)
        assert b"abcdef" == b"".join(stream)
        assert (True, body) == (stream.complete, stream.body)

    def test_what_goes_into_a_sink_is_let_go_of(self, tmp_path: Path) -> None:
        """With a place for it, nothing is held in memory either once the limit is passed, and the body is whole."""
        store = BodyStore(f"file:{tmp_path}/bodies")
        chunk = bytearray(b"x" * 60)
        stream = Tee(iter([chunk] * 3), None, 100, 10.0, partial(store.sink, "a" * 32))
        next(stream)
        assert [b"x" * 60] == stream._chunks
        next(stream)
        assert (False, []) == (stream.complete, stream._chunks)
        list(stream)
        assert isinstance(stream.body, Elsewhere)
        assert b"x" * 180 == b"".join(store.chunks(stream.body))

    def test_what_is_over_the_limit_is_let_go_of(self) -> None:
        """Once the limit is passed nothing is held in memory, and that there is no body is certain."""
        stream = tee([b"x" * 60, b"x" * 60, b"x"])
        next(stream)
        assert not stream.complete
        next(stream)
        assert (True, None, []) == (stream.complete, stream.body, stream._chunks)
        assert [b"x"] == list(stream)
        assert (True, None, []) == (stream.complete, stream.body, stream._chunks)

    def test_one_buffer_again_and_again(self) -> None:
        """A generator that fills the same buffer for each chunk is kept as it was when each passed."""

        def fill() -> Iterator[Any]:
            buffer = bytearray(2)
            for one in (b"ab", b"cd"):
                buffer[:] = one
                yield buffer

        stream = tee(fill())
        assert b"abcd" == b"".join(map(bytes, stream)) == stream.body

    @pytest.mark.parametrize("passed", [0, 1, 2])
    def test_closing_takes_in_the_rest(self, passed: int) -> None:
        """What the client did not wait for is kept as well, and the generator ends as if it had."""
        ended = []

        def generate() -> Iterator[bytes]:
            yield from (b"a", b"b", b"c")
            ended.append(True)

        stream = tee(generate())
        for _ in range(passed):
            next(stream)
        stream.close()
        assert (True, b"abc", [True]) == (stream.complete, stream.body, ended)
        assert [] == list(stream)

    @pytest.mark.parametrize("endless", [itertools.repeat(b"x"), itertools.repeat(b"")])
    def test_closing_takes_in_no_more_than_the_limit(self, endless: Iterator[bytes]) -> None:
        """An endless stream is left at the limit, or when patience ends."""
        stream = tee(endless, patience=0.2)
        stream.close()  # or never, if nothing ended it
        assert (True, None) == (stream.complete, stream.body)

    def test_without_patience(self) -> None:
        """Without patience nothing is asked of the stream any more."""
        stream = tee(iter([b"a", b"b"]), patience=0.0)
        next(stream)
        stream.close()
        assert (True, None) == (stream.complete, stream.body)

    @pytest.mark.parametrize("when", ["passing", "closing"])
    def test_an_exception(self, when: str) -> None:
        """A stream that breaks off is complete without a body; only who reads it sees the exception."""

        def generate() -> Iterator[bytes]:
            yield b"a"
            raise ZeroDivisionError

        stream = tee(generate())
        assert b"a" == next(stream)
        if when == "passing":
            with pytest.raises(ZeroDivisionError):
                next(stream)
        stream.close()
        assert (True, False, None) == (stream.complete, stream.crashed, stream.body)

    @pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
    @pytest.mark.parametrize("when", ["passing", "closing"])
    def test_a_crash(self, when: str, kind: type[BaseException]) -> None:
        """What is no Exception leaves nothing known, is seen by whoever called, and closing again asks no more."""

        def generate() -> Iterator[bytes]:
            yield b"a"
            raise kind

        stream = tee(generate())
        next(stream)
        with pytest.raises(kind):
            next(stream) if when == "passing" else stream.close()
        stream.close()
        assert (False, True) == (stream.complete, stream.crashed)

    @pytest.mark.parametrize("chunk", [None, 5])
    def test_what_is_no_chunk(self, chunk: Any) -> None:
        """What no server can send is an error, and nothing of the stream is kept."""
        stream = tee([b"a", chunk, b"b"])
        next(stream)
        with pytest.raises(TypeError):
            next(stream)
        stream.close()
        assert (True, None) == (stream.complete, stream.body)

    def test_the_source_is_closed(self) -> None:
        """Both the encoding stream and what is behind it are closed, each time that closing is asked for."""
        closed = []

        class Source:
            def __iter__(self) -> Iterator[bytes]:
                return iter([b"a"])

            def close(self) -> None:
                closed.append(True)

        stream = tee(Source())
        stream.close()
        assert ([True], b"a") == (closed, stream.body)

    @given(st.lists(st.binary(max_size=20)), st.integers(0, 40))
    def test_any_stream(self, chunks: list[bytes], limit: int) -> None:
        """Whatever passes, all of it comes out, and all or nothing is kept."""
        stream = tee(list(chunks), limit)
        assert chunks == list(stream)
        body = b"".join(chunks)
        assert (body if len(body) <= limit else None) == stream.body


class TestAnswer:
    """What there is to record."""

    def test_a_ready_answer(self) -> None:
        """An answer that is there is complete at once, with its headers in order."""
        response = Response("ü", "201 Made It", headers=[("X-B", "1"), ("X-A", "2"), ("X-B", "3")], mimetype="text/x")
        answer = Answer(response, Policy(), keep=True)
        headers = (("X-B", "1"), ("X-A", "2"), ("X-B", "3"), ("Content-Type", "text/x; charset=utf-8"))
        assert answer.complete
        assert Recorded(201, (*headers, ("Content-Length", "2")), "ü".encode(), "Made It") == answer.recorded()

    @pytest.mark.parametrize(
        ("status", "reason"),
        [
            (200, None),
            ("200 OK", None),
            ("200 ok", "ok"),
            ("200 Fine", "Fine"),
            ("200", None),
            (299, None),
            ("299 UNKNOWN", None),
            ("299 Odd", "Odd"),
            ("418 I'M A TEAPOT", None),
            ("200  two blanks ", " two blanks"),
        ],
    )
    def test_the_status_text(self, status: Any, reason: str | None) -> None:
        """A status text is kept where it is not the standard one, and the status line is the same again."""
        response = Response("x", status)
        recorded = Answer(response, Policy(), keep=True).recorded()
        assert reason == recorded.reason
        assert response.status == restore(recorded, Response(), Policy()).status

    @pytest.mark.parametrize("name", sorted(NEVER_RECORDED))
    def test_headers_that_are_never_recorded(self, name: str) -> None:
        """Each header of the fixed list is left out, in any case."""
        response = Response("x", headers=[(name.upper(), "1"), (name, "2"), ("X-Kept", "3")])
        headers = Headers(Answer(response, Policy(), keep=True).recorded().headers)
        assert (False, "3") == (name in headers, headers.get("X-Kept"))

    def test_headers_that_connection_names(self) -> None:
        """What any Connection header names describes the connection too."""
        response = Response("x", headers=[("Connection", "close, X-One ,"), ("connection", "x-two"), ("X-Kept", "1")])
        response.headers.extend([("X-One", "1"), ("X-Two", "2")])
        names = {name for name, _ in Answer(response, Policy(), keep=True).recorded().headers}
        assert {"X-Kept", "Content-Type", "Content-Length"} == names

    def test_excluded_headers(self) -> None:
        """The policy's own list is left out as well."""
        response = Response("x", headers={"X-Request-Id": "1", "Date": "today", "X-Kept": "1"})
        policy = Policy(excluded_headers=frozenset({"x-request-id"}))
        names = {name for name, _ in Answer(response, policy, keep=True).recorded().headers}
        assert {"X-Kept", "Content-Type", "Content-Length"} == names

    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize(("limit", "kept"), [(2, False), (3, True)])
    def test_the_largest_body(self, limit: int, kept: bool, streamed: bool) -> None:
        """A body over the limit leaves the status alone; the answer itself goes out whole."""
        response = Response(iter(["ab", "c"]) if streamed else "abc", 201)
        answer = Answer(response, Policy(max_body=limit), keep=True)
        assert b"abc" == wire(response)[2]
        assert answer.complete
        recorded = answer.recorded()
        assert (b"abc" if kept else None) == recorded.body
        assert kept or recorded == Recorded(201)

    @pytest.mark.parametrize("status", [100, 199, 204, 304])
    def test_statuses_without_a_body(self, status: int) -> None:
        """Behind a status without a body a stream never starts: the record is empty and complete at once."""
        answer = Answer(Response(iter(["never sent"]), status), Policy(), keep=True)
        assert (True, b"") == (answer.complete, answer.recorded().body)

    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_spoiled_answer(self, streamed: bool) -> None:
        """A spoiled answer is complete at once and leaves its status alone; it goes out whole all the same."""
        response = Response(iter(["a", "b"]) if streamed else "ab", 201)
        answer = Answer(response, Policy(), keep=True)
        answer.spoil()
        assert (True, Recorded(201)) == (answer.complete, answer.recorded())
        assert b"ab" == wire(response)[2]
        assert Recorded(201) == answer.recorded()

    def test_an_answer_that_is_not_kept(self) -> None:
        """What is released is not touched at all."""
        source = iter(["a", "b"])
        response = Response(source, 503, direct_passthrough=True)
        answer = Answer(response, Policy(), keep=False)
        assert (True, True, True) == (answer.complete, response.response is source, response.direct_passthrough)

    def test_what_only_looks_like_a_stream(self) -> None:
        """Flask runs an HTTP exception as a WSGI application; its body is there, and settled at once."""
        exception = Response("gone", 410)
        response = Response.force_type(exception.__call__, dict(ENVIRON))  # type: ignore[arg-type]
        assert not response.is_sequence
        answer = Answer(response, Policy(), keep=True)
        assert (True, False, b"gone") == (answer.complete, answer.streamed, answer.recorded().body)


class TestRestore:
    """The replay."""

    RESPONSES = (
        lambda: Response("text"),
        lambda: Response(b"\x00\xff", 202, content_type="application/octet-stream"),
        lambda: Response(["a", "b"], "201 Made It"),
        lambda: Response(iter(["a", "b"]), 299),
        lambda: Response(iter([]), 200),
        lambda: Response([], 200),
        lambda: Response("", 204),
        lambda: Response(status=204),
        lambda: Response(status=304, headers={"ETag": '"1"', "Content-Type": "text/plain"}),
        lambda: redirect("/ä?b=ü"),
        lambda: Response("x", headers={"Content-Length": "1", "Link": "<1>"}),
        lambda: Response("x", headers=[("Link", "<1>"), ("X", ""), ("Link", "<2>")]),
    )

    @pytest.mark.parametrize("number", range(len(RESPONSES)))
    def test_the_replay_equals_the_answer(self, number: int) -> None:
        """Status line, header list and bytes are those of the first answer."""
        response = self.RESPONSES[number]()
        answer = Answer(response, Policy(), keep=True)
        first = wire(response)
        assert first == wire(restore(answer.recorded(), Response(), Policy(replay_header=None)))

    def test_nothing_of_the_response_is_left(self) -> None:
        """Whatever was made of the replay on its way out, the record is put over it."""
        made = Response(iter(["null"]), "500 Made Up", headers={"X-Made": "1"}, direct_passthrough=True)
        restored = restore(Recorded(201, (("X-Kept", "1"), ("Content-Length", "1")), b"x"), made, Policy())
        headers = [("X-Kept", "1"), ("Content-Length", "1"), ("Idempotent-Replay", "true")]
        assert ("201 CREATED", headers, b"x") == wire(restored)

    def test_the_marker_is_there_once(self) -> None:
        """An answer that has the marker already, from further up the line, has it once on a replay."""
        recorded = Recorded(200, (("Idempotent-Replay", "false"), ("Content-Length", "0")), b"")
        headers = restore(recorded, Response(), Policy()).headers
        assert ["true"] == headers.getlist("Idempotent-Replay")

    def test_hooks_around_the_extension_can_change_it(self) -> None:
        """A hook that sets other data on a replay gets the right length, whether or not it was a stream."""
        for stream in (False, True):
            answer = Answer(response := Response(iter(["ab"]) if stream else "ab"), Policy(), keep=True)
            wire(response)
            restored = restore(answer.recorded(), Response(), Policy())
            assert (stream, b"ab") == (restored.is_streamed, restored.get_data())
            restored.set_data(b"abc")
            assert ("3", b"abc") == (dict(wire(restored)[1])["Content-Length"], wire(restored)[2])

    def test_in_the_apps_own_response_class(self) -> None:
        """A response class with defaults of its own has no say in a replay."""

        class Own(Response):
            default_status = 418
            default_mimetype = "text/x-own"

        app = Flask(__name__)
        app.response_class = Own
        restored = restore(Recorded(200, (("Content-Length", "1"),), b"x"), app.response_class(), Policy())
        assert ("200 OK", [("Content-Length", "1"), ("Idempotent-Replay", "true")], b"x") == wire(restored)


class TestRestored:
    """A replay, told from one that was changed on its way."""

    CHANGES: tuple[Callable[[Response], object], ...] = (
        lambda one: setattr(one, "status", "201 Made Up"),
        lambda one: one.headers.add("X-Added", "1"),
        lambda one: one.headers.set("X-Kept", "2"),
        lambda one: one.set_data(b"y"),
        lambda one: operator.setitem(cast("list[bytes]", one.response), 0, b"y"),
        lambda one: setattr(one, "direct_passthrough", True),
        lambda one: setattr(one, "autocorrect_location_header", True),
        lambda one: type("Own", (Response,), {}).force_type(one),
    )

    def made(self) -> Response:
        """A replay with a length."""
        recorded = Recorded(201, (("X-Kept", "1"), ("Content-Length", "1")), b"x")
        return restore(recorded, Response(), Policy())

    def test_as_it_was_made(self) -> None:
        """A replay that nobody has changed is told from another response that is the same."""
        restored = Restored(response := self.made())
        assert restored.is_still(response)
        assert not restored.is_still(self.made())

    @pytest.mark.parametrize("number", range(len(CHANGES)))
    def test_changed_on_its_way(self, number: int) -> None:
        """Whatever is changed of a replay shows, also what is changed in place."""
        restored = Restored(response := self.made())
        self.CHANGES[number](response)
        assert not restored.is_still(response)

    def test_a_stream(self) -> None:
        """Of a stream a part may have been read, so it is made anew."""
        restored = Restored(response := restore(Recorded(200, (), b"x"), Response(), Policy()))
        assert not restored.is_still(response)
