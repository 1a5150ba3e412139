"""Large answers of a real server process: clients that leave, a process that is killed, events without end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from tests.acceptance.large import MIB, PIECE, make_large
from tests.support.apps import Shop, close, new_key, until
from tests.support.server import GunicornServer

pytestmark = pytest.mark.thorough

UNAVAILABLE = "urn:problem-type:idempotency:record-unavailable"
SIZE = 8
WHOLE = PIECE * (SIZE * MIB // len(PIECE))


@dataclass
class Large:
    """The server, and a shop of the test's own over the same database and body store."""

    server: GunicornServer
    shop: Shop
    folder: Path
    kill: Path

    def post(self, key: str, path: str, **options: object) -> requests.Response:
        """Ask for something large. With ``stream`` only the headers are read for now."""
        headers = {"Idempotency-Key": key, "X-Tenant": "acme"}
        return requests.post(f"{self.server.url}{path}", headers=headers, timeout=25, **options)  # type: ignore[arg-type]

    def status(self, key: str) -> str:
        """The status of a key's row."""
        (row,) = [row for row in self.shop.rows() if row["key"] == key]
        return str(row["status"])

    def bodies(self, key: str) -> list[Path]:
        """The files of the claim that a key has now."""
        (row,) = [row for row in self.shop.rows() if row["key"] == key]
        return list(self.folder.glob(f"{row['fencing_token']}-*"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Large]:
    """One worker with four threads."""
    folder = tmp_path_factory.mktemp("large")
    database, bodies = f"sqlite:///{folder / 'large.sqlite'}", folder / "bodies"
    shop = make_large(database, f"file:{bodies}")
    env = {"LARGE_DATABASE": database, "LARGE_BODIES": f"file:{bodies}", "LARGE_KILL": str(folder / "kill")}
    server = GunicornServer("tests.acceptance.large:create_app()", worker_class="gthread", threads=4, env=env)
    try:
        yield Large(server, shop, bodies, folder / "kill")
    finally:
        server.stop()
        print(server.log)
        close(shop.app)


@pytest.mark.scenario(39, 40)
@pytest.mark.parametrize("leaves", [True, False])
def test_a_large_stream(large: Large, leaves: bool) -> None:
    """Whether or not its client stays to the end, a stream over the limit is recorded whole and replayed."""
    key = new_key()
    with large.post(key, f"/stream?mib={SIZE}", stream=True) as first:
        assert PIECE == first.raw.read(len(PIECE))
        if not leaves:
            assert WHOLE[len(PIECE) :] == first.raw.read()
    until(lambda: large.status(key) == "completed")
    retry = large.post(key, f"/stream?mib={SIZE}")
    assert (201, "true") == (retry.status_code, retry.headers["Idempotent-Replay"])
    assert WHOLE == retry.content
    assert 1 == len(large.bodies(key))


@pytest.mark.scenario(39)
def test_a_body_that_changes_while_it_is_replayed(large: Large) -> None:
    """The client of a replay that breaks off can tell: its server closes the connection before the end."""
    key = new_key()
    size = 64
    assert size * MIB == len(large.post(key, f"/stream?mib={size}").content)
    (path,) = large.bodies(key)
    with large.post(key, f"/stream?mib={size}", stream=True) as retry:
        os.truncate(path, MIB)  # the server is still busy: so much fits into no socket's buffers
        with pytest.raises((requests.exceptions.ChunkedEncodingError, requests.exceptions.ConnectionError)):
            b"".join(retry.iter_content(MIB))


@pytest.mark.scenario(39, 61)
def test_killed_between_body_and_record(large: Large) -> None:
    """What a process leaves that dies with the body written and no record: an orphan, which a sweep finds."""
    key = new_key()
    large.kill.touch()
    with large.post(key, "/stream?mib=2", stream=True) as first:
        assert 201 == first.status_code
        until(lambda: len(large.bodies(key)) == 1 and large.bodies(key)[0].stat().st_size == 2 * MIB)
        (orphan,) = large.bodies(key)
        # It dies when the last piece has passed, so that it may never be read.
        with pytest.raises(requests.exceptions.RequestException):
            for _ in first.iter_content(MIB):
                pass
    large.kill.unlink()
    assert 409 == large.post(key, "/stream?mib=2").status_code
    large.shop.shift(700)
    assert 2 * MIB == len(large.post(key, "/stream?mib=2").content)
    hour_ago = time.time() - 3700
    for path in large.folder.iterdir():
        os.utime(path, (hour_ago, hour_ago))
    recorded = set(large.folder.iterdir()) - {orphan}
    with large.shop.app.app_context():
        assert 1 == large.shop.idempotency.prune(body_store=True).orphans
    assert recorded == set(large.folder.iterdir())
    assert 2 * MIB == len(large.post(key, "/stream?mib=2").content)


@pytest.mark.scenario(40)
def test_events_without_end(large: Large) -> None:
    """A client that leaves a stream of events gives its thread back at once, and nothing of it is stored."""
    for _ in range(6):  # more than the server has threads
        key = new_key()
        with large.post(key, "/events", stream=True) as answer:
            assert 3 * MIB == len(answer.raw.read(3 * MIB))
        until(lambda key=key: large.status(key) == "completed")
        retry = large.post(key, "/events")
        assert (409, UNAVAILABLE, 201) == (retry.status_code, retry.json()["type"], retry.json()["original_status"])
        assert [] == large.bodies(key)
