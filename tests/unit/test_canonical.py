"""The canonical form of JSON is the same by every way to it: with orjson, without it, and by the exact parser."""

from __future__ import annotations

import json
from io import BytesIO

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flask_idempotency import canonical
from flask_idempotency.fingerprint import Message, fingerprint

# Digests of release 0.3.0, which wrote fingerprints of version 1 first: stored ones have to keep comparing equal.
OF_0_3_0 = [
    (
        b'{"b":[1,-0,1.0,10e-1,1e400],"a":{"z":"\\u00e9\\ud83d\\ude00","A":null}}',
        "74a94ddf8f27aa9dcdb0448e09fd6feb13f180f5106796585fb0a2949b925e41",
    ),
    (b'["\\ud800", "a:b", "\\u003a"]', "5e4d1f07ad0d8df673759e2b706e903648899fd81abf3025c6cf56f6131c8417"),
    (b'{"a":1,"a":2,"b":"\\u003a"}', "195c69bb522f15fdf4a25862e49992518d5f9919b3d35994f4a671dc32743278"),
    (b'{"a":1,"\\u0061":2}', "2e772a856c3aedeaffc35ce4d671a4bd0065aeecc73615c1aff62ac9e2b963dd"),
    (b'{"x":[{"a":1,"a":1}]}', "9d4f035b09ca838d5160a5b8600908c64885b69b8fbed2ebc4bece2383ea628b"),
    (
        b"[18446744073709551617,0.10000000000000000001,-12.50]",
        "424b4f2457c3bd8606177372f7aa6643fbaca73b6ad68fcbe83720028e70dd06",
    ),
    (b"[NaN]", "d7f3a613fb60ed17bf914a80d7eb394214941ca4f96c180f754172e268e2eaf6"),
    (b"\xef\xbb\xbf[1]", "3eb95792ccfefe541c7a0751c72ecfcb29c82626bd15a1d6ce4e0e748bd29667"),
    (b'["\xff"]', "cef2f2c00811e4818641ebc10923677226ba9697263ac7815878eee92616c89f"),
    (b"\xff\xfe[\x001\x00]\x00", "afe2b1cffe5b09dd94a236e81dce1cda4bbaf2767ffb9a561da148a0982b8b7c"),
    (
        b"\xff\xfe\x00\x00[\x00\x00\x001\x00\x00\x00]\x00\x00\x00",
        "85fbcca0504f5746330916b80e418c39fa4771753123ffe0613a03984550a031",
    ),
    (b"", "71d36c1cd8408357a6c8015d2ff5d86b4d32318d0d525669209c3bcf2b84e995"),
    (b"[1] x", "fa2f6e09d63be1eb5a7a3f0cbb2d312716c9bf18b0f831f9a0c320643eec1091"),
    (b" [ 1 ,\t2\r\n] ", "2a7cccc72913269aed1d65acc10270e773f5f9000680baf048bb67130ce96fa0"),
    (b'["\t"]', "b21c19a73e83741e4ced7649b1d971ec91f57475ae2011d54482801a76873468"),
    (b'["\\u0000\\u001f\\b\\f\\/\x7f"]', "1748187610f672874af2e130e7f29cd3b058a43f211ebbbc3f20ba3b8eb1ba70"),
    (b"[" * 64 + b"]" * 64, "f57b6facb6e9f3d4d8fb341868890b4f269a490860f3474607df5f3f8628f967"),
    (b"[" * 65 + b"]" * 65, "580813dd7f1f9924fcbc4f714191ba7f40f26ea2a1772da528e16a519dfd7ce3"),
    (
        b'{"\xef\xbf\xbf":1,"\xf0\x90\x80\x80":2,"at":"10:00:00.5","id":"3e5f"}',
        "16229c4a31230fb49fd0ae9f10a941a39ee72b95130ad92892501eff75d21aac",
    ),
    (
        b'{"id":"550e8400-e29b","at":"2026-01-01T10:00:00.123Z","total":12.50,"rate":1.5E-7,"big":1e16}',
        "04f24479c85f28e416647ca6ca6a61927a3651b42a8c316319b46272c3e9b95b",
    ),
    (
        b'{"id":"550e8400-e29b","at":"2026-01-01T10:00:00.123Z","total":9007199254740993}',
        "db916e73cedd18944f0a573168be5e31077e0d1734a87c8ee9495ad4c2daeaf5",
    ),
    (b"1.5", "dad75b016c8f08e030a5c55ea9b9c919c9e24650a8b5f24d6eae0533daf683d6"),
    (b"-0", "5f8dc19c6bc093bb78fe6c6c6d2a03610c547e8f4535766ca4699e3d4873c7b7"),
]


