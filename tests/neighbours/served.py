"""The app that the servers serve: the shop of the acceptance tests, with a stream and a view that crashes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flask import Flask, Response, request

from tests.acceptance.shop import create_shop
from tests.support.apps import new_key


def _time_out() -> None:
    import gevent

    with gevent.Timeout(0.02):
        gevent.sleep(30)


def _harakiri() -> None:
    import uwsgi  # only there in a process of uWSGI's

    uwsgi.set_user_harakiri(1)
    time.sleep(30)


#: How a view ends that is not let finish.
CRASHES: dict[str, Callable[[], object]] = {"exit": sys.exit, "timeout": _time_out, "harakiri": _harakiri}


def create_app() -> Flask:
    """The shop, with ``/stream`` and ``/crash``."""
    shop = create_shop()
    folder = Path(os.environ["SHOP_FOLDER"])

    def note(name: str) -> None:
        with (folder / f"{name}-{request.headers['Idempotency-Key']}").open("a") as runs:
            runs.write(f"{os.getpid()}\n")

    @shop.app.post("/stream")
    @shop.idempotency.required
    def stream() -> Response:
        """Three parts; after the first of them it can be held."""
        note("runs")
        key = request.headers["Idempotency-Key"]

        def parts() -> Iterator[bytes]:
            yield b"a" * 1000
            (folder / f"reached-before-{key}").touch()
            while (folder / f"before-{key}").exists():
                time.sleep(0.01)
            yield b"b" * 1000
            yield b"c" * 1000

        return Response(parts(), status=201, mimetype="text/plain")

    # No renewal is due, nor a lease over, before a test has seen what the crash has left.
    @shop.app.post("/crash")
    @shop.idempotency.required(lock_timeout=30)
    def crash() -> tuple[str, int]:
        """Crashes in the way that the header ``X-Crash`` says, the first time."""
        note("runs")
        mark = folder / f"reached-before-{request.headers['Idempotency-Key']}"
        if not mark.exists():
            mark.touch()
            CRASHES[request.headers["X-Crash"]]()
        return "late", 201

    return shop.app


def create_warm_app() -> Flask:
    """The same, having taken a claim before it is served: in the master of a server that forks."""
    app = create_app()
    headers = {"Idempotency-Key": new_key(), "X-Tenant": "acme"}
    answer = app.test_client().post("/work", json={"amount": 1}, headers=headers)
    assert answer.status_code == 201, answer.text
    with app.app_context():
        app.extensions["sqlalchemy"].engine.dispose()  # the app's own connections are the app's to look after
    return app
