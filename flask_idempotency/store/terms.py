"""What statements are made of: the clock, parameters, conditions and values. All databases have them in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import sqlalchemy as sa

from ..claim import Asking, Claim, Status

T = TypeVar("T")


class Clock(Protocol):
    """The database's clock as SQL expressions. App hosts may be off by minutes; they are never asked."""

    now: sa.ColumnElement[Any]

    def later(self, seconds: sa.ColumnElement[float]) -> sa.ColumnElement[Any]:
        """Now and so many seconds."""

    def since(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
        """The seconds since ``moment``, fractions included."""

    def reached(self, moment: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
        """Whether ``moment`` is past, written so that an index on it can be used where that is possible."""


def constant(text: str) -> sa.ColumnElement[Any]:
    """A text that never changes, as part of the statement."""
    return sa.literal_column(f"'{text}'", sa.String())


def quoted(*names: str | None) -> str:
    """A name as PostgreSQL and SQLite take it for exact, with what it is in before it, if anything."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names if name is not None)


def asked(asking: Asking) -> dict[str, Any]:
    """The parameters of the statements that grant a claim."""
    return {
        "asked_scope": asking.scope,
        "asked_key": asking.key,
        "asked_method": asking.method,
        "asked_path": asking.path,
        "asked_fingerprint": asking.fingerprint,
        "asked_version": asking.fingerprint_version,
        "asked_token": asking.token,
        "asked_retention": asking.retention,
        "asked_timeout": asking.lock_timeout,
        "asked_policy": asking.stale_policy,
    }


def held(claim: Claim) -> dict[str, Any]:
    """The parameters of the statements that only a claim's holder may run."""
    return {"held_id": claim.id, "held_scope": claim.scope, "held_key": claim.key, "held_token": claim.token}


class statement(Generic[T]):
    """A method that builds a statement, as an attribute: built at its first use, since an app uses few of them."""

    def __init__(self, build: Callable[[Any], T]) -> None:
        self._build = build
        self.__doc__ = build.__doc__

    def __get__(self, terms: Terms, owner: type[Terms]) -> T:
        # Not among the object's own attributes: atomic mode makes a copy of it for each operation, and what one of
        # them builds is for all.
        built: T | None = terms.built.get(self)
        if built is None:
            built = terms.built[self] = self._build(terms)
        return built


class Terms:
    """Under which conditions the rows of one table may change, and into what."""

    table: sa.Table
    clock: Clock
    #: The statements that have been used.
    built: dict[statement[Any], Any]
    #: Whether an UPDATE can return what it wrote.
    returning = False

    # Conditions

    def _at_key(self) -> sa.ColumnElement[bool]:
        c = self.table.c
        return sa.and_(c.scope == sa.bindparam("asked_scope"), c.key == sa.bindparam("asked_key"))

    def _by_holder(self) -> sa.ColumnElement[bool]:
        c = self.table.c
        # Id or key, either finds the row; scope and key say in which partition it is, where the table has any.
        at_key = sa.and_(c.scope == sa.bindparam("held_scope"), c.key == sa.bindparam("held_key"))
        return sa.and_(c.id == sa.bindparam("held_id"), at_key, c.fencing_token == sa.bindparam("held_token"))

    def _among(self, column: sa.ColumnElement[Any], name: str) -> sa.ColumnElement[bool]:
        """Whether a column's value is in a list that comes as a parameter."""
        return column.in_(sa.bindparam(name, expanding=True))

    def _running(self) -> sa.ColumnElement[bool]:
        return self.table.c.status == constant(Status.IN_PROGRESS.value)

    def _stale(self) -> sa.ColumnElement[bool]:
        c = self.table.c
        return sa.and_(self._running(), self.clock.since(c.locked_at) > c.lock_timeout)

    def _left(self) -> sa.ColumnElement[bool]:
        """In progress, and its lease is over, whatever its policy: somebody else may settle it."""
        return self._stale()

    def _abandoned(self) -> sa.ColumnElement[bool]:
        return sa.and_(self._stale(), self.table.c.stale_policy == constant("reexecute"))

    def _expired(self, past: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
        """Past retention, and neither alive nor waiting for a person."""
        settled = self.table.c.status.in_([constant(Status.COMPLETED.value), constant(Status.RELEASED.value)])
        return sa.and_(past, sa.or_(settled, self._abandoned()))

    def _judging(self) -> list[sa.ColumnElement[Any]]:
        """What the look-up asks of the clock."""
        c, clock = self.table.c, self.clock
        last = sa.case((c.status == constant(Status.COMPLETED.value), c.completed_at), else_=c.locked_at)
        return [
            self._stale().label("stale"),
            self._new_again().label("expired"),
            clock.since(last).label("age"),
        ]

    def _new_again(self) -> sa.ColumnElement[bool]:
        """Past retention, by the look-up's own comparison."""
        return self._expired(self.clock.since(self.table.c.expires_at) >= 0)

    def _claimable(self) -> sa.ColumnElement[bool]:
        """Nobody's: a retry may take the claim over."""
        return sa.or_(self.table.c.status == constant(Status.RELEASED.value), self._abandoned())

    def _body_headers(self) -> sa.ColumnElement[Any]:
        """The headers where they may say where the body is. Of the others nothing is fetched."""
        c = self.table.c
        return sa.case((c.response_body.is_(sa.null()), c.response_headers)).label("headers")

    # Values

    def _times(self, seconds: float = 0) -> dict[str, Any]:
        """Parameters of the clock's expressions, where it has any."""
        return {}

    def _lease_values(self) -> dict[str, Any]:
        return {
            "request_method": sa.bindparam("asked_method", type_=sa.String()),
            "request_path": sa.bindparam("asked_path", type_=sa.String()),
            "status": constant(Status.IN_PROGRESS.value),
            "fencing_token": sa.bindparam("asked_token", type_=sa.String()),
            "locked_at": self.clock.now,
            "lock_timeout": sa.bindparam("asked_timeout", type_=sa.Float()),
            "stale_policy": sa.bindparam("asked_policy", type_=sa.String()),
            "expires_at": self.clock.later(sa.bindparam("asked_retention", type_=sa.Float())),
            "updated_at": self.clock.now,
        }

    def _insert_values(self) -> dict[str, Any]:
        """A new row."""
        return {
            "scope": sa.bindparam("asked_scope", type_=sa.String()),
            "key": sa.bindparam("asked_key", type_=sa.String()),
            "request_fingerprint": sa.bindparam("asked_fingerprint", type_=sa.String()),
            "fingerprint_version": sa.bindparam("asked_version", type_=sa.Integer()),
            "attempts": sa.literal_column("1", sa.Integer()),
            "created_at": self.clock.now,
            **self._lease_values(),
        }

    def _fresh_values(self) -> dict[str, Any]:
        """A row past its retention, as if it were new: nothing of the old one is left."""
        kept = ("steps", "response_status", "response_headers", "response_body", "secret_id", "completed_at")
        values = {**self._insert_values(), **dict.fromkeys(kept, sa.null())}
        return {name: value for name, value in values.items() if name not in ("scope", "key")}

    def _takeover_values(self) -> dict[str, Any]:
        """A row whose holder is gone: its steps, fingerprint and beginning stay."""
        return {**self._lease_values(), "attempts": self.table.c.attempts + 1}

    def _record_values(self) -> dict[str, Any]:
        c = self.table.c
        answer = ("response_status", "response_headers", "response_body")
        return {
            **{name: sa.bindparam(f"kept_{name}", type_=c[name].type) for name in answer},
            "status": constant(Status.COMPLETED.value),
            "completed_at": self.clock.now,
            "expires_at": self.clock.later(sa.bindparam("asked_retention", type_=sa.Float())),
            "updated_at": self.clock.now,
        }

    def _ended_values(self, status: Status) -> dict[str, Any]:
        """A claim that its holder has given up, with its row kept. Its age counts from now."""
        return {"status": constant(status.value), "locked_at": self.clock.now, "updated_at": self.clock.now}

    def _freed_values(self) -> dict[str, Any]:
        """A row that is made claimable for the sake of its steps: of an answer, nothing is left.

        Its retention begins anew. A held key may have waited for longer than that, and would else be a new key at
        once, its steps forgotten.
        """
        answer = ("response_status", "response_headers", "response_body", "completed_at")
        return {
            **self._ended_values(Status.RELEASED),
            **dict.fromkeys(answer, sa.null()),
            "expires_at": self.clock.later(sa.bindparam("asked_retention", type_=sa.Float())),
        }
