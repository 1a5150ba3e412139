"""Guarded views with a neighbour's decorators around the guard, and callers with a browser's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flask.testing import FlaskClient

from tests.neighbours.five import Answer, Send, Work, answer_of
from tests.support.apps import Shop

#: Where a decorator stands: above the guard it runs on every request, below it when the view runs.
STANDINGS = ("above", "below")

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def add_view(
    shop: Shop, work: Work, *, above: Sequence[Decorator] = (), below: Sequence[Decorator] = (), **how: Any
) -> None:
    """Add the guarded view that works, with decorators around the guard: the outermost first.

    :param how: ``path``; ``view`` in place of the work; the others are options of ``required``.
    """
    path, view = how.pop("path", "/charges"), how.pop("view", work.asked)
    for decorator in reversed([*above, shop.idempotency.required(**how), *below]):
        view = decorator(view)
    shop.app.add_url_rule(path, path, view, methods=["POST"])


def browser(client: FlaskClient, headers: dict[str, str] | None = None, path: str = "/charges") -> Send:
    """A caller who keeps the cookies of all answers."""

    def send(key: str, amount: int) -> Answer:
        sent = {"Idempotency-Key": key, **(headers or {})}
        return answer_of(client.post(path, json={"amount": amount}, headers=sent))

    return send
