"""Requests without a client: environs made beforehand, given to ``app.wsgi_app`` as a server does it.

Flask's test client takes as long as a small view; it would blur every ratio.
"""

from __future__ import annotations

import io
import sys
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication, WSGIEnvironment

BODY: Final = b'{"amount": 100}'
TENANT: Final = "acme"


def new_key() -> str:
    """A key that no other request has."""
    return str(uuid.uuid4())


def environ(path: str, key: str | None = None, body: bytes = BODY, **more: Any) -> WSGIEnvironment:
    """A ``POST`` of JSON by the tenant :data:`TENANT`, as gunicorn would hand it to the app.

    :param more: further members: ``HTTP_…`` for headers.
    """
    made: WSGIEnvironment = {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": path,
        "RAW_URI": path,
        "QUERY_STRING": "",
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "8000",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "HTTP_HOST": "127.0.0.1:8000",
        "HTTP_X_TENANT": TENANT,
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        **more,
    }
    if key is not None:
        made["HTTP_IDEMPOTENCY_KEY"] = key
    return made


def answered(app: WSGIApplication, given: WSGIEnvironment) -> tuple[str, dict[str, str], bytes]:
    """Serve one request to its end: status, headers and body."""
    head: list[Any] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        head[:] = [status, headers]
        return head.append

    pieces: Iterable[bytes] = app(given, start_response)
    try:
        body = b"".join(pieces)
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    status, headers = head
    return status, dict(headers), body


def sender(app: WSGIApplication, status: int) -> Callable[[WSGIEnvironment], None]:
    """A function that serves a request, and raises where the answer has another status: nothing is measured then."""
    expected = str(status)

    def send(given: WSGIEnvironment) -> None:
        found, _, body = answered(app, given)
        if not found.startswith(expected):
            raise RuntimeError(f"{found} instead of {status}: {body[:300]!r}")

    return send
