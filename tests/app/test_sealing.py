"""``IDEMPOTENCY_ENCRYPTION_KEYS``: what is recorded can be replayed, and can't be read in the table."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Response

from flask_idempotency.bodies import BodyStore
from flask_idempotency.errors import RowUnreadable, SettleError
from flask_idempotency.heartbeat import heartbeat
from flask_idempotency.keyring import Keyring
from flask_idempotency.sealing import opened, opened_step
from flask_idempotency.state import get_state
from tests.support.apps import Shop, alter, answering, assert_replayed, close, guard, make_shop, new_key, row_of, send
from tests.support.bodies import names, place
from tests.support.sealed import as_stored, encryption_key

SECRET = b"IBAN DE89 3704 0044 0532 0130 00"
PROBLEM = "urn:problem-type:idempotency:"
OLD, NEW = encryption_key(), encryption_key()


def made() -> Any:
    return SECRET, 201, {"X-Token": "t0ken"}


def telling(shop: Shop, **options: Any) -> str:
    """Guard a view at /x that tells the secret; returns a key."""
    return answering(shop, made, **options)


def assert_unavailable(shop: Shop, key: str, caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """A retry gets 503 and does not run the view, and an error in the log has these words."""
    before = len(shop.runs)
    caplog.clear()
    with caplog.at_level(logging.ERROR, "flask_idempotency"):
        retry = send(shop, key)
    assert (503, PROBLEM + "store-unavailable") == (retry.status_code, retry.json["type"])
    assert "Retry-After" in retry.headers
    said = " ".join(record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    assert all(word in said for word in words), said
    assert before == len(shop.runs)


def key_id(key: str) -> str:
    return Keyring([key]).first.id


ANSWERS: dict[str, Callable[[], Any]] = {
    "text": lambda: (SECRET, 201, {"X-Token": "t0ken"}),
    "bytes": lambda: Response(bytes(range(256)), 202, mimetype="application/octet-stream"),
    "empty": lambda: ("", 204),
    "a reason": lambda: Response(SECRET, "299 Nearly Done"),
    "repeated headers": lambda: Response("x", 200, headers=[("Link", "<a>"), ("Link", "<b>"), ("X-Ü", "é")]),
    "a stream": lambda: Response(iter([SECRET, SECRET])),
    "not found": lambda: ({"error": "none"}, 404),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_sealed_answer_is_replayed(make_light: Callable[..., Shop], kind: str) -> None:
    """Every kind of answer comes back as the first client got it, after one run."""
    shop = make_light(encryption_keys=[NEW])
    key = answering(shop, ANSWERS[kind])
    first = send(shop, key, buffered=True)
    retry = send(shop, key, buffered=True)
    assert_replayed(retry, first)
    assert [*first.headers, ("Idempotent-Replay", "true")] == [*retry.headers]
    assert (first.status, 1) == (retry.status, len(shop.runs))


@pytest.mark.parametrize("atomic", [False, True])
def test_nothing_can_be_read_in_the_table(make: Callable[..., Shop], atomic: bool) -> None:
    """Neither the answer nor a digest of the request, which could be guessed at, is in the table or its file."""
    plain = make(atomic=atomic)
    key = telling(plain)
    send(plain, key, data=b"4711")
    digest = row_of(plain, key)["request_fingerprint"]
    assert (True, True) == (SECRET in as_stored(plain), digest.encode() in as_stored(plain))
    plain.execute(sa.delete(plain.table))
    shop = make(encryption_keys=[NEW], atomic=atomic)
    key = telling(shop)
    with shop.app.app_context():
        if shop.db.engine.dialect.name == "sqlite":
            with shop.db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("VACUUM")  # the deleted row's bytes are in the file until then
    first = send(shop, key, data=b"4711")
    assert_replayed(send(shop, key, data=b"4711"), first)
    stored = as_stored(shop)
    for secret in (SECRET, b"t0ken", b"X-Token", digest.encode(), sha256(b"4711").hexdigest().encode()):
        assert secret not in stored
    row = row_of(shop, key)
    assert (201, 1001, key_id(NEW)) == (
        row["response_status"],
        row["fingerprint_version"],
        row["request_fingerprint"][:8],
    )
    assert 422 == send(shop, key, data=b"4712").status_code


def test_the_same_request_has_another_fingerprint_under_another_key(make_light: Callable[..., Shop]) -> None:
    """A fingerprint of 64 digits is keyed: nobody who lacks the key can try payloads against it."""
    found = []
    for keys in ([OLD], [NEW]):
        shop = make_light(encryption_keys=keys)
        seen: list[str] = []
        guard(shop, lambda shop=shop, seen=seen: seen.append(shop.idempotency.current.fingerprint) or "")
        key = new_key()
        send(shop, key, data=b"4711")
        assert [row_of(shop, key)["request_fingerprint"]] == seen
        found += seen
    assert ([64, 64], 2) == ([len(one) for one in found], len({one[8:] for one in found}))


# Rotation


def test_rotation(make: Callable[..., Shop], caplog: pytest.LogCaptureFixture) -> None:
    """What an old key sealed is replayed and compared for as long as that key is there; new rows take the first key."""
    before = make(encryption_keys=[OLD])
    key = telling(before)
    first = send(before, key, data=b"1")
    between = make(encryption_keys=f"{OLD},{NEW}")  # every process knows the new key before any seals with it
    telling(between)
    rotated = make(encryption_keys=f"{NEW}, {OLD}")
    newer = telling(rotated)
    assert_replayed(send(rotated, key, data=b"1"), first)
    assert (422, []) == (send(rotated, key, data=b"2").status_code, rotated.runs)
    fresh = send(rotated, newer, data=b"1")
    assert key_id(NEW) == row_of(rotated, newer)["request_fingerprint"][:8]
    assert_replayed(send(between, newer, data=b"1"), fresh)
    over = make(encryption_keys=[NEW])
    telling(over)
    assert_replayed(send(over, newer, data=b"1"), fresh)
    assert_unavailable(over, key, caplog, key_id(OLD), "IDEMPOTENCY_ENCRYPTION_KEYS", "Put that key back")


@pytest.mark.parametrize("left", [None, [NEW]])
@pytest.mark.parametrize("on_store_error", ["reject", "execute"])
def test_a_key_that_is_gone(
    make_light: Callable[..., Shop], caplog: pytest.LogCaptureFixture, left: Any, on_store_error: str
) -> None:
    """A row whose encryption key is gone, or of an app that has none any more, is 503 and not run."""
    shop = make_light(encryption_keys=[OLD])
    key = telling(shop)
    first = send(shop, key)
    later = make_light(encryption_keys=left, on_store_error=on_store_error)
    telling(later)
    assert_unavailable(later, key, caplog, key_id(OLD), "IDEMPOTENCY_ENCRYPTION_KEYS")
    assert_replayed(send(shop, key), first)


def test_a_key_that_is_gone_for_the_answer_alone(
    make_light: Callable[..., Shop], caplog: pytest.LogCaptureFixture
) -> None:
    """An answer that was sealed for a key claimed before encryption is 503 without the encryption key."""
    plain = make_light()
    key = telling(plain)
    first = send(plain, key)
    shop = make_light(encryption_keys=[OLD])
    telling(shop)
    with shop.app.app_context():
        shop.idempotency.release("acme", key, force=True)
    send(shop, key)
    stored = row_of(shop, key)
    digest = sha256(b"").hexdigest()
    assert digest not in stored["request_fingerprint"]
    alter(shop, key, request_fingerprint=_fingerprint(plain), fingerprint_version=1)
    assert_replayed(send(shop, key), first)
    assert_unavailable(plain, key, caplog, key_id(OLD), "Give IDEMPOTENCY_ENCRYPTION_KEYS", f"key={key}")


def _fingerprint(plain: Shop) -> str:
    key = new_key()
    send(plain, key)
    return str(row_of(plain, key)["request_fingerprint"])


def test_encryption_is_turned_on(make: Callable[..., Shop]) -> None:
    """Rows from before are replayed and compared as ever, and a claim left behind by a crash is taken over."""
    plain = make()
    key, left = telling(plain), new_key()
    guard(plain, lambda: _die(), path="/y")
    first = send(plain, key, data=b"1")
    with pytest.raises(SystemExit):
        send(plain, left, path="/y")
    plain.shift(31)
    shop = make(encryption_keys=[NEW])
    telling(shop)
    guard(shop, lambda: SECRET, path="/y")
    assert_replayed(send(shop, key, data=b"1"), first)
    assert (422, []) == (send(shop, key, data=b"2").status_code, shop.runs)
    taken = send(shop, left, path="/y")
    assert_replayed(send(shop, left, path="/y"), taken)
    row = row_of(shop, left)
    assert (1, 2, False) == (row["fingerprint_version"], row["attempts"], SECRET in (row["response_body"] or b""))


def _die() -> None:
    raise SystemExit


# A writer to the table


def _changed(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    body = row["response_body"]
    return {
        "a bit of the body": {"response_body": body[:-1] + bytes([body[-1] ^ 1])},
        "the body's end": {"response_body": body[:-1]},
        "no body": {"response_body": b""},
        "the status": {"response_status": 200},
        "the key's id": {"response_headers": [[":sealed", f"1 {key_id(OLD)}"]]},
        "the form": {"response_headers": [[":sealed", "2 what a later release writes"]]},
    }


@pytest.mark.parametrize(
    "what", ["a bit of the body", "the body's end", "no body", "the status", "the key's id", "the form"]
)
def test_what_was_changed(make_light: Callable[..., Shop], caplog: pytest.LogCaptureFixture, what: str) -> None:
    """An answer that somebody has changed in the table is 503, logged, and neither sent nor run."""
    shop = make_light(encryption_keys=[NEW, OLD])
    key = telling(shop)
    send(shop, key)
    alter(shop, key, **_changed(row_of(shop, key))[what])
    assert_unavailable(shop, key, caplog, "A stored answer", f"key={key}")


def test_a_row_that_was_moved(make: Callable[..., Shop], caplog: pytest.LogCaptureFixture) -> None:
    """Nobody who can write to the table gets another key's answer by moving it to a key or a scope of his own."""
    shop = make(encryption_keys=[NEW])
    theirs, own = telling(shop), new_key()
    send(shop, theirs, headers={"X-Tenant": "victim"})
    send(shop, own)
    row = row_of(shop, theirs)
    moved = {one: row[one] for one in ("response_status", "response_headers", "response_body")}
    alter(shop, own, **moved)
    assert_unavailable(shop, own, caplog, "belongs to another place")
    shop.execute(sa.delete(shop.table).where(shop.table.c.id != row["id"]))
    scope = shop.table.c.scope
    alter(shop, theirs, scope=sa.literal("acme", scope.type))
    assert_unavailable(shop, theirs, caplog, "belongs to another place")


