"""What people ask about the stored keys. No request needs any of it.

All of it reads page by page, or one key at a time: no statement holds a snapshot of a large table for long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import sqlalchemy as sa

from ..claim import Status
from ..errors import RowUnreadable
from ..scope import fits
from . import rows
from .erasing import Erasing
from .shape import Shape
from .survey import Detail, Filters, Stats, Summary, Tally
from .table import COUNTS
from .terms import statement

#: How many keys a list reads in one statement where it has to look on, and how many a tally takes together.
PAGE: Final = 1_000
TALLIED: Final = 20_000

#: Seconds: a minute, an hour, a day, a week.
AGES: Final = (60.0, 3_600.0, 86_400.0, 604_800.0)

_TIMES: Final = ("created_at", "updated_at", "locked_at", "completed_at", "expires_at")
_GROUPS: Final = {"scope": ("scope",), "path": ("request_method", "request_path")}
#: What a list shows of a row, beside its times, the judgements of them, and its counts.
_SHOWN: Final = (
    "id", "scope", "key", "status", "request_method", "request_path", "attempts", "lock_timeout", "stale_policy",
    "response_status",
)  # fmt: skip
_LAST: Final = 2**63 - 1


class Surveying(Erasing):
    """Overviews of one table."""

    shape: Shape
    #: Whether the table was found without the columns of counts, as release 0.4 made it. They are zero then.
    older = False

    def stats(self) -> Stats:
        """The whole table at a glance."""
        found = self._looked("_stats", self._age_values())

        def total(name: str) -> int:
            return sum(int(getattr(row, name)) for row in found)

        keys, ages = total("total"), [total(f"age_{number}") for number in range(len(AGES))]
        # Each bound has counted what is younger than it, whatever the others have.
        parts = [younger - before for younger, before in zip([*ages, keys], [0, *ages], strict=True)]
        oldest = [time for row in found if (time := rows.time_of(row.oldest)) is not None]
        by_status = {status: sum(row.total for row in found if row.status == status.value) for status in Status}
        return Stats(
            by_status=by_status,
            stale=total("stale"),
            expired=total("expired"),
            by_age=list(zip([*AGES, None], parts, strict=True)),
            bytes=self._size(),
            oldest=min(oldest, default=None),
            counts=rows.counts_of(SimpleNamespace(**{name: total(name) for name in COUNTS})),
            unknown=keys - sum(by_status.values()),
        )

    def tally(self, by: str) -> Iterator[Tally]:
        """The keys of each scope, or of each method and path, some thousands of keys at a time.

        :raises ValueError: ``by`` is neither ``scope`` nor ``path``.
        """
        if by not in _GROUPS:
            raise ValueError(f"Keys are tallied by {' or by '.join(_GROUPS)}, not by {by!r}.")
        return self._tallied(by)

    def listed(self, filters: Filters, limit: int, before: int | None = None) -> Sequence[Summary]:
        """At most ``limit`` keys, those stored last first; with ``before`` only those with a smaller id."""
        found: list[Summary] = []
        if not _storable(filters):
            return found  # what no row can hold is in none of them, and need not be looked for in all
        last, size = _LAST if before is None else before, min(limit, PAGE)
        while len(found) < limit:
            page = self._page(filters, {"before_id": last, "page": size})
            # The statement lets through more than what is meant where the database compares inexactly, or can't judge.
            found += [one for row in page.values() if row is not None and _meant(filters, one := self._summed(row))]
            if len(page) < size:
                break
            last, size = min(page), PAGE
        return found[: max(limit, 0)]

    def detail(self, scope: str, key: str) -> Detail | None:
        """All that is stored of one key.

        :raises RowUnreadable: the row is corrupt.
        """
        if not (fits(scope) and fits(key)):
            return None
        for row in self._looked("_detail", {"asked_scope": scope, "asked_key": key}):
            stored = rows.stored_of(row, scope, key, self._judged(row))
            summary = self._summed(row)
            if summary.problem is not None:
                raise RowUnreadable(summary.problem)
            steps, version = rows.steps_of(row), stored.fingerprint_version
            return Detail(summary, stored.fingerprint, version, row.secret_id, steps, stored.recorded)
        return None

    # Parts

    def _looked(self, name: str, values: Mapping[str, Any]) -> Sequence[Any]:
        """What one of the statements reads, built for the shape that the table has now."""
        self._see_shape()
        return self.run.read(getattr(self, name), values).rows

    def _see_shape(self) -> None:
        older = not self.shape.has_counts(self.run)
        if older != self.older:
            self.older = older
            self.built.clear()

    def _tallied(self, by: str) -> Iterator[Tally]:
        last, seen, width = -1, TALLIED, len(_GROUPS[by])
        while seen == TALLIED:
            seen = 0
            # By their places: there may be as many groups as keys.
            for row in self._looked(f"_by_{by}", {"last_id": last, "page": TALLIED}):
                group, (last_id, keys, retried), counts = row[:width], row[width : width + 3], row[width + 3 :]
                last, seen = max(last, last_id), seen + keys
                # SQLite's columns hold what is no text, too. One such row takes nothing from the others.
                group = [one if isinstance(one, str) else str(one) for one in group]
                scope, method, path = (*group, None, None) if by == "scope" else (None, *group)
                yield Tally(scope, method, path, keys, int(retried), rows.counts_from(counts))

    def _page(self, filters: Filters, values: Mapping[str, Any]) -> dict[int, Any]:
        """Rows by their ids, largest first; ``None`` where one is gone by now."""
        values = {**values, "asked_scope": filters.scope}
        self._see_shape()
        try:
            return {row.id: row for row in self.run.read(self._chosen(self._summaries, filters), values).rows}
        except RowUnreadable:
            # A value of one of them can't even be fetched.
            ids = self.run.read(self._chosen(self._ids, filters), values).rows
            return {row.id: self._row(row.id) for row in ids}

    def _row(self, id: int) -> Any:
        """One row, without what can't be fetched of it."""
        mine = self.table.c.id == sa.bindparam("row_id", type_=self.table.c.id.type)
        try:
            found = self.run.read(sa.select(*self._summary_columns()).where(mine), {"row_id": id}).rows
            return found[0] if found else None
        except RowUnreadable:
            pass
        values: dict[str, Any] = {}
        for column in self._summary_columns():
            try:
                one = self.run.read(sa.select(column).where(mine), {"row_id": id}).rows
            except RowUnreadable:
                values[column.name] = None
                continue
            if not one:
                return None
            values[column.name] = one[0][0]
        return SimpleNamespace(**values)

    def _summed(self, row: Any) -> Summary:
        return rows.summary_of(row, self._judged)

    def _judged(self, row: Any) -> rows.Judgement:
        return rows.judged(row)

    def _size(self) -> int | None:
        """What table and indexes take, in bytes; ``None``: the database can't say."""
        return None

    # Statements

    @statement
    def _stats(self) -> sa.Executable:
        c = self.table.c
        sums = {"stale": self._perhaps_stale(), "expired": self._surely_expired()}
        sums |= {f"age_{number}": self._younger(age) for number, age in enumerate(AGES)}
        oldest = self._moment(sa.func.min(c.created_at))
        return sa.select(
            c.status,
            sa.func.count().label("total"),
            oldest.label("oldest"),
            *(_how_many(condition).label(name) for name, condition in sums.items()),
            *(sa.func.sum(count).label(count.name) for count in self._count_columns()),
        ).group_by(c.status)

    @statement
    def _by_scope(self) -> sa.Executable:
        return self._tallying(self.table.c.scope)

    @statement
    def _by_path(self) -> sa.Executable:
        return self._tallying(self.table.c.request_method, self._exact_path())

    @statement
    def _summaries(self) -> sa.Select[Any]:
        return self._listing(self._summary_columns())

    @statement
    def _ids(self) -> sa.Select[Any]:
        return self._listing([self.table.c.id])

    @statement
    def _detail(self) -> sa.Executable:
        c = self.table.c
        more = [c[name] for name in rows.COLUMNS if name not in _SHOWN]
        kept = [column for column in self._kept_columns() if column.name != "id"]
        return sa.select(*self._summary_columns(), *more, *kept).where(self._at_key())

    # Their parts

    def _tallying(self, *groups: sa.ColumnElement[Any]) -> sa.Select[Any]:
        """Of the next keys in the order of their ids, as many as make a page."""
        c = self.table.c
        page = (
            sa.select(c.id, c.attempts, *groups, *self._count_columns())
            .where(c.id > sa.bindparam("last_id", type_=c.id.type))
            .order_by(c.id)
            .limit(sa.bindparam("page", type_=sa.Integer()))
            .subquery()
        )
        by, counts = [page.c[group.name] for group in groups], [page.c[name] for name in COUNTS]
        retried = sa.or_(page.c.attempts > 1, *(count > 0 for count in counts[:3]))
        totals = (sa.func.max(page.c.id).label("last_id"), sa.func.count().label("total"))
        sums = (sa.func.sum(count).label(count.name) for count in counts)
        return sa.select(*by, *totals, _how_many(retried).label("retried"), *sums).group_by(*by)

    def _listing(self, columns: Sequence[sa.ColumnElement[Any]]) -> sa.Select[Any]:
        c = self.table.c
        before = c.id < sa.bindparam("before_id", type_=c.id.type)
        return sa.select(*columns).where(before).order_by(c.id.desc()).limit(sa.bindparam("page", type_=sa.Integer()))

    def _chosen(self, listing: sa.Select[Any], filters: Filters) -> sa.Select[Any]:
        c = self.table.c
        conditions = []
        if filters.scope is not None:
            conditions.append(self._of_scope())
        if filters.status is not None:
            conditions.append(self._is(filters.status))
        if filters.stale:
            conditions.append(self._perhaps_stale())
        for column, text in ((c.key, filters.key), (c.request_path, filters.path)):
            # What follows a character that a driver or a database may have its own ideas about is compared here.
            if text and (beginning := _plain(text)):
                conditions.append(sa.type_coerce(column, sa.String()).startswith(beginning, autoescape=True))
        return listing.where(*conditions)

    def _summary_columns(self) -> list[sa.ColumnElement[Any]]:
        c = self.table.c
        times = [self._moment(c[name]).label(f"told_{name}") for name in _TIMES]
        return [*(c[name] for name in _SHOWN), *times, *self._judging(), *self._count_columns()]

    def _count_columns(self) -> list[sa.Label[int]]:
        """The counts, which are absent until something is counted, and on an older table."""
        zero = sa.literal_column("0", sa.Integer())
        return [(zero if self.older else sa.func.coalesce(self.table.c[name], zero)).label(name) for name in COUNTS]

    def _exact_path(self) -> sa.ColumnElement[Any]:
        """The path, so that no two are one."""
        return self.table.c.request_path

    def _moment(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        """A time as the driver gives it: one that is none is found out later."""
        return sa.type_coerce(moment, sa.types.NullType())

    def _perhaps_stale(self) -> sa.ColumnElement[bool]:
        """In progress past its lease, as far as the database can judge."""
        return self._stale()

    def _surely_expired(self) -> sa.ColumnElement[bool]:
        """Past its retention, as far as the database can judge."""
        return self._expired(self.clock.reached(self.table.c.expires_at))

    def _younger(self, seconds: float) -> sa.ColumnElement[bool]:
        """Stored less than so many seconds ago."""
        return self.clock.since(self.table.c.created_at) < sa.literal_column(str(seconds), sa.Float())

    def _age_values(self) -> dict[str, Any]:
        """Parameters of :meth:`_younger`, where it has any."""
        return {}


def _how_many(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return sa.func.sum(sa.case((condition, sa.literal_column("1")), else_=sa.literal_column("0")))


def _plain(text: str) -> str:
    """What a text begins with, as far as it is printable ASCII."""
    for place, character in enumerate(text):
        if not " " <= character <= "~":
            return text[:place]
    return text


def _storable(filters: Filters) -> bool:
    """Whether a row can hold what is asked for."""
    return all(fits(text) for text in (filters.scope or "", filters.key or "", (filters.path or "")[:255]))


def _meant(filters: Filters, one: Summary) -> bool:
    return (
        filters.scope in (None, one.scope)
        and filters.status in (None, one.status)
        and one.key.startswith(filters.key or "")
        and one.path.startswith(filters.path or "")
        and (one.stale or not filters.stale)
    )
