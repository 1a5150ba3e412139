"""A process that ends at any statement, and what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa
from psycopg import sql

from tests.acceptance.killed import ask, make_killable
from tests.acceptance.shop import Served, replayed
from tests.support.apps import Shop, close, events, new_key, until
from tests.support.barrier import background, together
from tests.support.postgres import PgBouncer, Postgres
from tests.support.server import ROOT

pytestmark = [pytest.mark.one_driver, pytest.mark.thorough]

#: Longer than all processes and retries take, however slow the machine.
LEASE = 600

#: The events of a key's retries, and the statuses of their answers.
Outcome = tuple[list[str], list[int]]

FRESH: Outcome = (["executed"], [201])
TAKEOVER: Outcome = (["conflicted", "taken_over", "executed"], [409, 201])
REPLAY: Outcome = (["replayed"], [201])


@dataclass
class Killed:
    """What processes have left that ended at each point of a request under ``path``."""

    shop: Shop
    path: str
    key: str
    ledger: Path
    points: list[str]

    @property
    def numbers(self) -> range:
        """The points' numbers."""
        return range(1, len(self.points) + 1)

    def ask(self, number: int) -> int:
        """Try a point's key again: the status of the answer."""
        return ask(self.shop, self.path, self.key, number).status_code

    def charges(self) -> list[int]:
        """How many charges of each point are committed."""
        amount = self.shop.Charge.__table__.c.amount
        found = Counter(one for (one,) in self.shop.execute(sa.select(amount)))
        return [found[number] for number in self.numbers]

    def kept(self) -> list[str | None]:
        """The status of each point's row."""
        rows = {row["key"]: row["status"] for row in self.shop.rows()}
        return [rows.get(f"{self.key}-{number}") for number in self.numbers]

    def told(self, what: str) -> list[list[str]]:
        """For each point, what another system was told: the derived keys."""
        found: dict[str, list[str]] = {}
        for line in self.ledger.read_text().splitlines():
            told, key, derived = line.split()
            if told == what:
                found.setdefault(key, []).append(derived)
        return [found.get(f"{self.key}-{number}", []) for number in self.numbers]

    def index(self, *texts: str, start: int = 0) -> int:
        """The index of the first point, from ``start`` on, that has all these texts."""
        found = (n for n, point in enumerate(self.points) if n >= start and all(text in point for text in texts))
        return next(found)

    def retried(self) -> list[Outcome]:
        """Try each key again as a client does, past the lease if need be: the events, and the answers' statuses."""
        outcomes: dict[str, Outcome] = {f"{self.key}-{number}": ([], []) for number in self.numbers}
        with events(self.shop.app) as seen:
            for number, (_, statuses) in zip(self.numbers, outcomes.values(), strict=True):
                statuses.append(self.ask(number))
            self.shop.shift(LEASE + 1)
            for number, (_, statuses) in zip(self.numbers, outcomes.values(), strict=True):
                if statuses == [409]:
                    statuses.append(self.ask(number))
        for name, fields in seen:
            outcomes[fields["key"]][0].append(name)
        return list(outcomes.values())

    def assert_each(self, expected: Iterable[Any], found: Iterable[Any]) -> None:
        """Compare what was expected of each point, and name the points that differ."""
        compared = [*zip(self.points, expected, found, strict=True)]
        assert [] == [one for one in compared if one[1] != one[2]]


Kill = Callable[..., Killed]


