"""Callables that an app hands in, and the keys that they find."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from flask import Flask, Request, request

from flask_idempotency.caller import call, find_key
from flask_idempotency.errors import KeyInvalid
from flask_idempotency.policy import Policy


@pytest.fixture
def asked() -> Iterator[Request]:
    """A request in its context."""
    with Flask("shop").test_request_context("/x", headers={"X-Tenant": "acme"}):
        yield request._get_current_object()  # type: ignore[attr-defined]


@dataclass
class Loader:
    """A callable with state, equal to others of the same state, and so without a hash."""

    name: str

    def __call__(self, request: Request) -> str:
        return request.headers[self.name]

    def without(self) -> str:
        """Takes nothing."""
        return request.headers[self.name]


def with_request(request: Request) -> str:
    """Takes the request."""
    return request.headers["X-Tenant"]


def without_argument() -> str:
    """Takes nothing."""
    return request.headers["X-Tenant"]


def with_default(request: Any = None) -> str:
    """Can be called without."""
    assert request is None
    return "acme"


def with_options(*, strict: bool = True) -> str:
    """Keywords are not for the extension to give."""
    return "acme"


def with_any(*args: Any, **kwargs: Any) -> str:
    """What takes anything is called with nothing, as a wrapper of a loader without an argument must be."""
    assert ((), {}) == (args, kwargs)
    return "acme"


async def coroutine(request: Request) -> str:
    """Waits."""
    return request.headers["X-Tenant"]


@functools.wraps(with_request)
def wrapped(*args: Any) -> str:
    """Passes on what the wrapped function takes."""
    return with_request(*args)


@pytest.mark.parametrize(
    "function",
    [
        with_request,
        without_argument,
        with_default,
        with_options,
        with_any,
        coroutine,
        wrapped,
        lambda: "acme",
        lambda asked: asked.headers["X-Tenant"],
        functools.partial(lambda name, asked: asked.headers[name], "X-Tenant"),
        functools.partial(with_request, request),
        Loader("X-Tenant"),
        Loader("X-Tenant").without,
    ],
)
def test_callables_get_the_request_if_they_take_it(asked: Request, function: Any) -> None:
    """A callable is called with the request if it has to be given an argument, else with none."""
    assert "acme" == call(function, asked)
    assert "acme" == call(function, asked)


@pytest.mark.parametrize(
    ("value", "key"),
    [("evt_1", "evt_1"), (7, "7"), (None, None), ("", None), ("e" * 255, "e" * 255)],
)
def test_a_key_from_a_callable(asked: Request, value: Any, key: str | None) -> None:
    """A key that an app finds itself may have one character or more; nothing is no key."""
    assert key == find_key(asked, Policy(key=lambda: value))


@pytest.mark.parametrize("value", ["e" * 256, "événement", "a\x00b"])
def test_a_key_from_a_callable_that_is_hashed(asked: Request, value: str) -> None:
    """What is long or not ASCII is kept as its hash."""
    key = find_key(asked, Policy(key=lambda: value))
    assert key is not None
    assert key.startswith("~hash:")


@pytest.mark.parametrize("value", [b"evt_1", True, object(), {"evt_1"}])
def test_a_callables_value_that_is_no_key(asked: Request, value: Any) -> None:
    """A value without a text of its own is an error that speaks of the key."""
    with pytest.raises(TypeError, match=r"^A key must be"):
        find_key(asked, Policy(key=lambda: value))


def test_the_header_is_not_looked_at_beside_a_callable() -> None:
    """With a callable the header plays no part, valid or not; without one it has to be valid."""
    with Flask("shop").test_request_context("/x", headers={"Idempotency-Key": "short"}):
        asked: Request = request._get_current_object()  # type: ignore[attr-defined]
        assert find_key(asked, Policy(key=lambda: None)) is None
        with pytest.raises(KeyInvalid):
            find_key(asked, Policy())
        assert find_key(asked, Policy(header="X-Other")) is None