def test_an_answer_that_was_put_in(make_light: Callable[..., Shop], caplog: pytest.LogCaptureFixture) -> None:
    """An answer in plain text beside a keyed fingerprint is somebody's who lacks the keys: it is not sent."""
    shop = make_light(encryption_keys=[NEW])
    key = telling(shop)
    send(shop, key)
    alter(shop, key, response_headers=[["X-Paid", "1"]], response_body=b"paid")
    assert_unavailable(shop, key, caplog, "not sealed", f"key={key}")


def test_nobody_settles_a_sealed_key_without_the_keys(make_light: Callable[..., Shop]) -> None:
    """Where an app without encryption keys would put a plain answer beside a keyed fingerprint, it is told."""
    shop, plain = make_light(encryption_keys=[NEW]), make_light()
    key = answering(shop, lambda: ("", 500), on_error="hold")
    send(shop, key)
    with plain.app.app_context(), pytest.raises(SettleError, match="IDEMPOTENCY_ENCRYPTION_KEYS"):
        plain.idempotency.settle("acme", key, "done")
    assert "held" == row_of(shop, key)["status"]


# Steps


def stepping(shop: Shop, asked: list[str], statuses: list[int]) -> str:
    """Guard a view that charges in one step and mails in another, and answers with these statuses in turn."""

    def charge() -> dict[str, Any]:
        asked.append("charge")
        return {"iban": SECRET.decode()}

    def mail() -> str:
        asked.append("mail")
        return "sent to " + SECRET.decode()

    def view() -> Any:
        done = shop.idempotency.step("charge", charge)
        if len(asked) == 1:
            return {}, statuses.pop(0)
        return {"charge": done, "mail": shop.idempotency.step("mail", mail), "k": shop.idempotency.derive_key("k")}, 201

    guard(shop, view)
    return new_key()