def of(body):
    message = Message(method="POST", path="/charges", query=b"", content_type="application/json", body=BytesIO(body))
    return fingerprint(message)


def without_orjson(monkeypatch):
    monkeypatch.setattr(canonical, "_orjson", lambda: None)


@pytest.mark.parametrize(("body", "digest"), OF_0_3_0)
def test_digests_are_those_of_the_first_release(body, digest):
    """A document has the fingerprint that version 1 always gave it, with orjson."""
    pytest.importorskip("orjson")
    assert digest == of(body)


@pytest.mark.parametrize(("body", "digest"), OF_0_3_0)
def test_digests_are_the_same_without_orjson(monkeypatch, body, digest):
    """A document has the fingerprint that version 1 always gave it, without orjson."""
    without_orjson(monkeypatch)
    assert digest == of(body)


def depth(data):
    """The deepest level, counted byte by byte."""
    deepest = level = 0
    in_string = escaped = False
    for byte in data:
        if in_string:
            in_string = escaped or byte != ord('"')
            escaped = not escaped and byte == ord("\\")
        else:
            in_string = byte == ord('"')
            level += (byte in b"[{") - (byte in b"]}")
            deepest = max(deepest, level)
    return deepest


def by_exact_parser(data):
    """The form by the parser that looks at each number and each object; ``None``: by its bytes."""
    try:
        if depth(data) > canonical.MAX_DEPTH:
            return None
        return canonical.utf8(canonical._ENCODER.encode(canonical._EXACT.decode(data.decode())))
    except ValueError:
        return None


def form_of(data):
    try:
        return canonical.canonical_json(data, [])
    except ValueError:
        return None


