"""Derived keys: their form, what they depend on, and what names the secret behind them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from flask_idempotency.steps import derived, identity

ANY = st.text() | st.text(st.characters(min_codepoint=0xD800, max_codepoint=0xDFFF))
SECRET = b"a secret of tests"


def test_derived_keys_never_change() -> None:
    """These values are in other systems: a later release that derived others would have them do things twice."""
    assert "8fdc5e85-1c7f-8968-b36b-b67beec14546" == derived(SECRET, "acme", "order-00001", "charge")
    assert "3fa7b8ca-c82e-8fed-beb0-ba05664d13fe" == derived(SECRET, "acme", "order-00001", "refund ✉")
    assert "a62e0a3a0cc0f466" == identity(SECRET)


@given(secret=st.binary(min_size=1), scope=ANY, key=ANY, name=ANY)
def test_a_derived_key_is_a_uuid(secret: bytes, scope: str, key: str, name: str) -> None:
    """Whatever goes in: a UUID of version 8 in 36 characters, the same each time. Square takes 45, Adyen 64."""
    first = derived(secret, scope, key, name)
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", first)
    assert first == derived(secret, scope, key, name)


@given(one=st.tuples(st.binary(min_size=1), ANY, ANY, ANY), other=st.tuples(st.binary(min_size=1), ANY, ANY, ANY))
def test_every_part_counts(one: tuple[bytes, str, str, str], other: tuple[bytes, str, str, str]) -> None:
    """Keys of another secret, scope, key or name are other keys."""
    # HMAC fills a short key up with zeros: secrets that differ in trailing ones alone are one secret.
    same = (one[0].rstrip(b"\0"), *one[1:]) == (other[0].rstrip(b"\0"), *other[1:])
    assert same == (derived(*one) == derived(*other))


def test_parts_are_framed() -> None:
    """A character that moves from one part to the next makes another key, and so do parts that change places."""
    moved = [
        ("ab", "c", "d"),
        ("a", "bc", "d"),
        ("abc", "", "d"),
        ("a", "b", "cd"),
        ("a", 'b", "c', "d"),
        ("d", "c", "ab"),
    ]
    assert len(moved) == len({derived(SECRET, *parts) for parts in moved})


def test_the_digest_fills_the_key() -> None:
    """Beside the six bits of the form every bit varies: 122 of them can't be guessed."""
    numbers = [int(derived(SECRET, "acme", "order-00001", str(n)).replace("-", ""), 16) for n in range(200)]
    ones, zeros = 0, 0
    for number in numbers:
        ones, zeros = ones | number, zeros | ~number
    assert 122 == (ones & zeros & (2**128 - 1)).bit_count()


@given(one=st.binary(min_size=1), other=st.binary(min_size=1))
def test_what_names_a_secret(one: bytes, other: bytes) -> None:
    """A secret's name is 16 hexadecimal digits, another one for each secret, and gives no key away."""
    assert re.fullmatch("[0-9a-f]{16}", identity(one))
    assert (one == other) == (identity(one) == identity(other))
    assert identity(one) not in derived(one, "acme", "order-00001", "charge").replace("-", "")
