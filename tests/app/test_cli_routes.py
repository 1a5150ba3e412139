"""``flask idempotency routes`` as people and CI see it: its table, its findings and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

import flask_idempotency
from flask_idempotency.tabular import WIDTH, table
from tests.support.apps import Shop, command

GUARDED = "Nothing is forgotten: {} with POST or PATCH.\n"
ADVICE = (
    "A route is guarded by @idempotency.required or optional, or by protect(); unguarded on purpose with "
    "@idempotency.exempt, or --ignore.\n"
)


def run(app: Flask, *words: str) -> tuple[int, str]:
    """The command's exit status and output."""
    return command(app, "routes", *words)


def add(shop: Shop, path: str, endpoint: str, guard: Callable[[Any], Any] | None = None, method: str = "POST") -> None:
    """Add a view to the shop."""

    def view(**_: Any) -> str:
        return endpoint

    shop.app.add_url_rule(path, endpoint, view if guard is None else guard(view), methods=[method])


def test_the_table(make_light: Callable[..., Shop]) -> None:
    """Each route has a line with its methods, endpoint, state and what its options change; below stands the app's."""
    shop = make_light(retention=3600)
    add(shop, "/refunds", "refund", shop.idempotency.required(retention=86_400, methods=["POST", "PUT"]))
    add(shop, "/carts/<int:cart>", "cart", shop.idempotency.optional, "PATCH")
    add(shop, "/search", "search", shop.idempotency.exempt)
    add(shop, "/bare", "bare")
    assert (
        0,
        "route                    methods  endpoint       guard      options\n"
        "/bare                    POST     bare           unguarded\n"
        "/carts/<int:cart>        PATCH    cart           optional\n"
        "/charges                 POST     create_charge  required\n"
        "/refunds                 POST     refund         required   methods=POST,PUT retention=86400\n"
        "/search                  POST     search         exempt\n"
        "/static/<path:filename>  GET      static         safe\n"
        "Set for the app: retention=3600\n",
    ) == run(shop.app)


def test_the_table_has_problems_and_warnings_too(light: Shop) -> None:
    """Without --check the problems are shown below the table, and the exit status is 0; with and without, each once."""
    view = light.idempotency.required(lambda: "done")
    light.app.add_url_rule("/x", "x", view, methods=["GET"])
    light.app.add_url_rule("/y", "x", view, methods=["GET"])
    light.idempotency.protect(light.app, paths="^/none")
    status, output = run(light.app)
    assert 0 == status
    assert 1 == output.count("The guard on the view of 'x' guards nothing")
    assert 1 == output.count("Warning: protect(paths='^/none') on the app covers no route.\n")
    assert 1 == run(light.app, "--check")[1].count("The guard on the view of 'x' guards nothing")


def test_wide_tables() -> None:
    """Nothing is cut: a wide cell pushes its own line, and what does not fit there goes below it, within the width."""
    wide, options = "/" + 150 * "p", " ".join(f"option_{number}=value" for number in range(12))
    lines = table(
        ("route", "guard", "options"), [("/a", "required", "x=1"), ("/b", "safe", options), (wide, "safe", "")]
    )
    assert ["route  guard     options", "/a     required  x=1", "/b     safe"] == lines[:3]
    assert [f"{wide}  safe"] == lines[-1:]
    assert options.split() == " ".join(lines[3:-1]).split()
    assert 2 == len(lines[3:-1])
    assert all(line.startswith("    option") and len(line) <= WIDTH for line in lines[3:-1])


def test_nothing_is_forgotten(light: Shop) -> None:
    """The check passes, and says of how many routes."""
    assert (0, GUARDED.format("1 route")) == run(light.app, "--check")
    add(light, "/x", "x", light.idempotency.exempt)
    add(light, "/y", "y", light.idempotency.optional)
    add(light, "/z", "z", None, "PUT")
    assert (0, GUARDED.format("3 routes")) == run(light.app, "--check")


def test_something_is_forgotten(light: Shop) -> None:
    """The check fails with 1, names each method that is forgotten, and says what can be done."""
    add(light, "/x", "x")
    assert (1, f"POST /x (x) is not guarded.\n1 finding. {ADVICE}") == run(light.app, "--check")
    add(light, "/y", "y", None, "PATCH")
    expected = f"POST /x (x) is not guarded.\nPATCH /y (y) is not guarded.\n2 findings. {ADVICE}"
    assert (1, expected) == run(light.app, "--check")