# Texts of documents, valid or nearly so: repeated names however spelled, and everything that parsers disagree about.
blanks = st.sampled_from(["", "", "", " ", "\t", "\r\n", "\x0b", "\xa0"])
names = st.one_of(
    st.sampled_from(
        ['"a"', r'"\u0061"', '"b"', '"a:b"', r'"a\u003ab"', r'"a\u003Ab"', '""', '"\uffff"', '"\U00010000"']
    ),
    st.sampled_from([r'"\""', '"[{"', r'"\u0022"', r'"\u005b\u007B"', '"1.5"', r'"\/"', '"/"', r'"\\"', r'"\u00e9"']),
)
strings = st.one_of(
    names,
    st.sampled_from([r'"\ud800"', r'"\udc00\ud800"', r'"\ud83d\ude00"', '"\t"', '"\x00"', r'"\u0000\u001f\/\b"']),
    st.sampled_from([f'"{"[" * 70}"', f'"{"]" * 70}"', r'"\"[{\\"', r'"\\\"]"', '":1.5,"', '"1.5,2.5"', '",e,"']),
    st.sampled_from(
        [r'"\u0022"', r'"\u005D\u007d"', r'"\u005b"', '"00:00.123Z"', '"550e8400-e29b"', '"9007199254740993"']
    ),
    st.text('[]{}",:.e0-', max_size=6).map(lambda text: json.dumps(text)),
    st.sampled_from([r'"\"', '"3e5"', '"10:00:00.5"', r'"\\u003a"', r'"\\\u003a"', '":::"', '"\x7f\u2028"']),
)
numbers = st.one_of(
    st.sampled_from(["-0", "0", "1.0", "1", "10e-1", "1E2", "-0.0", "1e400", "-1e-400", "01", "1.", "-", "+1", ".5"]),
    st.sampled_from(["NaN", "Infinity", "-Infinity", "9" * 18, "9" * 19, "-" + "9" * 18, "9" * 4_400, "1e", "0x1"]),
    st.sampled_from(
        ["12.50", "0.1", "1e16", "1E+22", "1e-7", "1.5e-7", "1e5", "0e0", "0.0", "5e-324", "2e19", "1e-400"]
    ),
    st.integers(-(2**66), 2**66).map(str),
    st.integers(2**53 - 2, 2**53 + 2).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.decimals(allow_nan=False, allow_infinity=False, places=2).map(str),
)
texts = st.recursive(
    st.one_of(strings, numbers, st.sampled_from(["null", "true", "false", "", "nul"])),
    lambda inner: st.one_of(
        st.lists(st.tuples(blanks, inner).map("".join), max_size=4).map(lambda items: "[" + ",".join(items) + "]"),
        st.lists(st.tuples(names, blanks, st.just(":"), inner, blanks).map("".join), max_size=4).map(
            lambda members: "{" + ",".join(members) + "}"
        ),
        st.tuples(st.integers(60, 66), inner).map(lambda deep: "[" * deep[0] + deep[1] + "]" * deep[0]),
    ),
    max_leaves=10,
)
encodings = st.sampled_from(["utf-8"] * 6 + ["utf-8-sig", "utf-16", "utf-32", "latin-1"])
bodies = st.one_of(
    st.builds(lambda text, coding: text.encode(coding, "replace"), texts, encodings),
    st.builds(lambda text, junk: text.encode() + junk, texts, st.sampled_from([b"x", b"\xff", b"\x00", b"[]", b"}"])),
    st.binary(max_size=8),
)


@pytest.mark.parametrize("orjson", ["with", "without"])
@given(data=bodies)
@example(data=rb'{"a":1,"a":2,"b":"\u003a"}')
@example(data=rb'{"a":1,"a":2,"b":"\u003A"}')
@example(data=b'["\xed\xa0\x80"]')
@example(data=b'{"a":"\\u0022\\u0022","b":1,"b":2}')  # as many quotes are added as are dropped
@example(data=b"[" + b'["]",' * 64 + b'"' + b"[" * 64 + b'"' + b"]" * 65)  # balanced, if those in strings count
@example(data=b'[1.5,"x"]')
@example(data=b"[1e16]")
@example(data=b'{"a":1.5e-7}')
@example(data=b'["\\ud800",1.50]')
@settings(max_examples=500)
def test_the_fast_ways_lead_to_the_exact_form(orjson, data):
    """Whatever the bytes, the fast ways give the form that the exact parser gives, or none where it gives none."""
    if orjson == "with":
        pytest.importorskip("orjson")
        assert by_exact_parser(data) == form_of(data)
    else:
        with pytest.MonkeyPatch.context() as patch:
            without_orjson(patch)
            assert by_exact_parser(data) == form_of(data)


def test_orjson_writes_every_character_as_the_exact_way_does(monkeypatch):
    """Escapes and the order of names are alike for all characters that UTF-8 has."""
    pytest.importorskip("orjson")
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and chr(code) not in '"\\']
    document = '["' + "".join(characters[32:]) + '",{' + ",".join(f'"{c}":0' for c in characters[32::97]) + "}]"
    escaped = "[" + ",".join(f'"\\u00{code:02x}"' for code in range(48)) + "]"
    for body in (document.encode(), escaped.encode()):
        digest = of(body)
        with monkeypatch.context() as patch:
            without_orjson(patch)
            assert of(body) == digest
