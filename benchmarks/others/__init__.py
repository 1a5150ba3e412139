"""Other ways to the same promise, each against its own framework's bare view in the same run.

Runs in an environment of its own, with the dependency group ``others`` (``make bench BENCH=others``). A peer that is
not there, or does not run, is named in the last table together with its error. ``BENCH_ONLY``, words of
:data:`STAGES` with commas between them, leaves out the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from .. import servers
from ..interleaved import Sample, interleaved
from ..report import Report, duration, versions
from . import trials
from .subjects import SUBJECTS, Subject

VERSIONS = (
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
FIRST, REPLAY, BARE = "first run", "replay", "bare view"


def main(quick: bool) -> int:
    """Measure, print and write ``others.json``; returns the exit status, which no figure decides on."""
    with servers.postgres() as server, servers.redis() as redis:
        report = Report("others", versions=versions(PostgreSQL=servers.version(server), **trials.installed(VERSIONS)))
        database = server.create_database()
        os.environ.update(BENCH_DATABASE=servers.tcp_url(server, database), BENCH_REDIS=redis)
        trials.create_table()
        failed: dict[str, str] = {}
        ready = [one for one in SUBJECTS if succeeds(one.prepare, one, failed)]
        only = set(filter(None, os.environ.get("BENCH_ONLY", "").split(",")))
        for stage in [one for one in STAGES if one in only or not only]:
            STAGES[stage](report, [one for one in ready if one.name not in failed], failed, quick)
        if failed:
            report.table("Not measured", ["", "error"], failed.items())
        report.write()
        server.drop_database(database)
    return 0


def succeeds(step: Callable[[], object], subject: Subject, failed: dict[str, str]) -> bool:
    """Whether a step of one subject went well; what it raised is kept, and the others go on."""
    try:
        step()
    except Exception as error:
        failed[subject.name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return subject.name not in failed


def in_process(report: Report, subjects: list[Subject], failed: dict[str, str], quick: bool) -> None:
    """Time of a first run and of a replay, in one thread."""
    rounds, calls = (1, 3) if quick else (5, 20)
    variants: dict[str, Callable[[], Sample]] = {}
    for subject in subjects:
        found: dict[str, Callable[[], Sample]] = {}

        def build(subject: Subject = subject, found: dict[str, Callable[[], Sample]] = found) -> None:
            found.update(trials.timed_paths(subject, calls))

        if succeeds(build, subject, failed):
            variants.update({f"{subject.name}: {path}": call for path, call in found.items()})
    series = interleaved(variants, rounds)
    rows = []
    for subject in [one for one in subjects if one.name not in failed]:
        bare = series[f"{subject.name}: {BARE}"]
        mine = [series[f"{subject.name}: {path}"].ratio(bare) for path in (FIRST, REPLAY)]
        rows.append([subject.name, duration(bare.spread(), 1e-3), *mine])
    samples = {name: one.samples for name, one in series.items()}
    report.table("In process", ["", "bare view, ms", FIRST, REPLAY], rows, samples=samples)


def raced(report: Report, subjects: list[Subject], failed: dict[str, str], quick: bool) -> None:
    """How often the view ran for 50 concurrent identical requests."""
    rounds = 1 if quick else 10
    rows: list[list[object]] = []
    for subject in subjects:

        def race(subject: Subject = subject) -> None:
            runs, answers = trials.race(subject, rounds)
            judged = "once each" if all(count == 1 for count in runs) else "NOT once each"
            rows.append([subject.name, sum(runs), max(runs), judged, answers])

        succeeds(race, subject, failed)
    title = f"50 concurrent identical requests, {rounds} rounds"
    report.table(title, ["", "executions in all", "most in a round", "", "answers"], rows)


def killed(report: Report, subjects: list[Subject], failed: dict[str, str], quick: bool) -> None:
    """What a retry does when the first run's process was killed after the view's own commit."""
    rows: list[list[object]] = []
    for subject in subjects:

        def retry(subject: Subject = subject) -> None:
            rows.append([subject.name, *trials.kill(subject)])

        succeeds(retry, subject, failed)
    report.table("Killed after the view's commit, retried", ["", "charges", "the retry was answered"], rows)


def loaded(report: Report, subjects: list[Subject], failed: dict[str, str], quick: bool) -> None:
    """Requests a second as a share of the own bare view's, for the WSGI ones."""
    rows: list[list[object]] = []
    for subject in [one for one in subjects if not one.asgi]:

        def measure(subject: Subject = subject) -> None:
            series = trials.load_paths(subject, *((1, 0.2) if quick else (3, 0.6)))
            ratios = [series[path].ratio(series[BARE], "rate") for path in (FIRST, REPLAY)]
            rows.append([subject.name, series[BARE].spread("rate"), *ratios])

        succeeds(measure, subject, failed)
    title = f"gunicorn, {servers.WORKERS} workers × {servers.THREADS} threads"
    report.table(title, ["", "bare view, requests/s", FIRST, REPLAY], rows)


STAGES: Final = {"process": in_process, "race": raced, "kill": killed, "load": loaded}
