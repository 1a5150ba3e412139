"""The five things over the wire: the same as :mod:`tests.neighbours.five`, of an app under a real server."""

from __future__ import annotations

from collections.abc import Callable

import requests

from tests.acceptance.shop import TIMEOUT, Served
from tests.neighbours.five import AFTER_COMMIT, BEFORE_COMMIT, Answer, Case, Send

#: What a server adds to each answer by itself, beside what is never recorded.
_SERVERS_OWN = frozenset({"via"})

_FILES = {BEFORE_COMMIT: "fail-before", AFTER_COMMIT: "fail-after"}


def answer_over_the_wire(response: requests.Response) -> Answer:
    """The answer that a client got, its headers as they came, and repeated ones apart."""
    return Answer(response.status_code, list(response.raw.headers.iteritems()), response.content)


def caller(url: Callable[[], str], headers: dict[str, str]) -> Send:
    """A caller with these headers, and a connection of its own for each request."""

    def send(key: str, amount: int) -> Answer:
        sent = {"Idempotency-Key": key, **headers}
        return answer_over_the_wire(requests.post(url(), json={"amount": amount}, headers=sent, timeout=TIMEOUT))

    return send


def case_of(served: Served, path: str = "/work") -> Case:
    """A case of the servers of an app: each request goes to the next of them."""
    asked = 0

    def url() -> str:
        nonlocal asked
        asked += 1
        return served.servers[asked % len(served.servers)].url + path

    return Case(
        runs=lambda: sum(len(one.read_text().split()) for one in served.folder.glob("runs-*")),
        fail=lambda where: (served.folder / _FILES[where]).touch(),
        rows=served.shop.rows,
        good=caller(url, {"X-Tenant": "acme"}),
        other=caller(url, {"X-Tenant": "emca"}),
        refused=[caller(url, {})],
        fresh=_SERVERS_OWN,
    )
