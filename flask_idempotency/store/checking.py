"""What is wrong with the table as the database has it, and what waits in it for a person or for ``prune``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from ..claim import Status
from .survey import Finding
from .table import COUNTS, build_table

if TYPE_CHECKING:
    from .backend import Backend

#: Seconds. Time servers keep hosts within some milliseconds; a second is more than a slow reply explains.
CLOCKS_APART: Final = 1.0

#: Seconds. A week after the end of their retention, keys wait for a pruner that nobody runs.
UNPRUNED: Final = 7 * 86_400.0

_MIGRATE: Final = (
    "Run the migration: flask db migrate, then flask db upgrade; or db.create_all() where there is no table."
)
_TIMES: Final = ("locked_at", "expires_at", "completed_at", "created_at", "updated_at")
_MYSQL: Final = ("mysql", "mariadb")


def check(backend: Backend) -> list[Finding]:
    """All findings, what is missing first.

    :raises StoreError: the database can't answer.
    """
    found = backend.run.looked(lambda connection: _Look(backend, connection).findings())
    if not any(one.code in ("table-missing", "columns-missing") for one in found):
        found += _clock(backend)
        found += _waiting(backend)
    return found


class _Look:
    """One look at the catalogue."""

    def __init__(self, backend: Backend, connection: sa.Connection) -> None:
        self._table = backend.table
        self._schema = backend.run.schema
        self._dialect = connection.dialect.name
        self._inspector = sa.inspect(connection)

    def findings(self) -> list[Finding]:
        if not self._inspector.has_table(self._table.name, schema=self._schema):
            return [Finding(f"The table {self._table.fullname!r} is missing.", _MIGRATE, "table-missing")]
        columns = {one["name"]: one for one in self._inspector.get_columns(self._table.name, schema=self._schema)}
        missing = [column.name for column in build_table(sa.MetaData()).c if column.name not in columns]
        lacking = [name for name in missing if name not in COUNTS]
        if lacking:
            problem = f"The table {self._table.fullname!r} lacks the columns {', '.join(lacking)}."
            return [Finding(problem, _MIGRATE, "columns-missing")]
        return [*self._shape(missing), *self._kinds(columns), *self._indexes()]

    def _shape(self, missing: list[str]) -> Iterator[Finding]:
        if missing:
            yield Finding(
                f"The table has the shape of release 0.4 and before (version 1): it has no columns "
                f"{', '.join(missing)}, and counts can't be kept. All else works.",
                _MIGRATE,
                "older-shape",
                information=True,
            )

    def _kinds(self, columns: dict[str, Any]) -> Iterator[Finding]:
        if self._dialect in _MYSQL:
            inexact = [name for name in ("scope", "key") if not _is_exact(columns[name]["type"])]
            if inexact:
                yield Finding(
                    f"The columns {', '.join(inexact)} are compared inexactly: case, accents or trailing blanks do not "
                    "count, so that different keys can meet.",
                    "Run the migration (flask db migrate, then flask db upgrade), which makes them VARBINARY.",
                    "inexact",
                )
            coarse = [name for name in _TIMES if getattr(columns[name]["type"], "fsp", None) != 6]
            if coarse:
                yield Finding(
                    f"The columns {', '.join(coarse)} keep no microseconds: leases are rounded to whole seconds.",
                    "Alter them to DATETIME(6).",
                    "coarse-times",
                )
        if self._dialect == "postgresql":
            naive = [name for name in _TIMES if not getattr(columns[name]["type"], "timezone", True)]
            if naive:
                yield Finding(
                    f"The columns {', '.join(naive)} have no time zone: what they mean depends on the session's.",
                    "Alter them to TIMESTAMP WITH TIME ZONE.",
                    "naive-times",
                )

    def _indexes(self) -> Iterator[Finding]:
        indexes = self._inspector.get_indexes(self._table.name, schema=self._schema)
        constraints = self._inspector.get_unique_constraints(self._table.name, schema=self._schema)
        unique: list[set[str | None]] = [set(one["column_names"]) for one in constraints]
        unique += [set(one["column_names"]) for one in indexes if one["unique"] and not _partial(one)]
        # Scope and key together, or one of them alone, in either order: at most one row has both then.
        if not any(names and names <= {"scope", "key"} for names in unique):
            yield Finding(
                "There is no unique index on scope and key, which alone decides who gets a claim: two requests with "
                "one key can both run, or all are refused.",
                "Run the migration (flask db migrate, then flask db upgrade); or create the index by hand.",
                "unique-index-missing",
            )
        if not any(one["column_names"][:1] == ["expires_at"] for one in indexes if not _partial(one)):
            yield Finding(
                "There is no index on expires_at: each batch of prune reads the whole table.",
                "Run the migration (flask db migrate, then flask db upgrade); or create the index by hand.",
                "expiry-index-missing",
            )


def _partial(index: Any) -> bool:
    options = index.get("dialect_options", {})
    return any(name.endswith("_where") and value is not None for name, value in options.items())


def _is_exact(kind: Any) -> bool:
    """Whether MySQL compares a column of this type by its bytes, blanks at the end included."""
    if isinstance(kind, sa.types._Binary):
        return True
    return str(getattr(kind, "collation", None) or "").endswith(("nopad_bin", "0900_bin"))


def _clock(backend: Backend) -> Iterator[Finding]:
    """How far the database's clock is from this host's. Nothing depends on it but what people read in logs."""
    before = time.time()
    there = backend.time_there()
    after = time.time()
    apart = there - (before + after) / 2
    if abs(apart) - (after - before) / 2 > CLOCKS_APART:
        yield Finding(
            f"This host's clock and the database's are {abs(apart):.1f} s apart: the database's is "
            f"{'ahead' if apart > 0 else 'behind'}. Claims go by the database's alone.",
            "Let a time server set both (chrony, systemd-timesyncd).",
            "clocks-apart",
            information=True,
            seconds=abs(apart),
        )


def _waiting(backend: Backend) -> Iterator[Finding]:
    """What waits for a person, or for ``prune``."""
    held, rejected = backend.left_to_people()
    for number, what, code in (
        (held, "held: {} outcome is unknown", Status.HELD.value),
        (rejected, "past {} lease and not to be taken over (IDEMPOTENCY_STALE)", "stale"),
    ):
        if number:
            verb, of = ("key is", "its") if number == 1 else ("keys are", "their")
            yield Finding(
                f"{number} {verb} {what.format(of)}.",
                "Find out what was done; then flask idempotency release SCOPE KEY, or idempotency.settle().",
                code,
                information=True,
            )
    overdue = backend.longest_overdue()
    if overdue > UNPRUNED:
        yield Finding(
            f"Keys past their retention have not been pruned for {overdue / 86_400:.0f} days.",
            "Run flask idempotency prune from cron.",
            "unpruned",
            information=True,
            seconds=overdue,
        )
