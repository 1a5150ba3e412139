"""Bodies as they come over the wire, under gunicorn: a guarded view beside the same one without a guard."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.acceptance.reading import READERS
from tests.support.apps import Shop, close, make_shop, new_key
from tests.support.server import GunicornServer

JSON, CHUNKED = "Content-Type: application/json", "Transfer-Encoding: chunked"
PARTS = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--b--\r\n'
END = b"0\r\n\r\n"


@dataclass(frozen=True)
class Reply:
    """A status and a body; and how many interim replies came before."""

    status: int
    body: bytes
    interim: int = 0
    replayed: bool = False


class Pair:
    """A server with a guarded and an unguarded view, and a shop that looks at its table."""

    def __init__(self, server: GunicornServer, shop: Shop) -> None:
        self.server = server
        self.shop = shop

    def ask(self, path: str, lines: list[str], body: bytes, key: str) -> Reply:
        """Send these bytes, and nothing more, and read to the end."""
        with socket.create_connection((self.server.host, self.server.port), timeout=20) as connection:
            connection.sendall(head(path, [*lines, "Connection: close"], key) + body)
            connection.shutdown(socket.SHUT_WR)
            return replies(connection)[0]

    def stored(self, key: str) -> int:
        """How many rows there are of a key."""
        return sum(key == row["key"] for row in self.shop.rows())


@pytest.fixture(scope="module", params=["sync", "gthread"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A server of each worker class."""
    url = f"sqlite:///{tmp_path_factory.mktemp('bodies') / 'shop.sqlite'}"
    shop = make_shop(url)
    app = "tests.acceptance.reading:create_app()"
    server = GunicornServer(app, worker_class=request.param, threads=2, env={"SHOP_DATABASE": url})
    try:
        yield Pair(server, shop)
    finally:
        server.stop()
        print(f"--- gunicorn\n{server.log}")
        close(shop.app)


def head(path: str, lines: list[str], key: str) -> bytes:
    """A request's head."""
    lines = [f"POST {path} HTTP/1.1", "Host: test", "X-Tenant: acme", f"Idempotency-Key: {key}", *lines]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def chunks(*parts: bytes) -> bytes:
    """Parts of a body as chunks, without the last one."""
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def replies(connection: socket.socket) -> list[Reply]:
    """All replies up to the end of the connection."""
    with connection.makefile("rb") as stream:
        found, interim = [], 0
        while line := stream.readline():
            status = int(line.split()[1])
            headers = dict(one.split(b": ", 1) for one in iter(lambda: stream.readline().strip().lower(), b""))
            if status == 100:
                interim += 1
                continue
            body = stream.read(int(headers[b"content-length"]))
            found.append(Reply(status, body, interim, b"idempotent-replay" in headers))
            interim = 0
        return found


