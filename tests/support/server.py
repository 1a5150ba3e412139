"""Real server processes with an app of the tests, gunicorn first of all; workers that can be killed and frozen."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from tests.support import watchdog

#: The folder that holds ``tests``, so that an app can be named as ``tests.….module:app``.
ROOT = Path(__file__).resolve().parents[2]


class Server:
    """An app under a server on a free loopback port; answering from construction to :meth:`stop`.

    :param command: makes the command line, of the number of a listening socket that the server inherits.
    :param workers: how many child processes there are when it is up.
    :param env: further environment variables; ``None`` as value removes one.
    :param pythonpath: a folder to import from before the tests' own.
    """

    def __init__(
        self,
        command: Callable[[int], list[str]],
        *,
        workers: int,
        env: Mapping[str, str | None] | None = None,
        pythonpath: Path | None = None,
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="idempotency-server-"))
        self._log = self._directory / "log"
        self._last_log = ""
        self.workers = workers
        # Bound here and inherited: nobody can take the port in between, and early requests wait for a worker.
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.host, self.port = listener.getsockname()
        self.url = f"http://{self.host}:{self.port}"
        try:
            with self._log.open("wb") as log, listener:
                self._process = subprocess.Popen(
                    command(listener.fileno()),
                    cwd=self._directory,
                    env=_environment(env or {}, pythonpath),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(listener.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        watchdog.watch(self._process.pid, self._directory)
        try:
            self._wait_until_up()
        except BaseException:
            self.stop()
            raise

    def _wait_until_up(self, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._process.returncode}:\n{self.log}")
            if len(self.pids) >= self.workers and self._answers():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server gave no answer within {timeout} s:\n{self.log}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=2)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/")
            connection.getresponse().read()  # whatever it says, it is an answer
            return True
        return False

    @property
    def log(self) -> str:
        """Everything that the server and the app have written so far; still there after :meth:`stop`."""
        return self._log.read_text(errors="replace") if self._log.exists() else self._last_log

    @property
    def pid(self) -> int:
        """The pid of the process that was started; workers, where there are any, are its children."""
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """The workers' pids, oldest first. Which of them serves a request, the app must tell: ``os.getpid()``."""
        try:
            workers = psutil.Process(self.pid).children()
            alive = [worker for worker in workers if worker.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return []
        return sorted(worker.pid for worker in alive)

    def kill(self, pid: int, timeout: float = 10.0) -> None:
        """Kill a worker with SIGKILL and wait until it is gone; the server soon starts another."""
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(timeout)

    def freeze(self, pid: int) -> None:
        """Stop a worker with SIGSTOP, and return once it stands still. ``timeout`` has to be long enough for it."""
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.005)

    def thaw(self, pid: int) -> None:
        """Let a frozen worker go on."""
        os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        """Stop the server: gracefully first, then whatever is left of its process group by force."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(8)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(10)
        watchdog.forget(self.pid)
        self._last_log = self.log
        shutil.rmtree(self._directory, ignore_errors=True)


class GunicornServer(Server):
    """An app under gunicorn.

    :param app: what gunicorn serves: ``package.module:app``, or ``package.module:create_app()``.
    :param worker_class: ``sync``, ``gthread`` or ``gevent``.
    :param preload: import the app once, before the workers are forked.
    :param timeout: after how many seconds of silence gunicorn aborts a worker.
    :param options: further options of gunicorn's command line.
    """

    def __init__(
        self,
        app: str,
        *,
        worker_class: str = "sync",
        workers: int = 1,
        threads: int = 1,
        preload: bool = False,
        env: Mapping[str, str | None] | None = None,
        pythonpath: Path | None = None,
        timeout: int = 30,
        options: Sequence[str] = (),
    ) -> None:
        def command(listener: int) -> list[str]:
            line = [sys.executable, "-m", "gunicorn", f"--bind=fd://{listener}", f"--workers={workers}"]
            line += [f"--worker-class={worker_class}", f"--timeout={timeout}", "--graceful-timeout=5"]
            line += ["--no-control-socket", "--capture-output", "--log-level=info", "--error-logfile=-"]
            line += [f"--threads={threads}"] if worker_class == "gthread" else []
            line += [f"--worker-connections={max(threads, 50)}"] if worker_class == "gevent" else []
            return [*line, *(["--preload"] if preload else []), *options, app]

        super().__init__(command, workers=workers, env=env, pythonpath=pythonpath)


def _environment(changes: Mapping[str, str | None], pythonpath: Path | None) -> dict[str, str]:
    folders = [str(folder) for folder in (pythonpath, ROOT) if folder is not None]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FLASK_", "GUNICORN_"))}
    merged = {**inherited, "PYTHONPATH": os.pathsep.join(folders), "PYTHONUNBUFFERED": "1", **changes}
    return {name: value for name, value in merged.items() if value is not None}
