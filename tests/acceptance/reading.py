"""An app whose views tell what they read of a request: the same one guarded and unguarded."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from flask import Flask, request

from tests.support.apps import make_shop

READERS: dict[str, Callable[[], Any]] = {
    "json": lambda: request.json,
    "form": lambda: [request.form.to_dict(), [one.read().decode() for one in request.files.values()]],
    "data": lambda: request.get_data().decode(),
    "stream": lambda: [one.decode() for one in iter(lambda: request.stream.read(8), b"")],
    "lines": lambda: [one.decode() for one in request.stream],
}


def create_app() -> Flask:
    """``/bare/…`` and ``/guarded/…``, with the way of reading behind them, over the database ``SHOP_DATABASE``."""
    shop = make_shop(os.environ["SHOP_DATABASE"])
    shop.app.config["MAX_CONTENT_LENGTH"] = 5_000

    def read(how: str) -> dict[str, Any]:
        return {"read": READERS[how]()}

    shop.app.add_url_rule("/bare/<how>", "bare", read, methods=["POST"])
    shop.app.add_url_rule("/guarded/<how>", "guarded", shop.idempotency.required(read), methods=["POST"])
    return shop.app