@pytest.fixture
def kill(tmp_path: Path) -> Iterator[Kill]:
    """A function that lets processes end at each point of a request; takes a shop's options for the retries, too."""
    shops: list[Shop] = []

    def killed(url: str, path: str, status: int = 201, over_stale: bool = False, **config: Any) -> Killed:
        ledger, key, config = tmp_path / "ledger", new_key(), {"lock_timeout": LEASE, **config}
        command = [sys.executable, "-W", "ignore", "-m", "tests.acceptance.killed", url, str(ledger), path, key]
        command += [str(status), str(over_stale), json.dumps(config)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
        assert 0 == done.returncode, done.stderr
        shops.append(make_killable(url, ledger, **config))
        return Killed(shops[-1], path, key, ledger, json.loads(done.stdout))

    yield killed
    for shop in shops:
        close(shop.app)


@pytest.mark.scenario(3, 13, 66)
@pytest.mark.parametrize("engine", ["sqlite_url", "postgres_url", "mariadb_url"])
def test_killed_at_every_statement(engine: str, kill: Kill, request: pytest.FixtureRequest) -> None:
    """Until the claim is stored the retry just runs, from the recording on it replays, in between it takes over."""
    killed = kill(request.getfixturevalue(engine), "/charges")
    claim = killed.index("after", "INSERT INTO idempotency_keys")
    committed = killed.index("after COMMIT", start=killed.index("INSERT INTO charge"))
    record = killed.index("after", "UPDATE idempotency_keys SET status")
    length = len(killed.points)
    assert claim < committed < record < length
    expected = [FRESH] * claim + [TAKEOVER] * (record - claim) + [REPLAY] * (length - record)
    killed.assert_each(expected, killed.retried())
    killed.assert_each([1 + (committed <= n < record) for n in range(length)], killed.charges())


@pytest.mark.scenario(3, 41)
def test_killed_at_every_statement_of_a_release(sqlite_url: str, kill: Kill) -> None:
    """An attempt that is to be released leaves a claim until it is released, and nothing from then on."""
    killed = kill(sqlite_url, "/charges", 503, on_error="release")
    claim = killed.index("after", "INSERT INTO idempotency_keys")
    release = killed.index("after", "DELETE FROM idempotency_keys")
    length = len(killed.points)
    expected = [FRESH] * claim + [TAKEOVER] * (release - claim) + [FRESH] * (length - release)
    killed.assert_each(expected, killed.retried())


def test_killed_at_every_statement_of_a_hold(sqlite_url: str, kill: Kill) -> None:
    """An attempt that is to be held leaves a claim until it is, and from then on 409 until somebody settles it."""
    killed = kill(sqlite_url, "/charges", 503)
    claim = killed.index("after", "INSERT INTO idempotency_keys")
    hold = killed.index("after", "UPDATE idempotency_keys SET status")
    length = len(killed.points)
    held: Outcome = (["conflicted", "conflicted"], [409, 409])
    killed.assert_each([FRESH] * claim + [TAKEOVER] * (hold - claim) + [held] * (length - hold), killed.retried())
    assert ["completed"] * hold + ["held"] * (length - hold) == killed.kept()


@pytest.mark.scenario(13)
def test_killed_at_every_statement_of_steps(database_url: str, kill: Kill) -> None:
    """A retry goes on where a killed attempt stopped: one charge for one derived key, each run beyond logged."""
    killed = kill(database_url, "/steps")
    outcomes, index = killed.retried(), killed.index
    claim = index("after", "INSERT INTO idempotency_keys")
    record = index("after", "SET status")
    noted = index("after", "UPDATE", "secret_id")
    charged = index("before", "SET steps")
    mailed = index("before", "SET steps", start=charged + 2)
    committed = index("after COMMIT", start=index("INSERT INTO charge"))
    assert claim < noted < charged < mailed < committed < record < len(killed.points)
    length = len(killed.points)
    killed.assert_each([FRESH] * claim + [TAKEOVER] * (record - claim) + [REPLAY] * (length - record), outcomes)
    for what, stored in (("charge", charged), ("mail", mailed)):
        # Done twice only where the process ended between the doing and the storing.
        killed.assert_each([1 + (n == stored) for n in range(length)], map(len, killed.told(what)))
    killed.assert_each([1] * length, (len({*keys}) for keys in killed.told("charge")))
    assert length == len({key for keys in killed.told("charge") for key in keys})
    killed.assert_each([1 + (committed <= n < record) for n in range(length)], killed.charges())
    assert {"completed"} == {*killed.kept()}


@pytest.mark.scenario(13)
def test_killed_steps_that_are_not_run_again(sqlite_url: str, kill: Kill) -> None:
    """With STALE=reject nothing runs again by itself: 409 until it is released by hand, and then it goes on."""
    killed = kill(sqlite_url, "/steps", stale="reject")
    outcomes = killed.retried()
    claim = killed.index("after", "INSERT INTO idempotency_keys")
    record = killed.index("after", "SET status")
    length = len(killed.points)
    rejected: Outcome = (["conflicted", "conflicted"], [409, 409])
    killed.assert_each([FRESH] * claim + [rejected] * (record - claim) + [REPLAY] * (length - record), outcomes)
    charged = killed.index("before", "SET steps")
    killed.assert_each([int(not claim <= n < charged) for n in range(length)], map(len, killed.told("charge")))
    with killed.shop.app.app_context():
        for number in killed.numbers[claim:record]:
            killed.shop.idempotency.release("acme", f"{killed.key}-{number}")
            assert 201 == killed.ask(number)
    killed.assert_each([1 + (n == charged) for n in range(length)], map(len, killed.told("charge")))
    assert {"completed"} == {*killed.kept()}


@pytest.mark.scenario(41)
def test_killed_at_every_statement_of_a_release_with_steps(sqlite_url: str, kill: Kill) -> None:
    """A release that keeps its steps leaves a claim until it is done, and from then on a key to run at once."""
    killed = kill(sqlite_url, "/steps", 503, on_error="release")
    outcomes = killed.retried()
    claim = killed.index("after", "INSERT INTO idempotency_keys")
    release = killed.index("after", "UPDATE", "SET status")
    assert killed.index("after", "DELETE FROM idempotency_keys") < release
    length = len(killed.points)
    killed.assert_each([FRESH] * claim + [TAKEOVER] * (release - claim) + [FRESH] * (length - release), outcomes)
    charged = killed.index("before", "SET steps")
    killed.assert_each([1 + (n == charged) for n in range(length)], map(len, killed.told("charge")))


#: What must have been among the points, by engine: the frame of the transaction, and the view's savepoints within it.
FRAMES = {
    "sqlite": ["BEGIN IMMEDIATE", "SAVEPOINT", "RELEASE SAVEPOINT", "COMMIT"],
    "postgresql": ["BEGIN;", "pg_try_advisory_xact_lock", "RELEASE SAVEPOINT", "COMMIT"],
}
#: With a level of the engine's own, the driver begins the transaction, and no point tells of that.
FRAMES_OF_LEVELS = ["pg_try_advisory_xact_lock", "SAVEPOINT", "RELEASE SAVEPOINT", "COMMIT"]
EARLY = "INSERT INTO idempotency_keys"


@pytest.mark.scenario(13)
@pytest.mark.parametrize(
    ("engine", "level"),
    [
        ("sqlite_url", None),
        ("postgres_url", None),
        ("psycopg_url", None),
        ("postgres_url", "SERIALIZABLE"),
        ("psycopg_url", "REPEATABLE READ"),
    ],
)
def test_killed_at_every_statement_of_an_atomic_view(
    engine: str, level: str | None, kill: Kill, request: pytest.FixtureRequest
) -> None:
    """Until the commit there is nothing, of view and record alike, and from it on everything: no lease to wait out."""
    url = request.getfixturevalue(engine)
    killed = kill(url, "/atomic", engine_options={"isolation_level": level} if level else {})
    for text in FRAMES_OF_LEVELS if level else FRAMES[url.split(":")[0].split("+")[0]]:
        assert {"before", "after"} <= {point.split()[0] for point in killed.points if text in point}, text
    # Where snapshots are the transaction's, the row is inserted before the view, and completed after it.
    assert (killed.index("before", EARLY) < killed.index("INSERT INTO charge")) == bool(level)
    record = max(n for n, point in enumerate(killed.points) if EARLY in point or "SET status" in point)
    missing = killed.index("after", "COMMIT", start=record)
    length = len(killed.points)
    there = length - missing
    assert 0 < killed.index("INSERT INTO charge") < record <= missing < length
    killed.assert_each([None] * missing + ["completed"] * there, killed.kept())
    killed.assert_each([0] * missing + [2] * there, killed.charges())
    killed.assert_each([0] * length, map(len, killed.told("committed")))
    killed.assert_each([FRESH] * missing + [REPLAY] * there, killed.retried())
    killed.assert_each([2] * length, killed.charges())
    # What was to be done after the commit is lost with the process, and never done twice.
    killed.assert_each([1] * missing + [0] * there, map(len, killed.told("committed")))
    assert {"completed"} == {*killed.kept()}


@pytest.mark.scenario(13)
def test_killed_while_an_atomic_view_takes_over(kill: Kill, postgres_url: str) -> None:
    """Until the commit the dead holder's claim is there as it was, for the next retry to take over at once."""
    killed = kill(postgres_url, "/atomic", over_stale=True)
    taken = killed.index("after", "UPDATE idempotency_keys SET", "fencing_token")
    missing = killed.index("after COMMIT", start=killed.index("after", "SET status", start=taken + 1))
    length = len(killed.points)
    there = length - missing
    assert taken < killed.index("INSERT INTO charge") < missing < length
    killed.assert_each(["in_progress"] * missing + ["completed"] * there, killed.kept())
    killed.assert_each([0] * missing + [2] * there, killed.charges())
    takeover: Outcome = (["taken_over", "executed"], [201])
    killed.assert_each([takeover] * missing + [REPLAY] * there, killed.retried())
    killed.assert_each([2] * length, killed.charges())
    assert {("completed", 2)} == {(row["status"], row["attempts"]) for row in killed.shop.rows() if row["attempts"] > 1}


@pytest.mark.parametrize(("engine", "on_error"), [("sqlite_url", "auto"), ("psycopg_url", "record")])
def test_killed_while_an_atomic_view_is_undone(
    engine: str, on_error: str, kill: Kill, request: pytest.FixtureRequest
) -> None:
    """Of an atomic view that answers 503 there is never any work, and no record unless the 503 is to be recorded."""
    killed = kill(request.getfixturevalue(engine), "/atomic", 503, on_error=on_error)
    length = len(killed.points)
    assert any("INSERT INTO charge" in point for point in killed.points)
    killed.assert_each([0] * length, killed.charges())
    recorded = length
    if on_error == "record":
        recorded = killed.index("after", "COMMIT", start=killed.index(EARLY))
        assert recorded < length
    killed.assert_each([None] * recorded + ["completed"] * (length - recorded), killed.kept())
    replay: Outcome = (["replayed"], [503])
    killed.assert_each([FRESH] * recorded + [replay] * (length - recorded), killed.retried())
    killed.assert_each([2] * recorded + [0] * (length - recorded), killed.charges())


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
