"""The fingerprint of everything but JSON: framing, queries, forms, streams, versions."""

from __future__ import annotations

import io
import tracemalloc
from dataclasses import replace
from io import BytesIO
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from werkzeug.wrappers import Request

from flask_idempotency.fingerprint import (
    CURRENT_VERSION,
    MAX_PARTS,
    VERSIONS,
    Form,
    Message,
    UnknownVersion,
    Value,
    fingerprint,
)

URLENCODED = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=frontier"


def of(body=b"", content_type="", *, method="POST", path="/charges", query=b"", content_encoding="", **options):
    return fingerprint(
        Message(
            method=method,
            path=path,
            query=query,
            content_type=content_type,
            content_encoding=content_encoding,
            body=BytesIO(body) if isinstance(body, bytes) else body,
            **options,
        )
    )


# The request as a whole.


@pytest.mark.scenario(24)
def test_the_path_counts():
    """Another resource, route or mount point is another request."""
    paths = ["/orders/1/cancel", "/orders/2/cancel", "/refunds", "/v2/refunds", "/refunds/", "/Refunds", "/\udcff", ""]
    assert len(paths) == len({of(path=path) for path in paths})


def test_the_method_counts():
    """Another method is another request."""
    assert of(method="POST") != of(method="PATCH")


def test_a_request_of_nothing_but_its_method():
    """An empty body without a type has a fingerprint like any other, and it is always the same."""
    assert of(path="") == of(path="")
    assert 64 == len(of(path="")) == len(of(path="").strip("ghijklmnopqrstuvwxyzABCDEF"))


@pytest.mark.parametrize("content_type", ["", "text/plain", URLENCODED, MULTIPART, "application/json"])
def test_an_empty_body_is_no_other_body(content_type):
    """Under any type, an empty body is accepted, and is not taken for one that holds something."""
    assert of(b"", content_type) == of(b"", content_type)
    assert of(b"", content_type) != of(b"0", content_type)
    assert (content_type == "") == (of(b"", content_type) == of(b"", ""))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"method": "POST", "path": "/a"}, {"method": "POST/", "path": "a"}),
        ({"path": "/ab", "query": b"c"}, {"path": "/a", "query": b"bc"}),
        ({"path": "/a?b"}, {"path": "/a", "query": b"b"}),
        ({"query": b"a=b"}, {"query": b"ab"}),
        ({"query": b"ab=c"}, {"query": b"a=bc"}),
        ({"query": b"a=b&c=d"}, {"query": b"a=b%26c=d"}),
        ({"query": b"a=1&a=1"}, {"query": b"a=1"}),
        ({"query": b"a=&b="}, {"query": b"a=b%3D"}),
        ({"query": b"a=1"}, {"body": b"a=1", "content_type": URLENCODED}),
        ({"query": b"a=1", "body": b"", "content_type": URLENCODED}, {"body": b"a=1", "content_type": URLENCODED}),
        ({"body": b"a", "content_type": "text/x"}, {"body": b"", "content_type": "text/xa"}),
        ({"body": b"x", "content_type": "a/b;c=d"}, {"body": b"x", "content_type": "a/b;c=;d"}),
        ({"body": b"x", "content_type": "a/b", "content_encoding": "c"}, {"body": b"x", "content_type": "a/bc"}),
        ({"body": b"1:x", "content_type": "a/b"}, {"body": b"x", "content_type": "a/b1:"}),
        ({"body": b"a=1&b=2", "content_type": URLENCODED}, {"body": b"a=1%26b=2", "content_type": URLENCODED}),
    ],
)
def test_no_byte_moves_from_one_part_to_the_next(one, other):
    """Each part has its own place: what looks the same when written in a row is not the same."""
    assert of(**one) != of(**other)


def sorted_by_name(pairs):
    return sorted(pairs, key=lambda pair: pair[0])


