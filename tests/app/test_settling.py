"""``idempotency.settle``, ``idempotency.release`` and ``flask idempotency release``: keys that people or code end."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Response, jsonify, request, stream_with_context
from werkzeug.test import TestResponse

from flask_idempotency.errors import KeyNotFound, SettleError, StoreError, WriterHeld
from tests.support.apps import Shop, close, command, events, make_shop, new_key, until
from tests.support.barrier import background, together
from tests.support.guarded import Broken, assert_held, commit, commit_and_fail, fine, guard, refusal, send, statuses


def hold(shop: Shop, *views: Callable[[], Any], **options: Any) -> str:
    """A key that is held; the view does ``views`` from the next run on."""
    guard(shop, commit_and_fail(shop), *(views or (fine,)), **options)
    key = new_key()
    assert 500 == send(shop, key).status_code
    assert ["held"] == statuses(shop)
    return key


def kill(shop: Shop, seconds: float) -> str:
    """A key whose holder was killed so many seconds ago."""

    def die() -> Any:
        raise SystemExit

    guard(shop, die, fine)
    key = new_key()
    with pytest.raises(SystemExit):
        send(shop, key)
    shop.shift(seconds)
    return key


def settle(shop: Shop, key: str, response: Any = "settled", **options: Any) -> None:
    with shop.app.app_context():
        shop.idempotency.settle("acme", key, response, **options)


def release(shop: Shop, key: str, **options: Any) -> None:
    with shop.app.app_context():
        shop.idempotency.release("acme", key, **options)


def run(shop: Shop, *words: str, answer: str | None = None) -> tuple[int, str]:
    """The exit status and the output of ``flask idempotency release``; ``answer`` is typed in."""
    return command(shop.app, "release", *words, answer=answer)


def assert_settled(shop: Shop, key: str, status: int, body: bytes, runs: int = 1) -> TestResponse:
    """Retries get exactly that as a replay; the view does not run."""
    for _ in range(2):
        retry = send(shop, key)
        assert (status, body, "true") == (retry.status_code, retry.data, retry.headers["Idempotent-Replay"])
    assert (runs, ["completed"]) == (len(shop.runs), statuses(shop))
    return retry


class Slow:
    """A view that waits in its first run until it may go on, and its request in a thread."""

    def __init__(self, shop: Shop, *views: Callable[[], Any]) -> None:
        self.shop = shop
        self.key = new_key()
        self.entered, self.go = threading.Event(), threading.Event()
        guard(shop, self._wait, *(views or (fine,)))
        self.first = background(send, shop, self.key)
        assert self.entered.wait(20)

    def _wait(self) -> Any:
        self.entered.set()
        assert self.go.wait(20)
        return "slow", 201

    def end(self) -> TestResponse:
        """Let it go on, and take its answer."""
        self.go.set()
        return self.first.result(20)


class TestSettle:
    """``idempotency.settle``."""

    @pytest.mark.parametrize(
        ("response", "status", "body", "mimetype"),
        [
            ({"id": 7}, 200, b'{"id":7}\n', "application/json"),
            ([1, 2], 200, b"[1,2]\n", "application/json"),
            ("text", 200, b"text", "text/html"),
            (b"\x00\xff", 200, b"\x00\xff", "text/html"),
            (("", 204), 204, b"", "text/html"),
            (({"id": 7}, 201, {"Location": "/charges/7"}), 201, b'{"id":7}\n', "application/json"),
            (("gone", 410, [("X-One", "1"), ("X-One", "2")]), 410, b"gone", "text/html"),
        ],
    )
    def test_what_a_view_may_return(self, shop: Shop, response: Any, status: int, body: bytes, mimetype: str) -> None:
        """Anything that a view may return is the answer that retries get from then on."""
        key = hold(shop)
        settle(shop, key, response)
        retry = assert_settled(shop, key, status, body)
        if status != 204:
            assert mimetype == retry.mimetype
        if isinstance(response, tuple) and len(response) == 3:
            for name, value in response[2].items() if isinstance(response[2], dict) else response[2]:
                assert value in retry.headers.getlist(name)

    def test_responses_and_streams(self, light: Shop) -> None:
        """A response object with a status text of its own, a generator, and a JSON response."""
        for response, status, body in (
            (Response("own", "418 Own Text", headers={"X-Own": "yes", "Set-Cookie": "a=b"}), "418 Own Text", b"own"),
            (iter(["a", "b"]), "200 OK", b"ab"),
            (Response(stream_of("a", "b"), 202), "202 ACCEPTED", b"ab"),
        ):
            light.runs.clear()
            light.app.view_functions.pop("do", None)
            key = new_key()
            light.app.view_functions["do"] = light.idempotency.required(commit_and_fail(light))
            if not light.app.url_map._rules_by_endpoint.get("do"):
                light.app.add_url_rule("/do", "do", methods=["POST"])
            assert 500 == send(light, key).status_code
            settle(light, key, response)
            retry = send(light, key)
            assert (status, body, "true") == (retry.status, retry.data, retry.headers["Idempotent-Replay"])
            assert "Set-Cookie" not in retry.headers
        assert ["completed"] * 3 == statuses(light)

    def test_in_a_request(self, light: Shop) -> None:
        """It works in a request of the app's own, an operator's, whose own answer is untouched."""
        light.app.post("/settle")(
            lambda: (light.idempotency.settle("acme", request.form["key"], jsonify(id=7)), "done")[1]
        )
        key = hold(light)
        answer = light.client.post("/settle", data={"key": key})
        assert (200, "done") == (answer.status_code, answer.text)
        assert_settled(light, key, 200, b'{"id":7}\n')

    def test_a_stream_in_a_context(self, light: Shop) -> None:
        """A stream that needs the request is taken in while there is one."""

        def view() -> Any:
            light.idempotency.settle("acme", request.form["key"], stream_with_context(stream_of("a", "b")))
            return "done"

        light.app.post("/settle")(view)
        key = hold(light)
        assert "done" == light.client.post("/settle", data={"key": key}).text
        assert_settled(light, key, 200, b"ab")

    def test_what_can_not_be_kept(self, make: Callable[..., Shop]) -> None:
        """An answer that is too large, fails while it is made, or is none, is refused: the key stays held."""
        shop = make(max_body=10)
        key = hold(shop)

        def broken() -> Any:
            yield "a"
            raise Broken

        for response in ("x" * 11, stream_of("x" * 6, "x" * 5), Response("x", "none at all")):
            with pytest.raises(SettleError, match="can't be kept"):
                settle(shop, key, response)
        with pytest.raises(Broken):
            settle(shop, key, broken())
        with pytest.raises(TypeError):
            settle(shop, key, None)
        assert_held(shop, key)
        settle(shop, key, "x" * 10)
        assert_settled(shop, key, 200, b"x" * 10)

    def test_retention(self, make: Callable[..., Shop]) -> None:
        """The answer is kept for the app's retention, from the settling on."""
        shop = make(retention=600)
        key = hold(shop)
        shop.shift(90_000)
        settle(shop, key)
        shop.shift(550)
        assert_settled(shop, key, 200, b"settled")
        shop.shift(60)
        assert (201, "fine") == ((retry := send(shop, key)).status_code, retry.text)

    def test_there_is_no_such_key(self, shop: Shop) -> None:
        """Another scope, another key, and a record past its retention are not found: nothing changes."""
        key = hold(shop)
        with shop.app.app_context():
            for scope, other in (("acme", new_key()), ("other", key), ("ACME", key), ("acme ", key)):
                with pytest.raises(KeyNotFound, match="There is no such key in this scope"):
                    shop.idempotency.settle(scope, other, "settled")
                with pytest.raises(LookupError):
                    shop.idempotency.release(scope, other, force=True)
        assert_held(shop, key)
        settle(shop, key)
        shop.shift(90_000)
        with pytest.raises(KeyNotFound):
            release(shop, key, force=True)

    @pytest.mark.parametrize("force", [False, True])
    def test_what_is_recorded_stays(self, shop: Shop, force: bool) -> None:
        """A recorded answer is never replaced, by force neither."""
        key = hold(shop)
        settle(shop, key)
        with pytest.raises(SettleError, match="has a recorded answer, which is not replaced"):
            settle(shop, key, "another", force=force)
        assert_settled(shop, key, 200, b"settled")

    @pytest.mark.scenario(77)
    def test_a_claim_that_is_alive(self, shop: Shop) -> None:
        """A key whose view still runs is refused, and the view's own answer is the record."""
        slow = Slow(shop)
        with pytest.raises(SettleError, match="The key's claim is alive"):
            settle(shop, slow.key)
        assert 201 == slow.end().status_code
        assert_settled(shop, slow.key, 201, b"slow")

    def test_a_claim_that_is_alive_by_force(self, shop: Shop) -> None:
        """By force it is settled, the holder records nothing over it, and its loss is told once."""
        with events(shop.app) as seen:
            slow = Slow(shop)
            settle(shop, slow.key, ("settled", 202), force=True)
            assert_settled(shop, slow.key, 202, b"settled")
            assert (201, "slow") == ((first := slow.end()).status_code, first.text)
            until(lambda: "claim_lost" in [name for name, _ in seen])
        assert 1 == [name for name, _ in seen].count("claim_lost")
        assert "executed" not in [name for name, _ in seen]
        assert_settled(shop, slow.key, 202, b"settled")

    @pytest.mark.parametrize("stale", ["reexecute", "reject"])
    def test_a_lease_that_is_over(self, make: Callable[..., Shop], stale: str) -> None:
        """What a killed holder left is settled once its lease is over, and refused before."""
        shop = make(stale=stale)
        key = kill(shop, 0)
        with pytest.raises(SettleError, match="The key's claim is alive"):
            settle(shop, key)
        shop.shift(40)
        settle(shop, key)
        assert_settled(shop, key, 200, b"settled")

    def test_two_at_once(self, shop: Shop) -> None:
        """Of several that settle one key, one wins, and its answer stays."""
        key = hold(shop)

        def one(number: int) -> str | None:
            try:
                settle(shop, key, f"settled by {number}")
            except SettleError:
                return None
            return f"settled by {number}"

        (winner,) = [won for won in together(4, one) if won]
        assert_settled(shop, key, 200, winner.encode())

    def test_the_log(self, shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
        """Each settling is a warning with its fields; one that is refused is none."""
        key = hold(shop)
        shop.shift(100)
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "flask_idempotency"):
            settle(shop, key)
            with pytest.raises(SettleError):
                settle(shop, key)
            release(shop, key, force=True)
        assert [
            ("idempotency.settle", logging.WARNING, key, "acme", "POST", "/do", *rest)
            for rest in (("recorded", "held", False), ("released", "completed", True))
        ] == [
            (one.event, one.levelno, one.key, one.scope, one.method, one.path, one.outcome, one.was, one.forced)
            for one in caplog.records  # type: ignore[attr-defined]
        ]
        assert 100 <= caplog.records[0].age_seconds < 130  # type: ignore[attr-defined]
        message = caplog.messages[0]
        assert message.startswith(f"idempotency.settle key={key} scope=acme method=POST path=/do outcome=recorded ")
        assert "settled" not in message

    @pytest.mark.parametrize("name", ["settle", "release"])
    def test_without_the_table(self, light: Shop, name: str) -> None:
        """Without the table it is an error that says to run the migration."""
        light.execute(sa.text("DROP TABLE idempotency_keys"))
        with pytest.raises(StoreError, match="migration"):
            settle(light, new_key()) if name == "settle" else release(light, new_key())