def test_steps_are_sealed(make: Callable[..., Shop]) -> None:
    """A later attempt, also after a rotation, finds a step's result, which nobody can read in the table."""
    asked: list[str] = []
    shop = make(encryption_keys=[OLD])
    key = stepping(shop, asked, [503])
    assert 503 == send(shop, key).status_code
    (name, text), *rest = row_of(shop, key)["steps"].items()
    assert ("charge", [], True) == (name, rest, text.startswith(":sealed 1 "))
    assert SECRET not in as_stored(shop)
    asked += ["in between"]
    rotated = make(encryption_keys=[NEW, OLD])
    stepping(rotated, asked, [])
    answer = send(rotated, key)
    assert (201, SECRET.decode()) == (answer.status_code, answer.json["charge"]["iban"])
    assert ["charge", "in between", "mail"] == asked
    assert SECRET not in as_stored(shop)
    steps = row_of(shop, key)["steps"]
    assert '"sent to ' + SECRET.decode() + '"' == opened_step(
        get_state(rotated.app).settings.encryption_keys, steps["mail"], "acme", key, "mail"
    )


def test_steps_from_before_encryption(make_light: Callable[..., Shop]) -> None:
    """The result of a step that was stored plainly serves on; a text that looks sealed is the app's own."""
    asked: list[str] = []
    plain = make_light()
    guard(plain, lambda: plain.idempotency.step("odd", lambda: ":sealed 1 00000000"), path="/y")
    key = stepping(plain, asked, [503])
    send(plain, key)
    shop = make_light(encryption_keys=[NEW])
    asked += ["in between"]
    stepping(shop, asked, [])
    assert SECRET.decode() == send(shop, key).json["charge"]["iban"]
    assert ":sealed 1 00000000" == send(plain, new_key(), path="/y").text


