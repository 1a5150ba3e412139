"""The demos: a real server, real connections, and a story that has to be true."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

ROOT = Path(__file__).resolve().parents[2]

# Some ten seconds for the story, and several times that on a busy machine.
pytestmark = [pytest.mark.timeout(150), pytest.mark.thorough]

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Start]:
    """A function that starts a demo from a folder of its own, with further environment variables."""
    started: list[subprocess.Popen[str]] = []

    def start(example: str = "payments", **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", f"examples.{example}.demo"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()  # it stops its servers then
        try:
            process.communicate(timeout=20)
        finally:
            process.kill()


def left_over(folder: Path) -> list[str]:
    """The files in a folder, and the processes that work in it or did before it was deleted."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(f"{folder}{os.sep}"):
                processes.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return [*map(str, folder.iterdir()), *processes]


def read_until(process: subprocess.Popen[str], beginning: str) -> None:
    """Read what a process prints, up to a line that begins so."""
    assert process.stdout is not None
    assert process.stderr is not None
    if not any(line.startswith(beginning) for line in process.stdout):
        pytest.fail(f"no line begins with {beginning!r}:\n{process.stderr.read()}")


def test_story(demo: Start, tmp_path: Path) -> None:
    """The demo tells its story to the end, exits with 0 and leaves nothing behind."""
    process = demo()
    told, errors = process.communicate(timeout=120)
    assert (0, "") == (process.returncode, errors), told
    for line in (
        "   <- nothing: RemoteDisconnected. Was the card charged? The client can't know.",
        "   <- 201 CREATED, Idempotent-Replay: true",
        "   ok it is the lost answer, byte for byte",
        "   <- 422 UNPROCESSABLE ENTITY",
        "      type: urn:problem-type:idempotency:key-reused",
        "   <-  1 times 201 CREATED",
        "   ok both are charged, and neither sees the other's answer",
        "   $ flask --app examples.payments idempotency prune",
        "   == keys stored: 5 before, 4 now",
        "   == ledger of acme: no. 1 42.00 EUR, no. 2 15.00 EUR, no. 3 8.00 EUR",
        "   ok the key is new: it runs again",
    ):
        assert line in told.splitlines()
    assert "All of it is as told." == told.splitlines()[-1]
    assert max(map(len, told.splitlines())) < 110
    assert [] == left_over(tmp_path)


def test_broken_promise(demo: Start, tmp_path: Path) -> None:
    """Without the guard the story is not as told, and the demo says so, exits with 1 and leaves nothing behind."""
    process = demo(FLASK_IDEMPOTENCY_ENABLED="false")
    told, errors = process.communicate(timeout=120)
    assert 1 == process.returncode, told
    assert "NOT AS TOLD: the story says: the answer is a replay" in errors
    assert "Traceback" not in errors
    assert "2. The client tries again" in told
    assert "All of it is as told." not in told
    assert [] == left_over(tmp_path)


def test_interrupted(demo: Start, tmp_path: Path) -> None:
    """The demo that is interrupted leaves nothing behind."""
    process = demo()
    read_until(process, "2. The client tries again")
    assert [] != left_over(tmp_path)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (128 + signal.SIGINT, "") == (process.returncode, errors)
    assert [] == left_over(tmp_path)


def test_server_that_does_not_start(demo: Start, tmp_path: Path) -> None:
    """A server that can't start ends the demo with 1 and the server's own reason."""
    process = demo(FLASK_IDEMPOTENCY_POOL_SIZE="none")
    told, errors = process.communicate(timeout=120)
    assert 1 == process.returncode, told
    assert "IDEMPOTENCY_POOL_SIZE" in errors
    assert [] == left_over(tmp_path)


@pytest.mark.scenario(13)
def test_provider(demo: Start, tmp_path: Path) -> None:
    """Killed at five moments, in both modes, the example with a provider charges once, and leaves nothing behind."""
    process = demo("provider")
    told, errors = process.communicate(timeout=120)
    assert (0, "") == (process.returncode, errors), told
    lines = told.splitlines()
    assert 5 == lines.count("   <- nothing: RemoteDisconnected")
    assert 2 == lines.count("   ok the next attempt has taken over")
    assert 2 == lines.count("   ok it asked the provider with the same key")
    assert 2 == lines.count("   Delivered 1.")
    for line in (
        "   ok nothing was left, and no lease to wait for: it runs",
        "   ok the record was committed with the charge: a replay",
        "   ok in the ledger: 5 charged, 0 pending; requests to the provider: 7, payments: 5",
    ):
        assert line in lines
    assert "All of it is as told." == lines[-1]
    assert max(map(len, lines)) < 110
    assert [] == left_over(tmp_path)
