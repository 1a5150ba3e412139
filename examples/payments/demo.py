"""The story of a payment that is charged once, over real connections: ``python -m examples.payments.demo``.

It prints what is sent, what comes back and what the ledger holds, and ends with 1 if anything is not as told.
"""

from __future__ import annotations

import http.client
import json
import signal
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from . import create_app
from .auth import issue_token
from .extensions import db
from .stage import Answer, Ledger, Relay, Server, flask, send

#: How long the provider takes for a charge, in seconds: long enough for twelve requests to meet.
PROVIDER_DELAY = 0.4


class NotAsTold(Exception):
    """Something was to happen, and something else did."""


class Story:
    """The story, one method a chapter."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        database = folder / "payments.sqlite"
        self.ledger = Ledger(database)
        self.servers: list[Server] = []
        self.config = {
            "SQLALCHEMY_DATABASE_URI": f"sqlite:///{database}",
            "PROVIDER_DELAY": str(PROVIDER_DELAY),
            "IDEMPOTENCY_RETRY_AFTER": "1",
        }

    def tell(self) -> None:
        """From beginning to end.

        :raises NotAsTold: it came otherwise.
        """
        self.set_up()
        self.lose_the_answer()
        self.retry()
        self.change_the_amount()
        self.send_twelve_at_once()
        self.share_a_key()
        self.prune()
        self.read_the_logs()
        say("\nAll of it is as told.")

    def set_up(self) -> None:
        """Two tenants, and the shop under a real server."""
        say("Payments that are charged once")
        say("==============================")
        with create_app(self.config).app_context():
            db.create_all()
            self.tokens = {tenant: issue_token(tenant) for tenant in ("acme", "globex")}
            db.engine.dispose()
        self.main = self.start()
        self.short = self.start(IDEMPOTENCY_RETENTION="1")
        self.main.wait_until_up()
        say(f"The shop runs under gunicorn ({Server.PROCESSES} processes, {Server.THREADS} threads each) on port")
        say(f"{self.main.port}; its ledger is a SQLite file. The payment provider takes {PROVIDER_DELAY} s for a")
        say("charge. Two tenants have a token, acme and globex. All requests are POST /charges.")

    def lose_the_answer(self) -> None:
        """A charge whose answer is cut off on the way."""
        chapter("1. The answer is lost on the way")
        relay = Relay(self.main.port)
        say("   (through a relay that cuts the connection when the answer comes)")
        self.announce("acme", "order-1001", charge(4200))
        try:
            answer = send(relay.port, self.tokens["acme"], "order-1001", charge(4200))
        except (OSError, http.client.HTTPException) as error:
            say(f"   <- nothing: {type(error).__name__}. Was the card charged? The client can't know.")
        else:
            raise NotAsTold(f"the answer was to be lost, and it came: {answer}")
        relay.wait()
        head, _, self.lost = relay.lost.partition(b"\r\n\r\n")
        status = head.partition(b"\r\n")[0].decode("latin-1")
        say(f"      (the relay has dropped {len(relay.lost)} bytes: {status} ...)")
        told("the server had answered 201", status.split()[1:2] == ["201"], status or "it sent nothing")
        self.holds("acme", [4200])

    def retry(self) -> None:
        """The same request again."""
        chapter("2. The client tries again, with the same key")
        answer = self.post("acme", "order-1001", charge(4200))
        told("the answer is a replay: its marker says so", answer.status == 201 and answer.replay, answer)
        told("it is the lost answer, byte for byte", answer.body == self.lost, answer.body)
        self.holds("acme", [4200])

    def change_the_amount(self) -> None:
        """Another request under a used key."""
        chapter("3. The same key with another amount")
        answer = self.post("acme", "order-1001", charge(9900))
        told(
            "it is refused: 422, a problem document of the type key-reused",
            answer.status == 422 and answer.problem == "key-reused",
            answer,
        )
        self.holds("acme", [4200])

    def send_twelve_at_once(self) -> None:
        """A crowd of identical requests."""
        chapter("4. Twelve identical requests at once")
        self.announce("acme", "order-1002", charge(1500), " (12 times)")
        barrier = threading.Barrier(12, timeout=5)

        def join_in(_: int) -> Answer:
            barrier.wait()
            return send(self.main.port, self.tokens["acme"], "order-1002", charge(1500))

        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(join_in, range(12)))
        for line in sorted({str(answer) for answer in answers}):
            say(f"   <- {sum(str(answer) == line for answer in answers):2} times {line}")
        first = [one for one in answers if one.status == 201 and not one.replay]
        replays = [one for one in answers if one.status == 201 and one.replay]
        refused = [one for one in answers if one.status == 409 and one.problem == "in-flight"]
        told("one has run", len(first) == 1, f"{len(first)} have")
        told(
            "the rest got 409 with Retry-After, or the replay",
            len(replays) + len(refused) == 11 and all("Retry-After" in one.headers for one in refused),
            [str(one) for one in answers],
        )
        self.holds("acme", [4200, 1500])
        if refused:
            seconds = int(refused[0].headers["Retry-After"])
            say(f"   One that was refused waits for {seconds} s, as it was told, and tries again.")
            time.sleep(seconds)
            answer = self.post("acme", "order-1002", charge(1500))
            told("it gets the replay", answer.replay and answer.body == first[0].body, answer)
            self.holds("acme", [4200, 1500])

    def share_a_key(self) -> None:
        """Two tenants with one key."""
        chapter("5. Two tenants happen to use the same key")
        answers = [self.post(tenant, "order-1003", charge(800)) for tenant in ("acme", "globex")]
        told(
            "both are charged, and neither sees the other's answer",
            [(one.status, one.replay) for one in answers] == [(201, False)] * 2
            and answers[0].json()["id"] != answers[1].json()["id"],
            [str(one) for one in answers],
        )
        self.holds("acme", [4200, 1500, 800])
        self.holds("globex", [800])

    def prune(self) -> None:
        """A key whose retention is over."""
        chapter("6. A key is new again after its retention")
        say("   Records are kept for a day. So as not to wait for so long, a second server on the same")
        say("   ledger is set to keep what it records for 1 s (IDEMPOTENCY_RETENTION).")
        self.short.wait_until_up()
        answer = self.post("globex", "order-1004", charge(2000), self.short)
        told("the first time, it runs", answer.status == 201 and not answer.replay, answer)
        self.holds("globex", [800, 2000])
        say("   1.2 s later:")
        time.sleep(1.2)
        before = self.ledger.keys()
        say("   $ flask --app examples.payments idempotency prune")
        for line in flask(self.folder, self.config, "idempotency", "prune").splitlines():
            say(f"   {line}")
        after = self.ledger.keys()
        say(f"   == keys stored: {before} before, {after} now")
        told("that key is deleted, the ones kept for a day are still there", (before, after) == (5, 4), (before, after))
        answer = self.post("globex", "order-1004", charge(2000), self.short)
        told("the key is new: it runs again", answer.status == 201 and not answer.replay, answer)
        self.holds("globex", [800, 2000, 2000])
        answer = self.post("acme", "order-1001", charge(4200), self.short)
        told("the first key still replays, on this server too", answer.replay and answer.body == self.lost, answer)
        self.holds("acme", [4200, 1500, 800])

    def read_the_logs(self) -> None:
        """What the servers had to say."""
        say("")
        for server in self.servers:
            server.stop()
        log = "".join(server.log for server in self.servers)
        told("the servers have logged no exception", "Traceback" not in log, "one is in the log below")

    def start(self, **config: str) -> Server:
        """Start a server on the ledger; it is stopped when the story ends, however it ends."""
        server = Server(self.folder, {**self.config, **config})
        self.stack.callback(server.stop)
        self.servers.append(server)
        return server

    def announce(self, tenant: str, key: str, body: dict[str, Any], times: str = "") -> None:
        """Print a request."""
        say(f"   -> {tenant}, Idempotency-Key: {key}{times}")
        say(f"      {json.dumps(body)}")

    def post(self, tenant: str, key: str, body: dict[str, Any], server: Server | None = None) -> Answer:
        """Send a request, and print it and its answer."""
        self.announce(tenant, key, body)
        answer = send((server or self.main).port, self.tokens[tenant], key, body)
        say(f"   <- {answer}")
        say(textwrap.indent(answer.shown(), "      "))
        return answer

    def holds(self, tenant: str, amounts: list[int]) -> None:
        """Print what the ledger holds of a tenant, and compare it with what it should.

        :raises NotAsTold: it holds something else.
        """
        charges = self.ledger.charges(tenant)
        shown = ", ".join(f"no. {number} {cents / 100:.2f} {currency}" for number, cents, currency in charges)
        say(f"   == ledger of {tenant}: {shown}")
        told(
            f"{len(amounts)} charge{'s' if len(amounts) > 1 else ''}",
            [cents for _, cents, _ in charges] == amounts,
            f"{len(charges)}: {shown}",
        )


def charge(amount: int) -> dict[str, Any]:
    """The body of a request for a charge."""
    return {"amount": amount, "currency": "EUR", "card": "card-4242"}


def chapter(title: str) -> None:
    """Print a heading."""
    say(f"\n{title}")


def told(what: str, true: bool, instead: object) -> None:
    """Print a claim that holds.

    :raises NotAsTold: it does not.
    """
    if not true:
        raise NotAsTold(f"the story says: {what}. Instead: {instead}")
    say(f"   ok {what}")


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def main() -> int:
    """Tell the story; 0 if all of it is true."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, interrupted)
    # The servers are stopped before their folder goes.
    with tempfile.TemporaryDirectory(prefix="payments-demo-") as folder, ExitStack() as stack:
        story = Story(Path(folder), stack)
        try:
            story.tell()
        except NotAsTold as error:
            return failed(f"NOT AS TOLD: {error}", story.servers)
        except Exception as error:
            return failed(f"THE STORY BROKE OFF: {type(error).__name__}: {error}", story.servers)
    return 0


def failed(message: str, servers: list[Server]) -> int:
    """Say why, with the end of the servers' logs, and return the exit status for it."""
    print(f"\n{message}", file=sys.stderr)
    for server in servers:
        print(f"\nThe end of the log of the server on port {server.port}:", file=sys.stderr)
        print("\n".join(server.log.splitlines()[-20:]), file=sys.stderr)
    return 1


def interrupted(number: int, frame: object) -> NoReturn:
    """Leave by an exception, so that the servers are stopped on the way out."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
