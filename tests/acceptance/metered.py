"""An app with metrics for several worker processes, and gunicorn's configuration for it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from flask import Flask, Response, request
from prometheus_client.multiprocess import mark_process_dead

from flask_idempotency.contrib.prometheus import IdempotencyMetrics
from tests.support.apps import make_shop

FOLDER, URL = "METERED_FOLDER", "METERED_URL"


def create_app() -> Flask:
    """The shop, with a view that leaves a file in the folder, and stays until there is one that is called ``go``."""
    shop = make_shop(os.environ[URL])
    metrics = IdempotencyMetrics(shop.app, max_age=0)
    shop.app.add_url_rule("/metrics", "metrics", metrics.view)
    folder = Path(os.environ[FOLDER])

    @shop.app.post("/stay")
    @shop.idempotency.required
    def stay() -> Response:
        (folder / f"{os.getpid()}-{request.headers['Idempotency-Key']}").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        return Response("stayed", 201)

    @shop.app.after_request
    def tell(response: Response) -> Response:
        response.headers["X-Pid"] = str(os.getpid())
        return response

    return shop.app


def child_exit(server: Any, worker: Any) -> None:
    """A worker is gone, and with it its claims."""
    mark_process_dead(worker.pid)
