"""Fixtures for tests beside other extensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.neighbours.five import Work, build
from tests.support.apps import Shop, close


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What holds in one order of setting up holds in the other: each test meets one at a time."""
    for item in items:
        if "order" in getattr(item, "fixturenames", ()):
            item.add_marker("one_order")


@pytest.fixture
def beside(sqlite_url: str) -> Iterator[Callable[..., tuple[Shop, Work]]]:
    """:func:`tests.neighbours.five.build` on a fresh SQLite file; gives back the connections at the end."""
    shops: list[Shop] = []

    def make(**options: Any) -> tuple[Shop, Work]:
        shop, work = build(sqlite_url, **options)
        shops.append(shop)
        return shop, work

    yield make
    for shop in shops:
        close(shop.app)


@pytest.fixture(params=["before", "after"])
def order(request: pytest.FixtureRequest) -> str:
    """Whether a neighbour is set up before the extension or after it; what :func:`beside` takes a set-up as."""
    return str(request.param)
