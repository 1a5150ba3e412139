"""What is compared: for each a name, the module of its app, and what has to be done once before."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final


def nothing() -> None:
    """No preparation."""


def create_keys() -> None:
    """The table of the hand-written pattern, and the extension's."""
    importlib.import_module("benchmarks.others.flask_apps").create_tables()


def create_idemkit_table() -> None:
    """What ``idemkit init-pg`` does."""
    init = importlib.import_module("idemkit.backends.postgres").init_pg
    asyncio.run(init(plain_url()))


def migrate_django() -> None:
    """What ``manage.py migrate`` does."""
    importlib.import_module("benchmarks.others.django_apps").migrate()


def plain_url() -> str:
    """The database's URL as drivers have it, without SQLAlchemy's name of the driver."""
    return os.environ["BENCH_DATABASE"].replace("postgresql+psycopg2", "postgresql")


@dataclass(frozen=True)
class Subject:
    """One of those compared; its app serves ``/charge``, and ``/plain/charge`` without any guard."""

    name: str
    module: str
    variant: str
    prepare: Callable[[], None] = nothing
    asgi: bool = False

    @property
    def factory(self) -> str:
        """The app as gunicorn takes it."""
        return f"benchmarks.others.{self.module}:create({self.variant!r})"

    def create(self) -> Any:
        """The app, in this process."""
        return importlib.import_module(f"benchmarks.others.{self.module}").create(self.variant)


SUBJECTS: Final = (
    Subject("Flask-Idempotency, default", "flask_apps", "default", create_keys),
    Subject("Flask-Idempotency, STALE=reject", "flask_apps", "reject", create_keys),
    Subject("Flask-Idempotency, atomic", "flask_apps", "atomic", create_keys),
    Subject("hand-written, SQLAlchemy", "flask_apps", "classic", create_keys),
    Subject("hand-written, Redis", "flask_apps", "redis"),
    Subject("idemkit, PostgreSQL", "flask_apps", "idemkit-postgres", create_idemkit_table),
    Subject("idemkit, Redis", "flask_apps", "idemkit-redis"),
    Subject("drf-idempotency, database", "django_apps", "drf", migrate_django),
    Subject("django-idempotency-key, Redis", "django_apps", "key", migrate_django),
    Subject("fastapi-idempotency, Tortoise", "fastapi_app", "", asgi=True),
)