IGNORED = [
    (["x.*"], ["PATCH /y (y)"]),
    (["POST x.*"], ["PATCH /y (y)"]),
    (["PATCH x.*"], ["POST /x (x.create)", "PATCH /y (y)"]),
    (["x.*", "y"], []),
    (["*"], []),
    (["X.*"], ["POST /x (x.create)", "PATCH /y (y)"]),
    (["create"], ["POST /x (x.create)", "PATCH /y (y)"]),
]


@pytest.mark.parametrize(("patterns", "left"), IGNORED)
def test_ignored_endpoints(light: Shop, patterns: list[str], left: list[str]) -> None:
    """Endpoints may be ignored by patterns, for one method too; a pattern that matches nothing is said."""
    add(light, "/x", "x.create")
    add(light, "/y", "y", None, "PATCH")
    words = [word for one in patterns for word in ("--ignore", one)]
    status, output = run(light.app, "--check", *words)
    assert (1 if left else 0) == status
    assert left == [line.partition(" is not")[0] for line in output.splitlines() if "is not guarded" in line]
    assert (patterns[0] in {"PATCH x.*", "X.*", "create"}) == ("matches no route" in output)


def test_problems_are_not_ignored(light: Shop) -> None:
    """A guard that guards nothing fails the check, whatever is ignored: the app would serve no request."""
    add(light, "/x", "x", light.idempotency.required, "GET")
    status, output = run(light.app, "--check", "--ignore", "*")
    assert 1 == status
    assert "The guard on the view of 'x' guards nothing" in output


def test_an_app_that_is_switched_off(make_light: Callable[..., Shop]) -> None:
    """With ENABLED off nothing is guarded, whatever the decorators say: that is said, and the check fails."""
    shop = make_light(enabled=False)
    said = "IDEMPOTENCY_ENABLED is off: nothing is guarded."
    status, output = run(shop.app)
    assert (0, said) == (status, output.splitlines()[-1])
    status, output = run(shop.app, "--check")
    assert (1, said) == (status, output.splitlines()[0])
    assert [False, [said]] == [json.loads(run(shop.app, "--json")[1])[name] for name in ("enabled", "findings")]


def test_json_and_the_check(light: Shop) -> None:
    """With --json the output is one line with everything, and the exit status is the check's."""
    add(light, "/x", "x")
    (status, output), (checked, same) = run(light.app, "--json"), run(light.app, "--json", "--check")
    assert (0, 1) == (status, checked)
    assert output == same
    assert 1 == output.count("\n")
    found = json.loads(output)
    assert ["enabled", "options", "routes", "warnings", "findings"] == list(found)
    assert {
        "rule": "/x",
        "host": "",
        "methods": ["POST"],
        "endpoint": "x",
        "state": "unguarded",
        "options": {},
        "problems": [],
        "warnings": [],
    } == found["routes"][-1]


def test_warnings_change_no_exit_status(light: Shop) -> None:
    """Views of which a replay passes no decorator are named in one line, and the check passes."""

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        def decorated() -> Any:
            return view()

        decorated.__wrapped__ = view  # type: ignore[attr-defined]
        return decorated

    for name in "xy":
        add(light, f"/{name}", name, lambda view: light.idempotency.required(decorate(view)))
    status, output = run(light.app, "--check")
    assert 0 == status
    (warning,) = [line for line in output.splitlines() if line.startswith("Warning")]
    assert warning.startswith("Warning: x, y: A replay does not pass what lies below the guard: ")


def test_wrong_usage(light: Shop) -> None:
    """An option that does not exist is 2."""
    assert 2 == run(light.app, "--chekc")[0]


FACTORY = """
from flask import Flask
from flask_idempotency import Idempotency
from flask_sqlalchemy import SQLAlchemy

idempotency = Idempotency()


def create_app(forgotten):
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg2://nobody@127.0.0.1:1/nothing"
    idempotency.init_app(app, SQLAlchemy(app))
    app.post("/x", endpoint="x")(idempotency.required(atomic=True, scope="acme")(lambda: "x"))
    if forgotten:
        app.post("/y", endpoint="y")(lambda: "y")
    return app
"""


def test_a_real_command(tmp_path: Path) -> None:
    """The command works for an app factory, in a process of its own, and needs no database that answers."""
    (tmp_path / "factory.py").write_text(FACTORY)
    found = str(Path(flask_idempotency.__file__).parents[1])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([found, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "flask", "--app", "factory:create_app(True)", "idempotency", "routes", "--check"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=50)
    assert (1, "") == (done.returncode, done.stderr)
    assert f"POST /y (y) is not guarded.\n1 finding. {ADVICE}" == done.stdout
