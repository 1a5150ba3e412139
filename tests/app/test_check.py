"""``flask idempotency check``: what it finds, what it only notes, and its exit status."""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, checking
from flask_idempotency.state import get_state
from flask_idempotency.store.base import Store
from tests.support.apps import Shop, command, guard, make_shop, new_key, send
from tests.support.mariadb import MariaDB, earlier_table

Make = Callable[..., Shop]


def run(app: Flask, *words: str) -> tuple[int, str]:
    """The command's exit status and output."""
    return command(app, "check", *words)


def codes(app: Flask, **options: Any) -> tuple[list[str], list[str]]:
    """What the check finds, and what it notes."""
    options.setdefault("environ", {})
    found = checking.check(get_state(app), **options)
    return [one.code for one in found.findings], [one.code for one in found.notes]


@pytest.fixture(params=["sqlite", "postgresql-psycopg2", "postgresql-psycopg3", "mariadb"])
def shop(request: pytest.FixtureRequest) -> Shop:
    """A shop on each database."""
    if request.param == "mariadb":
        return make_shop(request.getfixturevalue("mariadb_url"))
    fixtures = {"sqlite": "sqlite_url", "postgresql-psycopg2": "postgres_url", "postgresql-psycopg3": "psycopg_url"}
    return make_shop(request.getfixturevalue(fixtures[request.param]))


def test_nothing_is_wrong(shop: Shop) -> None:
    """On a table as the migration makes it, with keys in it, the command says so and exits with 0."""
    shop.charge(new_key())
    assert (0, "Nothing is wrong.\n") == run(shop.app)
    status, output = run(shop.app, "--json")
    assert (0, {"findings": [], "notes": []}) == (status, json.loads(output))


def test_indexes_that_are_gone(shop: Shop) -> None:
    """Each missing index is a finding that says what it does to the app."""
    for index in sorted(shop.table.indexes, key=lambda one: str(one.name)):
        shop.execute(sa.schema.DropIndex(index))
    assert (["unique-index-missing", "expiry-index-missing"], []) == codes(shop.app)
    status, output = run(shop.app)
    assert (1, "2 findings.") == (status, output.splitlines()[-1])
    assert output.startswith("Wrong: There is no unique index on scope and key")


def test_a_table_that_is_missing(shop: Shop) -> None:
    """Without the table, or a column that every release needs, the command says to migrate, and nothing else."""
    shop.execute(sa.text("ALTER TABLE idempotency_keys DROP COLUMN secret_id"))
    assert (["columns-missing"], []) == codes(shop.app)
    shop.execute(sa.schema.DropTable(shop.table))
    assert (["table-missing"], []) == codes(shop.app)
    status, output = run(shop.app)
    assert (1, True) == (status, "flask db upgrade" in output)


def test_what_waits(shop: Shop) -> None:
    """Held keys, leases that are over under reject, and keys that nobody prunes are noted, and fail nothing."""
    guard(shop, lambda: ("held", 500), "/held", on_error="hold")
    send(shop, new_key(), "/held")
    shop.charge(new_key())
    shop.charge(new_key())
    stale = "UPDATE idempotency_keys SET status = 'in_progress', stale_policy = 'reject' WHERE id = 2"
    shop.execute(sa.text(stale))
    shop.shift(86_400 * 7.5)
    assert ([], ["held", "stale"]) == codes(shop.app)
    shop.shift(86_400)
    assert ([], ["held", "stale", "unpruned"]) == codes(shop.app)
    status, output = run(shop.app)
    assert (0, True) == (status, "Note: 1 key is held: its outcome is unknown" in output)