def test_the_result_of_a_step_that_was_moved(make_light: Callable[..., Shop]) -> None:
    """A result under another step's name, or whose encryption key is gone, is an error; the function is not called."""
    asked: list[str] = []
    shop = make_light(encryption_keys=[NEW])
    key = stepping(shop, asked, [503])
    send(shop, key)
    text = row_of(shop, key)["steps"]["charge"]
    keys = get_state(shop.app).settings.encryption_keys
    for where in (("acme", key, "mail"), ("acme", new_key(), "charge"), ("other", key, "charge")):
        with pytest.raises(RowUnreadable, match="belongs to another place"):
            opened_step(keys, text, *where)
    for without in (None, Keyring([OLD])):
        with pytest.raises(RowUnreadable, match=key_id(NEW)):
            opened_step(without, text, "acme", key, "charge")
    asked += ["in between"]
    alter(shop, key, steps={"charge": text[:-8] + "AAAAAAA="})
    assert 500 == send(shop, key).status_code
    assert ["charge", "in between"] == asked


def test_derived_keys_do_not_depend_on_encryption(make_light: Callable[..., Shop]) -> None:
    """Encryption is turned on and its key rotated: the next system gets the same derived key."""
    found = set()
    key = new_key()
    for keys in (None, [OLD], [NEW, OLD]):
        shop = make_light(encryption_keys=keys)
        guard(shop, lambda shop=shop: (found.add(shop.idempotency.derive_key("charge")) or "", 503))
        assert 503 == send(shop, key).status_code
    assert 1 == len(found)