def stream_of(*chunks: str) -> Any:
    """A generator of these."""
    yield from chunks


class TestRelease:
    """``idempotency.release``."""

    def test_a_held_key(self, shop: Shop) -> None:
        """A held key that is released runs at the next retry, once, whatever its age."""
        key = hold(shop)
        shop.shift(90_000)
        release(shop, key)
        assert [] == shop.rows()
        assert [(201, None), (201, "true")] == [
            (one.status_code, one.headers.get("Idempotent-Replay")) for one in (send(shop, key), send(shop, key))
        ]
        assert 2 == len(shop.runs)

    def test_held_again(self, shop: Shop) -> None:
        """A key that was released can be held anew."""
        key = hold(shop, commit_and_fail(shop))
        release(shop, key)
        assert 500 == send(shop, key).status_code
        assert_held(shop, key, runs=2)

    @pytest.mark.parametrize("stale", ["reexecute", "reject"])
    def test_a_lease_that_is_over(self, make: Callable[..., Shop], stale: str) -> None:
        """What a killed holder left is released once its lease is over: then the retry runs."""
        shop = make(stale=stale)
        key = kill(shop, 40)
        release(shop, key)
        assert (201, 2) == (send(shop, key).status_code, len(shop.runs))

    @pytest.mark.scenario(77)
    def test_a_claim_that_is_alive(self, shop: Shop) -> None:
        """A key whose view still runs is refused."""
        slow = Slow(shop)
        with pytest.raises(SettleError, match=r"gave a sign of life \d+\.\d s ago"):
            release(shop, slow.key)
        assert (409, "in-flight", True) == refusal(send(shop, slow.key))
        slow.end()
        assert_settled(shop, slow.key, 201, b"slow")

    @pytest.mark.scenario(77)
    def test_a_claim_that_is_alive_by_force(self, shop: Shop) -> None:
        """By force the retry runs beside it, its answer is the record, and the first holder's loss is told once."""
        with events(shop.app) as seen:
            slow = Slow(shop)
            release(shop, slow.key, force=True)
            assert 201 == send(shop, slow.key).status_code
            assert (201, "slow") == ((first := slow.end()).status_code, first.text)
            until(lambda: "claim_lost" in [name for name, _ in seen])
        assert ["claim_lost", "executed"] == sorted(name for name, _ in seen)
        assert_settled(shop, slow.key, 201, b"fine", runs=2)

    def test_a_recorded_answer(self, shop: Shop) -> None:
        """A recorded answer is dropped by force only."""
        guard(shop, lambda: "first", fine)
        key = new_key()
        send(shop, key)
        with pytest.raises(SettleError, match="has a recorded answer"):
            release(shop, key)
        assert "first" == send(shop, key).text
        release(shop, key, force=True)
        assert ("fine", 2) == (send(shop, key).text, len(shop.runs))

    def test_steps_are_kept(self, shop: Shop) -> None:
        """A row with steps is kept: the next attempt does not call them again, and another request is turned away."""
        called: list[str] = []

        def do() -> Any:
            assert shop.idempotency.current is not None
            paid = shop.idempotency.step("pay", lambda: called.append("pay") or "paid")
            commit(shop)
            if shop.idempotency.current.attempts == 0:
                raise Broken
            return paid, 201

        guard(shop, do)
        key = new_key()
        assert 500 == send(shop, key).status_code
        assert_held(shop, key)
        for _ in range(2):
            release(shop, key)  # the second time it is claimable already
            assert [("released", 1)] == [(row["status"], row["attempts"]) for row in shop.rows()]
        assert (422, "key-reused", False) == refusal(send(shop, key, json={"other": 1}))
        assert (201, "paid") == ((retry := send(shop, key)).status_code, retry.text)
        assert (["pay"], 2) == (called, len(shop.runs))

    def test_released_and_settled(self, shop: Shop) -> None:
        """A key that was released for its steps' sake can still be settled."""

        def do() -> Any:
            shop.idempotency.step("pay", lambda: 1)
            raise Broken

        guard(shop, do, fine)
        key = new_key()
        send(shop, key)
        assert ["released"] == statuses(shop)
        settle(shop, key)
        assert_settled(shop, key, 200, b"settled")

    def test_two_at_once(self, shop: Shop) -> None:
        """Of several that release one key each succeeds, is told that it moved, or finds it gone; it is free."""
        key = hold(shop)

        def one(number: int) -> bool:
            try:
                release(shop, key)
            except SettleError:
                return False
            return True

        assert 1 == together(4, one).count(True)
        assert 201 == send(shop, key).status_code


