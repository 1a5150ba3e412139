"""Other servers than gunicorn, as processes: waitress and uWSGI."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.server import Server
from tests.support.skips import missing

#: As ``waitress-serve`` does it, but on a socket that is bound already, which it has no option for.
_WAITRESS = """
import importlib, socket, sys, waitress
listener, threads, module, factory = sys.argv[1:]
app = getattr(importlib.import_module(module), factory)()
waitress.serve(app, sockets=[socket.socket(fileno=int(listener))], threads=int(threads))
"""


class WaitressServer(Server):
    """An app under waitress: one process, some threads.

    :param app: ``package.module:create_app()``.
    """

    def __init__(self, app: str, *, threads: int = 4, env: Mapping[str, str | None] | None = None) -> None:
        module, _, factory = app.removesuffix("()").partition(":")
        super().__init__(
            lambda listener: [sys.executable, "-c", _WAITRESS, str(listener), str(threads), module, factory],
            workers=0,
            env=env,
        )


class UwsgiServer(Server):
    """An app under uWSGI, whose workers are forked from a master that has loaded the app.

    :param app: ``package.module:create_app()``.
    :param options: further options of uWSGI's command line.
    """

    def __init__(
        self,
        app: str,
        *,
        workers: int = 1,
        options: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        program = Path(sys.executable).with_name("uwsgi")
        if not program.exists():
            missing("uWSGI is not installed: there is a wheel of it, pyuwsgi, for Linux")

        def command(listener: int) -> list[str]:
            line = [str(program), "--master", "--need-app", "--die-on-term", "--disable-logging"]
            line += [f"--http-socket=fd://{listener}", f"--processes={workers}", f"--module={app}"]
            return [*line, *options]

        super().__init__(command, workers=workers, env=env)
