"""What the extension adds to an app's start: its import, and its ``init_app``, beside Flask-SQLAlchemy's own.

Each sample is a process of its own, which starts an app with Flask-SQLAlchemy alone, or with the extension too. Its
database's dialect and driver count for Flask-SQLAlchemy, whose ``init_app`` makes the engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Final

from .interleaved import Sample, Series, interleaved
from .report import Report, duration

#: Engines are made, and none of them connects.
URLS: Final = {
    "PostgreSQL, psycopg2": "postgresql+psycopg2://localhost/none",
    "PostgreSQL, psycopg": "postgresql+psycopg://localhost/none",
    "SQLite": "sqlite://",
}

BASE: Final = "Flask-SQLAlchemy"
BOTH: Final = "and Flask-Idempotency"

#: How the figures of a sample are called in the table.
FIGURES: Final = {"imports": "import", "init_app": "init_app", "both": "import and init_app"}

#: The processor's time, since a start hardly waits, and what else the machine does is then no part of it.
#: Flask itself is no part of what is measured. SQLAlchemy is: Flask-SQLAlchemy's import brings it.
_START: Final = """
import gc, json, sys, time
from flask import Flask
url, extension = sys.argv[1], sys.argv[2] == "True"
app = Flask("startup")
app.config["SQLALCHEMY_DATABASE_URI"] = url
gc.collect()
begin = time.process_time()
from flask_sqlalchemy import SQLAlchemy
if extension:
    from flask_idempotency import Idempotency
imported = time.process_time()
db = SQLAlchemy(app)
if extension:
    Idempotency(app, db)
ready = time.process_time()
print(json.dumps({"imports": imported - begin, "init_app": ready - imported, "both": ready - begin}))
"""


def started(url: str, extension: bool) -> Sample:
    """Start an app in a fresh process, and return how many seconds its import and its ``init_app`` took."""
    command = [sys.executable, "-c", _START, url, str(extension)]
    # The rounds that are thrown away compile the modules, so that nothing is compiled in those that count.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, check=True, text=True, env=env)
    sample: dict[str, float] = json.loads(done.stdout)
    return sample


def measured(url: str, rounds: int) -> tuple[Series, Series]:
    """An app's start without and with the extension, in turn."""
    variants: dict[str, Callable[[], Sample]] = {
        BASE: partial(started, url, False),
        BOTH: partial(started, url, True),
    }
    series = interleaved(variants, rounds)
    return series[BASE], series[BOTH]


def main(quick: bool) -> int:
    """Measure and print; the exit status is 0, since no target is set.

    :param quick: one round.
    """
    report = Report("startup")
    for database, url in URLS.items():
        base, both = measured(url, 1 if quick else 15)
        report.table(
            f"Start of an app, {database}: milliseconds of the processor, and the ratio of the two",
            ["", BASE, BOTH, "ratio"],
            [
                [title, *(duration(one.spread(figure), 1e-3) for one in (base, both)), both.ratio(base, figure)]
                for figure, title in FIGURES.items()
            ],
            samples={one.name: one.samples for one in (base, both)},
        )
    report.write()
    return 0
