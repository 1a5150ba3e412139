"""The ways through the extension that are measured, and the requests that take them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal

from . import apps, calls
from .report import Target

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

#: The key of a request: none, a new one, one of those that are recorded, or the one that is in flight.
Key = Literal["none", "new", "recorded", "held"]

OTHER_BODY: Final = b'{"amount": 900}'

#: How many keys are replayed in turn.
RECORDED: Final = 100

PLAIN: Final = "without extension"
BARE: Final = "bare view"
SELECT: Final = "SELECT 1 view"
REPLAY: Final = "replay"
REPLAY_ATOMIC: Final = "replay, atomic"
HELLO: Final = "trivial, without extension"

#: For what must be "no dearer": medians of the same thing differ by so much.
NO_DEARER: Final = Target(at_most=1.05)


@dataclass(frozen=True)
class Case:
    """One way through the extension.

    :ivar base: the case that it is compared with; under load ``load_base``, if there is one.
    :ivar plain: whether the app without the extension serves it.
    :ivar needs_readers: whether it needs a database that answers while another transaction writes.
    :ivar targets: bounds of its ratio to the base by stage; ``counts`` bounds the round trips themselves.
    """

    name: str
    path: str
    status: int = 201
    key: Key = "none"
    body: bytes = calls.BODY
    base: str = BARE
    load_base: str | None = None
    plain: bool = False
    needs_readers: bool = False
    targets: dict[str, Target] = field(default_factory=dict)


CASES: Final = (
    Case(PLAIN, "/bare", plain=True, base=PLAIN),
    Case(BARE, "/bare", base=PLAIN, targets={"process": Target(at_most=1.02)}),
    Case(SELECT, "/select", 200),
    Case(
        "default, first run",
        "/default",
        key="new",
        targets={"process": Target(at_most=1.75), "load": Target(at_least=0.7), "counts": Target(at_most=5)},
    ),
    Case(
        "atomic, first run",
        "/atomic",
        key="new",
        targets={
            "process": Target(at_most=1.45),
            "line": Target(at_most=1.1),
            "load": Target(at_least=0.85),
            "p99": Target(at_most=1.3),
            "counts": Target(at_most=3),
        },
    ),
    Case(
        REPLAY,
        "/default",
        key="recorded",
        load_base=SELECT,
        targets={"process": Target(at_most=0.46), "load": Target(at_least=0.85), "counts": Target(at_most=1)},
    ),
    Case(
        REPLAY_ATOMIC,
        "/atomic",
        key="recorded",
        load_base=SELECT,
        targets={"process": Target(at_most=0.46), "load": Target(at_least=0.85), "counts": Target(at_most=1)},
    ),
    Case("conflict", "/held-default", 409, "held", base=REPLAY, targets={"process": NO_DEARER}),
    Case(
        "conflict, atomic",
        "/held-atomic",
        409,
        "held",
        base=REPLAY_ATOMIC,
        needs_readers=True,
        targets={"process": NO_DEARER},
    ),
    Case("mismatch", "/default", 422, "recorded", OTHER_BODY, base=REPLAY, targets={"process": NO_DEARER}),
    Case("mismatch, atomic", "/atomic", 422, "recorded", OTHER_BODY, REPLAY_ATOMIC, targets={"process": NO_DEARER}),
    Case("missing key", "/default", 400),
    Case(HELLO, "/hello", plain=True, base=HELLO),
    Case("trivial view", "/hello", base=HELLO),
)


class Requests:
    """The app on a database, with keys recorded and keys in flight, and the next request of each case.

    Up for the length of a ``with`` block; a server on the same database meets the same keys.

    :param elsewhere: another URL of the database, for the requests in flight: past a proxy that counts.
    """

    def __init__(self, url: str, elsewhere: str | None = None) -> None:
        self._bench = apps.create_app(url)
        self._plain = apps.create_app(url, extension=False)
        # Of an app of their own, and with a lease so long that none is renewed while something is measured.
        self._holder = apps.create_app(elsewhere or url, lock_timeout=3600)
        self._holders: list[threading.Thread] = []
        self._keys: dict[str, Iterator[str]] = {}

    def __enter__(self) -> Requests:
        try:
            self._record()
            self._hold()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def wsgi(self, case: Case) -> WSGIApplication:
        """The app that serves a case."""
        return (self._plain if case.plain else self._bench).app.wsgi_app

    def next(self, case: Case) -> tuple[str, str | None, bytes]:
        """Path, key and body of a case's next request."""
        if case.key == "none":
            return case.path, None, case.body
        return case.path, calls.new_key() if case.key == "new" else next(self._keys[case.path]), case.body

    def disconnect(self) -> None:
        """Give back every connection, but those of the requests in flight."""
        self._bench.close()
        self._plain.close()

    def _record(self) -> None:
        send = calls.sender(self._bench.app.wsgi_app, 201)
        for path in ("/default", "/atomic"):
            keys = [calls.new_key() for _ in range(RECORDED)]
            for key in keys:
                send(calls.environ(path, key))
            self._keys[path] = itertools.cycle(keys)

    def _hold(self) -> None:
        """Bring a request of each mode as far as its view, where it stays."""
        send = calls.sender(self._holder.app.wsgi_app, 201)
        modes = ["default", "atomic"] if self._holder.many_writers() else ["default"]
        for mode in modes:
            path, key = f"/held-{mode}", calls.new_key()
            self._keys[path] = itertools.repeat(key)
            self._holder.reached.clear()
            thread = threading.Thread(target=send, args=(calls.environ(path, key),), daemon=True)
            self._holders.append(thread)
            thread.start()
            if not self._holder.reached.wait(30):
                raise TimeoutError(f"the view of {path} was not reached")

    def _end(self) -> None:
        self._holder.held.set()
        for thread in self._holders:
            thread.join(30)
        self._holder.close()
        self.disconnect()
