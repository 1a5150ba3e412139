"""What becomes of a table of PostgreSQL that grows: latency by size, pruning, bytes per key, and bloat.

``python -m benchmarks growth``. Rows are made by ``INSERT … SELECT generate_series``, before the indexes.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import sqlalchemy as sa

from flask_idempotency.claim import Asking
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.testing import ANSWER, ask, claimed
from tests.store.support import app_engine, execute, opened

from . import servers
from .interleaved import Sample, Spread, interleaved, timed
from .load import percentile
from .report import Report, Target, duration

SIZES: Final = (10_000, 1_000_000, 10_000_000)
PRUNED: Final = 1_000_000
#: Keys that stay while others are pruned: the replays' own.
KEPT: Final = 10_000
BODY: Final = 2_000
SCOPES: Final = 1_000
FLAT: Final = Target(at_most=1.5)

#: A day in hours, each with so many keys. After two of them each hour prunes what the day before wrote.
HOURS: Final = 24
KEYS_AN_HOUR: Final = 1_000

_KEY = "md5(n::text)"


def asking(number: int) -> Asking:
    """The request whose row :func:`fill` has made from that number."""
    key = hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()
    return ask(scope=f"tenant-{number % SCOPES}", key=key)


def fill(store: SQLAlchemyStore, first: int, last: int, body: int = 0, expires: str = "1 day") -> None:
    """Add recorded rows, copies of the one that is there, under keys of their own."""
    # Of random bytes, which PostgreSQL can't compress.
    values = {
        "scope": f"'tenant-' || n % {SCOPES}",
        "key": _KEY,
        "expires_at": f"now() + interval '{expires}' + n * interval '1 microsecond'",
        "response_body": "CAST(:body AS bytea)" if body else "response_body",
    }
    columns = [column.name for column in store.table.c if column.name != "id"]
    chosen = ", ".join(values.get(name, name) for name in columns)
    source = f"(SELECT * FROM {{table}} WHERE {{key}} = 'template') t, generate_series({first}, {last}) n"
    given = {"body": secrets.token_bytes(body)} if body else {}
    execute(store, f"INSERT INTO {{table}} ({', '.join(columns)}) SELECT {chosen} FROM {source}", **given)


def template(store: SQLAlchemyStore) -> None:
    """The row that others are copied from."""
    store.record(claimed(store, ask(key="template")), ANSWER, 86_400)


def grown(store: SQLAlchemyStore, size: int) -> None:
    """Make a table of so many rows, and its indexes afterwards."""
    template(store)
    with unindexed(store):
        fill(store, 1, size)
    settle(store)


@contextmanager
def unindexed(store: SQLAlchemyStore) -> Iterator[None]:
    """Without the indexes other than the primary key, which are made again afterwards."""
    engine = app_engine(store)
    for index in store.table.indexes:
        index.drop(engine)
    yield
    for index in store.table.indexes:
        index.create(engine)


def settle(store: SQLAlchemyStore) -> None:
    """Leave no work of the filling to what is measured."""
    with app_engine(store).connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text(f"VACUUM ANALYZE {store.table.name}"))
        connection.execute(sa.text("CHECKPOINT"))


def latency(report: Report, url: str, sizes: tuple[int, ...], rounds: int, calls: int) -> None:
    """Replays and claims at each size, in turn, and what a key takes on disk in the largest table."""
    with ExitStack() as stack:
        stores = {size: stack.enter_context(opened(url)) for size in sizes}
        variants: dict[str, Callable[[], Sample]] = {}
        for size, store in stores.items():
            grown(store, size)
            variants[f"replay, {size:,} keys"] = timed(store.claim, partial(known, size), calls)
            variants[f"claim, {size:,} keys"] = timed(store.claim, unknown, calls)
        series = interleaved(variants, rounds)
        rows = []
        for name, one in series.items():
            base = series[f"{name.split(',')[0]}, {sizes[0]:,} keys"]
            ratio = one.ratio(base)
            rows.append([name, duration(one.spread(), 1e-3), ratio, FLAT.verdict(ratio.median)])
        samples = {name: one.samples for name, one in series.items()}
        report.table("A call of the store, by the table's size", ["", "ms", "ratio", "target"], rows, samples=samples)
        title = "Bytes per key, with keys of 32 characters and a small answer"
        report.table(title, ["", "bytes"], sizes_of(stores[sizes[-1]], sizes[-1]))


def known(size: int) -> Asking:
    """A request that has been answered."""
    return asking(random.randint(1, size))


def unknown() -> Asking:
    """A request that nobody has seen."""
    return ask(key=secrets.token_hex(16))


def sizes_of(store: SQLAlchemyStore, rows: int) -> list[list[object]]:
    """What the table and each index take, for each row."""
    found = execute(
        store,
        "SELECT replace(relname, '{table}', 'idempotency_keys'), pg_relation_size(oid) FROM pg_class WHERE oid = "
        "'{table}'::regclass OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = '{table}'::regclass)",
    )
    return [[name, size / rows] for name, size in sorted(found)]


def pruning(report: Report, url: str, rows: int, rounds: int) -> None:
    """A prune in batches, and one plain DELETE, each of the same number of rows while replays go on."""
    ways: dict[str, Callable[[SQLAlchemyStore], object]] = {
        "one DELETE": lambda store: execute(store, "DELETE FROM {table} WHERE expires_at <= now()"),
        "prune, batches of 5,000": pruned,
    }
    series = interleaved({name: partial(deleting, url, rows, way) for name, way in ways.items()}, rounds, 0)
    base = series["one DELETE"]
    table = []
    for name, one in series.items():
        speed, slower = one.ratio(base, "rows/s"), Spread.of([s["p99"] / s["idle p99"] for s in one.samples])
        verdict = f"{Target(at_least=0.7).verdict(speed.median)}; {Target(at_most=2).verdict(slower.median)}"
        idle, during = duration(one.spread("idle p99"), 1e-3), duration(one.spread("p99"), 1e-3)
        table.append([name, one.spread("rows/s"), speed, idle, during, slower, verdict])
    heads = ["", "rows/s", "ratio", "replay p99, idle, ms", "during, ms", "ratio", "target"]
    samples = {name: one.samples for name, one in series.items()}
    report.table(f"Deleting {rows:,} expired rows with bodies of 2 kB", heads, table, samples=samples)


def pruned(store: SQLAlchemyStore) -> None:
    """As ``flask idempotency prune`` goes."""
    while store.prune(5_000).count:
        pass


def deleting(url: str, rows: int, way: Callable[[SQLAlchemyStore], object]) -> Sample:
    """Fill a table, and delete what is expired in one way."""
    with opened(url) as store:
        template(store)
        with unindexed(store):
            fill(store, 1, KEPT)
            fill(store, KEPT + 1, KEPT + rows, BODY, "-1 hour")
        settle(store)
        begin = time.monotonic()
        idle = replays(store, lambda: time.monotonic() > begin + 2)
        taken: list[float] = []

        def work() -> None:
            start = time.monotonic()
            way(store)
            taken.append(time.monotonic() - start)

        worker = threading.Thread(target=work)
        worker.start()
        during = replays(store, lambda: bool(taken) or not worker.is_alive())
        worker.join()
        execute(store, "DROP TABLE {table}")
        return {"rows/s": rows / taken[0], "idle p99": percentile(idle, 0.99), "p99": percentile(during, 0.99)}


def replays(store: SQLAlchemyStore, over: Callable[[], bool]) -> list[float]:
    """The times of one replay after the other, in seconds."""
    times = []
    while not over():
        request = known(KEPT)
        begin = time.perf_counter()
        store.claim(request)
        times.append(time.perf_counter() - begin)
    return times


#: The share of dead rows at which a table is vacuumed, its fillfactor, and whether expires_at is indexed.
CHURN: Final[dict[str, tuple[float, int, bool]]] = {
    "PostgreSQL's defaults": (0.2, 100, True),
    "scale factor 0.02": (0.02, 100, True),
    "scale factor 0.02, fillfactor 70": (0.02, 70, True),
    "scale factor 0.02, expires_at not indexed": (0.02, 100, False),
}


def churn(report: Report, url: str, keys_an_hour: int) -> None:
    """Table and indexes after two days of claims, records and prunes, vacuumed as autovacuum would between hours."""
    rows = [[name, *lived(url, keys_an_hour, *settings)] for name, settings in CHURN.items()]
    title = f"After two days of {HOURS} hours with {keys_an_hour:,} keys each, of which one day is kept"
    heads = ["", "table, bytes per key", "indexes, bytes per key", "HOT updates, %", "log, bytes per key", "vacuums"]
    report.table(title, heads, rows)


def lived(url: str, keys: int, scale: float, fillfactor: int, indexed: bool) -> list[object]:
    """Let two days pass over one table."""
    with opened(url, isolation_level="AUTOCOMMIT") as store, app_engine(store).connect() as connection:
        name = store.table.name
        template(store)

        def run(text: str) -> Any:
            return connection.execute(sa.text(text))

        run(f"ALTER TABLE {name} SET (fillfactor = {fillfactor}, autovacuum_enabled = off)")
        run("SET synchronous_commit = off")
        if not indexed:
            run(f"DROP INDEX ix_{name}_expires_at")
        log = run("SELECT pg_current_wal_insert_lsn()::text").scalar()
        vacuums = 0
        for hour in range(2 * HOURS):
            run(an_hour(store, hour * keys, keys))
            if hour >= HOURS:
                run(f"DELETE FROM {name} WHERE expires_at <= {moment(hour - HOURS)}")
            run("SELECT pg_stat_force_next_flush()")
            count = "SELECT n_dead_tup, n_live_tup FROM pg_stat_user_tables WHERE relname = "
            dead, live = run(f"{count}'{name}'").one()
            if dead > 50 + scale * live:
                run(f"VACUUM {name}")
                vacuums += 1
        kept = HOURS * keys
        sizes = run(f"SELECT pg_relation_size('{name}'), pg_indexes_size('{name}')").one()
        stats = f"SELECT 100.0 * n_tup_hot_upd / n_tup_upd FROM pg_stat_user_tables WHERE relname = '{name}'"
        written = run(f"SELECT pg_current_wal_insert_lsn() - CAST('{log}' AS pg_lsn)").scalar()
        hot = float(run(stats).scalar())
        return [sizes[0] / kept, sizes[1] / kept, hot, float(written) / (2 * kept), vacuums]


def moment(hour: int) -> str:
    """The end of the retention of what that hour records."""
    return f"(timestamptz '2000-01-01' + interval '{hour} hours')"


def an_hour(store: SQLAlchemyStore, first: int, keys: int) -> str:
    """Claim and record one key after the other, each a transaction, as requests do."""
    name, hour = store.table.name, first // keys
    early = {"key": _KEY, "status": "'in_progress'", "response_status": "NULL", "response_headers": "NULL"}
    early |= {"response_body": "NULL", "completed_at": "NULL", "expires_at": moment(hour)}
    columns = [column.name for column in store.table.c if column.name != "id"]
    chosen = ", ".join(early.get(column, column) for column in columns)
    answer = "response_status, response_headers, response_body, completed_at"
    source = f"{name} WHERE scope = 'tenant-1' AND key = 'template'"
    return f"""DO $$ BEGIN FOR n IN {first + 1}..{first + keys} LOOP
        INSERT INTO {name} ({", ".join(columns)}) SELECT {chosen} FROM {source};
        COMMIT;
        UPDATE {name} k SET ({answer}) = (SELECT {answer} FROM {source}),
            status = 'completed', expires_at = {moment(hour)} + interval '1 microsecond' * (n % 1000 - 1000)
            WHERE scope = 'tenant-1' AND key = {_KEY};
        COMMIT;
    END LOOP; END $$"""


def main(quick: bool) -> int:
    """Measure, print and write."""
    report = Report("growth")
    with servers.postgres() as server:
        report.versions["PostgreSQL"] = servers.version(server)
        url = servers.tcp_url(server, server.create_database())
        sizes, rounds, calls = ((100, 1_000), 2, 5) if quick else (SIZES, 7, 200)
        latency(report, url, sizes, rounds, calls)
        pruning(report, url, *((1_000, 1) if quick else (PRUNED, 2)))
        churn(report, url, 10 if quick else KEYS_AN_HOUR)
    report.write()
    return 0