def test_clocks_apart(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose clock is off is told so; by more than a third of the lease it is a finding."""
    real = time.time
    for seconds, expected in ((0.5, ([], [])), (-3, ([], ["clocks-apart"])), (20, (["clocks-apart"], []))):
        monkeypatch.setattr("flask_idempotency.store.checking.time.time", lambda seconds=seconds: real() + seconds)
        assert expected == codes(shop.app)


def test_the_older_shape(make_light: Make) -> None:
    """A table of release 0.4 is noted; where counts are asked for, it is a finding."""
    for counted, expected in ((False, ([], ["older-shape"])), (True, (["older-shape"], []))):
        shop = make_light(count_replays=counted)
        if not counted:
            shop.execute(sa.text("ALTER TABLE idempotency_keys DROP COLUMN late_replays"))
        assert expected == codes(shop.app)


def test_inexact_columns(mariadb_server: MariaDB, mariadb_database: str) -> None:
    """On MariaDB a table of release 0.2 compares inexactly, and keeps no microseconds."""
    mariadb_server.execute(earlier_table("utf8mb4_general_ci"), database=mariadb_database)
    shop = make_shop(mariadb_server.url(mariadb_database))
    assert (["inexact", "coarse-times"], []) == codes(shop.app)


TIMEOUTS = [
    ("", None),
    ("--bind=:8000 --timeout 120", 120),
    ("--timeout=120 -t 60", 60),
    ("-t90", 90),
    ("--timeout", None),
    ("--timeout=x", None),
    ("--graceful-timeout 90", None),
    ("'", None),
]


@pytest.mark.parametrize(("arguments", "expected"), TIMEOUTS)
def test_gunicorns_arguments(arguments: str, expected: float | None) -> None:
    """The worker's time-out is read as gunicorn reads it; what can't be read is not guessed."""
    assert expected == checking.gunicorn_timeout(arguments)


def test_the_lease_and_the_workers_timeout(light: Shop) -> None:
    """A worker that may be blocked for longer than the lease is noted, by the option or by gunicorn's arguments."""
    wrong: tuple[list[str], list[str]] = ([], ["lease-below-timeout"])
    assert ([], []) == codes(light.app, worker_timeout=30)
    assert wrong == codes(light.app, worker_timeout=31)
    assert wrong == codes(light.app, worker_timeout=0)
    assert wrong == codes(light.app, environ={"GUNICORN_CMD_ARGS": "--timeout 120"})
    assert ([], []) == codes(light.app, worker_timeout=10, environ={"GUNICORN_CMD_ARGS": "--timeout 120"})
    status, output = run(light.app, "--worker-timeout", "31")
    assert (0, True) == (status, "Note: The lease (IDEMPOTENCY_LOCK_TIMEOUT) is 30 s" in output)
    assert 2 == run(light.app, "--worker-timeout", "-1")[0]


def test_threads_that_do_not_run(light: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within uWSGI without threads the function finds that claims are not renewed."""
    uwsgi = types.ModuleType("uwsgi")
    uwsgi.opt, uwsgi.version_info = {}, (2, 0, 20)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "uwsgi", uwsgi)
    assert (["threads"], []) == codes(light.app)


def test_what_the_first_request_would_raise(light: Shop) -> None:
    """A guard that guards nothing, and a database that was never initialised, are findings before any request."""
    light.app.add_url_rule("/x", "x", light.idempotency.required(lambda: "x"), methods=["GET"])
    assert (["app"], []) == codes(light.app)
    assert "guards nothing" in run(light.app)[1]
    app = Flask("other")
    Idempotency(app, SQLAlchemy())
    assert (["app"], []) == codes(app)


def test_an_app_that_is_switched_off(make_light: Make) -> None:
    """With ENABLED off nothing is guarded, which is a finding."""
    assert (["not-enabled"], []) == codes(make_light(enabled=False).app)


def test_a_store_of_ones_own() -> None:
    """A store without a check is noted; the rest is looked at."""
    app = Flask("other")
    members = {name: lambda self, *rest: None for name in dir(Store) if not name.startswith("_")}
    app.config["IDEMPOTENCY_STORE"] = type("Half", (), members)()
    Idempotency(app)
    assert ([], ["store-unchecked"]) == codes(app)


def test_a_database_that_is_down() -> None:
    """Where the database does not answer the command fails, and says what the driver says."""
    app = Flask("other")
    app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg2://nobody@127.0.0.1:1/nothing"
    Idempotency(app, SQLAlchemy(app))
    status, output = run(app)
    assert (1, True) == (status, output.startswith("Error: The database that holds the idempotency keys"))
