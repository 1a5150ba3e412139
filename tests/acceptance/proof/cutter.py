"""A TCP proxy in front of an HTTP server that loses requests and cuts answers at random."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import Counter

#: What can happen to a request, and how many of a hundred it happens to.
FATES = {"pass": 80, "cut answer": 12, "go away": 5, "cut request": 3}


class AnswerCutter:
    """Forwards one request a connection, as a client with ``Connection: close`` sends it; loopback only.

    ``counts`` tells what has happened: ``cut answer`` delivers a part of the answer, or nothing of it, ``go away``
    leaves while the server works, ``cut request`` leaves before the server has all of the request.
    """

    def __init__(self, target: tuple[str, int], seed: object) -> None:
        self.target = target
        self.counts: Counter[str] = Counter()
        self._dice = random.Random(f"cutter {seed}")
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.host, self.port = self._listener.getsockname()
        threading.Thread(target=self._accept, name="cutter-accept", daemon=True).start()

    def stop(self) -> None:
        """Accept nothing more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                (fate,) = self._dice.choices(list(FATES), list(FATES.values()))
                share = self._dice.random()
            threading.Thread(target=self._serve, args=(client, fate, share), name="cutter", daemon=True).start()

    def _serve(self, client: socket.socket, fate: str, share: float) -> None:
        with contextlib.suppress(OSError), client:
            client.settimeout(30)
            asked = _request(client)
            with socket.create_connection(self.target, timeout=30) as server:
                if fate == "cut request":
                    server.sendall(asked[: int(len(asked) * share)])
                    return self._happened(fate)
                server.sendall(asked)
                if fate == "go away":
                    threading.Event().wait(share * 0.05)
                    return self._happened(fate)
                answer = _until_closed(server)
                if answer and fate == "cut answer":
                    answer = answer[: int(len(answer) * share)]
                    self._happened(fate)
                client.sendall(answer)

    def _happened(self, fate: str) -> None:
        with self._lock:
            self.counts[fate] += 1


def _request(client: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(client)
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.splitlines() if line.lower().startswith(b"content-length:")]
    missing = int(lengths[0]) - len(body) if lengths else 0
    while missing > 0:
        more = _some(client)
        data, missing = data + more, missing - len(more)
    return data


def _some(client: socket.socket) -> bytes:
    data = client.recv(65536)
    if not data:
        raise OSError("The client has left.")
    return data


def _until_closed(server: socket.socket) -> bytes:
    data = b""
    while more := server.recv(65536):
        data += more
    return data