few = st.binary(max_size=2).map(lambda data: data.translate(bytes(b"&=ab%+1:"[byte % 8] for byte in range(256))))
pairs_of_bytes = st.lists(st.tuples(few, few), max_size=3)


def quoted(pairs):
    return b"&".join(
        b"=".join(b"".join(b"%%%02x" % byte for byte in word) for word in pair) if any(pair) else b"=" for pair in pairs
    )


class Plain(NamedTuple):
    """A request without a structured body."""

    method: str
    path: str
    query: list
    content_type: str
    content_encoding: str
    body: bytes

    def fingerprint(self):
        return of(**{**self._asdict(), "query": quoted(self.query)})

    def meaning(self):
        return self._replace(query=sorted_by_name(self.query))


plain = st.builds(
    Plain,
    st.sampled_from(("P", "PP")),
    st.sampled_from(("", "P", "/", "/1", "/1:")),
    pairs_of_bytes,
    st.sampled_from(("", "a/b", "a/b;c=1")),
    st.sampled_from(("", "br", "gzip")),
    few,
)


@given(plain, plain)
@settings(max_examples=200)
def test_requests_are_equal_exactly_if_their_fingerprints_are(one, other):
    """Requests share a fingerprint if, and only if, all of their parts are equal."""
    assert (one.meaning() == other.meaning()) == (one.fingerprint() == other.fingerprint())


# Queries and urlencoded forms.


@pytest.mark.scenario(25)
def test_the_query_counts():
    """A query is not the same as none, nor as another one."""
    queries = [b"", b"dry=1", b"dry=0", b"dry", b"DRY=1", b"dry=1&dry=1"]
    assert len(queries) == len({of(query=query) for query in queries})


same_pairs = pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a=1&b=2", b"b=2&a=1"),
        (b"a=1&b=2&a=3", b"b=2&a=1&a=3"),
        (b"a", b"a="),
        (b"a&&b&", b"&a=&b="),
        (b"a+b=c+d", b"a%20b=c%20d"),
        (b"%61=%2f", b"a=%2F"),
        (b"a=1=2", b"a=1%3d2"),
        (b"a=%zz%", b"a=%25zz%25"),
        (b"a=\xc3\xa9", b"a=%C3%A9"),
    ],
)
different_pairs = pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a=1&a=2", b"a=2&a=1"),
        (b"a=1&a=2&b=3", b"a=2&b=3&a=1"),
        (b"a=%FF", b"a=%FE"),
        (b"a=%FF", b"a=%EF%BF%BD"),
        (b"a=%FF", b"a=%25FF"),
        (b"%FF=a", b"%FE=a"),
        (b"a=+", b"a=%2B"),
        (b"=", b""),
        (b"=a", b"a="),
        (b"a=1;b=2", b"a=1&b=2"),
        (b"a=1", b"a=1%00"),
    ],
)


@same_pairs
def test_spellings_of_a_query_are_equal(one, other):
    """Order between names, escapes, plus signs and empty pieces make no difference."""
    assert of(query=one) == of(query=other)


@same_pairs
def test_spellings_of_a_form_are_equal(one, other):
    """A urlencoded form is compared as a query is."""
    assert of(one, URLENCODED) == of(other, URLENCODED.upper() + "; charset=utf-8")


@different_pairs
def test_different_queries_differ(one, other):
    """Order within a name counts, and so does every byte, be it UTF-8 or not."""
    assert of(query=one) != of(query=other)


@pytest.mark.scenario(33)
@different_pairs
def test_different_forms_differ(one, other):
    """In a form, too, order within a name and every byte count."""
    assert of(one, URLENCODED) != of(other, URLENCODED)


@given(pairs_of_bytes, st.integers().map(Random))
def test_order_between_names_does_not_count(pairs, random):
    """However the names are mixed, values of one name that keep their order make one fingerprint."""
    queues = {name: [pair for pair in pairs if pair[0] == name] for name, _ in pairs}
    mixed = [queues[name].pop(0) for name, _ in random.sample(pairs, len(pairs))]
    assert of(query=quoted(pairs)) == of(query=quoted(mixed))
    assert of(quoted(pairs), URLENCODED) == of(quoted(mixed), URLENCODED)


