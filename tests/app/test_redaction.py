"""``IDEMPOTENCY_REDACT``: an app edits what is stored, and the first client's answer is not touched."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask import Response, current_app, g, stream_with_context
from werkzeug.test import TestResponse

from flask_idempotency.errors import OptionError
from tests.support.apps import Shop, answering, assert_replayed, events, guard, make_shop, new_key, row_of, send
from tests.support.guarded import refusal

SECRET = "4111 1111 1111 1111"


def edit(response: Response) -> None:
    """Takes the card's number out, in place."""
    response.set_data(response.get_data().replace(SECRET.encode(), b"****"))
    response.headers.pop("X-Card", None)


def card() -> Any:
    return {"card": SECRET, "id": 7}, 201, {"X-Card": SECRET, "X-Kept": "1"}


def assert_edited(first: TestResponse, retry: TestResponse) -> None:
    """The first client got all of it, and the retry what the app left of it."""
    assert (True, SECRET) == (SECRET in first.text, first.headers["X-Card"])
    assert (first.status, "true", "1") == (retry.status, retry.headers["Idempotent-Replay"], retry.headers["X-Kept"])
    assert (first.text.replace(SECRET, "****"), False) == (retry.text, "X-Card" in retry.headers)


def assert_without_answer(shop: Shop, key: str, seen: list[tuple[str, dict[str, Any]]], words: str) -> None:
    """The key is completed, nothing of the answer is stored, an event says why, and the view does not run again."""
    failed = [fields["exception"] for name, fields in seen if name == "record_failed"]
    assert (1, True) == (len(failed), words in failed[0]), failed
    retry = send(shop, key)
    assert (409, "record-unavailable", False) == refusal(retry)
    assert 201 == retry.json["original_status"]
    (row,) = shop.rows()
    assert ("completed", None, None, 1) == (
        row["status"],
        row["response_headers"],
        row["response_body"],
        len(shop.runs),
    )


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("where", ["app", "view"])
def test_what_is_stored_is_edited(make: Callable[..., Shop], atomic: bool, where: str) -> None:
    """In both modes the retry gets the edited answer, and the table has nothing of what was taken out."""
    shop = make(redact=edit if where == "app" else None, atomic=atomic)
    key = answering(shop, card, **({"redact": edit} if where == "view" else {}))
    first, retry = send(shop, key), send(shop, key)
    assert_edited(first, retry)
    assert (str(len(retry.data)), 1) == (retry.headers["Content-Length"], len(shop.runs))
    assert SECRET not in repr(shop.rows())


def test_a_blueprints_option(make_light: Callable[..., Shop]) -> None:
    """protect() takes it, and a view's own wins."""
    shop = make_light()
    shop.idempotency.protect(shop.app, redact=lambda response: response.set_data("all"))
    shop.app.add_url_rule("/p", "p", lambda: card(), methods=["POST"])
    guard(shop, card, redact=edit)
    key, other = new_key(), new_key()
    send(shop, key, path="/p")
    assert "all" == send(shop, key, path="/p").text
    assert_edited(send(shop, other), send(shop, other))


def test_another_response(make_light: Callable[..., Shop]) -> None:
    """A response that is returned takes the other's place, its headers as they are never recorded included."""

    def other(response: Response) -> Response:
        made = Response("less", response.status_code, {"X-New": "1", "Set-Cookie": "a=b"})
        return made

    shop = make_light()
    key = answering(shop, card, redact=other)
    send(shop, key)
    retry = send(shop, key)
    assert (201, "less", "4", "1") == (
        retry.status_code,
        retry.text,
        retry.headers["Content-Length"],
        retry.headers["X-New"],
    )
    assert not {"Set-Cookie", "X-Kept"} & set(retry.headers.keys())


def test_coroutines(make_light: Callable[..., Shop]) -> None:
    """A coroutine function serves, too."""

    async def later(response: Response) -> None:
        edit(response)

    shop = make_light()
    key = answering(shop, card, redact=later)
    assert_edited(send(shop, key), send(shop, key))


def test_it_is_called_in_the_apps_context(make_light: Callable[..., Shop]) -> None:
    """The function sees the app, whether or not the request's own context is still there."""
    seen = []

    def look(response: Response) -> None:
        seen.append((current_app.name, g.get("nothing")))

    shop = make_light()
    guard(shop, lambda: stream_with_context(iter(["a", "b"])), path="/stream", redact=look)
    key = answering(shop, card, redact=look)
    send(shop, key)
    send(shop, new_key(), path="/stream", buffered=True)
    with shop.app.app_context():
        send(shop, new_key())
    assert [("shop", None)] * 3 == seen


def test_streams(make: Callable[..., Shop]) -> None:
    """A stream is edited once it is complete, in one piece, and is a stream again on a replay."""
    calls = []

    def whole(response: Response) -> None:
        calls.append(response.get_data(as_text=True))
        edit(response)

    shop = make()
    halves = [SECRET[:7], SECRET[7:], " and more"]
    key = answering(shop, lambda: Response(iter(halves), 201, {"X-Card": SECRET, "X-Kept": "1"}), redact=whole)
    first = send(shop, key, buffered=True)
    retry = send(shop, key, buffered=True)
    assert_edited(first, retry)
    assert (["".join(halves)], False) == (calls, "Content-Length" in retry.headers)


