"""JSON pointers among the options are checked where they are written."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from flask import Flask

from flask_idempotency.config import read_config, read_keywords
from flask_idempotency.errors import ConfigurationError, OptionError
from flask_idempotency.fingerprint import Message, fingerprint

#: The document of RFC 6901, section 5, and its pointers with the member that each names.
DOCUMENT: dict[str, Any] = {
    "foo": ["bar", "baz"],
    "": 0,
    "a/b": 1,
    "c%d": 2,
    "e^f": 3,
    "g|h": 4,
    "i\\j": 5,
    'k"l': 6,
    " ": 7,
    "m~n": 8,
}
POINTERS = {
    "/foo": "foo",
    "/": "",
    "/a~1b": "a/b",
    "/c%d": "c%d",
    "/e^f": "e^f",
    "/g|h": "g|h",
    "/i\\j": "i\\j",
    '/k"l': 'k"l',
    "/ ": " ",
    "/m~0n": "m~n",
}


def of(document: Any, leave_out: tuple[str, ...]) -> str:
    """The fingerprint of a document."""
    body = io.BytesIO(json.dumps(document).encode())
    kind = "application/json"
    return fingerprint(Message(method="POST", path="/", query=b"", content_type=kind, body=body, leave_out=leave_out))


def from_code(pointers: Any) -> tuple[str, ...]:
    """The option as a decorator takes it."""
    return read_keywords("required", {"fingerprint": pointers})["fingerprint"]  # type: ignore[no-any-return]


def test_pointers() -> None:
    """Members to leave out are names or RFC 6901 pointers."""
    assert ("at", "/client/time") == from_code(["at", "/client/time"])


@pytest.mark.parametrize("where", ["code", "environment"])
@pytest.mark.parametrize("pointer", POINTERS)
def test_the_examples_of_the_rfc(pointer: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pointer of RFC 6901, section 5, leaves out the member that it names there, and no other."""
    if where == "code":
        leave_out = from_code([pointer])
    else:
        monkeypatch.setenv("FLASK_IDEMPOTENCY_FINGERPRINT", json.dumps([pointer]))
        app = Flask("shop")
        app.config.from_prefixed_env()
        leave_out = read_config(app.config)[0].fingerprint
    for name in DOCUMENT:
        changed = {**DOCUMENT, name: "changed"}
        assert (POINTERS[pointer] == name) == (of(DOCUMENT, leave_out) == of(changed, leave_out))
    without = {name: value for name, value in DOCUMENT.items() if name != POINTERS[pointer]}
    assert of(DOCUMENT, leave_out) == of(without, leave_out)


def test_an_element_of_an_array() -> None:
    """ "/foo/0" of the RFC names an element: its value does not count, and its neighbours' and their number do."""
    leave_out = from_code(["/foo/0"])
    changed = {**DOCUMENT, "foo": [1, "baz"]}
    assert of(DOCUMENT, leave_out) == of(changed, leave_out)
    for foo in (["bar"], ["baz"], ["bar", "other"], ["bar", "baz", "more"]):
        assert of(DOCUMENT, leave_out) != of({**DOCUMENT, "foo": foo}, leave_out)


@pytest.mark.parametrize(
    ("variable", "members"),
    [
        ("sent_at, /client/a~1b ,", ("sent_at", "/client/a~1b")),
        ('["/a,b", " c ", "/d/"]', ("/a,b", " c ", "/d/")),
        ("/items/0/at", ("/items/0/at",)),
        ('"sent_at"', ("sent_at",)),
        ("null", None),
        ("[]", ()),
    ],
)
def test_environment_variables(variable: str, members: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable lists members with commas between them, or is a JSON list, in which names stand as they are."""
    monkeypatch.setenv("FLASK_IDEMPOTENCY_FINGERPRINT", variable)
    app = Flask("shop")
    app.config.from_prefixed_env()
    assert members == read_config(app.config)[0].fingerprint


@pytest.mark.parametrize("variable", ["/client~time", '["a~1b", "/~"]', '[""]', '["a", 1]', '{"a": 1}', "5"])
def test_wrong_environment_variables(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no list of members is an error when the extension is initialised."""
    monkeypatch.setenv("FLASK_IDEMPOTENCY_FINGERPRINT", variable)
    app = Flask("shop")
    app.config.from_prefixed_env()
    with pytest.raises(ConfigurationError, match=r"^IDEMPOTENCY_FINGERPRINT: "):
        read_config(app.config)


def test_a_pointer_that_is_none() -> None:
    """A stray tilde in a pointer is an error at the decorator, not in every request."""
    with pytest.raises(OptionError, match="no JSON pointer"):
        from_code(["/client~time"])


def test_the_whole_document() -> None:
    """The empty pointer, which names all of it, is refused rather than ignored, and says how to name an empty name."""
    with pytest.raises(OptionError, match=r"the whole document as a JSON pointer; .* is '/'"):
        from_code(["a", ""])