def test_a_form_that_the_app_refuses_goes_by_its_bytes():
    """A form up to the app's limit is compared by its meaning; a byte more, and its bytes are compared."""
    one, other = b"a=1&b=2", b"b=2&a=1"
    assert of(one, URLENCODED, max_form_memory_size=7) == of(other, URLENCODED, max_form_memory_size=7)
    assert of(one, URLENCODED, max_form_memory_size=None) == of(other, URLENCODED, max_form_memory_size=None)
    assert of(one, URLENCODED, max_form_memory_size=6) != of(other, URLENCODED, max_form_memory_size=6)
    assert of(one, URLENCODED, max_form_memory_size=6) != of(one, URLENCODED, max_form_memory_size=7)
    assert of(b"a" * 500_000, URLENCODED) == of(b"%61" + b"a" * 499_999 + b"=", URLENCODED, max_form_memory_size=None)
    assert of(b"a" * 500_001, URLENCODED) != of(b"a" * 500_001, URLENCODED, max_form_memory_size=None)


@given(st.lists(st.tuples(st.text(), st.text()), max_size=4))
@example([("é", "\x00&=+ %"), ("", "")])
def test_a_parsed_form_is_the_form_that_was_sent(fields):
    """A urlencoded form that the app has parsed already has the fingerprint of its bytes."""
    body = quoted_text(fields)
    with request_with(body, URLENCODED) as request:
        assert of(body, URLENCODED) == of(parsed(request), URLENCODED)


def request_with(body, content_type):
    """What an app's own request object makes of a body; its files are closed with it."""
    environ = {"REQUEST_METHOD": "POST", "CONTENT_TYPE": content_type, "CONTENT_LENGTH": str(len(body))}
    return Request({**environ, "wsgi.input": BytesIO(body)})


def quoted_text(fields):
    return quoted([(name.encode(), value.encode()) for name, value in fields])


def parsed(request):
    files = [
        (name, file.filename, file.headers.get("content-type"), file.stream)
        for name, file in request.files.items(multi=True)
    ]
    return Form(list(request.form.items(multi=True)), files)


# Multipart forms.


class Part(NamedTuple):
    """A part of a form: a field, or a file if it has a file name."""

    name: str
    content: bytes
    file_name: str | None = None
    content_type: str | None = None


def multipart(parts, boundary="frontier", preamble=b"", epilogue=b"\r\n"):
    body = preamble
    for part in parts:
        disposition = f'Content-Disposition: form-data; name="{part.name}"'
        if part.file_name is not None:
            disposition += f'; filename="{part.file_name}"'
        head = [disposition] + ([f"Content-Type: {part.content_type}"] if part.content_type is not None else [])
        body += f"--{boundary}\r\n".encode() + "\r\n".join(head).encode() + b"\r\n\r\n" + part.content + b"\r\n"
    return body + f"--{boundary}--".encode() + epilogue


names = st.sampled_from(("", "a", "b", "é"))
contents = st.text(st.sampled_from("ab\r\n-é"), max_size=6).map(str.encode)
fields = st.builds(Part, names, contents, st.none(), st.none())
files = st.builds(Part, names, contents, st.sampled_from(("", "a", "b.pdf")), st.none() | st.sampled_from(("a/b", "é")))
forms = st.lists(fields | files, max_size=5)


def kind_and_name(part):
    return part.file_name is not None, part.name


