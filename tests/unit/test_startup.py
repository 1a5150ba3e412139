"""What an app's start loads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata

from tests.support.server import ROOT

START = """
import json, sys
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from flask_idempotency import Idempotency
app = Flask("startup")
app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite://"
Idempotency(app, SQLAlchemy(app))
print(json.dumps(sorted(sys.modules)))
"""


def imported() -> set[str]:
    """The modules that such a start has imported."""
    done = subprocess.run([sys.executable, "-c", START], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def spelled(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def packages_of_extras() -> set[str]:
    """The top-level packages of all distributions that are here for an extra."""
    declared = [one for one in metadata.requires("Flask-Idempotency") or () if "extra ==" in one]
    wanted = {spelled(re.split(r"[^\w.-]", one, maxsplit=1)[0]) for one in declared}
    found = metadata.packages_distributions().items()
    return {package for package, names in found if wanted & {spelled(name) for name in names}}


def test_extras_are_imported_when_they_are_used() -> None:
    """An app that uses none of them has imported none of their packages when it is initialised."""
    extras = packages_of_extras()
    assert {"brotli", "flask_migrate", "fsspec", "psycopg2"} <= extras
    assert set() == extras & {name.partition(".")[0] for name in imported()}


def test_commands_are_imported_when_they_are_used() -> None:
    """What serves people at the command line, and the console, no server has to load."""
    found = imported()
    assert "flask_idempotency.commands" in found
    assert set() == {f"flask_idempotency.{name}" for name in ("cli", "overview", "drawing", "contrib.console")} & found
