"""A process that ends at any statement, and what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import requests
from psycopg import sql

from tests.acceptance.shop import Served, replayed
from tests.support.apps import Shop, close, events, make_shop, new_key, until
from tests.support.barrier import background, together
from tests.support.postgres import PgBouncer, Postgres
from tests.support.server import ROOT

#: Forks one process for each statement of one request, which ends with that statement: before it is sent, or after its
#: reply came. Prints for each where it ended.
SCRIPT = """
    import json, os, sys
    import sqlalchemy as sa
    from tests.support.apps import make_shop

    url, status, key = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    shop = make_shop(url)

    @shop.app.after_request
    def decide(response):
        response.status_code = status
        return response

    with shop.app.app_context():
        shop.db.engine.dispose()

    def serve(last, writing):
        seen = 0
        def point(what):
            nonlocal seen
            seen += 1
            if seen == last:
                os.write(writing, what.encode())
                os._exit(9)
        def before(conn, cursor, statement, *rest):
            point("before " + statement)
        def after(conn, cursor, statement, *rest):
            point("after " + statement)
        sa.event.listen(sa.Engine, "before_cursor_execute", before)
        sa.event.listen(sa.Engine, "after_cursor_execute", after)
        sa.event.listen(sa.Engine, "commit", lambda conn: point("before COMMIT"))
        answer = shop.charge(f"{key}-{last}")
        assert answer.status_code == status, answer.data
        os._exit(0)

    points = []
    while True:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            serve(len(points) + 1, writing)
        os.close(writing)
        what = os.read(reading, 10_000).decode()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            break
        assert code == 9, code
        points.append(what)
    print(json.dumps(points))
"""


def killed_everywhere(url: str, status: int, key: str) -> list[str]:
    """Let a process end at every statement of a request, each under a key of its own, numbered from 1."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT), url, str(status), key],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    points: list[str] = json.loads(done.stdout)
    return points


def retried(shop: Shop, keys: list[str]) -> list[Outcome]:
    """Try each key again as a client does, past the lease if need be: the events, and the statuses of the answers."""
    outcomes: dict[str, Outcome] = {key: ([], []) for key in keys}
    with events(shop.app) as seen:
        for key, (_, statuses) in outcomes.items():
            statuses.append(shop.charge(key).status_code)
        shop.shift(31)
        for key, (_, statuses) in outcomes.items():
            if statuses == [409]:
                statuses.append(shop.charge(key).status_code)
    for name, fields in seen:
        outcomes[fields["key"]][0].append(name)
    return list(outcomes.values())


Outcome = tuple[list[str], list[int]]

FRESH: Outcome = (["executed"], [201])
TAKEOVER: Outcome = (["conflicted", "taken_over", "executed"], [409, 201])
REPLAY: Outcome = (["replayed"], [201])


def first(points: list[str], *texts: str) -> int:
    """The index of the first point that has all these texts."""
    return next(number for number, point in enumerate(points) if all(text in point for text in texts))


@pytest.mark.scenario(3, 13, 66)
@pytest.mark.parametrize("engine", ["sqlite_url", "postgres_url"])
def test_killed_at_every_statement(engine: str, request: pytest.FixtureRequest) -> None:
    """Until the claim is stored the retry just runs, from the recording on it replays, in between it takes over."""
    database_url, key = request.getfixturevalue(engine), new_key()
    points = killed_everywhere(database_url, 201, key)
    shop = make_shop(database_url)
    charges = shop.charges()
    outcomes = retried(shop, [f"{key}-{number}" for number in range(1, len(points) + 1)])
    claim = first(points, "after", "INSERT INTO idempotency_keys")
    record = first(points, "after", "UPDATE idempotency_keys SET status")
    expected = [FRESH] * claim + [TAKEOVER] * (record - claim) + [REPLAY] * (len(points) - record)
    assert [*zip(points, expected, strict=True)] == [*zip(points, outcomes, strict=True)]
    assert record == shop.charges() - charges
    assert claim < first(points, "after", "INSERT INTO charge") < record < len(points)
    close(shop.app)


@pytest.mark.scenario(3, 41)
def test_killed_at_every_statement_of_a_release(sqlite_url: str) -> None:
    """An attempt that is to be released leaves a claim until it is released, and nothing from then on."""
    key = new_key()
    points = killed_everywhere(sqlite_url, 503, key)
    shop = make_shop(sqlite_url)
    outcomes = retried(shop, [f"{key}-{number}" for number in range(1, len(points) + 1)])
    claim = first(points, "after", "INSERT INTO idempotency_keys")
    release = first(points, "after", "DELETE FROM idempotency_keys")
    expected = [FRESH] * claim + [TAKEOVER] * (release - claim) + [FRESH] * (len(points) - release)
    assert [*zip(points, expected, strict=True)] == [*zip(points, outcomes, strict=True)]
    close(shop.app)


@pytest.mark.scenario(23)
def test_a_client_of_a_transaction_pooler_is_killed(
    pgbouncer: PgBouncer,
    postgres_server: Postgres,
    postgres_database: str,
    driver: str,
    serve: Callable[..., Served],
) -> None:
    """Behind PgBouncer with two server connections, a killed process leaves no lock behind, and every key usable."""
    served = serve(pgbouncer.url(postgres_database, driver), lock_timeout=2)
    server = served.start(worker_class="gthread", workers=2, threads=8)
    keys = [new_key() for _ in range(50)]
    answers: dict[str, Any] = {}

    def ask(number: int) -> None:
        for key in keys[1 + number :: 8]:
            try:
                answers[key] = served.ask(key).status_code
            except requests.RequestException:  # before the answer, or in the middle of it
                answers[key] = None

    with served.held(keys[0]):
        victim = background(served.ask, keys[0])
        pid = served.running(keys[0])
        rest = background(together, 8, ask)
        until(lambda: len(answers) >= 10, 20)
        server.kill(pid)
        assert isinstance(victim.exception(20), requests.RequestException)
    rest.result(25)
    assert {201, None, 409} >= set(answers.values())

    def usable(key: str) -> bool:
        answer = served.ask(key)
        assert answer.status_code in (201, 409), answer.text
        return answer.status_code == 201

    for key in keys:
        until(lambda key=key: usable(key), 10)
    assert all(replayed(answer) for answer in together(8, lambda n: served.ask(keys[n])))
    assert {("completed", 50)} == {(row["status"], len(served.shop.rows())) for row in served.shop.rows()}
    attempts = {row["key"]: row["attempts"] for row in served.shop.rows()}
    assert all(served.logged("takeover", key) == attempts[key] - 1 >= len(served.runs(key)) - 1 for key in keys)
    assert {"idle"} == {state for _, state, _ in postgres_server.sessions(postgres_database)}
    locks = sql.SQL(
        "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database "
        "WHERE datname = {} AND pid <> pg_backend_pid()"
    ).format(sql.Literal(postgres_database))
    assert [(0,)] == postgres_server.execute(locks.as_string(None))
