"""The key: how it may be spelled, and how it is stored."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flask_idempotency.errors import KeyInvalid
from flask_idempotency.key import MAX_LENGTH, parse_header, storable

UUID = "8e03978e-40d5-43dd-bc93-6894a57f9324"
PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E))


def quoted(text: str) -> str:
    """The text as a Structured Field string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@pytest.mark.parametrize(
    "value",
    [
        UUID,
        f'"{UUID}"',
        f"  {UUID}\t",
        f' \t"{UUID}" ',
        f'"{UUID}";v=1',
        f'"{UUID}"; a; b="x, y";c=?0',
    ],
)
def test_bare_and_quoted_spell_one_key(value: str) -> None:
    """A bare and a quoted key are the same key; outer blanks, and parameters after a quoted one, do not count."""
    assert UUID == parse_header(value)


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("Order-00001", "Order-00001"),
        ("order-00001", "order-00001"),
        ("order 00001 ; v=1", "order 00001 ; v=1"),
        ('or"der-00001', 'or"der-00001'),
        ('("order-00001" "b")', '("order-00001" "b")'),
        ('"order,00001"', "order,00001"),
        (r'"a \"b\" \\ cd"', r'a "b" \ cd'),
        ('"  order-1  "', "  order-1  "),
        ("../../etc/x", "../../etc/x"),
        ("%0a%0d%00abc", "%0a%0d%00abc"),
    ],
)
@pytest.mark.scenario(58)
def test_every_character_of_a_key_counts(value: str, key: str) -> None:
    """Case, inner blanks, and everything between the quotes belong to the key, which is kept as it is."""
    assert key == parse_header(value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "   ",
        "\t",
        '""',
        "order-00001,order-00002",
        "order-00001, order-00001",
        '"order-00001", "order-00002"',
        '"order-00001" order-00002',
        '"order-00001',
        '"',
        '"order-0000\\1"',
        "order\t00001",
        "order-00001\x00",
        "order\n00001",
        "order-00001\x7f",
        "commandé-1",
        "order-0001\xa0",
        '"order\t00001"',
        '"order-00001\x00"',
        '"order-0000é"',
        '"order-00001";=',
    ],
)
@pytest.mark.scenario(31, 58)
def test_what_is_no_key(value: str) -> None:
    """An empty value, a list, a broken string, and a character that is not printable ASCII are refused."""
    with pytest.raises(KeyInvalid):
        parse_header(value)


@pytest.mark.parametrize("length", [8, 9, 254, 255])
@pytest.mark.parametrize("spell", [str, quoted])
@pytest.mark.scenario(57)
def test_lengths_of_a_key(length: int, spell: type) -> None:
    """A key of 8 to 255 characters is kept whole; the quotes do not count."""
    assert "k" * length == parse_header(spell("k" * length))


@pytest.mark.parametrize("length", [1, 7, 256, 4096])
@pytest.mark.parametrize("spell", [str, quoted])
@pytest.mark.scenario(57)
def test_lengths_that_are_none_of_a_key(length: int, spell: type) -> None:
    """A shorter or longer key is refused, never cut, and the error tells its length and the limits."""
    with pytest.raises(KeyInvalid, match=rf"has {length} characters. Send a key of 8 to 255"):
        parse_header(spell("k" * length))


def test_the_shortest_key_can_be_configured() -> None:
    """The lower limit is the app's; the upper one is not."""
    assert "1" == parse_header("1", min_length=1)
    with pytest.raises(KeyInvalid, match="20 to 255"):
        parse_header("k" * 19, min_length=20)


@given(PRINTABLE.filter(lambda text: 8 <= len(text) <= MAX_LENGTH))
def test_any_printable_key_can_be_quoted(text: str) -> None:
    """Whatever printable text is quoted as RFC 9651 has it comes back, in its stored form."""
    assert storable(text) == parse_header(quoted(text))


@given(st.text(st.characters(max_codepoint=0xFF), max_size=300))
def test_no_header_breaks_the_parser(value: str) -> None:
    """Any value that WSGI can give is a key of 8 to 255 printable characters, or refused."""
    try:
        key = parse_header(value)
    except KeyInvalid:
        return
    assert 8 <= len(key) <= MAX_LENGTH
    assert key.isascii()
    assert key.isprintable()


@pytest.mark.parametrize("text", ["1", "evt_1", "k" * 255, " x ", "~fixed:x"])
def test_short_printable_keys_are_stored_as_they_are(text: str) -> None:
    """A key from an app's callable may have one character or more."""
    assert text == storable(text)


@pytest.mark.parametrize(
    "text", ["k" * 256, "commandé", "a\x00b", "a\nb", "\x7f", "\ud800", "~hash:x", "~hash:" + "0" * 64]
)
def test_other_keys_are_stored_as_their_hash(text: str) -> None:
    """What is long, not printable ASCII, or looks like a hash is kept as its hash."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    assert f"~hash:{digest}" == storable(text)


@given(st.text(max_size=300), st.text(max_size=300))
@example("k" * 256, "k" * 255 + "l")
@example("é", storable("é"))
@pytest.mark.scenario(57)
def test_two_keys_never_share_a_stored_form(one: str, other: str) -> None:
    """Different keys have different stored forms, also where they are equal in their first 255 characters."""
    assert (one == other) == (storable(one) == storable(other))