# Large bodies


LARGE = SECRET * 10_000


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of an empty body store."""
    return f"file:{tmp_path}/bodies"


def bodies(shop: Shop) -> BodyStore:
    store = get_state(shop.app).settings.body_store
    assert store is not None
    return store


def in_store(shop: Shop, name: str) -> Path:
    return Path(place(bodies(shop), name)[1])


def pieces() -> Iterator[bytes]:
    for start in range(0, len(LARGE), 7_000):
        yield LARGE[start : start + 7_000]


@pytest.mark.parametrize(("streamed", "atomic"), [(False, False), (True, False), (False, True)])
def test_large_bodies(make: Callable[..., Shop], url: str, streamed: bool, atomic: bool) -> None:
    """A body in the body store can't be read there, is replayed, also after a rotation, and is pruned with its key."""
    shop = make(encryption_keys=[OLD], body_store=url, max_body=1000, atomic=atomic)
    key = answering(shop, lambda: Response(pieces() if streamed else LARGE, 201))
    first = send(shop, key, buffered=True)
    (name,) = names(bodies(shop))
    assert (LARGE, False) == (first.data, SECRET in in_store(shop, name).read_bytes())
    assert SECRET not in as_stored(shop)
    rotated = make(encryption_keys=[NEW, OLD], body_store=url, max_body=1000, atomic=atomic)
    telling(rotated)
    retry = send(rotated, key, buffered=True)
    assert_replayed(retry, first)
    assert first.headers.get("Content-Length") == retry.headers.get("Content-Length")
    rotated.shift(90_000)
    with rotated.app.app_context():
        assert 1 == rotated.idempotency.prune().deleted
    assert set() == names(bodies(shop))


