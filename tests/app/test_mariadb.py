"""The whole extension on a real MariaDB: what a client gets, and what the app's own statements leave."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Response, request

from flask_idempotency.errors import ConfigurationError
from tests.support.apps import Shop, assert_replayed, close, events, make_shop, new_key, until
from tests.support.barrier import together
from tests.support.charges import add
from tests.support.guarded import Broken, assert_free, assert_held, commit_and_fail, fine, guard, refusal, send
from tests.support.mariadb import MariaDB

#: As an app has them that survives a restart of its server.
OPTIONS = {"pool_pre_ping": True}


@pytest.fixture
def make(mariadb_url: str) -> Iterator[Callable[..., Shop]]:
    """A function that makes shops on MariaDB, in a database whose texts are compared inexactly."""
    shops: list[Shop] = []

    def build(url: str = mariadb_url, **config: Any) -> Shop:
        shops.append(make_shop(url, **{"engine_options": OPTIONS, **config}))
        return shops[-1]

    yield build
    for shop in shops:
        close(shop.app)


@pytest.fixture
def shop(make: Callable[..., Shop]) -> Shop:
    """A shop with the default configuration."""
    return make()


# What a client gets


def test_a_first_run_its_replay_and_a_mismatch(mysql_url: str, make: Callable[..., Shop]) -> None:
    """The view runs once, a retry gets its answer, another request under the key 422; by SQLAlchemy's other dialect."""
    shop, key = make(mysql_url), new_key()
    first = shop.charge(key)
    assert 201 == first.status_code
    assert_replayed(shop.charge(key), first)
    assert 422 == shop.charge(key, 900).status_code
    assert 201 == shop.charge(key, tenant="other").status_code
    assert (2, 2) == (len(shop.runs), shop.charges())


def test_what_is_sealed(make: Callable[..., Shop]) -> None:
    """Encrypted answers and results of steps come back, and can't be read in the table."""
    pytest.importorskip("cryptography")
    shop = make(encryption_keys=["MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="])
    statuses = [503, 201]

    def view() -> Any:
        return {"card": shop.idempotency.step("card", lambda: f"card of acme {len(statuses)}")}, statuses.pop(0)

    guard(shop, view)
    key = new_key()
    assert 503 == send(shop, key).status_code
    assert "card of acme" not in repr(shop.rows())
    first = send(shop, key)
    assert {"card": "card of acme 2"} == first.json
    assert_replayed(send(shop, key), first)
    assert "card of acme" not in repr(shop.rows())