@pytest.mark.scenario(27)
@given(forms, st.integers().map(Random))
def test_the_boundary_and_the_order_between_names_do_not_count(parts, random):
    """A form sent again with another boundary, preamble or mixture of names has the same fingerprint."""
    queues = {
        kind_and_name(part): [other for other in parts if kind_and_name(other) == kind_and_name(part)] for part in parts
    }
    mixed = [queues[kind_and_name(part)].pop(0) for part in random.sample(parts, len(parts))]
    boundary = f"x{random.getrandbits(64)}"
    again = multipart(mixed, boundary, b"to be ignored\r\n", b"\r\nto be ignored")
    assert of(multipart(parts), MULTIPART) == of(again, f'Multipart/Form-Data; charset=utf-8; boundary="{boundary}"')


@given(forms, forms)
@settings(max_examples=200)
@example([Part("a", b"")], [Part("a", b"", "")])
@example([Part("a", b"", "")], [Part("a", b"", "", "")])
@example([Part("a", b"b")], [Part("a", b"", "b")])
@example([Part("a", b"", "b", "c")], [Part("a", b"c", "b", "")])
@example([Part("a", b"x", "b", "c")], [Part("a", b"x", "bc", "")])
@example([Part("a", b"x", "b", "c=")], [Part("a", b"x", "b=c", "")])
@example([Part("ab", b"x", "c")], [Part("a", b"x", "bc")])
@example([Part("a", b"b")], [Part("ab", b"")])
@example([Part("a", b"1"), Part("a", b"2")], [Part("a", b"2"), Part("a", b"1")])
@example([Part("a", b"1"), Part("a", b"1")], [Part("a", b"1")])
def test_forms_are_equal_exactly_if_their_fingerprints_are(one, other):
    """Forms share a fingerprint if, and only if, their parts are equal and, within a name, in the same order."""
    equal = sorted(one, key=kind_and_name) == sorted(other, key=kind_and_name)
    assert equal == (of(multipart(one), MULTIPART) == of(multipart(other), MULTIPART))


@given(forms)
def test_parsed_parts_are_the_parts_that_were_sent(parts):
    """A multipart form that the app has parsed already has the fingerprint of its bytes."""
    body = multipart(parts)
    with request_with(body, MULTIPART) as request:
        assert of(body, MULTIPART) == of(parsed(request), MULTIPART)


@pytest.mark.scenario(27)
def test_a_changed_byte_of_a_file_counts():
    """One byte in the middle of a large file makes another request."""
    content = bytearray(200_000)
    one = multipart([Part("file", bytes(content), "a.pdf", "application/pdf")])
    content[123_456] = 1
    other = multipart([Part("file", bytes(content), "a.pdf", "application/pdf")])
    assert of(one, MULTIPART) != of(other, MULTIPART)


@pytest.mark.scenario(33)
@pytest.mark.parametrize(("one", "other"), [(b"\xff", b"\xfe"), (b"\xff", "\ufffd".encode()), (b"1\r\n", b"1\n")])
@pytest.mark.parametrize("file_name", [None, "a"])
def test_parts_compare_by_their_bytes(one, other, file_name):
    """What is no valid text in a part, or has other line ends, is told apart."""
    assert of(multipart([Part("a", one, file_name)]), MULTIPART) != of(
        multipart([Part("a", other, file_name)]), MULTIPART
    )


def test_a_latin_field_is_its_text():
    """A field that says that it is Latin-1 is the text that the app reads, and so what a parsed form holds."""
    body = multipart([Part("a", b"\xe9", None, 'text/plain; charset="ISO-8859-1"')])
    assert (
        of(body, MULTIPART) == of(multipart([Part("a", "é".encode())]), MULTIPART) == of(Form([("a", "é")]), MULTIPART)
    )
    file = multipart([Part("a", b"\xe9", "a", "text/plain; charset=iso-8859-1")])
    assert of(file, MULTIPART) == of(
        Form([], [("a", "a", "text/plain; charset=iso-8859-1", BytesIO(b"\xe9"))]), MULTIPART
    )