WHOLE: dict[str, tuple[list[str], bytes]] = {
    "a length": ([JSON, "Content-Length: 7"], b'{"a":1}'),
    "chunks": ([JSON, CHUNKED], chunks(b'{"a":', b"1}") + END),
    "one-byte chunks": ([JSON, CHUNKED], chunks(*[bytes([one]) for one in b'{"a":1}']) + END),
    "a trailer": ([JSON, CHUNKED], chunks(b'{"a":1}') + b"0\r\nX-Checksum: 1\r\n\r\n"),
    "no bytes in chunks": ([JSON, CHUNKED], END),
    "parts in chunks": (["Content-Type: multipart/form-data; boundary=b", CHUNKED], chunks(PARTS[:9], PARTS[9:]) + END),
    "lines in chunks": (["Content-Type: text/plain", CHUNKED], chunks(b"one\ntw", b"o\n") + END),
    "more than the length": ([JSON, "Content-Length: 5"], b"[1,2]and more"),
    "neither length nor chunks": ([JSON], b"[1,2]"),
    "no number": ([JSON, "Content-Length: five"], b"[1,2]"),
    "a negative length": ([JSON, "Content-Length: -5"], b"[1,2]"),
    "two lengths": ([JSON, "Content-Length: 5", "Content-Length: 6"], b"[1,2]"),
    "a length and chunks": ([JSON, "Content-Length: 5", CHUNKED], chunks(b"[1,2]") + END),
    "a length over the limit": ([JSON, "Content-Length: 6000"], b'"%b"' % (b"x" * 5998)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_bodies(pair: Pair, name: str) -> None:
    """What the server hands over as a body is read, and answered, as without a guard."""
    lines, body = WHOLE[name]
    for how in READERS:
        bare, guarded = (pair.ask(f"/{which}/{how}", lines, body, new_key()) for which in ("bare", "guarded"))
        assert (how, bare) == (how, guarded)


BROKEN: dict[str, tuple[list[str], bytes, int]] = {
    "within its length": ([JSON, "Content-Length: 20"], b'{"a":1}', 400),
    "within a chunk": ([JSON, CHUNKED], b'9\r\n{"a":1}', 400),
    "between two chunks": ([JSON, CHUNKED], chunks(b'{"a":1}'), 400),
    "within the last chunk": ([JSON, CHUNKED], chunks(b'{"a":1}') + b"0\r\n", 500),
    "no chunk": ([JSON, CHUNKED], chunks(b'{"a":1}') + b"zz\r\n", 500),
    "over the limit": ([JSON, CHUNKED], chunks(b'["', b"x" * 6000, b'"]') + END, 413),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_bodies(pair: Pair, name: str) -> None:
    """A body that breaks off, or is too large, is no request: whatever the view would read, the key stays free."""
    lines, body, status = BROKEN[name]
    key = new_key()
    for how in READERS:
        bare, guarded = (pair.ask(f"/{which}/{how}", lines, body, key) for which in ("bare", "guarded"))
        assert status == guarded.status
        # Without a guard the beginning may pass for all of it, or nobody looks.
        assert bare.status in (status, 200, 400)
    assert 0 == pair.stored(key)
    assert 200 == pair.ask("/guarded/json", *WHOLE["a length"], key).status
    assert 1 == pair.stored(key)


def test_the_same_body_in_other_pieces(pair: Pair) -> None:
    """Chunks or a length, however cut: the same bytes are the same request, and others are not."""
    key = new_key()
    ways = ["a length", "chunks", "one-byte chunks", "a trailer"]
    answers = [pair.ask("/guarded/json", *WHOLE[way], key) for way in ways]
    assert [False, True, True, True] == [one.replayed for one in answers]
    assert 1 == len({one.body for one in answers})
    assert 422 == pair.ask("/guarded/json", *WHOLE["no bytes in chunks"], key).status


@pytest.mark.parametrize("which", ["bare", "guarded"])
def test_expect_continue(pair: Pair, which: str) -> None:
    """A client that waits for "100 Continue" before it sends the body gets it, on the first request and on a retry."""
    key = new_key()
    lines = [JSON, "Content-Length: 7", "Expect: 100-continue", "Connection: close"]
    for attempt in range(2):
        with socket.create_connection((pair.server.host, pair.server.port), timeout=20) as connection:
            connection.sendall(head(f"/{which}/json", lines, key))
            assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
            connection.sendall(b'{"a":1}')
            [reply] = replies(connection)
        assert (200, b'{"read":{"a":1}}\n') == (reply.status, reply.body)
        assert (attempt == 1 and which == "guarded") == reply.replayed


@pytest.mark.parametrize("pair", ["gthread"], indirect=True)
def test_requests_that_follow(pair: Pair) -> None:
    """On a connection that the server keeps open, each answer leaves the next request's bytes alone."""
    key = new_key()
    requests = [
        head("/guarded/json", [JSON, "Content-Length: 7"], key) + b'{"a":1}',
        head("/guarded/json", [JSON, CHUNKED], key) + chunks(b'{"a":2}') + END,
        head("/guarded/stream", [JSON, CHUNKED], new_key()) + chunks(b'{"a":3}') + END,
        head("/guarded/json", [JSON, CHUNKED, "Connection: close"], key) + chunks(b'{"a":', b"1}") + END,
    ]
    with socket.create_connection((pair.server.host, pair.server.port), timeout=20) as connection:
        connection.sendall(b"".join(requests))
        answers = replies(connection)
    assert [200, 422, 200, 200] == [one.status for one in answers]
    assert [False, False, False, True] == [one.replayed for one in answers]
