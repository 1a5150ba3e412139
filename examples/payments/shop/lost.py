"""Answers that get lost: the request is carried out, and the connection is cut in place of an answer."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from werkzeug.exceptions import NotImplemented
from werkzeug.wsgi import ClosingIterator

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

#: The header of a request whose answer is to be lost, in the WSGI environment.
HEADER = "HTTP_LOSE_ANSWER"

#: Where servers leave the connection's socket: Werkzeug's, and gunicorn.
SOCKETS = ("werkzeug.socket", "gunicorn.socket")


class LostAnswers:
    """Around an app: lose the answer to each request with the header ``Lose-Answer``.

    All other connections end after their one answer. A browser sends a request again by itself, a POST too, when a
    connection breaks that had been open for an earlier one; with a new connection each, whatever is sent again was
    sent by the page.
    """

    def __init__(self, app: WSGIApplication) -> None:
        self._app = app

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer, or raise ``BrokenPipeError`` when the app has: servers take it for a client that has gone away."""
        connection = next((environ[name] for name in SOCKETS if name in environ), None)
        if HEADER not in environ:
            answer = self._app(environ, start_response)
            return answer if connection is None else ClosingIterator(answer, [lambda: cut(connection)])
        if connection is None:
            return NotImplemented("This server does not let an app cut a connection.")(environ, start_response)
        carry_out(self._app, environ)
        cut(connection)
        raise BrokenPipeError(errno.EPIPE, "the answer was to be lost")


def carry_out(app: WSGIApplication, environ: WSGIEnvironment) -> None:
    """Run an app as a server does, to the end of its answer, and drop the answer."""

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        return lambda data: None

    answer = app(environ, start_response)
    with contextlib.closing(ClosingIterator(answer)) as parts:
        for _ in parts:
            pass


def cut(connection: socket.socket) -> None:
    """End a connection, whether or not the other side has done so already."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
