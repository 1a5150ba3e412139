"""How much memory large bodies take: that of a server process beyond what it has when it is idle.

``python -m benchmarks memory``, or ``make memory``. Linux only: the figures are the kernel's, VmHWM of a gunicorn
worker, whose mark is put back before each request. Ends with status 1 where a figure is over the bound.
"""

from __future__ import annotations

import http.client
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from tests.acceptance.large import MIB, PIECE
from tests.support.server import GunicornServer

#: The size of each body, and what a process may take for it, in MiB.
SIZE: Final = int(os.environ.get("MEMORY_MIB", "1024"))
BOUND: Final = 64

BOUNDARY: Final = "part-of-the-benchmark"
HEAD: Final = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="large"\r\n'
    "Content-Type: application/octet-stream\r\n\r\n"
).encode()
TAIL: Final = f"\r\n--{BOUNDARY}--\r\n".encode()


def large(mib: int) -> Iterator[bytes]:
    """So many MiB, in pieces."""
    for _ in range(mib * MIB // len(PIECE)):
        yield PIECE


def multipart(mib: int) -> Iterator[bytes]:
    """The same as a form with one file."""
    yield HEAD
    yield from large(mib)
    yield TAIL


def post(
    server: GunicornServer, path: str, key: str, body: Iterable[bytes] = (), size: int = 0, kind: str = "text/plain"
) -> tuple[int, int, bool]:
    """Send a request and read its answer: status, size, and whether it is a replay."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=600)
    headers = {"Idempotency-Key": key, "X-Tenant": "acme", "Content-Type": kind, "Content-Length": str(size)}
    connection.request("POST", path, body or None, headers)
    answer = connection.getresponse()
    read = 0
    while chunk := answer.read(MIB):
        read += len(chunk)
    connection.close()
    return answer.status, read, answer.getheader("Idempotent-Replay") == "true"


def upload(server: GunicornServer, mib: int) -> None:
    """A large body, in a guarded view that reads ``request.stream``."""
    assert 201 == post(server, "/upload", str(uuid.uuid4()), large(mib), mib * MIB, "application/octet-stream")[0]


def form(server: GunicornServer, mib: int) -> None:
    """A large file in a form, in a guarded view that reads ``request.files``."""
    size = len(HEAD) + mib * MIB + len(TAIL)
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    assert 201 == post(server, "/upload", str(uuid.uuid4()), multipart(mib), size, kind)[0]


def streamed(server: GunicornServer, mib: int, key: str) -> None:
    """A large streamed answer, on its way to its client and to the body store."""
    assert (201, mib * MIB, False) == post(server, f"/stream?mib={mib}", key)


def replayed(server: GunicornServer, mib: int, key: str) -> None:
    """Its replay from the body store."""
    assert (201, mib * MIB, True) == post(server, f"/stream?mib={mib}", key)


def memory(pid: int, field: str) -> float:
    """One of the kernel's figures for a process, in MiB."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def measured(server: GunicornServer, request: Callable[[], None]) -> tuple[float, float]:
    """What the worker had before a request, and how much more at most during it, in MiB."""
    (pid,) = server.pids
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = memory(pid, "VmRSS")
    request()
    return before, memory(pid, "VmHWM") - before


def main(quick: bool = False) -> int:
    """Measure and print; returns the exit status.

    :param quick: with bodies of 64 MiB at most.
    """
    size = min(SIZE, 64) if quick else SIZE
    with tempfile.TemporaryDirectory(prefix="idempotency-memory-") as folder:
        env = {"LARGE_DATABASE": f"sqlite:///{folder}/large.sqlite", "LARGE_BODIES": f"file:{folder}/bodies"}
        app = "tests.acceptance.large:create_app()"
        # One worker and one thread: what is measured is one request.
        server = GunicornServer(app, worker_class="sync", timeout=600, env={**env, "TMPDIR": folder})
        try:
            return report(server, size)
        finally:
            server.stop()


def report(server: GunicornServer, size: int) -> int:
    """Each kind of body, small ones first: what a first request loads is no part of what a body takes."""
    first, key = str(uuid.uuid4()), str(uuid.uuid4())
    for warm in (upload, form):
        warm(server, 1)
    for warm_too in (streamed, replayed):
        warm_too(server, 2, first)
    cases: dict[str, Callable[[], None]] = {
        "upload, request.stream": lambda: upload(server, size),
        "upload, request.files": lambda: form(server, size),
        "streamed answer": lambda: streamed(server, size, key),
        "its replay": lambda: replayed(server, size, key),
    }
    print(f"Bodies of {size} MiB; MiB of memory in the server process, bound {BOUND}\n")
    print(f"{'':24}{'idle':>8}{'more':>8}")
    over = False
    for name, request in cases.items():
        before, more = measured(server, request)
        over = over or more > BOUND
        print(f"{name:24}{before:8.1f}{more:8.1f}{'  over the bound' if more > BOUND else ''}", flush=True)
    return int(over)