@pytest.mark.parametrize("kind", ["bytes", "empty", "not found", "a reason"])
def test_unedited(make_light: Callable[..., Shop], kind: str) -> None:
    """What the function leaves alone is replayed as if there were none."""
    answer: Any = {
        "bytes": lambda: Response(bytes(range(256)), 201, headers=[("Link", "a"), ("Link", "b"), ("ETag", '"1"')]),
        "empty": lambda: ("", 204),
        "not found": lambda: ({}, 404),
        "a reason": lambda: Response("x", "299 Nearly Done"),
    }[kind]
    shop = make_light(redact=lambda response: None)
    key = answering(shop, answer)
    first, retry = send(shop, key), send(shop, key)
    assert_replayed(retry, first)
    assert [*first.headers, ("Idempotent-Replay", "true")] == [*retry.headers]
    assert first.status == retry.status


def test_headers_of_the_old_bytes(make_light: Callable[..., Shop]) -> None:
    """Where the body has changed, digests of the old one go, an ETag becomes weak, and the length is the new one's."""
    named = {"ETag": '"v1"', "Content-Digest": "sha-256=:x:", "Content-MD5": "y", "X-Kept": "1"}

    def replaced(response: Response) -> None:
        response.response = [b"short"]

    shop = make_light()
    key = answering(shop, lambda: ("a long body", 201, named), redact=replaced)
    guard(shop, lambda: ("a body", 201, named), path="/y", redact=lambda response: response.headers.set("ETag", '"v2"'))
    first, retry = send(shop, key), send(shop, key)
    assert ('"v1"', "11") == (first.headers["ETag"], first.headers["Content-Length"])
    assert ('W/"v1"', "5", b"short") == (retry.headers["ETag"], retry.headers["Content-Length"], retry.data)
    assert not {"Content-Digest", "Content-Md5"} & {name.title() for name, _ in retry.headers}
    send(shop, key := new_key(), path="/y")
    headers = send(shop, key, path="/y").headers
    assert ('"v2"', "y") == (headers["ETag"], headers["Content-MD5"])


def test_a_coded_body(make_light: Callable[..., Shop]) -> None:
    """What was compressed below the extension comes as it is, with its coding, for the function to undo."""

    def undo(response: Response) -> None:
        response.set_data(gzip.decompress(response.get_data()))
        del response.headers["Content-Encoding"]
        edit(response)

    shop = make_light()
    coded = gzip.compress(SECRET.encode())
    key = answering(shop, lambda: Response(coded, 201, {"Content-Encoding": "gzip"}), redact=undo)
    send(shop, key)
    assert "****" == send(shop, key).text


# What fails


def raising(response: Response) -> None:
    raise ZeroDivisionError("no")


def changing(response: Response) -> None:
    response.status_code = 202


def growing(response: Response) -> None:
    response.set_data("x" * 2000)


FAILING: dict[str, tuple[Callable[[Response], Any], str]] = {
    "it raises": (raising, "ZeroDivisionError"),
    "the status": (changing, "changed the status from 201 to 202"),
    "no response": (lambda response: "text", "returned str"),
    "too large": (growing, "IDEMPOTENCY_MAX_BODY"),
}


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("kind", FAILING)
def test_it_fails(make: Callable[..., Shop], kind: str, atomic: bool) -> None:
    """The client gets its answer, and the key is completed without one: never is the unedited answer stored."""
    function, words = FAILING[kind]
    shop = make(redact=function, max_body=1000, atomic=atomic)
    key = answering(shop, card)
    with events(shop.app) as seen:
        first = send(shop, key)
    assert (201, SECRET) == (first.status_code, first.json["card"])
    assert_without_answer(shop, key, seen, words)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_large_body(make_light: Callable[..., Shop], tmp_path: Path, streamed: bool) -> None:
    """A body over the limit can't be edited, so it is not kept in the body store either; the event says why."""
    shop = make_light(redact=edit, max_body=10, body_store=f"file:{tmp_path}/bodies")
    key = answering(shop, lambda: Response(iter([SECRET]) if streamed else SECRET, 201))
    with events(shop.app) as seen:
        assert SECRET == send(shop, key, buffered=True).text
    assert_without_answer(shop, key, seen, "IDEMPOTENCY_REDACT")
    assert not (tmp_path / "bodies").exists()


def test_it_is_not_called_for_what_is_not_stored(make_light: Callable[..., Shop]) -> None:
    """A released answer, a replay and an answer that a person gives are not edited."""
    calls: list[int] = []
    answers = [("busy", 429), ("done", 201)]
    shop = make_light(redact=lambda response: calls.append(response.status_code))
    key = answering(shop, lambda: answers.pop(0))
    assert [429, 201, 201] == [send(shop, key).status_code for _ in range(3)]
    assert [201] == calls
    other = answering_held(shop)
    with shop.app.app_context():
        shop.idempotency.settle("acme", other, (SECRET, 201))
    assert (SECRET, [201]) == (send(shop, other, path="/held").text, calls)


def answering_held(shop: Shop) -> str:
    """A key that is held."""
    shop.app._got_first_request = False
    guard(shop, lambda: ("", 500), path="/held", on_error="hold")
    key = new_key()
    send(shop, key, path="/held")
    return key


def test_what_is_no_function(sqlite_url: str) -> None:
    """Anything but a callable is an error of the app's start."""
    with pytest.raises(OptionError, match=r"^IDEMPOTENCY_REDACT: .*it must be a callable"):
        make_shop(sqlite_url, redact="card")


def test_edited_and_sealed(make_light: Callable[..., Shop]) -> None:
    """What is edited is sealed after that."""
    from tests.support.sealed import encryption_key

    shop = make_light(redact=edit, encryption_keys=[encryption_key()])
    key = answering(shop, card)
    assert_edited(send(shop, key), send(shop, key))
    assert ":sealed" == row_of(shop, key)["response_headers"][0][0]