def test_the_content_type_of_a_field_does_not_count():
    """The content type of a file counts; that of a field, which no app gets to see, does not."""
    assert of(multipart([Part("a", b"1", None, "text/plain")]), MULTIPART) == of(
        multipart([Part("a", b"1")]), MULTIPART
    )
    assert of(multipart([Part("a", b"1", "a", "a/b")]), MULTIPART) != of(multipart([Part("a", b"1", "a")]), MULTIPART)


def test_part_without_a_name():
    """A part without a name is not one with an empty name."""
    nameless = multipart([Part("a", b"1")]).replace(b'; name="a"', b"")
    assert of(nameless, MULTIPART) != of(multipart([Part("", b"1")]), MULTIPART)
    assert of(nameless, MULTIPART) == of(nameless.replace(b"\r\n\r\n1", b"\r\nX-Other: header\r\n\r\n1"), MULTIPART)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"", MULTIPART),
        (b"no boundary at all", MULTIPART),
        (multipart([Part("a", b"1")]).removesuffix(b"--frontier--\r\n"), MULTIPART),
        (multipart([Part("a", b"1")]).replace(b"Content-Disposition", b"Other"), MULTIPART),
        (multipart([Part("a", b"1")]).replace(b'"a"', b'"\xff"'), MULTIPART),
        (multipart([Part("a", b"1")]), "multipart/form-data"),
        (multipart([Part("a", b"1")], ""), "multipart/form-data"),
        (multipart([Part("a", b"1")], ""), 'multipart/form-data; boundary=""'),
        (multipart([Part("a", b"1")]), "multipart/form-data; boundary=é"),
        (multipart([Part("a", b"1")]), "multipart/mixed; boundary=frontier"),
        (multipart([Part("a", b"1")], preamble=b"x" * 400_000 + b"\r\n"), MULTIPART),
        (multipart([Part("a", b"1")], epilogue=b"\r\n" + b"x" * 400_000), MULTIPART),
        (multipart([Part("a" * 400_000, b"1")]), MULTIPART),
    ],
    ids=lambda value: value[:40],
)
def test_multipart_that_can_not_be_read_goes_by_its_bytes(body, content_type):
    """A form that does not parse, or would take much memory, is compared byte by byte, with its type."""
    assert of(body, content_type) == of(body, content_type)
    assert of(body, content_type) != of(body + b"\n", content_type)
    assert of(body, content_type) != of(body, content_type + ";x=y")
    assert of(body, content_type) != of(Form([("a", "1")]), content_type)
    assert of(body, content_type) != of(Form([]), content_type)


def test_a_form_of_many_parts(monkeypatch):
    """MAX_PARTS parts are compared by their meaning; with one more, the bytes are."""
    monkeypatch.setattr("flask_idempotency.fingerprint.MAX_PARTS", 50)
    for rest, equal in ((49, True), (50, False)):
        parts = [Part("a", b"1"), *([Part("b", b"")] * rest)]
        again = of(multipart(parts[::-1], "other"), "multipart/form-data; boundary=other")
        assert equal == (again == of(multipart(parts), MULTIPART))
    assert MAX_PARTS >= 1000, "what an app accepts by default must be compared by its meaning"


def test_a_parsed_form_without_a_known_type():
    """A form that the app parsed from a type of its own is compared with its type."""
    assert of(Form([("a", "1")]), "application/x-own; a=b") == of(Form([("a", "1")]), "Application/x-own")
    assert of(Form([("a", "1")]), "application/x-own") != of(Form([("a", "1")]), "application/x-other")
    assert of(Form([("a", "1")]), URLENCODED) != of(Form([("a", "1")]), MULTIPART)


# All else, and coded bodies.


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("text/html;charset=utf-8", 'Text/HTML;Charset="utf-8"'),
        ("text/html;charset=utf-8", 'text/html; charset="UTF-8"'),
        ("text/plain; a=b; c=d", 'text/plain;c="d" ;A=b;'),
        ("text/plain", " text/plain ; "),
        ('a/b; c="x;y"; d=e', 'a/b; d=e; c="x;y"'),
    ],
)
def test_spellings_of_a_media_type_are_equal(one, other):
    """Case of type, names and charset, blanks, quotes and the order of parameters make no difference."""
    assert of(b"x", one) == of(b"x", other)


