"""Fixtures for tests of the extension on a Flask app."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.apps import Shop, close, make_shop

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests are about the extension; what is about databases is in tests/store, or says so."""
    for item in items:
        said = any(item.get_closest_marker(mark) for mark in ("each_driver", "one_driver"))
        if HERE in item.path.parents and not said:
            item.add_marker("one_database")


@pytest.fixture
def make(database_url: str) -> Iterator[Callable[..., Shop]]:
    """A function that makes shops on a fresh database, once for each engine and driver; takes options."""
    shops: list[Shop] = []

    def build(**config: Any) -> Shop:
        shops.append(make_shop(database_url, **config))
        return shops[-1]

    yield build
    for shop in shops:
        close(shop.app)


@pytest.fixture
def shop(make: Callable[..., Shop]) -> Shop:
    """A shop with the default configuration, on each engine and driver."""
    return make()


@pytest.fixture
def make_light(sqlite_url: str) -> Iterator[Callable[..., Shop]]:
    """As ``make``, on SQLite alone: for behaviour in which the database has no part."""
    shops: list[Shop] = []

    def build(**config: Any) -> Shop:
        shops.append(make_shop(sqlite_url, **config))
        return shops[-1]

    yield build
    for shop in shops:
        close(shop.app)


@pytest.fixture
def light(make_light: Callable[..., Shop]) -> Shop:
    """A shop with the default configuration, on SQLite alone."""
    return make_light()


@pytest.fixture(params=["sqlite", "memory", "postgresql-psycopg2", "postgresql-psycopg3"])
def atomic_url(request: pytest.FixtureRequest) -> str:
    """SQLAlchemy's URL of a fresh database, once for each kind of database and driver that atomic mode knows."""
    if request.param == "memory":
        return "sqlite://"
    fixtures = {"sqlite": "sqlite_url", "postgresql-psycopg2": "postgres_url", "postgresql-psycopg3": "psycopg_url"}
    return str(request.getfixturevalue(fixtures[request.param]))


@pytest.fixture
def make_atomic(atomic_url: str) -> Iterator[Callable[..., Shop]]:
    """As ``make``, with every guard in atomic mode, and once in memory too; ``url`` says where else."""
    shops: list[Shop] = []

    def build(url: str = atomic_url, **config: Any) -> Shop:
        shops.append(make_shop(url, **{"atomic": True, **config}))
        return shops[-1]

    yield build
    for shop in shops:
        close(shop.app)


@pytest.fixture
def atomic(make_atomic: Callable[..., Shop]) -> Shop:
    """A shop in atomic mode."""
    return make_atomic()
