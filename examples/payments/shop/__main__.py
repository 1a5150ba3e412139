"""Serve the page, with a ledger that goes when the server does: ``python -m examples.payments.shop [PORT]``."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from werkzeug.serving import make_server

from ..demo import interrupted
from . import create_app

#: The port of ``flask run``.
PORT = 5000


def main(port: int) -> int:
    """Serve until Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    with tempfile.TemporaryDirectory(prefix="payments-shop-") as folder:
        app = create_app({"SQLALCHEMY_DATABASE_URI": f"sqlite:///{Path(folder) / 'shop.sqlite'}"})
        server = make_server("127.0.0.1", port, app, threaded=True)  # where the port is taken it says so, and exits
        print(f"The shop is open: http://127.0.0.1:{server.server_port}/ (Ctrl-C closes it)", flush=True)
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else PORT))
