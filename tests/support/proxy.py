"""A TCP proxy in front of PostgreSQL that understands the protocol well enough to fail at the worst moment.

PostgreSQL's messages are a type byte, a length and a body; only a connection's first messages lack the type. One
cycle is what the client sends up to a simple query or a Sync, and what the server answers up to its ReadyForQuery.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from tests.support.postgres import database_url

Address = Path | tuple[str, int]
Action = Literal["lose_reply", "lose_request", "hold_reply", "hold_request"]

_PROTOCOL_3 = range(196608, 196608 + 0x10000)
_ENCRYPTION_REQUESTS = (80877103, 80877104)  # SSLRequest, GSSENCRequest


class Rule:
    """What happens to the next statements that contain a text, but for the first ``after``. ``times`` use it up."""

    def __init__(self, action: Action, substring: str, times: int, after: int) -> None:
        self.action = action
        self.substring = substring
        self.left = times
        self.after = after
        self.count = 0  #: how many statements it has met
        self._happened = threading.Event()
        self._released = threading.Event()

    def wait(self, timeout: float = 10.0) -> None:
        """Wait until it has happened once: a reply was lost, a request dropped, one of them is being held."""
        if not self._happened.wait(timeout):
            raise TimeoutError(f"no statement with {self.substring!r} came within {timeout} s")

    @property
    def happened(self) -> bool:
        """Whether it has happened at least once."""
        return self._happened.is_set()

    def release(self) -> None:
        """Let what is being held go on, and hold nothing more."""
        self._released.set()

    def _apply(self) -> None:
        self._happened.set()
        if self.action.startswith("hold"):
            self._released.wait(60)


class CuttingProxy:
    """Forwards to a server's Unix socket or TCP port, from construction to :meth:`stop`; loopback only.

    ``statements`` lists the SQL that clients had carried out, in the order of its arrival; ``round_trips`` counts the
    cycles after the log-in. ``latency`` is the time in seconds that each round trip takes longer.
    """

    def __init__(self, target: Address) -> None:
        self.target = target
        self.statements: list[str] = []
        self.round_trips = 0
        self.latency = 0.0
        self.lock = threading.Lock()
        self.running = threading.Event()  # cleared while hanging
        self.running.set()
        self._rules: list[Rule] = []
        self._connections: set[_Connection] = set()
        # A bound socket that never listens keeps the port ours while the server is "gone".
        self._placeholder = _bound(0)
        self.host, self.port = self._placeholder.getsockname()
        self._listener: socket.socket | None = None
        self.come_back()

    def url(self, database: str, driver: str = "psycopg2") -> str:
        """SQLAlchemy's URL of a database, through the proxy."""
        return database_url(database, host=self.host, port=self.port, driver=driver)

    # What statements meet

    def lose_reply(self, substring: str, *, times: int = 1, after: int = 0) -> Rule:
        """Have a statement with this text carried out, then cut the connection before a reply reaches the client."""
        return self._add("lose_reply", substring, times, after)

    def lose_request(self, substring: str, *, times: int = 1, after: int = 0) -> Rule:
        """Cut the connection before a statement with this text reaches the server."""
        return self._add("lose_request", substring, times, after)

    def hold_reply(self, substring: str, *, times: int = 1, after: int = 0) -> Rule:
        """Have a statement with this text carried out, and keep its reply until :meth:`Rule.release`."""
        return self._add("hold_reply", substring, times, after)

    def hold_request(self, substring: str, *, times: int = 1, after: int = 0) -> Rule:
        """Keep a statement with this text from the server until :meth:`Rule.release`."""
        return self._add("hold_request", substring, times, after)

    def _add(self, action: Action, substring: str, times: int, after: int) -> Rule:
        rule = Rule(action, substring, times, after)
        with self.lock:
            self._rules.append(rule)
        return rule

    def meet(self, statement: str) -> Rule | None:
        """Note a statement, and return the rule that it meets."""
        with self.lock:
            self.statements.append(statement)
            for rule in self._rules:
                if rule.left > 0 and rule.substring in statement:
                    if rule.after > 0:
                        rule.after -= 1
                        continue
                    rule.left -= 1
                    rule.count += 1
                    return rule
        return None

    # What all connections meet

    def cut(self) -> None:
        """Cut the connections that there are; new ones are welcome."""
        with self.lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def go_away(self) -> None:
        """Refuse new connections and cut the old ones: the server is gone."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
            self._listener.close()
            self._listener = None
        self.cut()

    def come_back(self) -> None:
        """Accept connections (again)."""
        if self._listener is None:
            self._listener = _bound(self.port)
            self._listener.listen(256)
            threading.Thread(target=self._accept, args=(self._listener,), name="proxy-accept", daemon=True).start()

    def hang(self) -> None:
        """Accept connections and bytes and pass nothing on, in either direction."""
        self.running.clear()

    def resume(self) -> None:
        """Pass on what has piled up, and what comes."""
        self.running.set()

    @contextlib.contextmanager
    def gone(self) -> Iterator[None]:
        """Be gone for the length of a ``with`` block."""
        self.go_away()
        try:
            yield
        finally:
            self.come_back()

    @contextlib.contextmanager
    def counting(self) -> Iterator[list[str]]:
        """The statements that arrive during a ``with`` block; filled in when it ends."""
        start, found = len(self.statements), []
        yield found
        found.extend(self.statements[start:])

    def stop(self) -> None:
        """Cut everything and give the port back."""
        for rule in self._rules:
            rule.release()
        self.resume()
        self.go_away()
        self._placeholder.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="proxy-serve", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self.running.wait()
        try:
            server = _connected(self.target)
        except OSError:
            client.close()
            return
        connection = _Connection(self, client, server)
        with self.lock:
            self._connections.add(connection)
        try:
            connection.run()
        finally:
            with self.lock:
                self._connections.discard(connection)


class _Connection:
    """One client and its server connection, a thread for each direction."""

    def __init__(self, proxy: CuttingProxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy = proxy
        self.client, self.server = client, server
        self.prepared: dict[bytes, str] = {}  # name to SQL, as sent in Parse
        self.asked = 0  # cycles sent to the server
        self.answered = -1  # cycles that the server has ended; the log-in ends with one that was not asked for
        self.marked: dict[int, Rule] = {}  # cycle to the rule for its reply
        for one in (client, server):
            if one.family == socket.AF_INET:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self) -> None:
        answers = threading.Thread(target=self._guarded, args=(self._answers,), name="proxy-answers", daemon=True)
        answers.start()
        self._guarded(self._requests)
        answers.join()
        self.client.close()
        self.server.close()

    def close(self) -> None:
        """Make both threads end; they close the sockets."""
        for one in (self.client, self.server):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _guarded(self, pump: Callable[[], None]) -> None:
        try:
            pump()
        except (OSError, EOFError):
            pass  # one side has gone: so does the other
        finally:
            self.close()

    # From the client to the server

    def _requests(self) -> None:
        self._log_in()
        while True:
            kind, message = _typed(self.client)
            self.proxy.running.wait()
            rule = self._meet(kind, message[5:])
            if rule is not None and rule.action in ("lose_request", "hold_request"):
                rule._apply()
                if rule.action == "lose_request":
                    return
            elif rule is not None:
                self.marked.setdefault(self.asked + 1, rule)
            if kind in b"QS":
                if self.proxy.latency:
                    time.sleep(self.proxy.latency)
                self.asked += 1
            self.server.sendall(message)

    def _log_in(self) -> None:
        while True:
            head = _exactly(self.client, 8)
            length, code = struct.unpack("!II", head)
            if code in _ENCRYPTION_REQUESTS:
                self.client.sendall(b"N")
                continue
            self.server.sendall(head + _exactly(self.client, length - 8))
            if code in _PROTOCOL_3:
                return
            # else a request to cancel, after which the server closes the connection

    def _meet(self, kind: bytes, body: bytes) -> Rule | None:
        if kind == b"Q":
            return self.proxy.meet(body.rstrip(b"\0").decode(errors="replace"))
        if kind == b"P":
            name, query, _ = body.split(b"\0", 2)
            self.prepared[name] = query.decode(errors="replace")
        elif kind == b"B":
            _, name, _ = body.split(b"\0", 2)
            return self.proxy.meet(self.prepared.get(name, ""))
        return None

    # From the server to the client

    def _answers(self) -> None:
        kept: list[bytes] = []
        while True:
            kind, message = _typed(self.server)
            rule = self.marked.get(self.answered + 1) if self.answered >= 0 else None
            if rule is not None:
                kept.append(message)
            if kind == b"Z":
                self.answered += 1
                if self.answered > 0:
                    with self.proxy.lock:
                        self.proxy.round_trips += 1
                if rule is not None:
                    rule._apply()
                    if rule.action == "lose_reply":
                        return
                    message = b"".join(kept)
                    kept, rule = [], None
            if rule is None:
                self.proxy.running.wait()
                self.client.sendall(message)


def _bound(port: int) -> socket.socket:
    one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind(("127.0.0.1", port))
    return one


def _connected(target: Address) -> socket.socket:
    if isinstance(target, Path):
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            one.connect(str(target))
        except OSError:
            one.close()
            raise
        return one
    return socket.create_connection(target, timeout=None)


def _typed(source: socket.socket) -> tuple[bytes, bytes]:
    """One message: its type, and all its bytes."""
    head = _exactly(source, 5)
    return head[:1], head + _exactly(source, int.from_bytes(head[1:], "big") - 4)


def _exactly(source: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = source.recv(min(count, 65536))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