class TestScopesAndKeys:
    """What ``settle`` and ``release`` are called with."""

    @pytest.mark.parametrize("scope", [5, 0, uuid.UUID(int=7)], ids=repr)
    def test_a_scope_as_the_loader_gave_it(self, shop: Shop, scope: Any) -> None:
        """A number or a UUID that the scope loader returned is taken as it is, and so is a UUID for the key."""
        shop.idempotency.loader = lambda: scope
        key = hold(shop)
        with shop.app.app_context():
            shop.idempotency.release(scope, uuid.UUID(key))
        assert [] == [one for one in statuses(shop) if one != "released"]
        assert 201 == send(shop, key).status_code
        shop.runs.clear()
        other = new_key()
        shop.app.view_functions["do"] = shop.idempotency.required(commit_and_fail(shop))
        assert 500 == send(shop, other).status_code
        with shop.app.app_context():
            shop.idempotency.settle(scope, other, "settled")
        assert (200, "settled") == ((retry := send(shop, other)).status_code, retry.text)

    @pytest.mark.parametrize(
        ("scope", "key"), [("a\0b", "key-00000"), ("acme", "key\0000000"), ("\ud800", "key-00000"), ("", "key-00000")]
    )
    def test_what_no_row_can_hold(self, shop: Shop, scope: str, key: str) -> None:
        """A NUL, half a character or nothing is not found, on every database."""
        with shop.app.app_context():
            with pytest.raises(KeyNotFound, match="no such key"):
                shop.idempotency.settle(scope, key, "settled")
            with pytest.raises(KeyNotFound, match="no such key"):
                shop.idempotency.release(scope, key, force=True)

    def test_nothing_to_record(self, light: Shop) -> None:
        """``None`` is no answer: an error that says what is, and nothing is changed."""
        key = hold(light)
        with pytest.raises(TypeError, match=r"settle\(\) takes a response, .*, not NoneType"):
            settle(light, key, None)
        assert_held(light, key)

    def test_writes_of_ones_own(self, light: Shop) -> None:
        """On SQLite, uncommitted writes of the same thread are an error that speaks of settling, not of views."""
        key = hold(light)
        with light.app.app_context():
            light.db.session.add(light.Charge(amount=1))
            light.db.session.flush()
            with pytest.raises(WriterHeld, match="before a key is settled or released"):
                light.idempotency.settle("acme", key, "settled")
            with pytest.raises(WriterHeld, match="before a key is settled or released"):
                light.idempotency.release("acme", key)
            light.db.session.commit()
            light.idempotency.settle("acme", key, "settled")
        assert_settled(light, key, 200, b"settled")

    def test_a_claim_in_memory(self) -> None:
        """In SQLite's memory no lease is renewed: a claim whose view runs is refused past its lease, too."""
        shop = make_shop("sqlite://")
        try:
            slow = Slow(shop)
            shop.shift(40)
            for call in (settle, release):
                with pytest.raises(SettleError, match="The key's claim is alive"):
                    call(shop, slow.key)
            assert 201 == slow.end().status_code
            assert_settled(shop, slow.key, 201, b"slow")
        finally:
            close(shop.app)