def test_a_large_body_that_was_changed(
    make_light: Callable[..., Shop], url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What lies there otherwise than it was sealed, or under another's name, is never sent."""
    shop = make_light(encryption_keys=[NEW], body_store=url, max_body=1000)
    key, other = answering(shop, lambda: Response(LARGE, 201)), new_key()
    send(shop, key)
    (name,) = names(bodies(shop))
    send(shop, other)
    (second,) = names(bodies(shop)) - {name}
    whole = in_store(shop, name).read_bytes()
    # The row is made to name the other's object, with its size and digest: what a writer to both could do.
    headers = row_of(shop, other)["response_headers"]
    alter(shop, key, response_headers=[headers[0], row_of(shop, key)["response_headers"][1]])
    assert_unavailable(shop, key, caplog, "belongs to another place")
    in_store(shop, second).write_bytes(whole)
    retry = send(shop, other)
    assert (409, PROBLEM + "record-unavailable", 2) == (retry.status_code, retry.json["type"], len(shop.runs))


# Other ways to a record


def test_a_record_that_is_postponed(make: Callable[..., Shop]) -> None:
    """An answer that could not be written yet is replayed from memory, and sealed when it is written."""
    shop = make(encryption_keys=[NEW])
    rename = "ALTER TABLE {} RENAME TO {}"

    def hide() -> Any:
        shop.execute(sa.text(rename.format("idempotency_keys", "hidden")))
        return SECRET, 201

    key = answering(shop, hide)
    first = send(shop, key)
    try:
        assert (201, 1) == (first.status_code, len(heartbeat._postponed))
        assert_replayed(send(shop, key), first)
    finally:
        shop.execute(sa.text(rename.format("hidden", "idempotency_keys")))
    assert_replayed(send(shop, key), first)
    assert (0, "completed") == (len(heartbeat._postponed), row_of(shop, key)["status"])
    assert SECRET not in as_stored(shop)


@pytest.mark.parametrize("size", [10, 100_000])
def test_an_answer_that_a_person_gives(make: Callable[..., Shop], url: str, size: int) -> None:
    """What is settled by hand is sealed, too, and is replayed."""
    shop = make(encryption_keys=[NEW], body_store=url, max_body=1000)
    key = answering(shop, lambda: ("", 500), on_error="hold")
    send(shop, key)
    with shop.app.app_context():
        shop.idempotency.settle("acme", key, (SECRET * size, 201))
    assert SECRET not in as_stored(shop)
    retry = send(shop, key, buffered=True)
    assert (201, SECRET * size, 1) == (retry.status_code, retry.data, len(shop.runs))


def test_a_completed_key_without_an_answer(make_light: Callable[..., Shop]) -> None:
    """An answer that could not be kept leaves its status alone, and there is nothing to seal."""
    shop = make_light(encryption_keys=[NEW], max_body=10)
    key = telling(shop)
    send(shop, key)
    retry = send(shop, key)
    assert (409, 201) == (retry.status_code, retry.json["original_status"])
    row = row_of(shop, key)
    assert (None, None) == (row["response_headers"], row["response_body"])


@pytest.mark.parametrize("options", [{}, {"atomic": True}])
def test_what_can_not_be_sealed(
    make: Callable[..., Shop],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
) -> None:
    """Where an answer is too large to be encrypted, its key is completed without it, and never run again."""
    shop = make(encryption_keys=[NEW])
    key = answering(shop, made, **options)

    def refuse(*place: Any) -> Any:
        raise OverflowError("Data or associated data too long. Max 2**31 - 1 bytes")

    monkeypatch.setattr("flask_idempotency.sealing.encrypted", refuse)
    first = send(shop, key)
    assert (201, SECRET) == (first.status_code, first.data)
    shop.shift(100)
    retry = send(shop, key)
    assert (409, PROBLEM + "record-unavailable") == (retry.status_code, retry.json["type"])
    assert 1 == len(shop.runs)
    assert "idempotency.record_failed" in caplog.text
    assert SECRET not in as_stored(shop)


def test_a_person_can_read_a_record(make_light: Callable[..., Shop]) -> None:
    """What the store finds can be opened with the app's keys, for its own scope and key."""
    shop = make_light(encryption_keys=[NEW])
    key = telling(shop)
    send(shop, key)
    state = get_state(shop.app)
    stored = state.store.find("acme", key)
    assert stored is not None
    assert stored.recorded is not None
    found = opened(state.settings.encryption_keys, stored.recorded, "acme", key)
    assert (SECRET, "t0ken") == (found.body, dict(found.headers)["X-Token"])


def test_an_operator_can_read_a_record(make_light: Callable[..., Shop]) -> None:
    """``show`` opens what is encrypted; without the key it shows the rest, names the key, and exits with 1."""
    shop = make_light(encryption_keys=[OLD])
    asked: list[str] = []
    key = stepping(shop, asked, [201])
    send(shop, key)
    show = ["idempotency", "show", "acme", key]
    found = shop.app.test_cli_runner().invoke(args=[*show, "--json", "--body"])
    told = json.loads(found.output)
    assert (0, 201) == (found.exit_code, told["answer"]["status"])
    assert told["steps"]
    assert told["answer"]["body"]["text"]
    found = make_light(encryption_keys=[NEW]).app.test_cli_runner().invoke(args=show)
    assert 1 == found.exit_code
    assert "completed" in found.output
    assert key_id(OLD) in found.output
    assert "answer        201\n" in found.output
    assert "not kept" not in found.output


def test_an_atomic_view_is_overtaken_across_a_rotation(postgres_url: str) -> None:
    """What another process has recorded under the old key meanwhile is the same request: 409, and not 422."""
    shop = make_shop(postgres_url, encryption_keys=[OLD])
    rotated = make_shop(postgres_url, encryption_keys=[NEW, OLD], atomic=True)
    key = telling(shop)

    def overtaken() -> Any:
        assert 201 == send(shop, key).status_code
        return "late", 201

    guard(rotated, overtaken)
    try:
        answer = send(rotated, key)
        assert (409, PROBLEM + "in-flight") == (answer.status_code, answer.json["type"])
        retry = send(rotated, key)
        assert (201, SECRET) == (retry.status_code, retry.data)
    finally:
        close(shop.app)
        close(rotated.app)
