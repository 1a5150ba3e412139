"""What a request gets, and what becomes of its key, when the database fails in the middle of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from flask import request
from werkzeug.test import TestResponse

from flask_idempotency.heartbeat import heartbeat
from flask_idempotency.state import get_state
from tests.support.apps import Shop, close, events, make_shop, new_key, until
from tests.support.barrier import background
from tests.support.postgres import Postgres
from tests.support.proxy import CuttingProxy, Rule

CLAIM = "INSERT INTO idempotency_keys"
RECORD = "SET status='completed'"
RELEASE = "DELETE FROM idempotency_keys"
RENEW = "SET locked_at"
TAKE = "SET request_method"

UNAVAILABLE = "urn:problem-type:idempotency:store-unavailable"

#: Both drivers give up a connection that nobody accepts after this many seconds; libpq knows no shorter time.
CONNECT_TIMEOUT = 2


@pytest.fixture
def make_distant(tcp_url: str) -> Iterator[Callable[..., Shop]]:
    """A function that makes shops whose database is behind the proxy, once for each driver."""
    shops: list[Shop] = []

    def build(**config: Any) -> Shop:
        # The app's own connections are looked at before they are used, so that what fails is the extension's part.
        options = {"pool_pre_ping": True, **config.pop("engine_options", {})}
        shops.append(make_shop(tcp_url, engine_options=options, **config))
        shop = shops[-1]
        shop.app.config["DURING"] = lambda: None

        @shop.app.post("/work")
        @shop.idempotency.required
        def work() -> tuple[dict[str, Any], int]:
            shop.runs.append(request.get_json())
            shop.db.session.add(shop.Charge(amount=request.get_json()["amount"]))
            shop.db.session.commit()
            shop.app.config["DURING"]()
            return {"run": len(shop.runs)}, shop.app.config.get("STATUS", 201)

        return shop

    yield build
    for shop in shops:
        close(shop.app)


@pytest.fixture
def distant(make_distant: Callable[..., Shop]) -> Shop:
    """A shop with the default configuration behind the proxy."""
    return make_distant()


def work(shop: Shop, key: str, amount: int = 100) -> TestResponse:
    """Ask for a charge; the view calls ``DURING`` after its commit, and answers with ``STATUS``."""
    headers = {"X-Tenant": "acme", "Idempotency-Key": key}
    return shop.client.post("/work", json={"amount": amount}, headers=headers)


def names(seen: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The signals' names."""
    return [name for name, _ in seen]


def outcome(answer: TestResponse) -> tuple[int, bool]:
    """An answer's status, and whether it is a replay."""
    return answer.status_code, "Idempotent-Replay" in answer.headers


@pytest.fixture
def outside(postgres_server: Postgres, postgres_database: str) -> Callable[..., list[tuple[Any, ...]]]:
    """A function that carries out a statement past the proxy."""

    def execute(statement: str) -> list[tuple[Any, ...]]:
        return postgres_server.execute(statement, database=postgres_database)

    return execute


@contextmanager
def locked(server: Postgres, database: str) -> Iterator[None]:
    """The table of keys under a lock that every statement on it waits for: a database that hangs."""
    with server.connect(database) as connection, connection.transaction():
        connection.execute("LOCK TABLE idempotency_keys IN ACCESS EXCLUSIVE MODE")
        yield


# Down


@pytest.mark.scenario(59)
def test_down_at_the_claim(
    distant: Shop, cutting_proxy: CuttingProxy, caplog: pytest.LogCaptureFixture, outside: Callable[..., Any]
) -> None:
    """Without the database a guarded view does not run: 503 with Retry-After, a line in the log, and no row."""
    key = new_key()
    with events(distant.app) as seen, cutting_proxy.gone():
        answer = work(distant, key)
        assert (503, UNAVAILABLE, "2") == (answer.status_code, answer.json["type"], answer.headers["Retry-After"])
    assert [("rejected", "store-unavailable")] == [(name, fields["reason"]) for name, fields in seen]
    assert "The store can't answer, and the view is not run" in caplog.text
    assert [] == distant.runs == outside("SELECT * FROM idempotency_keys")
    assert (201, False) == outcome(work(distant, key))


