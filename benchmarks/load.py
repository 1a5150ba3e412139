"""A load generator: as many connections as the server has threads, each sending its next request upon an answer.

One thread with a selector and no HTTP library: a request costs it some 30 µs, a thirtieth of what the server takes, so
that it is not what is measured. The connections stay open from one variant to the next.
"""

from __future__ import annotations

import re
import selectors
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from .calls import BODY, TENANT
from .interleaved import Sample


def message(path: str, key: str | None = None, body: bytes = BODY) -> bytes:
    """A ``POST`` of JSON as it goes over the wire."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"X-Tenant: {TENANT}", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *([] if key is None else [f"Idempotency-Key: {key}"]), "", ""]
    return "\r\n".join(lines).encode() + body


@dataclass
class _Connection:
    socket: socket.socket
    begun: float = 0.0
    received: bytes = b""

    def send(self, request: bytes) -> None:
        self.received = b""
        self.begun = time.perf_counter()
        self.socket.sendall(request)

    def complete(self) -> bool:
        """Whether the whole answer is there, after what has just come."""
        piece = self.socket.recv(65536)
        if not piece:
            raise ConnectionError(f"the server closed a connection after {self.received[:200]!r}")
        self.received += piece
        return ended(self.received)


class Load:
    """Open connections to a server, for several measurements; closed at the end of its ``with`` block."""

    def __init__(self, host: str, port: int, connections: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections = []
        for _ in range(connections):
            one = socket.create_connection((host, port), timeout=60)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.append(_Connection(one))
            self._selector.register(one, selectors.EVENT_READ, self._connections[-1])

    def __enter__(self) -> Load:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._selector.close()
        for connection in self._connections:
            connection.socket.close()

    def measure(self, request: Callable[[], bytes], status: int, seconds: float) -> Sample:
        """Send requests for a while: ``rate`` a second, and the time of an answer in seconds, ``p50`` and ``p99``.

        ``generator`` is the share of one core that this process took: near 1 it would be what is measured.

        :param request: makes the next request.
        :param status: that each answer must have.
        """
        start, own = time.perf_counter(), time.process_time()
        for connection in self._connections:
            connection.send(request())
        times, waiting = [], len(self._connections)
        while waiting:
            for key, _ in self._selector.select():
                connection = key.data
                if not connection.complete():
                    continue
                now = time.perf_counter()
                times.append(now - connection.begun)
                _check(connection.received, status)
                if now - start < seconds:
                    connection.send(request())
                else:
                    waiting -= 1
        taken = time.perf_counter() - start
        return {
            "rate": len(times) / taken,
            "p50": statistics.median(times),
            "p99": percentile(times, 0.99),
            "generator": (time.process_time() - own) / taken,
        }


def ended(answer: bytes) -> bool:
    """Whether an answer is there to its end: as long as it says, or up to the last of its chunks."""
    head, blank, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length: *(\d+)", head.lower())
    if length is None:
        return answer.endswith(b"\r\n0\r\n\r\n")
    return bool(blank) and len(body) >= int(length[1])


def _check(answer: bytes, status: int) -> None:
    if int(answer[9:12]) != status:
        first, _, rest = answer.partition(b"\r\n")
        raise RuntimeError(f"{first.decode()} instead of {status}\n{rest[:600]!r}")


def percentile(values: list[float], share: float) -> float:
    """The value that so great a share of all is no greater than."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
