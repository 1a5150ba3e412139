"""The database goes at each statement of a request in turn: before it arrives, or before its reply does; for that
statement alone, or for all that the request sends after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from werkzeug.test import TestResponse

from tests.support.apps import Shop, close, new_key
from tests.support.kinds import ask, charged, make_kinds, settled
from tests.support.proxy import CuttingProxy

pytestmark = pytest.mark.one_driver

#: More than any of the views below sends, so that a loop that never ends is a failure.
MOST = 40


@pytest.fixture
def behind(tcp_url: str) -> Iterator[Shop]:
    """A shop behind the cutting proxy."""
    shop = make_kinds(tcp_url)
    yield shop
    close(shop.app)


def each_cut(
    shop: Shop, proxy: CuttingProxy, path: str, how: str, times: int
) -> Iterator[tuple[int, str, TestResponse]]:
    """A key and an amount of its own for each statement of the request, and the first answer, cut there."""
    lose: Callable[..., Any] = getattr(proxy, how)
    for number in range(1, MOST):
        settled(shop, "/plain", new_key(), 0)  # so that each finds connections, and none begins with a new one's words
        key = new_key()
        rule = lose("", after=number - 1, times=times)
        first = ask(shop, path, key, number)
        rule.left = 0
        if not rule.happened:
            assert number > 3, "hardly a statement was met"
            return
        yield number, key, first
    raise AssertionError(f"a request sent more than {MOST} statements")


@pytest.mark.scenario(59, 75)
@pytest.mark.parametrize("times", [1, 1_000])
@pytest.mark.parametrize("how", ["lose_request", "lose_reply"])
def test_an_atomic_view(behind: Shop, cutting_proxy: CuttingProxy, how: str, times: int) -> None:
    """In atomic mode the retry ends with work and record, once each, wherever the connection was cut before."""
    for number, key, first in each_cut(behind, cutting_proxy, "/atomic", how, times):
        assert first.status_code in (201, 500, 503), number
        assert first.status_code != 201 or charged(behind, number) == 1, number
        assert 201 == settled(behind, "/atomic", key, number).status_code, number
        assert (1, 1) == (charged(behind, number), charged(behind, -number)), number
        assert "true" == ask(behind, "/atomic", key, number).headers["Idempotent-Replay"], number


@pytest.mark.scenario(59, 75)
@pytest.mark.parametrize("times", [1, 1_000])
@pytest.mark.parametrize("how", ["lose_request", "lose_reply"])
def test_a_view_that_commits(behind: Shop, cutting_proxy: CuttingProxy, how: str, times: int) -> None:
    """In the default mode no retry charges a second time: it gets the answer, or the outcome is unknown."""
    unknown = 0
    for number, key, first in each_cut(behind, cutting_proxy, "/plain", how, times):
        assert first.status_code in (201, 500, 503), number
        retry = settled(behind, "/plain", key, number)
        if retry.status_code == 409:  # its COMMIT had no reply: held, since nobody knows
            unknown += 1
            assert retry.json["type"].endswith("outcome-unknown"), number
            assert charged(behind, number) <= 1, number
        else:
            assert (201, 1) == (retry.status_code, charged(behind, number)), number
    assert unknown <= 1


@pytest.mark.scenario(59)
@pytest.mark.parametrize("times", [1, 1_000])
@pytest.mark.parametrize("how", ["lose_request", "lose_reply"])
def test_steps(behind: Shop, cutting_proxy: CuttingProxy, how: str, times: int) -> None:
    """A step is repeated at most where its result could not be stored, and then with the same derived key."""
    for number, key, first in each_cut(behind, cutting_proxy, "/stepped", how, times):
        assert first.status_code in (201, 500, 503), number
        retry = settled(behind, "/stepped", key, number)
        assert 201 == retry.status_code, number
        assert (1, True) == (len(set(behind.runs)), len(behind.runs) <= 2), number
        behind.runs.clear()
