"""Metrics of several worker processes, as a scrape of any one of them gives them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import requests

from tests.acceptance import metered
from tests.support.apps import new_key, until
from tests.support.barrier import background
from tests.support.metrics import Samples, samples, value
from tests.support.server import GunicornServer


def test_several_processes(tmp_path: Path, sqlite_url: str, gunicorn: Callable[..., GunicornServer]) -> None:
    """Counters add up over the workers, claims over those that live, and the store is asked by the one scraped."""
    folders = [tmp_path / "metrics", tmp_path / "staying"]
    for folder in folders:
        folder.mkdir()
    server = gunicorn(
        "tests.acceptance.metered:create_app()",
        worker_class="gthread",
        workers=2,
        threads=4,
        preload=True,
        env={"PROMETHEUS_MULTIPROC_DIR": str(folders[0]), metered.FOLDER: str(folders[1]), metered.URL: sqlite_url},
        # A worker whose threads are all busy leaves further connections to the other one.
        options=["--config", metered.__file__, "--worker-connections=4", "--keep-alive=0"],
    )

    def post(path: str, key: str) -> requests.Response:
        headers = {"Idempotency-Key": key, "X-Tenant": "acme"}
        return requests.post(server.url + path, json={"amount": 1}, headers=headers, timeout=50)

    def scrape() -> Samples:
        return samples(requests.get(f"{server.url}/metrics", timeout=20).text)

    def claims() -> float | None:
        return value(scrape(), "idempotency_claims_in_progress")

    pids = set()
    keys: list[str] = []
    while len(pids) < 2 and len(keys) < 500:
        keys.append(new_key())
        pids |= {post("/charges", keys[-1]).headers["X-Pid"] for _ in range(2)}
    assert 2 == len(pids)
    for found in [scrape() for _ in range(4)]:
        where = {"endpoint": "create_charge"}
        assert len(keys) == value(found, "idempotency_requests_total", outcome="executed", **where)
        assert len(keys) == value(found, "idempotency_requests_total", outcome="replayed", **where)
        assert 0 == value(found, "idempotency_requests_total", outcome="mismatch", endpoint="stay")
        assert len(keys) == value(found, "idempotency_execution_seconds_count", **where)
        assert (1, len(keys)) == (
            value(found, "idempotency_store_up"),
            value(found, "idempotency_keys", status="completed"),
        )
        assert 0 == value(found, "idempotency_claims_in_progress")

    def staying() -> list[int]:
        return [int(one.name.partition("-")[0]) for one in folders[1].glob("*-*")]

    answers = []
    while len(set(staying())) < 2 and len(answers) < 5:
        answers.append(background(post, "/stay", new_key()))
        until(lambda: len(staying()) == len(answers))
    assert 2 == len(set(staying()))
    assert len(answers) == claims()
    gone = staying()[0]
    server.kill(gone)
    until(lambda: len(answers) - staying().count(gone) == claims(), timeout=20)
    (folders[1] / "go").touch()
    until(lambda: 0 == claims(), timeout=20)
    assert staying().count(gone) == value(scrape(), "idempotency_keys", status="in_progress")
    failed = [one for one in answers if one.exception(20) is not None]
    assert staying().count(gone) == len(failed)
