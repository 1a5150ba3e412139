"""Keyrings, and bodies that are sealed piece by piece."""

from __future__ import annotations

import base64
import os
import re
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flask_idempotency.config import read_config
from flask_idempotency.errors import BodyLost, BodyStoreError, OptionError, RowUnreadable
from flask_idempotency.keyring import Keyring
from flask_idempotency.recorded import Elsewhere, Recorded
from flask_idempotency.sealed_bodies import PIECE, BodySealer, opened_body
from flask_idempotency.sealing import fingerprinted, opened, opened_step, sealed, sealed_step

pytest.importorskip("cryptography")

# Fixed, since they are in the names of tests.
ONE, TWO = (base64.urlsafe_b64encode(letter * 32).decode() for letter in (b"1", b"2"))
RING, BOTH = Keyring([ONE]), Keyring([TWO, ONE])
NAME = "0123456789abcdef0123456789abcdef-0123456789abcdef.body"

#: Made by the first release that sealed, with the key of the bytes 0 to 31.
FIXED_ID = "03e7d9cb"
FIXED_FINGERPRINT = "03e7d9cbc3721c9f29b367a828aac8a5fee32ad8d6f54330dc6f92237c1490de"
FIXED_STEP = (
    ":sealed 1 03e7d9cb 8YrgS5qLUEJlSv3iMn6HIVEqvcnfhTMJQJzE/EKAxqE9L8Zcdpn1zDNf7hVOnrxY5xHaIw="
    "="
)
FIXED_ANSWER = base64.b64decode(
    "tuuA40+Mm9nEFU+7LfWN/u8e5QlJplfwirC7ETOJ8TKlpHb/DStV+Z7Y1oWoUNIIToWYvUmyW3fZPzQmXlhUEqyeznrBmaJCZ4Kh"
    "Nw2zXFGPows="
)
FIXED_BODY = base64.b64decode(
    "AQPn2csoVS7BcY9n0YmUOgf8ycOuWsgI+G/8Em/2YRBbwtJnqQOL90Gg"
)


def ring(value: Any) -> Any:
    """The keyring that an app gets of its configuration."""
    return read_config({"IDEMPOTENCY_ENCRYPTION_KEYS": value})[1].encryption_keys


@pytest.mark.parametrize(
    "value", [[ONE, TWO], (ONE, TWO), f"{ONE},{TWO}", f" {ONE} , {TWO} ,", [ONE.encode(), TWO], [ONE, TWO, ONE]]
)
def test_ways_to_give_keys(value: Any) -> None:
    """A list, or one string with commas, of keys as Fernet makes them; the first one seals."""
    assert Keyring([ONE]).first.id == ring(value).first.id
    assert ring(value).find(Keyring([TWO]).first.id) is not None
    assert ONE not in repr(ring(value))


@pytest.mark.parametrize(
    "value",
    ["", ",", [], "s3cret", ["s3cret"], [ONE, "s3cret"], [ONE[:-4]], [ONE + ONE], [1], {ONE: 1}, ONE.encode(), 5,
     [None], [base64.urlsafe_b64encode(b"s3cret-s3cret-s3cret-s3cret-s3cr").decode() + "é"]],
)  # fmt: skip
def test_what_is_no_key(value: Any) -> None:
    """Anything else is an error of the app's start that shows nothing of it; an empty text is not "no encryption"."""
    with pytest.raises(OptionError, match=r"^IDEMPOTENCY_ENCRYPTION_KEYS: ") as caught:
        ring(value)
    assert not re.search(f"s3cret|{re.escape(ONE[:8])}", str(caught.value))
    assert caught.value.__cause__ is None