def test_different_media_types_differ():
    """Type and parameters count, with the case of their values, and what breaks the grammar counts as well."""
    types = [
        *("", "text/plain", "text/html", "text/plain;a", "text/plain;a=", "text/plain;a=b", "text/plain;a=B"),
        *("text/plain;a=b;c=d", "text/plain;a=d;c=b", "text/plain;a=b;a=c", "text/plain;a=c;a=b", "text/plain;ab"),
        *('text/plain;a="b;c=d"', 'text/plain;a="b', 'text/plain;a="b c"', 'text/plain;a="b\\"c"', "text/plain;=b"),
        *("text/plain, text/plain", "text/plain;charset=utf-8", "text/plain;charset=latin-1"),
    ]
    assert len(types) == len({of(b"x", content_type) for content_type in types})


@pytest.mark.scenario(28)
def test_bodies_of_unknown_length_differ():
    """A stream is read to its end, whatever length a request declared, if any."""
    bodies = [b"", b"a", b"b", b"a" * 70_000, b"a" * 70_001]
    assert len(bodies) == len({of(Trickle(body), "text/plain") for body in bodies})


@pytest.mark.parametrize("content_type", ["application/json", URLENCODED, MULTIPART, "text/plain"])
def test_a_coded_body_counts_as_sent(content_type):
    """Under a content coding the bytes count, and the coding; identity is no coding."""
    one, other = (b"[1]", b"[ 1 ]") if "json" in content_type else (b"a=1&b=2", b"b=2&a=1")
    sent = of(one, content_type, content_encoding="gzip")
    assert sent != of(other, content_type, content_encoding="gzip")
    assert sent != of(one, content_type, content_encoding="br")
    assert sent != of(one, content_type)
    assert sent == of(one, content_type, content_encoding=" GZIP ")
    assert of(one, content_type) == of(one, content_type, content_encoding="Identity")


def test_a_value_stands_for_body_type_and_coding():
    """With a value of the app's own, nothing else of the body counts; the rest of the request does."""
    assert of(Value("v"), "text/plain", content_encoding="br") == of(Value("v"), "application/json")
    assert of(Value("v")) != of(Value("v"), path="/refunds")
    assert of(Value("v")) != of(Value("v"), query=b"a")


# Streams.


class Trickle(BytesIO):
    """A stream whose reads give less than they were asked for."""

    def read(self, size=-1):
        return super().read(size if size < 0 else min(size, 1 + size // 3))


bodies = pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"a": [1, 2]}', "application/json"),
        (b'{"a": [1, 2}', "application/json"),
        (b"a=1&b=2", URLENCODED),
        (multipart([Part("a", b"1"), Part("b", b"2" * 150_000, "b")]), MULTIPART),
        (multipart([Part("a", b"1"), Part("b", b"2" * 150_000, "b")])[:-20], MULTIPART),
        (b"x" * 150_000, "text/plain"),
        (b"x" * 600_000, URLENCODED),
    ],
)


@pytest.mark.scenario(29)
@bodies
def test_the_view_can_still_read_everything(body, content_type):
    """Wherever a stream stands, it is read from its start, and stands there again afterwards."""
    stream = BytesIO(body)
    stream.seek(3)
    assert of(body, content_type) == of(stream, content_type)
    assert body == stream.read()


@bodies
def test_the_size_of_reads_makes_no_difference(body, content_type):
    """A stream that gives little at a time has the fingerprint of one that gives all."""
    assert content_type == "application/json" or of(body, content_type) == of(Trickle(body), content_type)


