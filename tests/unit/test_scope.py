"""The scope: its stored forms, and that no two origins ever meet."""

from __future__ import annotations

import datetime
import enum
import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from werkzeug.local import LocalProxy

from flask_idempotency import scope as scopes

ORIGINS: dict[str, Callable[[str], str | None]] = {
    "loader": scopes.from_loader,
    "fixed": scopes.fixed,
    "user": scopes.from_user,
    "authorization": scopes.from_authorization,
}
LONG = "s" * 300


class Tenant:
    """A value with a text form of its own."""

    def __str__(self) -> str:
        return "acme"


class Plan(enum.Enum):
    """Values whose class can be iterated, and which have a text of their own."""

    FREE = 1


class Plain:
    """A value without one."""


@dataclass
class Account:
    """What a query gives; its ``repr()`` is another one when it has changed."""

    id: int
    balance: int


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ("acme", "acme"),
        ("Acme ", "Acme "),
        ("u1:x", "u1:x"),
        ("租户", "租户"),
        ("a\nb", "a\nb"),
        ("s" * 255, "s" * 255),
        (7, "7"),
        (0, "0"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Tenant(), "acme"),
        (1.5, "1.5"),
        (Decimal("1.50"), "1.50"),
        (Plan.FREE, "Plan.FREE"),
        (datetime.date(2026, 12, 1), "2026-12-01"),
        (LocalProxy(lambda: Tenant()), "acme"),
        ("acme at 0x1", "acme at 0x1"),
    ],
)
@pytest.mark.scenario(58)
def test_a_loaders_value_is_stored_as_it_is(value: object, stored: str) -> None:
    """What a loader returns is stored as its text, character by character."""
    assert stored == scopes.from_loader(value)


@pytest.mark.parametrize("value", [None, ""])
def test_nothing_is_no_scope(value: object) -> None:
    """``None`` and the empty string are no scope, never a shared one."""
    assert scopes.from_loader(value) is None
    assert scopes.from_user(value) is None


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(object(), id="object"),
        pytest.param(test_nothing_is_no_scope, id="function"),
        pytest.param(Tenant().__str__, id="method that was not called"),
        pytest.param(LocalProxy(lambda: Plain()), id="proxy"),
        pytest.param(("acme", object()), id="tuple of an object"),
        pytest.param({"acme", "emca"}, id="set"),
        pytest.param(b"acme", id="bytes"),
        pytest.param(True, id="true"),
        pytest.param(False, id="false"),
        pytest.param(Account(1, 100), id="record"),
        pytest.param(LocalProxy(lambda: Account(1, 100)), id="proxy of a record"),
        pytest.param(ValueError("acme"), id="exception"),
        pytest.param(iter("acme"), id="iterator"),
    ],
)
def test_values_without_a_stable_text_are_refused(value: object) -> None:
    """A value whose text is another one in each process, or is a slip, is an error that does not show it."""
    with pytest.raises(TypeError, match=r"^A scope must be the caller's stable id, .*, not \w+\.$"):
        scopes.from_loader(value)
    with pytest.raises(TypeError, match="stable id"):
        scopes.from_user(value)


@pytest.mark.parametrize(
    "value", ["~", "~fixed:stripe", "~user:7", "~auth:x", "~hash:x", "a\x00b", "\ud800", "s" * 256, "s" * 1000]
)
@pytest.mark.scenario(57, 78)
def test_what_the_column_can_not_hold_is_hashed(value: str) -> None:
    """A loader's value that begins with a tilde, holds a NUL or is too long is kept as its hash."""
    assert "~hash:" + hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest() == scopes.from_loader(value)


def test_a_scope_that_equals_a_credential_is_hashed() -> None:
    """A loader that returns the credential itself gets its hash stored."""
    secret = "sk_live_4242"
    stored = scopes.from_loader(secret, {secret, "another"}.__contains__)
    assert "~hash:" + hashlib.sha256(secret.encode()).hexdigest() == stored
    assert "acme" == scopes.from_loader("acme", {secret}.__contains__)


def test_the_origins_that_are_no_loader() -> None:
    """Each other origin has its prefix, and what an Authorization header says is a hash alone."""
    assert "~fixed:stripe" == scopes.fixed("stripe")
    assert "~user:7" == scopes.from_user(7)
    assert "~auth:" + hashlib.sha256(b"bearer x").hexdigest() == scopes.from_authorization("bearer x")


@pytest.mark.parametrize("text", ["acme", "7", "", "a\x00b", LONG, "\ud800"])
@pytest.mark.scenario(78)
def test_forms_fit_the_column(text: str) -> None:
    """Whatever the origin, the stored form fits the column and holds nothing that a database refuses."""
    for origin in ORIGINS.values():
        stored = origin(text)
        assert stored is None or scopes.fits(stored)


@given(st.text(max_size=60), st.text(max_size=60))
@example("stripe", "stripe")
@example("7", "~user:7")
@example(LONG, "~fixed:" + LONG)
@example(LONG, "~user:" + LONG)
@example("a\x00b", "~user:a\x00b")
@example(LONG, "~user:~fixed:" + LONG)
@pytest.mark.scenario(78)
def test_no_two_origins_ever_meet(one: str, other: str) -> None:
    """The stored forms of two origins differ, whatever text each is given; within one, only equal texts are equal."""
    for (first, from_first), (second, from_second) in product(ORIGINS.items(), repeat=2):
        forms = from_first(one), from_second(other)
        if None not in forms:
            assert (first == second and one == other) == (forms[0] == forms[1])
