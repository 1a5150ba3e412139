"""What a crash leaves in either mode, over real connections: ``python -m examples.provider.demo``.

It kills the process that serves a request at five moments, sends the request again, and prints what the client gets,
what the ledger holds and what the provider took. It ends with 1 if anything is not as told.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import sqlite3
import sys
import tempfile
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path

from examples.payments.demo import NotAsTold, chapter, failed, interrupted, say, told
from examples.payments.stage import PATIENCE, Answer, Server, flask, send

from . import create_app
from .extensions import db
from .provider import Service

APP = "examples.provider"
TOKEN = "token-of-acme"
AMOUNT = 4200

#: Seconds. So short that the demo has not to wait for long; 30 s unless configured otherwise.
LEASE = 2.0


class Story:
    """The story, one method a chapter."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.database = folder / "provider.sqlite"
        self.provider = Service()
        stack.callback(self.provider.stop)
        self.config = {
            "SQLALCHEMY_DATABASE_URI": f"sqlite:///{self.database}",
            "PROVIDER_URL": self.provider.url,
            "IDEMPOTENCY_LOCK_TIMEOUT": str(LEASE),
            "ACCIDENTS": "true",
        }
        with create_app(self.config).app_context():
            db.create_all()
            db.engine.dispose()
        self.server = Server(folder, self.config, APP)
        stack.callback(self.server.stop)

    def tell(self) -> None:
        """From beginning to end.

        :raises NotAsTold: it came otherwise.
        """
        say("One charge, and a process that is killed")
        say("========================================")
        self.server.wait_until_up()
        say("POST /charges is in default mode: it asks the provider in a step, with a derived key. POST /orders")
        say("is in atomic mode: it writes into an outbox, which is delivered after the commit.")
        self.killed_in_the_step()
        self.killed_after_the_commit()
        self.killed_before_the_atomic_commit()
        self.killed_before_the_delivery()
        self.killed_in_the_delivery()
        self.server.stop()
        say("\nAll of it is as told.")

    def killed_in_the_step(self) -> None:
        """Default mode: the money is taken, and nobody here knows."""
        chapter("1. Default mode: killed after the provider's answer, before the step is stored")
        self.lose("/charges", "order-1001", "after the provider's answer")
        self.holds(charged=0, pending=0, asked=1, payments=1)
        answer = self.post("/charges", "order-1001")
        told("the claim's lease is not over: 409", answer.problem == "in-flight", answer)
        answer = self.post_after_lease("/charges", "order-1001")
        told("the next attempt has taken over", answer.status == 201 and not answer.replay, answer)
        told("it asked the provider with the same key", len(set(self.provider.asked)) == 1, self.provider.asked)
        self.holds(charged=1, pending=0, asked=2, payments=1)

    def killed_after_the_commit(self) -> None:
        """Default mode: all is done, but for the record of the answer."""
        chapter("2. Default mode: killed after the view's commit, before the answer is recorded")
        self.lose("/charges", "order-1002", "after the session's commit")
        self.holds(charged=2, pending=0, asked=3, payments=2)
        answer = self.post_after_lease("/charges", "order-1002")
        told("the next attempt has taken over", answer.status == 201 and not answer.replay, answer)
        say("   Its step was stored, so the provider was not asked; its charge met the unique reference.")
        self.holds(charged=2, pending=0, asked=3, payments=2)

    def killed_before_the_atomic_commit(self) -> None:
        """Atomic mode: the session has ended its savepoint, and the transaction is not committed."""
        chapter("3. Atomic mode: killed at the same line, after the session's commit")
        self.lose("/orders", "order-1003", "after the session's commit")
        self.holds(charged=2, pending=0, asked=3, payments=2)
        answer = self.post("/orders", "order-1003")
        told("nothing was left, and no lease to wait for: it runs", answer.status == 202 and not answer.replay, answer)
        self.holds(charged=3, pending=0, asked=4, payments=3)

    def killed_before_the_delivery(self) -> None:
        """Atomic mode: the charge is committed, and the function that was to be called after it is lost."""
        chapter("4. Atomic mode: killed after the commit, before the provider is asked")
        self.lose("/orders", "order-1004", "before the provider is asked")
        self.holds(charged=3, pending=1, asked=4, payments=3)
        answer = self.post("/orders", "order-1004")
        told("the record was committed with the charge: a replay", answer.status == 202 and answer.replay, answer)
        self.deliver("Delivered 1.")
        self.holds(charged=4, pending=0, asked=5, payments=4)

    def killed_in_the_delivery(self) -> None:
        """Atomic mode: the outbox is delivered twice."""
        chapter("5. Atomic mode: killed after the provider's answer, before the outbox knows of it")
        self.lose("/orders", "order-1005", "after the provider's answer")
        self.holds(charged=4, pending=1, asked=6, payments=5)
        self.deliver("Delivered 1.")
        told("it asked the provider with the same key", len(set(self.provider.asked[-2:])) == 1, self.provider.asked)
        self.holds(charged=5, pending=0, asked=7, payments=5)
        answer = self.post("/orders", "order-1005")
        told("the client's retry is a replay", answer.status == 202 and answer.replay, answer)

    def lose(self, path: str, key: str, moment: str) -> None:
        """Send a request whose process is killed."""
        self.announce(path, key)
        say(f"      Accident: {moment}")
        try:
            answer = send(self.server.port, TOKEN, key, {"amount": AMOUNT}, path, Accident=moment)
        except (OSError, http.client.HTTPException) as error:
            say(f"   <- nothing: {type(error).__name__}")
        else:
            raise NotAsTold(f"the process was to be killed, and it answered: {answer}")

    def post(self, path: str, key: str) -> Answer:
        """Send a request, and print it and its answer."""
        self.announce(path, key)
        answer = send(self.server.port, TOKEN, key, {"amount": AMOUNT}, path)
        say(f"   <- {answer}")
        say(textwrap.indent(answer.shown(), "      "))
        return answer

    def post_after_lease(self, path: str, key: str) -> Answer:
        """Send a request when the lease of the one that was killed is over."""
        say(f"   {LEASE:g} s later, when the lease is over:")
        time.sleep(LEASE + 0.2)
        return self.post(path, key)

    def announce(self, path: str, key: str) -> None:
        """Print a request."""
        say(f"   -> POST {path}, Idempotency-Key: {key}")
        say(f"      {json.dumps({'amount': AMOUNT})}")

    def deliver(self, expected: str) -> None:
        """Deliver what is left in the outbox, as cron would."""
        say(f"   $ flask --app {APP} deliver")
        printed = flask(self.folder, self.config, "deliver", app=APP)
        say(f"   {printed}")
        told("the outbox had kept it", printed == expected, printed)

    def holds(self, *, charged: int, pending: int, asked: int, payments: int) -> None:
        """Compare the ledger, and what the provider has seen, with what they should be."""
        with contextlib.closing(sqlite3.connect(self.database, timeout=PATIENCE)) as connection:
            found = connection.execute("SELECT count(reference), count(*) - count(reference) FROM charge").fetchone()
        seen = (*found, len(self.provider.asked), len(self.provider.payments))
        text = f"in the ledger: {charged} charged, {pending} pending; requests to the provider: {asked}"
        text += f", payments: {payments}"
        told(text, seen == (charged, pending, asked, payments), seen)


def main() -> int:
    """Tell the story; 0 if all of it is true."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, interrupted)
    # The server is stopped before its folder goes.
    with tempfile.TemporaryDirectory(prefix="provider-demo-") as folder, ExitStack() as stack:
        story = Story(Path(folder), stack)
        try:
            story.tell()
        except NotAsTold as error:
            return failed(f"NOT AS TOLD: {error}", [story.server])
        except Exception as error:
            return failed(f"THE STORY BROKE OFF: {type(error).__name__}: {error}", [story.server])
    return 0


if __name__ == "__main__":
    sys.exit(main())
