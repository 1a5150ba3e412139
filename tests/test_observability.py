"""The example's dashboard and alerts: they ask for what is emitted, and Prometheus' own tool runs the alerts."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from flask_idempotency.claim import Status
from flask_idempotency.contrib import observing
from flask_idempotency.contrib.prometheus import IdempotencyMetrics
from tests.support.apps import close, make_shop, new_key
from tests.support.metrics import samples
from tests.support.skips import needs

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "observability"
ALERTS, ALERTS_TEST, DASHBOARD = (FOLDER / name for name in ("alerts.yml", "alerts_test.yml", "dashboard.json"))

#: Labels that Prometheus itself gives.
TARGET = {"job", "instance"}

VALUES = {
    "outcome": set(observing.OUTCOMES.values()),
    "reason": {*observing.REJECTIONS, *observing.UNGUARDED},
    "status": {one.value for one in Status},
}


def alerts() -> list[dict[str, Any]]:
    """The rules."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels that ask for something."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if "targets" in panel]


def queries() -> Iterator[str]:
    """Every expression of the example, with the dashboard's variables filled in."""
    yield from (rule["expr"] for rule in alerts())
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {one["name"]: one["query"] for one in dashboard["templating"]["list"] if one["type"] == "textbox"}
    for panel in panels():
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "5m").replace("$job", ".*")
            yield re.sub(r"\$(\w+)", lambda found: variables[found[1]], text)


@pytest.fixture
def emitted(sqlite_url: str) -> Iterator[dict[str, set[str]]]:
    """The names of the samples that an app emits after a run and a replay, with the names of their labels."""
    shop = make_shop(sqlite_url)
    registry, key = CollectorRegistry(), new_key()
    IdempotencyMetrics(shop.app, registry=registry)
    for _ in range(2):
        shop.charge(key)
    found: dict[str, set[str]] = {}
    for name, labels in samples(generate_latest(registry).decode()):
        found.setdefault(name, set()).update(name for name, _ in labels)
    yield found
    close(shop.app)


def test_the_example_asks_for_what_is_emitted(emitted: dict[str, set[str]]) -> None:
    """Each metric, label and value in dashboard and alerts is one that an app has."""
    asked = set()
    for query in queries():
        selectors = re.findall(r"\b(idempotency_\w+)\b(?:\{([^}]*)\})?", query)
        known = set(TARGET)
        for name, matchers in selectors:
            assert name in emitted, query
            asked.add(name)
            known |= emitted[name]
            for label, _, values in re.findall(r'(\w+)(=~|=|!=|!~)"([^"]*)"', matchers):
                assert label in emitted[name] | TARGET, query
                assert label in TARGET or set(values.split("|")) <= VALUES[label], query
        for labels in re.findall(r"\bby \(([^)]*)\)", query):
            assert set(labels.split(", ")) <= known, query
    counted = {one.prometheus + ("_bucket" if one.kind == "histogram" else "") for one in observing.FIGURES}
    assert counted == asked, "the dashboard shows every figure"


def test_panels_label_their_series_by_what_is_left() -> None:
    """The legend of a series names labels by which its query is summed up."""
    for panel in panels():
        for target in panel["targets"]:
            summed = {name for one in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for name in one.split(", ")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) == summed - {"le"}, panel["title"]


def test_each_alert_is_tested() -> None:
    """Each alert has a moment in the test file at which it fires, and one at which it does not; the README has it."""
    fires: dict[bool, set[str]] = {True: set(), False: set()}
    for group in yaml.safe_load(ALERTS_TEST.read_text())["tests"]:
        for one in group["alert_rule_test"]:
            fires[bool(one["exp_alerts"])].add(one["alertname"])
    names = {rule["alert"] for rule in alerts()}
    assert names == fires[True] == fires[False]
    rows = re.findall(r"^\| `(Idempotency\w+)` \| (\w+) \|", (FOLDER / "README.md").read_text(), re.M)
    assert {rule["alert"]: rule["labels"]["severity"] for rule in alerts()} == dict(rows)


@pytest.mark.parametrize("command", [("check", ALERTS), ("test", ALERTS_TEST)], ids=lambda one: one[0])
def test_promtool_on_the_alerts(command: tuple[str, Path]) -> None:
    """Prometheus' own tool reads the alerts, and finds that they fire when they should."""
    line = [needs("promtool"), command[0], "rules", str(command[1])]
    done = subprocess.run(line, capture_output=True, text=True, timeout=50)
    assert 0 == done.returncode, done.stdout + done.stderr


def test_promtool_on_the_dashboard(tmp_path: Path) -> None:
    """Each of the dashboard's queries is one that Prometheus understands."""
    rules = [{"record": f"query:number_{number}", "expr": query} for number, query in enumerate(queries())]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    line = [needs("promtool"), "check", "rules", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=50)
    assert 0 == done.returncode, done.stdout + done.stderr


def test_panels_do_not_overlap() -> None:
    """The panels lie beside and below each other, within the 24 columns that there are."""
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + right, at["y"] + down) for right in range(at["w"]) for down in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
