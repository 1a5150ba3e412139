"""Other ways to the same promise, each against its own framework's bare view in the same run.

Runs in an environment of its own, with the dependency group ``others`` (``make bench BENCH=others``). A peer that is
not there, or does not run, is named in the last table together with its error. ``BENCH_ONLY``, words of
:data:`STAGES` with commas between them, leaves out the others.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from .. import servers
from ..interleaved import Series
from ..report import Report, duration, versions
from . import trials
from .subjects import SUBJECTS, Subject
from .trials import BARE, FIRST, REPLAY

VERSIONS: Final = (
    "idemkit",
    "Django",
    "drf-idempotency",
    "django-idempotency-key",
    "fastapi-idempotency",
    "fastapi",
    "tortoise-orm",
    "asyncpg",
    "uvicorn",
)
#: The column that says of which subjects the speed is not worth much.
TWICE: Final = "charged twice"

Found = TypeVar("Found")


@dataclass
class Run:
    """What is compared in one run, and what came of it so far."""

    report: Report
    quick: bool = False
    stage: str = "prepare"
    failed: dict[str, tuple[str, str]] = field(default_factory=dict)
    twice: dict[str, list[str]] = field(default_factory=dict)

    def each(
        self, step: Callable[[Subject], Found], subjects: Iterable[Subject] = SUBJECTS
    ) -> list[tuple[Subject, Found]]:
        """What a step gives for each subject. One that raises drops out, its error is kept, and the others go on."""
        found = []
        for subject in [one for one in subjects if one.name not in self.failed]:
            try:
                found.append((subject, step(subject)))
            except Exception as error:
                traceback.print_exc()
                self.failed[subject.name] = (self.stage, f"{type(error).__name__}: {error}".splitlines()[0][:200])
        return found

    def tried(self, subject: Subject, occasion: str, twice: bool) -> None:
        """Keep whether a subject charged twice on an occasion."""
        self.twice.setdefault(subject.name, []).extend([occasion] if twice else [])

    def charged_twice(self, subject: Subject) -> str:
        """On what occasions a subject charged twice, as a cell of a table."""
        occasions = self.twice.get(subject.name)
        return "not tried" if occasions is None else ", ".join(occasions) or "not seen"


def main(quick: bool) -> int:
    """Measure, print and write ``others.json``; returns the exit status, which no figure decides on."""
    with servers.postgres() as server, servers.redis() as redis:
        report = Report("others", versions=versions(PostgreSQL=servers.version(server), **trials.installed(VERSIONS)))
        database = server.create_database()
        os.environ.update(BENCH_DATABASE=servers.tcp_url(server, database), BENCH_REDIS=redis)
        trials.create_table()
        run = Run(report, quick)
        run.each(lambda subject: subject.prepare())
        only = set(filter(None, os.environ.get("BENCH_ONLY", "").split(",")))
        for stage in [one for one in STAGES if one in only or not only]:
            run.stage = stage
            STAGES[stage](run)
        if run.failed:
            report.table("Not measured", ["", "from", "error"], [[name, *why] for name, why in run.failed.items()])
        report.write()
        server.drop_database(database)
    return 0


def raced(run: Run) -> None:
    """How often the view ran for 50 concurrent identical requests."""
    rounds = 1 if run.quick else 10
    rows = []
    for subject, (counts, answers) in run.each(lambda subject: trials.race(subject, rounds)):
        run.tried(subject, "when raced", max(counts) > 1)
        judged = "once each" if {*counts} == {1} else "NOT once each"
        rows.append([subject.name, sum(counts), max(counts), judged, answers])
    title = f"{trials.DUPLICATES} concurrent identical requests, {rounds} rounds"
    run.report.table(title, ["", "executions in all", "most in a round", "", "answers"], rows)


def killed(run: Run) -> None:
    """What a retry does when the first run's process was killed after the view's own commit."""
    rows = []
    for subject, (charges, status) in run.each(trials.kill):
        run.tried(subject, "when killed", charges > 1)
        rows.append([subject.name, charges, status])
    run.report.table("Killed after the view's commit, retried", ["", "charges", "the retry was answered"], rows)


def in_process(run: Run) -> None:
    """Time of a first run and of a replay, in one thread."""
    rounds, calls = (1, 3) if run.quick else (7, 30)
    found = run.each(lambda subject: trials.in_process(subject, rounds, calls))
    rows = []
    for subject, series in found:
        ratios = [series[path].ratio(series[BARE]) for path in (FIRST, REPLAY)]
        rows.append([subject.name, duration(series[BARE].spread(), 1e-3), *ratios, run.charged_twice(subject)])
    heads = ["", f"{BARE}, ms", FIRST, REPLAY, TWICE]
    run.report.table("In process, one thread", heads, rows, samples=samples(found))


def loaded(run: Run) -> None:
    """Requests a second and the time of an answer against the own bare view's, for the WSGI ones."""
    rounds, seconds = (1, 0.2) if run.quick else (5, 0.4)
    subjects = [one for one in SUBJECTS if not one.asgi]
    found = run.each(lambda subject: trials.load_paths(subject, rounds, seconds), subjects)
    rows = [load_row(run, subject, series, path) for subject, series in found for path in series]
    heads = ["", "path", "requests/s", "ratio", "p50 ms", "p99 ms", "p99 ratio", TWICE]
    title = f"gunicorn, {servers.WORKERS} workers × {servers.THREADS} threads"
    run.report.table(title, heads, rows, samples=samples(found))


def load_row(run: Run, subject: Subject, series: dict[str, Series], path: str) -> list[object]:
    """One line of the table."""
    mine, base = series[path], series[BARE]
    times = [duration(mine.spread(figure), 1e-3) for figure in ("p50", "p99")]
    twice = "" if path == BARE else run.charged_twice(subject)
    return [subject.name, path, mine.spread("rate"), mine.ratio(base, "rate"), *times, mine.ratio(base, "p99"), twice]


def samples(found: list[tuple[Subject, dict[str, Series]]]) -> dict[str, object]:
    """Every sample, for the JSON file."""
    return {f"{subject.name}: {path}": one.samples for subject, series in found for path, one in series.items()}


#: In the order in which they run: the tables of what a subject costs say whether it charged twice before.
STAGES: Final = {"race": raced, "kill": killed, "process": in_process, "load": loaded}
