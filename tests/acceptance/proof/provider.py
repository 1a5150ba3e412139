"""A payment provider of the tests: a process of its own, which charges once for each key that it is sent.

It survives what happens to the app, remembers everything, and tells it on ``GET /charges``.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support import watchdog
from tests.support.server import ROOT


class Provider:
    """The process, from construction to :meth:`stop`."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="idempotency-provider-"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        watchdog.watch(self._process.pid, self._directory)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def charges(self) -> list[dict[str, Any]]:
        """All charges: ``derived`` (the key it was sent), ``charge``, ``key`` (ours) and ``runs`` that called."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/charges")
            return list(json.loads(connection.getresponse().read()))

    def stop(self) -> None:
        """End the process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        watchdog.forget(self._process.pid)
        shutil.rmtree(self._directory, ignore_errors=True)


def charge(port: int, derived: str, key: str, run: str) -> str:
    """Ask the provider for a charge, as a client library would: returns the charge's id."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3)
    with contextlib.closing(connection):
        body = json.dumps({"key": key, "run": run})
        connection.request("POST", "/charges", body, {"Idempotency-Key": derived})
        return str(json.loads(connection.getresponse().read())["charge"])


class _Handler(BaseHTTPRequestHandler):
    """What the process answers."""

    charges: dict[str, dict[str, Any]] = {}  # noqa: RUF012 - the process has one provider
    lock = threading.Lock()

    def do_POST(self) -> None:
        derived = self.headers["Idempotency-Key"]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not body:
            return  # the caller was killed before it had asked
        asked = json.loads(body)
        with self.lock:
            made = {"derived": derived, "charge": f"ch_{uuid.uuid4().hex}", "key": asked["key"], "runs": []}
            known = self.charges.setdefault(derived, made)
            known["runs"].append(asked["run"])
        self._answer(known)

    def do_GET(self) -> None:
        with self.lock:
            self._answer(list(self.charges.values()))

    def _answer(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        # Whoever has asked may have been killed.
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def main() -> None:
    """Serve until killed; print the port first."""
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