@pytest.mark.scenario(1)
def test_twenty_at_once(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Of twenty identical requests one runs; the rest get 409, to be asked again, and the log is quiet."""
    key = new_key()
    with caplog.at_level(logging.WARNING):
        answers = together(20, lambda _: shop.charge(key))
    assert (1, 1) == (len(shop.runs), shop.charges())
    outcomes = [(answer.status_code, answer.headers.get("Retry-After")) for answer in answers]
    assert {(201, None), (409, "2")} >= set(outcomes)
    assert 1 == sum(answer.status_code == 201 and "Idempotent-Replay" not in answer.headers for answer in answers)
    assert [] == caplog.records


@pytest.mark.scenario(1, 16)
def test_many_keys_at_once(make: Callable[..., Shop], caplog: pytest.LogCaptureFixture) -> None:
    """Requests with keys of their own, neighbours in the index, all succeed, with an app's pool of two."""
    shop = make(engine_options={**OPTIONS, "pool_size": 2, "max_overflow": 0})
    with caplog.at_level(logging.WARNING):
        answers = together(10, lambda number: [shop.charge(f"key-{turn:03}-{number}").status_code for turn in range(5)])
    assert [[201] * 5] * 10 == answers
    assert (50, []) == (shop.charges(), caplog.records)


@pytest.mark.scenario(3)
def test_one_of_eight_takes_over(shop: Shop) -> None:
    """After a crash the key is taken over by one of eight retries once its lease is over."""

    def die() -> Any:
        raise SystemExit

    guard(shop, die, fine)
    key = new_key()
    with pytest.raises(SystemExit):
        send(shop, key)
    assert 409 == send(shop, key).status_code
    shop.shift(31)
    with events(shop.app) as seen:
        answers = together(8, lambda _: send(shop, key).status_code)
    assert {201, 409} >= set(answers)
    assert (2, 1) == (len(shop.runs), [name for name, _ in seen].count("taken_over"))


@pytest.mark.scenario(57, 58)
def test_keys_and_scopes_are_exact(shop: Shop) -> None:
    """Keys and scopes that differ in case, accents or trailing blanks alone are different ones."""
    guard(shop, fine, scope=lambda: request.args["who"])
    scopes = ["acme", "ACME", "ácme", "acme ", "a\0b", "租户", "😀", "😀 "]
    for key in ("key-0000000a", "KEY-0000000A", "key-0000000a."):
        for scope in scopes:
            answers = [shop.client.post("/do", query_string={"who": scope}, headers={"Idempotency-Key": key})]
            answers.append(shop.client.post("/do", query_string={"who": scope}, headers={"Idempotency-Key": key}))
            assert [None, "true"] == [one.headers.get("Idempotent-Replay") for one in answers], (key, scope)
    assert 3 * len(scopes) == len(shop.runs)


def test_a_large_body(make: Callable[..., Shop]) -> None:
    """A body of 5 MiB is replayed whole."""
    body = bytes(range(256)) * (5 * 4096)
    shop, key = make(max_body=8 * 2**20), new_key()
    guard(shop, lambda: Response(body, mimetype="application/octet-stream"))
    first = send(shop, key)
    assert body == first.data
    assert_replayed(send(shop, key), first)


@pytest.mark.scenario(39)
def test_a_body_that_the_server_does_not_take(make: Callable[..., Shop], caplog: pytest.LogCaptureFixture) -> None:
    """A body over the server's max_allowed_packet goes out, and the retry gets 409: the view never runs again."""
    shop, key = make(max_body=32 * 2**20), new_key()
    guard(shop, lambda: Response(bytes(9 * 2**20)))
    assert 200 == send(shop, key).status_code
    assert "max_allowed_packet is 16777216" in caplog.text
    assert "lower IDEMPOTENCY_MAX_BODY" in caplog.text
    assert (409, "record-unavailable", False) == refusal(send(shop, key))
    assert 1 == len(shop.runs)


@pytest.mark.scenario(38)
def test_a_stream(shop: Shop) -> None:
    """A streamed answer is recorded when it has ended."""
    guard(shop, lambda: Response(iter(["one, ", "two, ", "é"])))
    key = new_key()
    first = send(shop, key)
    assert "one, two, é" == first.text
    assert_replayed(send(shop, key), first)


@pytest.mark.scenario(79, 80)
def test_steps(shop: Shop) -> None:
    """Steps and derived keys outlive a failure: the retry goes on where the first attempt stopped."""
    derived, charged = [], []

    def work() -> Any:
        derived.append(shop.idempotency.derive_key("provider"))
        result = shop.idempotency.step("charge", lambda: charged.append(1) or {"id": "ch_é_😀"})
        if len(shop.runs) == 1:
            raise Broken
        return result, 201

    guard(shop, work, on_error="release")
    key = new_key()
    assert 500 == send(shop, key).status_code
    assert {"id": "ch_é_😀"} == send(shop, key).json
    assert (1, 1, 2) == (len(charged), len(set(derived)), len(shop.runs))


def test_a_held_key_is_settled(shop: Shop) -> None:
    """A key that was held waits for a person, whose answer is replayed from then on."""
    guard(shop, commit_and_fail(shop))
    key = new_key()
    assert 500 == send(shop, key).status_code
    assert_held(shop, key)
    with shop.app.app_context():
        shop.idempotency.settle("acme", key, ({"id": 1}, 201))
    answer = send(shop, key)
    assert (201, {"id": 1}, "true") == (answer.status_code, answer.json, answer.headers["Idempotent-Replay"])


@pytest.mark.scenario(62)
def test_two_pruners(shop: Shop) -> None:
    """Two pruners at once delete each expired key once between them, and what is kept stays."""
    shop.charge(new_key())
    old = {name: value for name, value in shop.rows()[0].items() if name != "id"} | {"scope": b"acme"}
    with shop.app.app_context(), shop.db.engine.begin() as connection:
        connection.execute(sa.insert(shop.table), [{**old, "key": b"old-%d" % number} for number in range(1200)])
    shop.shift(86401)
    assert 201 == shop.charge(new_key()).status_code

    def prune(number: int) -> int:
        with shop.app.app_context():
            return shop.idempotency.prune(batch_size=1000).deleted

    assert 1201 == sum(together(2, prune))
    assert 1 == len(shop.rows())


@pytest.mark.parametrize("where", ["config", "option"])
def test_atomic_mode_is_refused(make: Callable[..., Shop], where: str) -> None:
    """Atomic mode is an error that says where there is one, and no view runs."""
    shop = make(atomic=where == "config")
    guard(shop, fine, **({"atomic": True} if where == "option" else {}))
    shop.app.testing = True
    with pytest.raises(ConfigurationError, match="PostgreSQL and SQLite"):
        send(shop, new_key())
    assert [] == shop.runs


# When the database fails


@pytest.mark.scenario(59)
def test_the_server_is_gone_at_the_claim(shop: Shop, mariadb_server: MariaDB) -> None:
    """503 without a server, and the view does not run; once it is back all is well."""
    assert 201 == shop.charge(new_key()).status_code
    mariadb_server.shut_down()
    try:
        key = new_key()
        answer = shop.charge(key)
        assert (503, "store-unavailable", True) == refusal(answer)
    finally:
        mariadb_server.start()
    assert 201 == shop.charge(key).status_code
    assert 2 == len(shop.runs)


@pytest.mark.scenario(59)
def test_the_server_is_gone_at_the_recording(
    make: Callable[..., Shop], mariadb_server: MariaDB, caplog: pytest.LogCaptureFixture
) -> None:
    """The client still gets its answer, which is recorded once the server is back."""
    shop, key = make(lock_timeout=1.5), new_key()

    def work() -> Any:
        add(shop)
        shop.db.session.commit()
        mariadb_server.shut_down()
        return {"charged": True}, 201

    guard(shop, work)
    try:
        first = send(shop, key)
        assert 201 == first.status_code
        assert "idempotency.record_failed" in caplog.text
    finally:
        mariadb_server.start()
    until(lambda: [row["status"] for row in shop.rows()] == ["completed"])
    assert_replayed(send(shop, key), first)
    assert (1, 1) == (len(shop.runs), shop.charges())


@pytest.mark.scenario(11, 59)
def test_connections_are_killed_in_the_view(shop: Shop, mariadb_server: MariaDB, mariadb_database: str) -> None:
    """When all connections are killed while the view runs, its answer is recorded on a new one."""
    guard(shop, lambda: (shop.db.session.remove(), mariadb_server.disconnect(mariadb_database), fine())[-1])
    key = new_key()
    first = send(shop, key)
    assert 201 == first.status_code
    assert_replayed(send(shop, key), first)


# What the app's own statements leave (ON_ERROR=auto)


def statement(text: str) -> Callable[[Shop], Any]:
    """A view's doing: a statement in the session."""
    return lambda shop: shop.db.session.execute(sa.text(text))


WRITES: dict[str, Callable[[Shop], Any]] = {
    "orm": lambda shop: (add(shop), shop.db.session.flush()),
    "insert": statement("INSERT INTO `charge` (amount) VALUES (1)"),
    "upsert": statement("INSERT INTO charge (id, amount) VALUES (1, 1) ON DUPLICATE KEY UPDATE amount = 2"),
    "replace": statement("REPLACE INTO charge (id, amount) VALUES (1, 1)"),
    "update": statement("/* of the day */ UPDATE `charge` SET amount = 2"),
    "settings": statement("SET STATEMENT max_statement_time = 5 FOR INSERT INTO charge (amount) VALUES (1)"),
    "call": statement("SET @charge = book()"),
    "with": statement("INSERT INTO charge (amount) WITH one AS (SELECT 1 AS amount) SELECT amount FROM one"),
}
#: What commits by itself, and what was written before it.
COMMITS: dict[str, Callable[[Shop], Any]] = {
    "ddl": lambda shop: (add(shop), shop.db.session.flush(), statement("CREATE TABLE other (id INTEGER)")(shop)),
    "call": lambda shop: statement("CALL settle()")(shop),
    **{
        text: lambda shop, text=text: (add(shop), shop.db.session.flush(), statement(text)(shop))
        for text in (
            "START TRANSACTION",
            "SET autocommit = 1",
            "SET STATEMENT max_statement_time = 5 FOR CREATE TABLE other (id INTEGER)",
            "CHECK TABLE charge",
            "CREATE TEMPORARY SEQUENCE numbers",
            "SET PASSWORD = ''",
            "SET DEFAULT ROLE NONE",
        )
    },
    "block": lambda shop: statement(f"BEGIN NOT ATOMIC {PROCEDURE}; END")(shop),
    "executable comment": lambda shop: (
        statement("/*! INSERT INTO charge (amount) VALUES (1) */")(shop),
        shop.db.session.commit(),
    ),
}
COMPOUND = "IF 1 = 1 THEN INSERT INTO charge (amount) VALUES (1); ELSE SET @no = 1; ROLLBACK; END IF"
PROCEDURE = "INSERT INTO charge (amount) VALUES (1); COMMIT"
FUNCTION = (
    "CREATE FUNCTION book() RETURNS INT NOT DETERMINISTIC MODIFIES SQL DATA "
    "BEGIN INSERT INTO charge (amount) VALUES (1); RETURN 1; END"
)
READS: dict[str, Callable[[Shop], Any]] = {
    "select": statement("SELECT `id` AS `update` FROM `charge` FOR UPDATE"),
    "show": statement("SHOW TABLES"),
    "set": statement("SET NAMES utf8mb4"),
    "lock": statement("SELECT GET_LOCK('one', 0)"),
    "check": statement("CHECKSUM TABLE charge"),
    "handler": lambda shop: (statement("HANDLER charge OPEN")(shop), statement("HANDLER charge CLOSE")(shop)),
}


def fail_after(shop: Shop, do: Callable[[Shop], Any], end: str) -> str:
    """A key whose first request did something, ended its transaction so, and failed."""

    def work() -> Any:
        do(shop)
        getattr(shop.db.session, end)()
        raise Broken

    guard(shop, work, fine)
    key = new_key()
    assert 500 == send(shop, key).status_code
    return key


@pytest.mark.scenario(42)
@pytest.mark.parametrize("way", [*WRITES, "compound"])
def test_a_failure_after_a_commit(shop: Shop, way: str) -> None:
    """What was written in MySQL's own ways and committed holds the key."""
    shop.execute(sa.text(FUNCTION))
    key = fail_after(shop, {**WRITES, "compound": statement(COMPOUND)}[way], "commit")
    assert_held(shop, key)


@pytest.mark.scenario(14)
@pytest.mark.parametrize("way", [*WRITES, *READS])
def test_a_failure_after_a_rollback(shop: Shop, way: str) -> None:
    """What was rolled back, and what only reads, releases it."""
    shop.execute(sa.text(FUNCTION))
    key = fail_after(shop, {**WRITES, **READS}[way], "rollback")
    assert 0 == shop.charges()
    assert_free(shop, key)


@pytest.mark.scenario(42)
@pytest.mark.parametrize("way", COMMITS)
def test_a_failure_after_a_commit_of_the_servers_own(shop: Shop, way: str) -> None:
    """What the server has committed by itself is there after a rollback, so the key is held."""
    shop.execute(sa.text(f"CREATE PROCEDURE settle() BEGIN {PROCEDURE}; END"))
    key = fail_after(shop, COMMITS[way], "rollback")
    assert 1 == shop.charges()
    assert_held(shop, key)


@pytest.mark.scenario(42)
@pytest.mark.parametrize("how", ["option", "driver"])
def test_a_failure_in_autocommit(make: Callable[..., Shop], how: str) -> None:
    """What is committed at once is so after a rollback too, whoever has switched autocommit on."""
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}
    if how == "driver":
        options = {"connect_args": {"autocommit": True}}
    shop = make(engine_options=options)
    key = fail_after(shop, WRITES["insert"], "rollback")
    assert 1 == shop.charges()
    assert_held(shop, key)
