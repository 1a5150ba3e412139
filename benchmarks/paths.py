"""Every way through the extension, against the same app's bare view.

In process: one thread, environs given to ``app.wsgi_app`` (see ``calls``); the same with each round trip to the
database a millisecond longer; under gunicorn with a load generator; and what PostgreSQL counts. ``BENCH_ONLY``, words
of :data:`DATABASES` and :data:`STAGES` with commas between them, leaves out all others.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Final

from tests.support.postgres import Postgres
from tests.support.proxy import CuttingProxy

from . import apps, calls, counting, load, servers
from .cases import CASES, Case, Requests
from .interleaved import Sample, Series, interleaved, timed
from .report import Report, Target, duration, versions

#: On what the paths are measured, and in which ways.
DATABASES: Final = ("psycopg2", "psycopg", "sqlite")
STAGES: Final = ("process", "line", "load", "counts")

MILLISECOND: Final = 1e-3


@dataclass(frozen=True)
class Size:
    """How much is measured: rounds, calls of a variant in each, and seconds of load."""

    rounds: int
    calls: int
    seconds: float

    @classmethod
    def of(cls, quick: bool) -> Size:
        """Enough for a median, or just enough to see that everything runs."""
        return cls(1, 3, 0.2) if quick else cls(7, 100, 1.25)


@dataclass
class Place:
    """A database to measure on; ``server`` and ``name`` are those of PostgreSQL."""

    driver: str
    url: str
    server: Postgres | None = None
    name: str = ""

    @property
    def title(self) -> str:
        """How tables call it."""
        return "SQLite, a file in WAL mode" if self.server is None else f"PostgreSQL, {self.driver}"


def main(quick: bool) -> int:
    """Measure, print and write ``paths.json``; returns the exit status, which no figure decides on."""
    only = set(filter(None, os.environ.get("BENCH_ONLY", "").split(",")))
    drivers = [one for one in DATABASES if one in only or not only & set(DATABASES)]
    stages = [one for one in STAGES if one in only or not only & set(STAGES)]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(servers.postgres()) if {*drivers} != {"sqlite"} else None
        also = {} if server is None else {"PostgreSQL": servers.version(server)}
        report = Report("paths", versions=versions(SQLite=sqlite3.sqlite_version, **also))
        for driver in drivers:
            with place(driver, server) as here:
                for stage in stages:
                    MEASUREMENTS[stage](report, here, Size.of(quick))
        report.write()
    return 0


@contextlib.contextmanager
def place(driver: str, server: Postgres | None) -> Iterator[Place]:
    """A fresh database for one driver."""
    if driver == "sqlite":
        with servers.sqlite() as url:
            yield Place(driver, url)
    else:
        assert server is not None
        name = server.create_database()
        yield Place(driver, servers.tcp_url(server, name, driver), server, name)
        server.drop_database(name)


def applying(here: Place) -> list[Case]:
    """The cases that the place has: on SQLite a duplicate of an atomic request waits for the one writer."""
    return [case for case in CASES if here.server is not None or not case.needs_readers]


# In process


def in_process(report: Report, here: Place, size: Size) -> None:
    """One thread, no client."""
    report_times(report, f"{here.title}: in process, one thread", here, here.url, size, "process")


def on_a_line(report: Report, here: Place, size: Size) -> None:
    """The same where each round trip takes a millisecond longer."""
    if here.server is not None:
        with servers.delayed(here.server.port) as port:
            url = servers.tcp_url(here.server, here.name, here.driver, port)
            report_times(report, f"{here.title}: in process, round trips 1 ms longer", here, url, size, "line")


def report_times(report: Report, title: str, here: Place, url: str, size: Size, stage: str) -> None:
    """Time all cases in turn and report them."""
    with Requests(url, here.url) as requests:
        variants = {case.name: timed_case(requests, case, size) for case in applying(here)}
        found = interleaved(variants, size.rounds)
    rows = []
    for case in applying(here):
        mine, base = found[case.name], found[case.base]
        ratio = mine.ratio(base)
        time = duration(mine.spread(), MILLISECOND)
        rows.append([case.name, time, ratio, case.base, verdict(case.targets.get(stage), ratio.median)])
    report.table(title, ["", "ms", "ratio", "base", "target"], rows, samples=samples(found))


def timed_case(requests: Requests, case: Case, size: Size) -> Callable[[], Sample]:
    """The measurement of one case."""
    send = calls.sender(requests.wsgi(case), case.status)
    return timed(send, lambda: calls.environ(*requests.next(case)), size.calls)


def samples(found: dict[str, Series]) -> dict[str, list[Sample]]:
    """Every sample, for the JSON file."""
    return {name: series.samples for name, series in found.items()}


def verdict(target: Target | None, value: float) -> str:
    """The cell of a target, empty where there is none."""
    return "" if target is None else target.verdict(value)


# Under load


def under_load(report: Report, here: Place, size: Size) -> None:
    """Two workers of eight threads under gunicorn, and a connection for each thread."""
    env = {"BENCH_DATABASE": here.url}
    with (
        Requests(here.url) as requests,
        servers.gunicorn("benchmarks.apps:create_wsgi()", env) as server,
        load.Load(server.host, server.port, servers.WORKERS * servers.THREADS) as generator,
    ):
        variants = {case.name: loaded(generator, requests, case, size) for case in applying(here)}
        found = interleaved(variants, size.rounds)
    rows = [load_row(case, found) for case in applying(here)]
    title = f"{here.title}: gunicorn, {servers.WORKERS} workers × {servers.THREADS} threads"
    heads = ["", "requests/s", "ratio", "base", "target", "p50 ms", "p99 ms", "p99 ratio", "target"]
    report.table(title, heads, rows, samples=samples(found))


def loaded(generator: load.Load, requests: Requests, case: Case, size: Size) -> Callable[[], Sample]:
    """The measurement of one case."""
    prefix = apps.PLAIN if case.plain else ""

    def message() -> bytes:
        path, key, body = requests.next(case)
        return load.message(prefix + path, key, body)

    return lambda: generator.measure(message, case.status, size.seconds)


def load_row(case: Case, found: dict[str, Series]) -> list[object]:
    """One line of the table."""
    name = case.load_base or case.base
    mine, base = found[case.name], found[name]
    rate, tail = mine.ratio(base, "rate"), mine.ratio(base, "p99")
    times = [duration(mine.spread(figure), MILLISECOND) for figure in ("p50", "p99")]
    judged = verdict(case.targets.get("load"), rate.median)
    judged_tail = verdict(case.targets.get("p99"), tail.median)
    return [case.name, mine.spread("rate"), rate, name, judged, *times, tail, judged_tail]


# Counted


def counts(report: Report, here: Place, size: Size) -> None:
    """What a request costs PostgreSQL."""
    if here.server is None:
        return
    with counting.counted(here.server) as proxy:
        url = counting.url(here.server, here.name, here.driver, proxy)
        with Requests(url, here.url) as requests:
            rows = [count_row(here.server, here, proxy, requests, case, size) for case in applying(here)]
    heads = ["", "statements", "messages", "round trips", "WAL flushes", "WAL bytes", "dead tuples", "target"]
    report.table(f"{here.title}: counted at the server, for each request", heads, rows)


def count_row(
    server: Postgres, here: Place, proxy: CuttingProxy, requests: Requests, case: Case, size: Size
) -> list[object]:
    """One line of the table."""
    send = calls.sender(requests.wsgi(case), case.status)

    def once() -> None:
        send(calls.environ(*requests.next(case)))

    found = counting.cost(server, here.name, proxy, once, requests.disconnect, size.calls)
    return [case.name, *astuple(found), verdict(case.targets.get("counts"), found.round_trips)]


MEASUREMENTS: Final = {"process": in_process, "line": on_a_line, "load": under_load, "counts": counts}
