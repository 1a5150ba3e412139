"""The example's page under real servers: what a client gets when an answer is lost, and what the server says of it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support.apps import new_key
from tests.support.server import GunicornServer

ROOT = Path(__file__).resolve().parents[2]

CHARGE: dict[str, Any] = {"amount": 4200, "currency": "EUR", "card": "card-4242"}


def lose_and_retry(url: str) -> None:
    """Pay with a lost answer, and pay again with the same key."""
    token = requests.post(f"{url}/visits").json()["token"]
    headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": new_key(), "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    connection.request("POST", "/charges", json.dumps(CHARGE), {**headers, "Lose-Answer": "true"})
    with pytest.raises(http.client.RemoteDisconnected):
        connection.getresponse()
    connection.close()
    retry = requests.post(f"{url}/charges", json=CHARGE, headers=headers)
    assert (201, "true") == (retry.status_code, retry.headers["Idempotent-Replay"])
    assert [retry.json()] == requests.get(f"{url}/charges", headers=headers).json()["charges"]


def test_gunicorn(sqlite_url: str, gunicorn: Callable[..., GunicornServer]) -> None:
    """Under gunicorn without threads a lost answer is none, the retry is a replay, and the log has no traceback."""
    server = gunicorn(
        "examples.payments.shop:create_app()",
        workers=2,
        preload=True,
        env={"FLASK_SQLALCHEMY_DATABASE_URI": sqlite_url, "FLASK_PROVIDER_DELAY": "0"},
    )
    lose_and_retry(server.url)
    assert "Traceback" not in server.log


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_command(how: signal.Signals, tmp_path: Path) -> None:
    """The command serves the page where it says, loses answers, and leaves nothing behind when it is ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.payments.shop", "0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "FLASK_PROVIDER_DELAY": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("The shop is open: http://127.0.0.1:"), said
        url = said.split()[4].rstrip("/")
        assert "<title>Pay once</title>" in requests.get(url).text
        lose_and_retry(url)
        process.send_signal(how)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert (0 if how == signal.SIGINT else 128 + how) == process.returncode
    assert "Traceback" not in errors
    assert [] == list(tmp_path.iterdir())
