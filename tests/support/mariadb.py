"""A real MariaDB for the tests, of the distribution's package."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymysql
import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from flask_idempotency.store.table import build_table
from tests.support import watchdog
from tests.support.skips import needs

#: A crash of the machine may cost the tests' data. No port is opened: the socket lies in the server's own folder.
SETTINGS = (
    "--skip-networking",
    "--skip-name-resolve",
    "--skip-log-bin",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-doublewrite=OFF",
    "--innodb-flush-method=nosync",
    "--innodb-buffer-pool-size=16M",
    "--innodb-log-file-size=8M",
    "--innodb-fast-shutdown=2",
    "--key-buffer-size=1M",
    "--max-connections=300",
    "--max-allowed-packet=16M",
    # Nothing may depend on the server's own time zone or character set; these are the least convenient ones.
    "--default-time-zone=+05:45",
    "--character-set-server=latin1",
)

#: Who connects: may do anything in the tests' databases, and nothing to the server.
USER = "shop"


class MariaDB:
    """One server in a temporary folder, reached through a Unix socket in it. Up from construction to :meth:`stop`."""

    def __init__(self) -> None:
        self._program = needs("mariadbd")
        install = needs("mariadb-install-db")
        self.directory = Path(tempfile.mkdtemp(prefix="idempotency-mdb-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
        self._data, self._log, self.socket = (self.directory / name for name in ("data", "log", "socket"))
        self._as_user: list[str] = []
        if os.geteuid() == 0:  # it refuses to run as root
            account = pwd.getpwnam("mysql")  # the package's own
            os.chown(self.directory, account.pw_uid, account.pw_gid)
            self._as_user = ["--user=mysql"]
        command = [install, "--no-defaults", f"--datadir={self._data}", *self._as_user, *SETTINGS]
        command += ["--auth-root-authentication-method=normal", "--skip-test-db"]
        try:
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                raise RuntimeError(f"mariadb-install-db failed:\n{made.stdout}{made.stderr}")
            self.start()
            self.execute(f"CREATE USER {USER}@localhost")
            self.execute(f"GRANT ALL ON `test\\_%`.* TO {USER}@localhost")
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise

    def start(self) -> None:
        """Start the server, at first or after :meth:`shut_down`."""
        command = [self._program, "--no-defaults", f"--datadir={self._data}", f"--socket={self.socket}"]
        command += [f"--log-error={self._log}", f"--pid-file={self.directory / 'pid'}", *self._as_user, *SETTINGS]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        watchdog.watch(self._process.pid, self.directory)
        try:
            self._wait_until_up()
        except BaseException:
            self._end()
            raise

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            if self.socket.exists():  # also one that a killed server has left behind
                with contextlib.suppress(pymysql.err.OperationalError):
                    self.connect().close()
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"mariadbd did not start:\n{self.log}")
            time.sleep(0.02)

    @property
    def log(self) -> str:
        """What the server has logged so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def shut_down(self) -> None:
        """End the server's process at once, as a crash of it does. Its folder stays, for :meth:`start`."""
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait(30)
        watchdog.forget(self._process.pid)

    def stop(self) -> None:
        """End the server, its clients included, and delete its folder."""
        self._end()
        shutil.rmtree(self.directory, ignore_errors=True)

    def connect(self, database: str | None = None) -> Any:
        """Return a connection of its own in autocommit, for looking and meddling from outside the app."""
        return pymysql.connect(
            unix_socket=str(self.socket),
            user="root",
            database=database,
            charset="utf8mb4",
            autocommit=True,
            ssl_disabled=True,
        )

    def execute(self, statement: str, *values: Any, database: str | None = None) -> list[tuple[Any, ...]]:
        """Carry out one statement in autocommit and return its rows, if it has any."""
        with contextlib.closing(self.connect(database)) as connection, connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            return list(cursor.fetchall())

    @contextlib.contextmanager
    def database(self, charset: str = "latin1", collation: str = "latin1_swedish_ci") -> Iterator[str]:
        """The name of an empty database with these defaults."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        self.execute(f"CREATE DATABASE {name} CHARACTER SET {charset} COLLATE {collation}")
        try:
            yield name
        finally:
            self.disconnect(name)
            self.execute(f"DROP DATABASE {name}")

    def url(self, database: str, dialect: str = "mysql") -> str:
        """SQLAlchemy's URL of a database, for PyMySQL, through the Unix socket, as an ordinary user.

        Without ``ssl_disabled`` the driver would read all of the machine's certificates for each connection.
        """
        options = f"charset=utf8mb4&unix_socket={self.socket}&ssl_disabled=true"
        return f"{dialect}+pymysql://{USER}@localhost/{database}?{options}"

    def disconnect(self, database: str) -> int:
        """Cut everyone off a database, as a restart of the server does; returns how many there were."""
        found = self.execute("SELECT id FROM information_schema.processlist WHERE db = %s", database)
        for (connection,) in found:
            with contextlib.suppress(pymysql.err.OperationalError):  # it has gone by itself
                self.execute(f"KILL {connection}")
        return len(found)


def earlier_table(collation: str) -> str:
    """The statement that makes the table as version 0.2 did, of types that are the same on every database."""
    plain = {"DateTime": sa.DateTime(), "LargeBinary": sa.BLOB(), "Float": sa.Float()}

    def spelled(column: sa.Column[Any]) -> str:
        kind = plain.get(type(column.type).__name__, column.type)
        kind = sa.String(kind.length) if isinstance(kind, sa.String) else kind
        return f"`{column.name}` {kind.compile(dialect=mysql.dialect())} {'NULL' if column.nullable else 'NOT NULL'}"

    columns = ", ".join(spelled(column) for column in build_table(sa.MetaData()).columns if column.name != "id")
    return (
        f"CREATE TABLE idempotency_keys (id BIGINT AUTO_INCREMENT PRIMARY KEY, {columns}, "
        "UNIQUE INDEX ix_idempotency_keys_scope (scope, `key`), INDEX ix_idempotency_keys_expires_at (expires_at)) "
        f"CHARACTER SET {collation.partition('_')[0]} COLLATE {collation}"
    )
