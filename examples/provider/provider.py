"""A stand-in for a payment provider: an HTTP service that is idempotent by key, and the client that the shop uses."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class Provider:
    """The shop's side."""

    def __init__(self, url: str) -> None:
        self._netloc = urlsplit(url).netloc

    def charge(self, amount: int, key: str) -> str:
        """Take money from the customer's card, once for each key; returns the provider's reference for it.

        :raises OSError: there was no answer. Whether the money was taken is not known; the same key tells.
        """
        connection = http.client.HTTPConnection(self._netloc, timeout=10)
        with contextlib.closing(connection):
            headers = {"Idempotency-Key": key, "Content-Type": "application/json", "Connection": "close"}
            connection.request("POST", "/payments", json.dumps({"amount": amount}), headers)
            response = connection.getresponse()
            body = response.read()
            if response.status != 201:
                raise OSError(f"the provider answered {response.status}")
            return str(json.loads(body)["reference"])


@dataclass
class Service:
    """The provider's side. It runs in this process, and remembers until it ends.

    :ivar asked: the keys of all requests, in order.
    :ivar payments: the amount of each payment, by its key: the money that was taken.
    """

    asked: list[str] = field(default_factory=list)
    payments: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._references: dict[str, str] = {}
        self._lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                amount = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["amount"]
                body = json.dumps({"reference": service.pay(amount, self.headers["Idempotency-Key"])}).encode()
                self.send_response(201)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def pay(self, amount: int, key: str) -> str:
        """One request: a key that is known gets the first answer again, and no money is taken."""
        with self._lock:
            self.asked.append(key)
            self.payments.setdefault(key, amount)
            return self._references.setdefault(key, f"pay_{secrets.token_hex(8)}")

    def stop(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
