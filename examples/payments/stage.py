"""What the demo is played on: the shop under gunicorn, a relay that loses answers, a client, and the ledger's file."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

#: The folder that ``examples`` can be imported from.
ROOT = Path(__file__).resolve().parents[2]

#: Seconds after which an answer is given up. It should take well under one.
PATIENCE = 10.0

#: The same for the start of a process, which takes its time on a busy machine.
START = 30.0


@dataclass(frozen=True)
class Answer:
    """What came back over HTTP."""

    status: int
    reason: str
    headers: Message
    body: bytes

    @property
    def replay(self) -> bool:
        """Whether it carries the replay marker."""
        return self.headers.get("Idempotent-Replay") == "true"

    @property
    def problem(self) -> str:
        """The last part of a problem document's ``type``; empty where it is none."""
        if self.headers.get("Content-Type") != "application/problem+json":
            return ""
        return str(self.json()["type"]).rpartition(":")[2]

    def json(self) -> dict[str, Any]:
        """The body, a JSON object."""
        found: dict[str, Any] = json.loads(self.body)
        return found

    def shown(self) -> str:
        """The body in short lines; of a problem document, what matters most."""
        if not self.problem:
            return self.body.decode(errors="replace").strip()
        lines = [f"{name}: {self.json()[name]}" for name in ("type", "title", "detail")]
        return "\n".join(textwrap.fill(line, 84, subsequent_indent="  ") for line in lines)

    def __str__(self) -> str:
        telling = ("Idempotent-Replay", "Retry-After")
        shown = [f"{name}: {self.headers[name]}" for name in telling if name in self.headers]
        return ", ".join([f"{self.status} {self.reason}", *shown])


def send(port: int, token: str, key: str, body: Mapping[str, Any], path: str = "/charges", **further: str) -> Answer:
    """POST ``body`` as JSON over a connection of its own. Nothing is retried behind the caller's back.

    :param further: headers beside those of every request, a hyphen written as an underscore.

    :raises OSError: the connection broke before the answer was there.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    headers = {
        "Authorization": f"Bearer {token}",
        "Content-Type": "application/json",
        "Idempotency-Key": key,
        "Connection": "close",
        **{name.replace("_", "-"): value for name, value in further.items()},
    }
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return Answer(response.status, response.reason, response.headers, response.read())


class Server:
    """The shop under gunicorn, on a free port of this machine, from construction to :meth:`stop`.

    :param folder: where its log goes.
    :param config: the app's configuration, given as ``FLASK_…`` environment variables.
    :param app: the package of the app.
    """

    PROCESSES, THREADS = 2, 8

    def __init__(self, folder: Path, config: Mapping[str, str], app: str = "examples.payments") -> None:
        # Bound here and inherited: nobody can take the port in between, and early requests wait for the server.
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = listener.getsockname()[1]
        self._log = folder / f"server-{self.port}.log"
        command = [sys.executable, "-m", "gunicorn", f"--bind=fd://{listener.fileno()}", "--worker-class=gthread"]
        command += [f"--workers={self.PROCESSES}", f"--threads={self.THREADS}", "--preload"]
        command += ["--no-control-socket", "--capture-output", f"{app}:create_app()"]
        with self._log.open("wb") as log, listener:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(config),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
            )

    def wait_until_up(self) -> None:
        """Return when it answers.

        :raises RuntimeError: it does not.
        """
        until = time.monotonic() + START
        while self._process.poll() is None and time.monotonic() < until:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START)
            with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
                connection.request("GET", "/charges", headers={"Connection": "close"})
                connection.getresponse().read()  # 401, since there is no token; but an answer
                return
            time.sleep(0.05)
        raise RuntimeError("the server did not start")

    @property
    def log(self) -> str:
        """All that the server and the app have logged so far."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Stop it at once, by a word or else by force: no request is in flight, or nobody waits for its answer."""
        self._process.send_signal(signal.SIGQUIT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE)


class Relay:
    """Stands between a client and the server, passes one request on, and hangs up when the answer comes.

    :ivar lost: the answer that the client did not get.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.lost = b""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            self._listener.settimeout(PATIENCE)
            client, _ = self._listener.accept()
            with client, socket.create_connection(("127.0.0.1", self._server), timeout=PATIENCE) as server:
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                while data := server.recv(65536):
                    self.lost += data
                client.shutdown(socket.SHUT_RDWR)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)

    def wait(self) -> None:
        """Wait until it has hung up."""
        self._thread.join(PATIENCE)


class Ledger:
    """The database's file, read past the app."""

    def __init__(self, path: Path) -> None:
        self._address = f"{path.as_uri()}?mode=ro"

    def charges(self, tenant: str) -> list[tuple[int, int, str]]:
        """The tenant's charges: number, cents, currency."""
        return self._rows(
            "SELECT charge.id, amount, currency FROM charge JOIN tenant ON tenant.id = tenant_id"
            " WHERE tenant.name = ? ORDER BY charge.id",
            tenant,
        )

    def keys(self) -> int:
        """How many idempotency keys are stored."""
        return int(self._rows("SELECT count(*) FROM idempotency_keys")[0][0])

    def _rows(self, statement: str, *values: str) -> list[Any]:
        with contextlib.closing(sqlite3.connect(self._address, uri=True, timeout=PATIENCE)) as connection:
            return connection.execute(statement, values).fetchall()


def flask(folder: Path, config: Mapping[str, str], *arguments: str, app: str = "examples.payments") -> str:
    """Run ``flask --app examples.payments …`` as an operator would, and return what it prints.

    :raises RuntimeError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "flask", "--app", app, *arguments],
        cwd=folder,
        env=environment(config),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START,
    )
    if done.returncode:
        raise RuntimeError(f"flask {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def environment(config: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with the app's configuration.

    Settings of Flask and gunicorn for other apps are left out, those of the extension are let through.
    """
    others = ("FLASK_", "GUNICORN_", "WEB_CONCURRENCY")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(others) or name.startswith("FLASK_IDEMPOTENCY_")
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, **{f"FLASK_{name}": value for name, value in config.items()}}