def test_a_stream_that_breaks_off_is_rewound():
    """An error while reading is the caller's to handle, with the stream at its start."""

    class Broken(BytesIO):
        def read(self, size=-1):
            super().read(size)
            raise OSError("the disk is gone")

    stream = Broken(b"abc")
    with pytest.raises(OSError, match="the disk is gone"):
        of(stream)
    assert stream.tell() == 0


def test_a_parsed_file_keeps_its_position():
    """A parsed file is read from its start, and then stands where the app left it."""
    stream = BytesIO(b"abcdef")
    stream.seek(2)
    form = Form([], [("a", "a.txt", None, stream)])
    assert of(multipart([Part("a", b"abcdef", "a.txt")]), MULTIPART) == of(form, MULTIPART)
    assert stream.read() == b"cdef"


class Endless(io.RawIOBase):
    """A seekable stream of many megabytes that are made while they are read."""

    def __init__(self, head, unit, tail, size):
        self.head, self.unit, self.tail = head, unit * (256 * 1024 // len(unit)), tail
        self.end = len(head) + size // len(self.unit) * len(self.unit)
        self.position = 0

    def seek(self, position, whence=0):
        self.position = position if whence == 0 else self.end + len(self.tail) + position
        return self.position

    def tell(self):
        return self.position

    def read(self, size=-1):
        assert 0 < size <= 1024 * 1024
        position = self.position
        if position < len(self.head):
            data = self.head[position : position + size]
        elif position < self.end:
            start = (position - len(self.head)) % len(self.unit)
            data = self.unit[start : start + size]
        else:
            data = self.tail[position - self.end :][:size]
        self.position += len(data)
        return data


def head_of(part):
    return multipart([part]).split(b"\r\n\r\n")[0] + b"\r\n\r\n"


MEGABYTE = 1024 * 1024


@pytest.mark.scenario(27)
@pytest.mark.parametrize(
    ("stream", "content_type"),
    [
        (Endless(b"", b"x", b"", 64 * MEGABYTE), "application/octet-stream"),
        (Endless(b"", b"a=1&", b"", 64 * MEGABYTE), URLENCODED),
        (Endless(head_of(Part("a", b"", "a")), b"x", b"\r\n--frontier--", 64 * MEGABYTE), MULTIPART),
        (Endless(head_of(Part("a", b"")), b"x\r\n-", b"\r\n--frontier--", 16 * MEGABYTE), MULTIPART),
        (
            Endless(b'--frontier\r\nContent-Disposition: form-data; name="', b"x", b'"\r\n\r\n', 16 * MEGABYTE),
            MULTIPART,
        ),
        (Endless(b"", b"x", b"\r\n--frontier--", 16 * MEGABYTE), MULTIPART),
        (Endless(multipart([]), b"x", b"", 16 * MEGABYTE), MULTIPART),
        (
            Endless(
                b"--frontier", b"\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n--frontier", b"--", 4 * MEGABYTE
            ),
            MULTIPART,
        ),
    ],
    ids=["bytes", "form", "file", "field", "header", "preamble", "epilogue", "parts"],
)
def test_memory_stays_flat(monkeypatch, stream, content_type):
    """Whatever a client sends in whatever part of a body, a few megabytes hold what is needed of it."""
    monkeypatch.setattr("flask_idempotency.fingerprint.MAX_PARTS", 200)  # for speed; each part costs the same
    tracemalloc.start()
    try:
        of(stream, content_type)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_fingerprint_of_a_long_stream_is_that_of_its_bytes(repeats):
    """A file that is made while it is read is the same file as one that is held in memory."""
    size = repeats * 256 * 1024
    stream = Endless(head_of(Part("a", b"", "a")), b"x", b"\r\n--frontier--\r\n", size)
    assert of(multipart([Part("a", b"x" * size, "a")]), MULTIPART) == of(stream, MULTIPART)


# Versions.


MESSAGES = {
    "empty": Message(method="POST", path="/", query=b"", body=BytesIO()),
    "query": Message(method="PATCH", path="/api/v1/caf\u00e9", query=b"b=%FF&a=1&b=2+3&c", body=BytesIO()),
    "json": Message(
        method="POST",
        path="/charges",
        query=b"",
        content_type="application/json; charset=utf-8",
        body=BytesIO(
            b'{"amount": 12.50, "big": 9007199254740993, "huge": 1e400, "note": "caf\\u00e9 \\ud800 \xf0\x9f\x98\x80",'
            b' "items": [{"id": 1, "ok": true}, null, [], {}, -0.0, 100000000000000000000]}'
        ),
        leave_out=("/items/0/id",),
    ),
    "twice": Message(
        method="POST", path="/", query=b"", content_type="application/json", body=BytesIO(b'{"a": 1, "a": 2}')
    ),
    "form": Message(method="POST", path="/", query=b"", content_type=URLENCODED, body=BytesIO(b"b=2&a=%FF&b=1")),
    "parts": Message(
        method="POST",
        path="/",
        query=b"",
        content_type=MULTIPART,
        body=BytesIO(
            multipart([Part("a", b"1"), Part("\u00e9", b"%PDF", "a.pdf", "application/pdf"), Part("a", b"2", "b.txt")])
        ),
    ),
    "bytes": Message(
        method="POST",
        path="/",
        query=b"",
        content_type='Text/CSV; Charset="UTF-8"; header=present',
        content_encoding="GZIP",
        body=BytesIO(bytes(range(256))),
    ),
    "value": Message(method="POST", path="/", query=b"", body=Value(["a", b"b", 1, 2.5, {"c": None, "a": True}])),
}


GOLDEN = {
    "empty": "a6160c4bc68786ed4aca4673c9d5d2b667c0590cff7203048fd07da7ba799096",
    "query": "f84f836ddc8161146d6eacb805aca54c954cbbc4e39eb59dbcf6bdaf6487453c",
    "json": "ae16f616c45cf8a87e83e9046fc0dabb9dc4888fba24bd45a26c358ac6424de9",
    "twice": "afc21c3af42970206322e5993a86e0626ada8e9bf8b0ac0587a815adf1e6ea5f",
    "form": "fdc5ddeb02373fd193244f1512d8af8a84835da5060dfc482b3c5d0a3fdd03bc",
    "parts": "c6afc9d9eb8bb3b342034bea1a0b2485e93a3fa418e3420566402de54d0814ea",
    "bytes": "a6d59c57b740b1dd1e0a53d71b7d0ccccbf1666c8e16e0afcdb78024772fd73b",
    "value": "1260ae8c3b5bc2f70a6dfe72a6638139fe13794d0d8642c277f8fb90cc29b336",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_version_1_never_changes(name):
    """The fingerprints that are stored today are found again by every later release."""
    assert GOLDEN[name] == fingerprint(MESSAGES[name], 1)


@pytest.mark.scenario(30)
def test_an_older_version_is_still_computed(monkeypatch):
    """A fingerprint that an older version made is compared by that version's rules."""
    monkeypatch.setitem(VERSIONS, 0, lambda message: message.path)
    message = MESSAGES["empty"]
    assert fingerprint(message, 0) == "/"
    assert fingerprint(message, CURRENT_VERSION) == fingerprint(message) != fingerprint(message, 0)


def test_an_unknown_version_is_refused():
    """A version that this release does not know is an error that names it, and those that it knows."""
    with pytest.raises(UnknownVersion, match=r"versions \[1\], not of 99"):
        fingerprint(MESSAGES["empty"], 99)
    assert issubclass(UnknownVersion, LookupError)


def test_a_message_is_a_value():
    """A message can't be changed, and a copy with one part replaced is another message."""
    message = MESSAGES["query"]
    with pytest.raises(AttributeError):
        message.path = "/"
    assert fingerprint(message) != fingerprint(replace(message, path="/"))
