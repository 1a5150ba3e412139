"""A TCP proxy that hands on what clients send a while later: ``python -m benchmarks.delay PORT SECONDS``.

It knows no protocol. Each piece is due a fixed time after it came, whatever comes before or after it, as on a long
line: messages sent one after the other without waiting for answers are delayed once. A process of its own, so that its
threads take no turn from those that are measured. It prints the port that it listens on, and ends with its input.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
import time

_PIECE = 65536


def serve(port: int, seconds: float) -> None:
    """Accept connections for a server on a loopback port, without end."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listener.getsockname()[1], flush=True)
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", port))
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        due: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        for target, arguments in (
            (_receive, (client, due, seconds)),
            (_send, (server, due)),
            (_answer, (server, client)),
        ):
            threading.Thread(target=target, args=arguments, daemon=True).start()


def _receive(client: socket.socket, due: queue.SimpleQueue[tuple[float, bytes]], seconds: float) -> None:
    piece = b" "
    while piece:
        try:
            piece = client.recv(_PIECE)
        except OSError:
            piece = b""
        due.put((time.monotonic() + seconds, piece))


def _send(server: socket.socket, due: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    while True:
        moment, piece = due.get()
        time.sleep(max(0.0, moment - time.monotonic()))
        with contextlib.suppress(OSError):
            if not piece:
                server.shutdown(socket.SHUT_RDWR)
                return
            server.sendall(piece)


def _answer(server: socket.socket, client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := server.recv(_PIECE):
            client.sendall(piece)
    for one in (server, client):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


if __name__ == "__main__":
    threading.Thread(target=serve, args=(int(sys.argv[1]), float(sys.argv[2])), daemon=True).start()
    sys.stdin.read()
