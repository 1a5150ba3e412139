"""An app with answers that are too large for the table, for servers of the tests and of ``benchmarks/memory.py``.

``LARGE_DATABASE`` and ``LARGE_BODIES`` are its URLs.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from flask import Flask, Response, request

from tests.support.apps import Shop, make_shop

MIB = 2**20
#: What large answers are made of, again and again.
PIECE = hashlib.sha256(b"piece").digest() * (64 * 1024 // 32)


def make_large(database: str, bodies: str) -> Shop:
    """The shop that the servers serve, for them and for those that look into it."""
    return make_shop(
        database,
        engine_options={"connect_args": {"timeout": 20}},
        body_store=bodies,
        lock_timeout=600,
    )


def create_app() -> Flask:
    """Guarded views: ``/stream?mib=…`` answers with so much, ``/events`` without end, ``/upload`` takes what comes.

    While the file ``LARGE_KILL`` is there, the process is killed when it is about to write a record with a body
    elsewhere.
    """
    shop = make_large(os.environ["LARGE_DATABASE"], os.environ["LARGE_BODIES"])
    _kill_at_the_record(Path(os.environ.get("LARGE_KILL", "nowhere")))

    @shop.app.post("/stream")
    @shop.idempotency.required
    def stream() -> Response:
        count = int(request.args["mib"]) * MIB // len(PIECE)
        return Response(itertools.repeat(PIECE, count), 201, mimetype="application/octet-stream")

    @shop.app.post("/events")
    @shop.idempotency.required
    def events() -> Response:
        return Response(_events(), 201, mimetype="text/event-stream")

    @shop.app.post("/upload")
    @shop.idempotency.required
    def upload() -> tuple[dict[str, Any], int]:
        stream: Any = request.files["file"].stream if request.files else request.stream
        size = 0
        while chunk := stream.read(64 * 1024):
            size += len(chunk)
        return {"size": size}, 201

    @shop.app.get("/ping")
    def ping() -> str:
        return str(os.getpid())

    return shop.app


def _events() -> Iterator[bytes]:
    while True:
        yield b"data: %s\n\n" % PIECE.hex().encode()


def _kill_at_the_record(wanted: Path) -> None:
    def before(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "response_body=" in statement and wanted.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    sa.event.listen(sa.Engine, "before_cursor_execute", before)