def test_cryptography_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is missing, the error says how to install it."""
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(OptionError, match=re.escape("pip install Flask-Idempotency[encryption]")):
        ring([ONE])


RECORDED = st.builds(
    Recorded,
    st.integers(100, 999),
    st.lists(st.tuples(st.text(), st.text())).map(tuple),
    st.binary() | st.just(Elsewhere(NAME, 5, "0" * 64, sealed=True)),
    st.none() | st.text(),
)


@given(recorded=RECORDED, scope=st.text(), key=st.text(), other=st.text())
def test_records(recorded: Recorded, scope: str, key: str, other: str) -> None:
    """Any record comes back, for its scope and key alone, by any ring that has the key; and never twice alike."""
    stored = sealed(RING, recorded, scope, key)
    assert recorded == opened(BOTH, stored, scope, key)
    assert stored != sealed(RING, recorded, scope, key)
    for place in ((scope + "x", key), (scope, key + "x"), (other + "y", other)):
        with pytest.raises(RowUnreadable, match="belongs to another place"):
            opened(RING, stored, *place)
    for without in (None, Keyring([TWO])):
        with pytest.raises(RowUnreadable, match=RING.first.id):
            opened(without, stored, scope, key)


@given(text=st.text(), name=st.text(min_size=1))
def test_results_of_steps(text: str, name: str) -> None:
    """The text of a step's result comes back character for character."""
    assert text == opened_step(BOTH, sealed_step(RING, text, "acme", "k", name), "acme", "k", name)


def test_forms_stay_as_they_are() -> None:
    """What an earlier release has sealed, and its fingerprints, are in tables: a later one has to read them."""
    fixed = Keyring([base64.urlsafe_b64encode(bytes(range(32))).decode()])
    assert FIXED_ID == fixed.first.id
    assert FIXED_FINGERPRINT == fingerprinted(fixed, "ab" * 32, 1, "")
    assert '{"a": 1}' == opened_step(fixed, FIXED_STEP, "acme", "order-00001", "charge")
    headers = ((":sealed", f"1 {FIXED_ID}"),)
    expected = Recorded(201, (("X-A", "1"),), b"made", "Done")
    assert expected == opened(fixed, Recorded(201, headers, FIXED_ANSWER), "acme", "order-00001")
    assert b"large" == b"".join(opened_body(fixed, NAME, [FIXED_BODY]))


def seal(body: Iterable[bytes], keys: Keyring = RING, name: str = NAME) -> bytes:
    sealer = BodySealer(keys, name)
    return b"".join([*(piece for chunk in body for piece in sealer.add(chunk)), sealer.end()])


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 7])
@pytest.mark.parametrize("chunk", [1000, PIECE, 10 * PIECE])
def test_bodies(size: int, chunk: int) -> None:
    """A body comes back whatever the pieces that it came in, and was read in."""
    body = os.urandom(size)
    whole = seal([body[start : start + chunk] for start in range(0, size, chunk)])
    assert body == b"".join(opened_body(BOTH, NAME, [whole]))
    assert body == b"".join(opened_body(RING, NAME, (whole[at : at + 999] for at in range(0, len(whole), 999))))


def test_bodies_that_were_changed() -> None:
    """Pieces that are changed, left out, doubled, swapped or cut off, and those of another body, are refused."""
    body = os.urandom(3 * PIECE + 5)
    whole = seal([body])
    head, step = 21, PIECE + 16
    cut = [whole[:head], *(whole[head + n * step : head + (n + 1) * step] for n in range(4))]
    wrong = {
        "changed": whole[:-1] + bytes([whole[-1] ^ 1]),
        "left out": b"".join([cut[0], cut[1], *cut[3:]]),
        "doubled": b"".join([*cut[:2], *cut[1:]]),
        "swapped": b"".join([cut[0], cut[2], cut[1], *cut[3:]]),
        "cut off": b"".join(cut[:-1]),
        "cut in the head": whole[:10],
        "empty": b"",
        "another form": b"\x02" + whole[1:],
        "another's": seal([body], name=NAME.replace("0", "1")),
    }
    for what, stored in wrong.items():
        with pytest.raises(BodyLost):
            assert body == b"".join(opened_body(RING, NAME, [stored])), what
    for without in (None, Keyring([TWO])):
        with pytest.raises(BodyStoreError, match=RING.first.id):
            b"".join(opened_body(without, NAME, [whole]))


def test_memory_stays_flat() -> None:
    """A body of 16 MiB is sealed and opened in less than 1 MiB."""
    sealer = BodySealer(RING, NAME)
    chunk = bytes(100_000)

    def stored() -> Iterator[bytes]:
        for _ in range(160):
            yield from sealer.add(chunk)
        yield sealer.end()

    tracemalloc.start()
    try:
        assert 16_000_000 == sum(map(len, opened_body(RING, NAME, stored())))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