class TestCommand:
    """``flask idempotency release``."""

    def test_it_asks(self, shop: Shop) -> None:
        """It asks first, and does as it is told."""
        key = hold(shop)
        status, output = run(shop, "acme", key, answer="n\n")
        assert 1 == status
        assert f"The next request with the key '{key}' of 'acme' will run the view. Release it? [y/N]" in output
        assert output.endswith("Aborted!\n")
        assert (1, True) == ((asked := run(shop, "acme", key, answer=""))[0], "Aborted!" in asked[1])
        assert_held(shop, key)
        status, output = run(shop, "acme", key, answer="y\n")
        assert (0, True) == (status, output.endswith("Released.\n"))
        assert 201 == send(shop, key).status_code

    def test_yes(self, shop: Shop) -> None:
        """With --yes it does not ask."""
        key = hold(shop)
        assert (0, "Released.\n") == run(shop, "acme", key, "--yes")
        assert 201 == send(shop, key).status_code

    @pytest.mark.scenario(77)
    def test_force(self, shop: Shop) -> None:
        """A view that still runs: refused with status 1, and done with --force."""
        slow = Slow(shop)
        status, output = run(shop, "--yes", "acme", slow.key)
        assert (1, True) == (status, output.startswith("Error: The key's claim is alive: "))
        assert (409, "in-flight", True) == refusal(send(shop, slow.key))
        assert (0, "Released.\n") == run(shop, "acme", slow.key, "--yes", "--force")
        assert 201 == send(shop, slow.key).status_code
        slow.end()
        assert_settled(shop, slow.key, 201, b"fine", runs=2)

    def test_a_recorded_answer(self, light: Shop) -> None:
        """A recorded answer: refused, and dropped with --force."""
        guard(light, fine)
        key = new_key()
        send(light, key)
        status, output = run(light, "acme", key, "--yes")
        assert (1, True) == (status, output.startswith("Error: The key has a recorded answer."))
        assert (0, "Released.\n") == run(light, "acme", key, "--yes", "--force")
        assert [] == light.rows()

    def test_not_found(self, light: Shop) -> None:
        """A key that is not there: status 1, and how scope and key are to be given."""
        status, output = run(light, "acme", new_key(), "--yes")
        assert 1 == status
        assert output.startswith("Error: There is no such key in this scope. Both are given as they are stored")

    @pytest.mark.parametrize("words", [[], ["acme"], ["acme", "key-00000", "more"], ["acme", "key-00000", "--no"]])
    def test_wrong_usage(self, light: Shop, words: list[str]) -> None:
        """Wrong usage: status 2, and nothing is touched."""
        key = hold(light)
        assert 2 == run(light, *words)[0]
        assert_held(light, key)

    def test_without_the_table(self, shop: Shop) -> None:
        """A missing table: status 1, and to run the migration."""
        shop.execute(sa.text("DROP TABLE idempotency_keys"))
        status, output = run(shop, "acme", new_key(), "--yes")
        assert (1, True) == (status, "flask db upgrade" in output)
        assert output.startswith("Error: ")
        assert "Traceback" not in output

    @pytest.mark.parametrize(
        "scope", ["a b", "~fixed", "Käufer Ünal", "x" * 300, "-rf", "a'b\"c", "日本", "a\tb", "%(scope)s"]
    )
    def test_odd_scopes(self, shop: Shop, scope: str) -> None:
        """A scope in its stored form, as the log has it, is taken whatever its characters."""
        shop.idempotency.loader = lambda: scope
        with events(shop.app) as seen:
            key = hold(shop)
        ((_, fields),) = seen
        assert (0, "Released.\n") == run(shop, "--yes", "--", fields["scope"], key)
        assert [] == shop.rows()