@pytest.mark.scenario(59, 72)
def test_down_at_the_recording(
    make_distant: Callable[..., Shop],
    cutting_proxy: CuttingProxy,
    postgres_server: Postgres,
    postgres_database: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client has its answer, the failure is told, nobody runs the view again, and it is recorded when it can be."""
    distant = make_distant(lock_timeout=2)
    near = make_shop(postgres_server.url(postgres_database), lock_timeout=2)
    near.app.add_url_rule("/work", view_func=near.app.view_functions["create_charge"], methods=["POST"])
    key = new_key()
    with events(distant.app) as seen:
        distant.app.config["DURING"] = cutting_proxy.go_away
        first = work(distant, key)
        assert (201, False) == outcome(first)
        assert ["record_failed"] == names(seen)
        assert seen[0][1]["exception"].startswith("StoreError: The database that holds the idempotency keys")
        # This process knows the answer; another one knows that there is a claim.
        retry = work(distant, key)
        assert (201, True, first.data) == (*outcome(retry), retry.data)
        assert 422 == work(distant, key, 900).status_code
        assert 409 == work(near, key).status_code
        distant.app.config["DURING"] = lambda: None
        cutting_proxy.come_back()
        until(lambda: "executed" in names(seen))
    retry = work(near, key)
    assert (201, True, first.data) == (*outcome(retry), retry.data)
    assert (1, 0) == (len(distant.runs), len(near.runs))
    assert "record_failed" not in names(seen)[1:]
    (failed,) = [one for one in caplog.records if getattr(one, "event", "") == "idempotency.record_failed"]
    assert logging.ERROR == failed.levelno
    close(near.app)


@pytest.mark.scenario(59)
def test_down_at_the_release(
    make_distant: Callable[..., Shop], cutting_proxy: CuttingProxy, outside: Callable[..., Any]
) -> None:
    """What could not be released when it should have been is released as soon as it can be, long before the lease."""
    distant = make_distant(lock_timeout=5)
    distant.app.config.update(DURING=cutting_proxy.go_away, STATUS=409)
    key = new_key()
    with events(distant.app) as seen:
        assert 409 == work(distant, key).status_code
        again = work(distant, key)
        assert (409, "urn:problem-type:idempotency:in-flight") == (again.status_code, again.json["type"])
        distant.app.config.update(DURING=lambda: None, STATUS=201)
        cutting_proxy.come_back()
        until(lambda: "released" in names(seen), 4)
    assert ["record_failed", "conflicted", "released"] == names(seen)
    assert [] == outside("SELECT * FROM idempotency_keys")
    assert (201, False) == outcome(work(distant, key))


@pytest.mark.scenario(59, 12)
def test_down_for_longer_than_the_lease(
    distant: Shop, cutting_proxy: CuttingProxy, postgres_server: Postgres, postgres_database: str
) -> None:
    """An answer that waited for the database for too long does not replace the one that was recorded since."""
    near = make_shop(postgres_server.url(postgres_database))
    near.app.add_url_rule("/work", view_func=near.app.view_functions["create_charge"], methods=["POST"])
    key = new_key()
    with events(distant.app) as seen:
        distant.app.config["DURING"] = cutting_proxy.go_away
        first = work(distant, key)
        near.shift(31)
        with events(near.app) as seen_near:
            second = work(near, key)
        assert (201, False) == outcome(second)
        assert ["taken_over", "executed"] == names(seen_near)
        cutting_proxy.come_back()
        third = work(distant, key)
    assert (201, True, second.data) == (*outcome(third), third.data)
    assert first.data != second.data
    assert ["record_failed", "claim_lost", "replayed"] == names(seen)
    close(near.app)


# Hanging


@pytest.mark.scenario(59)
def test_hanging_at_the_claim(
    make_distant: Callable[..., Shop], cutting_proxy: CuttingProxy, postgres_server: Postgres, postgres_database: str
) -> None:
    """A database that hangs keeps a request for no longer than the app's own time-out: 503, the view not run."""
    distant = make_distant(engine_options={"connect_args": {"options": "-c statement_timeout=300"}})
    with locked(postgres_server, postgres_database), cutting_proxy.counting() as statements:
        answer = background(work, distant, key := new_key()).result(20)
    assert 1 == sum(CLAIM in one for one in statements)
    assert (503, UNAVAILABLE) == (answer.status_code, answer.json["type"])
    assert [] == distant.runs
    assert (201, False) == outcome(work(distant, key))


@pytest.mark.scenario(59)
def test_hanging_at_the_recording(
    make_distant: Callable[..., Shop], postgres_server: Postgres, postgres_database: str
) -> None:
    """A database that hangs when the answer is to be recorded takes the answer from nobody, and records it later."""
    distant = make_distant(engine_options={"connect_args": {"options": "-c statement_timeout=300"}}, lock_timeout=2)
    hanging = locked(postgres_server, postgres_database)
    distant.app.config["DURING"] = hanging.__enter__
    with events(distant.app) as seen:
        assert (201, False) == outcome(background(work, distant, key := new_key()).result(20))
        assert (201, True) == outcome(work(distant, key))
        hanging.__exit__(None, None, None)
        until(lambda: "executed" in names(seen))
    assert ["record_failed", "replayed", "executed"] == names(seen)
    assert "completed" == distant.rows()[0]["status"]


@pytest.mark.scenario(59)
def test_nobody_answers(make_distant: Callable[..., Shop], cutting_proxy: CuttingProxy) -> None:
    """A server that accepts a connection and says nothing is waited for once, as long as the app's engine says."""
    distant = make_distant(engine_options={"connect_args": {"connect_timeout": CONNECT_TIMEOUT}})
    waits = []

    def note(dialect: Any, record: Any, args: Any, parameters: dict[str, Any]) -> None:
        waits.append((threading.current_thread(), parameters["connect_timeout"]))

    with distant.app.app_context():
        sa.event.listen(distant.db.engine, "do_connect", note)
    cutting_proxy.hang()
    thread, answer = background(lambda: (threading.current_thread(), work(distant, new_key()))).result(20)
    assert [CONNECT_TIMEOUT] == [seconds for one, seconds in waits if one is thread]
    assert (503, UNAVAILABLE) == (answer.status_code, answer.json["type"])
    cutting_proxy.resume()


# Lost replies


@pytest.mark.scenario(75)
@pytest.mark.parametrize("way", ["lose_reply", "lose_request"])
def test_the_claims_reply_is_lost(way: str, distant: Shop, cutting_proxy: CuttingProxy) -> None:
    """A request whose claim was granted, its reply cut off, finds its own claim: it runs, once, and is recorded."""
    key = new_key()
    rule: Rule = getattr(cutting_proxy, way)(CLAIM)
    with events(distant.app) as seen:
        assert (201, False) == outcome(work(distant, key))
        assert 1 == rule.count
        assert (201, True) == outcome(work(distant, key))
    assert ["executed", "replayed"] == names(seen)
    assert 1 == len(distant.runs) == distant.rows()[0]["attempts"]


@pytest.mark.scenario(75)
def test_the_takeovers_reply_is_lost(distant: Shop, cutting_proxy: CuttingProxy) -> None:
    """A takeover that was granted, its reply cut off, is found again, and counted once."""
    key = new_key()
    distant.app.config["DURING"] = exit_at_once
    with pytest.raises(SystemExit):
        work(distant, key)
    distant.app.config["DURING"] = lambda: None
    distant.shift(31)
    rule = cutting_proxy.lose_reply(TAKE)
    with events(distant.app) as seen:
        assert (201, False) == outcome(work(distant, key))
    assert (1, 2) == (rule.count, distant.rows()[0]["attempts"])
    assert ["taken_over", "executed"] == names(seen)


def exit_at_once() -> None:
    """End the view as the abort of a worker does."""
    raise SystemExit


@pytest.mark.scenario(75)
@pytest.mark.parametrize("way", ["lose_reply", "lose_request"])
def test_the_recordings_reply_is_lost(way: str, distant: Shop, cutting_proxy: CuttingProxy) -> None:
    """An answer whose recording was carried out, its reply cut off, is recorded: neither lost nor failed."""
    key = new_key()
    rule: Rule = getattr(cutting_proxy, way)(RECORD)
    with events(distant.app) as seen:
        first = work(distant, key)
        assert ["executed"] == names(seen)
        retry = work(distant, key)
    assert (201, True, first.data) == (*outcome(retry), retry.data)
    assert (1, 1) == (rule.count, len(distant.runs))


@pytest.mark.scenario(75)
@pytest.mark.parametrize("way", ["lose_reply", "lose_request"])
def test_the_releases_reply_is_lost(way: str, distant: Shop, cutting_proxy: CuttingProxy) -> None:
    """A release that was carried out, its reply cut off, is a release: no claim is lost, the retry runs at once."""
    key = new_key()
    rule: Rule = getattr(cutting_proxy, way)(RELEASE)
    distant.app.config["STATUS"] = 429
    with events(distant.app) as seen:
        assert 429 == work(distant, key).status_code
        assert (["released"], 1, []) == (names(seen), rule.count, distant.rows())
        distant.app.config["STATUS"] = 201
        assert (201, False) == outcome(work(distant, key))
    assert 2 == len(distant.runs)


def lose_and_go(proxy: CuttingProxy, statement: str) -> Callable[[], None]:
    """Have a statement carried out, lose its reply, and be gone from then on; to be called when it is time for it."""

    def arm() -> None:
        rule = proxy.hold_reply(statement)

        def cut() -> None:
            rule.wait()
            proxy.go_away()
            rule.release()

        background(cut)

    return arm


@pytest.mark.scenario(75)
def test_the_claims_reply_is_lost_and_the_database_gone(
    make_distant: Callable[..., Shop], cutting_proxy: CuttingProxy, outside: Callable[..., Any]
) -> None:
    """A claim that was granted to a request which never heard of it, and got 503, blocks the key for no lease."""
    distant = make_distant(lock_timeout=8)
    key = new_key()
    lose_and_go(cutting_proxy, CLAIM)()
    assert (503, UNAVAILABLE) == ((answer := work(distant, key)).status_code, answer.json["type"])
    assert [("in_progress",)] == outside("SELECT status FROM idempotency_keys")
    cutting_proxy.come_back()
    until(lambda: not outside("SELECT * FROM idempotency_keys"), 5)
    assert (201, False) == outcome(work(distant, key))
    assert 1 == len(distant.runs)


@pytest.mark.scenario(75, 13)
def test_the_takeovers_reply_is_lost_and_the_database_gone(
    make_distant: Callable[..., Shop], cutting_proxy: CuttingProxy
) -> None:
    """A takeover that nobody heard of is not given up as if there had been no first run: its lease decides again."""
    distant = make_distant(lock_timeout=2)
    key = new_key()
    distant.app.config["DURING"] = exit_at_once
    with pytest.raises(SystemExit):
        work(distant, key)
    distant.app.config["DURING"] = lambda: None
    distant.shift(3)
    lose_and_go(cutting_proxy, TAKE)()
    assert 503 == work(distant, key).status_code
    cutting_proxy.come_back()
    store = get_state(distant.app).store
    until(lambda: not any(one.store is store for one in heartbeat._unheard.values()))
    assert ("in_progress", 2) == ((row := distant.rows()[0])["status"], row["attempts"])
    distant.shift(3)
    with events(distant.app) as seen:
        assert (201, False) == outcome(work(distant, key))
    assert ["taken_over", "executed"] == names(seen)


@pytest.mark.scenario(75)
def test_the_recordings_reply_is_lost_and_the_database_gone(
    make_distant: Callable[..., Shop], cutting_proxy: CuttingProxy
) -> None:
    """A recording of which nobody knows whether it was carried out is repeated, and is no lost claim."""
    distant = make_distant(lock_timeout=2)
    key = new_key()
    distant.app.config["DURING"] = lose_and_go(cutting_proxy, RECORD)
    with events(distant.app) as seen:
        assert (201, False) == outcome(work(distant, key))
        cutting_proxy.come_back()
        until(lambda: "executed" in names(seen))
        assert (201, True) == outcome(work(distant, key))
    assert ["record_failed", "executed", "replayed"] == names(seen)
    assert 1 == len(distant.runs)


@pytest.mark.scenario(75)
def test_the_releases_reply_is_lost_and_the_database_gone(
    make_distant: Callable[..., Shop], cutting_proxy: CuttingProxy
) -> None:
    """A release of which nobody knows whether it was carried out ends as a release, not as a lost claim."""
    distant = make_distant(lock_timeout=2)
    key = new_key()
    distant.app.config.update(DURING=lose_and_go(cutting_proxy, RELEASE), STATUS=429)
    with events(distant.app) as seen:
        assert 429 == work(distant, key).status_code
        distant.app.config.update(DURING=lambda: None, STATUS=201)
        cutting_proxy.come_back()
        until(lambda: "released" in names(seen))
        assert (201, False) == outcome(work(distant, key))
    assert ["record_failed", "released", "executed"] == names(seen)


# Renewals


@pytest.mark.scenario(11)
@pytest.mark.parametrize("way", ["lose_reply", "lose_request"])
def test_a_renewals_connection_is_cut(way: str, make_distant: Callable[..., Shop], cutting_proxy: CuttingProxy) -> None:
    """A renewal that is cut off, and its repetition too, is tried again soon, and changes nothing for the client."""
    distant = make_distant(lock_timeout=2)

    def renewed() -> None:
        rule: Rule = getattr(cutting_proxy, way)(RENEW, times=2)
        until(lambda: rule.count == 2)
        sent = len(cutting_proxy.statements)
        until(lambda: any(RENEW in one for one in cutting_proxy.statements[sent:]))

    distant.app.config["DURING"] = renewed
    with events(distant.app) as seen:
        assert (201, False) == outcome(work(distant, key := new_key()))
        assert (201, True) == outcome(work(distant, key))
    assert ["executed", "replayed"] == names(seen)


@pytest.mark.scenario(11)
@pytest.mark.parametrize("way", ["hold_request", "hold_reply"])
def test_a_renewal_in_flight_while_the_view_ends(
    way: str, make_distant: Callable[..., Shop], cutting_proxy: CuttingProxy
) -> None:
    """A renewal that is on its way while the answer is recorded neither spoils the record nor loses the claim."""
    distant = make_distant(lock_timeout=1)
    rules: list[Rule] = []

    def caught() -> None:
        rules.append(getattr(cutting_proxy, way)(RENEW))
        rules[0].wait()

    distant.app.config["DURING"] = caught
    with events(distant.app) as seen:
        assert (201, False) == outcome(work(distant, key := new_key()))
        before = distant.rows()
        rules[0].release()
        sent = len(cutting_proxy.statements)
        distant.app.config["DURING"] = lambda: until(
            lambda: any(RENEW in one for one in cutting_proxy.statements[sent:])
        )
        assert (201, False) == outcome(work(distant, new_key()))
        assert (201, True) == outcome(work(distant, key))
    assert ["executed", "executed", "replayed"] == names(seen)
    assert before == distant.rows()[:1]


@pytest.mark.scenario(5)
def test_a_slow_recording_and_a_waiter(make_distant: Callable[..., Shop], cutting_proxy: CuttingProxy) -> None:
    """A waiter whose owner's recording takes its time goes on waiting, and replays."""
    distant = make_distant(wait=20)
    key = new_key()
    rule = cutting_proxy.hold_request(RECORD)
    first = background(work, distant, key)
    rule.wait()
    waiter = background(work, distant, key)
    until(lambda: get_state(distant.app).lifecycle.places._value == 1)
    assert not waiter.done()
    rule.release()
    assert [(201, False), (201, True)] == [outcome(first.result(10)), outcome(waiter.result(10))]
    assert 1 == len(distant.runs)


# What the database may be set up to


@pytest.mark.scenario(17)
def test_no_transaction_is_left_open_while_the_view_runs(
    make_distant: Callable[..., Shop], postgres_server: Postgres, postgres_database: str
) -> None:
    """Where the database ends idle transactions, a view that takes longer is recorded and replayed all the same."""
    postgres_server.execute(f'ALTER DATABASE "{postgres_database}" SET idle_in_transaction_session_timeout = 200')
    distant = make_distant()

    def look() -> None:
        time.sleep(0.5)
        states = {state for _, state, _ in postgres_server.sessions(postgres_database)}
        assert states <= {"idle", "active"}

    distant.app.config["DURING"] = look
    assert (201, False) == outcome(work(distant, key := new_key()))
    assert (201, True) == outcome(work(distant, key))


@pytest.mark.scenario(68)
def test_the_table_is_missing(make: Callable[..., Shop], caplog: pytest.LogCaptureFixture) -> None:
    """Before the migration has run a guarded request gets 503, the log says what to do, and the view does not run."""
    shop = make()
    shop.execute(sa.text("DROP TABLE idempotency_keys"))
    answer = shop.charge(new_key())
    assert (503, UNAVAILABLE) == (answer.status_code, answer.json["type"])
    assert "Retry-After" in answer.headers
    assert [] == shop.runs
    (record,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert "'idempotency_keys' is missing" in record.getMessage()
    assert "flask db upgrade" in record.getMessage()
    with shop.app.app_context():
        shop.db.create_all()
    assert 201 == shop.charge(new_key()).status_code


@pytest.mark.scenario(59)
def test_the_table_goes_away_while_the_view_runs(light: Shop) -> None:
    """What fails at the recording for any reason leaves the client its answer, and is told."""
    go, entered = threading.Event(), threading.Event()

    @light.app.post("/late")
    @light.idempotency.required(lock_timeout=1)
    def late() -> tuple[str, int]:
        entered.set()
        assert go.wait(10)
        return "made", 201

    headers = {"X-Tenant": "acme", "Idempotency-Key": new_key()}
    with events(light.app) as seen:
        asked = background(lambda: light.client.post("/late", headers=headers))
        assert entered.wait(10)
        light.execute(sa.text("ALTER TABLE idempotency_keys RENAME TO moved_away"))
        go.set()
        assert (201, b"made") == ((answer := asked.result(10)).status_code, answer.data)
        assert ["record_failed"] == names(seen)
        assert "is missing" in seen[0][1]["exception"]
        light.execute(sa.text("ALTER TABLE moved_away RENAME TO idempotency_keys"))
        until(lambda: "executed" in names(seen))
    assert "true" == light.client.post("/late", headers=headers).headers["Idempotent-Replay"]


@pytest.mark.scenario(1, 7)
def test_the_server_is_restarted_between_two_requests(
    distant: Shop, postgres_server: Postgres, postgres_database: str
) -> None:
    """Connections that the server has closed since the last request cost nobody an answer."""
    key = new_key()
    assert (201, False) == outcome(distant.charge(key))
    with distant.app.app_context():
        distant.db.engine.dispose()
    postgres_server.disconnect(postgres_database)
    assert (201, True) == outcome(distant.charge(key))
    postgres_server.disconnect(postgres_database)
    with distant.app.app_context():
        distant.db.engine.dispose()
    assert (201, False) == outcome(distant.charge(new_key()))
