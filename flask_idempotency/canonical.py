"""The canonical form of JSON: one for every spelling of a document, different ones for different documents.

Version 1 of the fingerprint hashes it, so no document may ever get another form than it has today.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from functools import cache
from hashlib import sha256
from importlib import import_module
from itertools import accumulate
from typing import Any

#: Levels of JSON that is compared by its meaning; deeper documents go by their bytes. Those of APIs rarely have ten.
#: The parser takes a frame or two for each, so 64 always fit an empty stack under Python's limit of 1,000 frames.
MAX_DEPTH = 64

# Digits of the integers that are written as such: those that fit 64 bits, which are parsed and written fast.
_INT_DIGITS = 18


def utf8(text: str) -> bytes:
    """The text's bytes."""
    return text.encode("utf-8", "surrogatepass")  # gives lone surrogates bytes of their own, where strict UTF-8 fails


def canonical_json(data: bytes, leave_out: list[tuple[str, ...]]) -> bytes:
    """The canonical form of a document, without what the paths lead to. ValueError: it goes by its bytes."""
    return _with_room(_document, data, leave_out)


def canonical_value(value: object) -> bytes:
    """The canonical form of what an app gave. TypeError: it holds what has none."""
    return _with_room(lambda: utf8(_ENCODER.encode(_plain(value, 0))))


# JSON (RFC 8259). Its canonical form is JSON again, with sorted members and no white space. A number that is no short
# integer, and bytes in a Value, become a list that begins with NaN or Infinity: no accepted document holds either.

_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_ESCAPED_MARK = re.compile(rb"\\u00[2357]")  # how "\u0022" and the like begin: a quote, a colon, a bracket, a brace
_ONE_BRACKET = bytes.maketrans(b"{}", b"[]")
_BRACKETS_TO_STEPS = bytes.maketrans(b"[]", b"\x01\xff")  # one up and, as signed bytes, one down
# Innermost levels that are taken away at once, not step by step: few, since each costs a search of what is left.
_FAST_LEVELS = 4
_ONE_DIGIT = bytes.maketrans(b"123456789", b"0" * 9)
# A number that is no integer has "." or "e" or both, and before and behind it one of ",:[]{}", which become one here.
# Its digits and signs are dropped, as are letters (for speed) but those that tell "true" and "false" from an "e".
_AROUND = bytes.maketrans(b".:[]{}", b"e,,,,,")
_DROPPED = bytes(byte for byte in range(128) if chr(byte).isalnum() and byte not in b"eft") + b"+-"
_NO_INTEGER = re.compile(b",ee?,")
_EXPONENTS = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)


def _with_room(function: Callable[..., bytes], *args: object) -> bytes:
    """What the function returns, however little the caller left of its stack: a thread begins with an empty one."""
    try:
        return function(*args)
    except RecursionError:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function, *args).result()


def _marks(data: bytes) -> bytes:
    """The quotes, brackets and braces."""
    return data.translate(None, _NO_MARKS)


def _is_shallow(data: bytes, marks: bytes) -> bool:
    """Whether a document has at most MAX_DEPTH levels. Broken JSON may be found deeper: it goes by its bytes too."""
    if len(marks) <= 2 * MAX_DEPTH:
        return True
    if b"\\" in data:
        marks = _marks(data.replace(b"\\\\", b"").replace(b'\\"', b""))
    # Without pairs of quotes, each bracket is still inside or outside of a string, as it was.
    levels = marks.replace(b'""', b"").translate(_ONE_BRACKET)
    if b'"' in levels:
        levels = b"".join(levels.split(b'"')[::2])
    for _ in range(_FAST_LEVELS):
        levels = levels.replace(b"[]", b"")
    steps = memoryview(levels.translate(_BRACKETS_TO_STEPS)).cast("b")
    return max(accumulate(steps), default=0) <= MAX_DEPTH - _FAST_LEVELS


def _document(data: bytes, leave_out: list[tuple[str, ...]]) -> bytes:
    """The canonical form of a document. ValueError: it goes by its bytes."""
    marks = _marks(data)
    if not _is_shallow(data, marks):
        raise ValueError("deeper than MAX_DEPTH, or no JSON")
    escaped = b"\\" in data and _ESCAPED_MARK.search(data)
    if not leave_out and not escaped and (form := _by_orjson(data, marks)) is not None:
        return form
    # Python's own integers are faster, and serve as long as no run of digits is longer than _INT_DIGITS.
    exact = b"0" * (_INT_DIGITS + 1) in data.translate(_ONE_DIGIT)
    if leave_out or escaped:
        document = (_EXACT if exact else _QUICK).decode(data.decode())
        for path in leave_out:
            _remove(document, path)
        return _written(document)
    form = _written((_EXACT_LAST if exact else _QUICK_LAST).decode(data.decode()))
    # Of members of one name only the last was kept. Each that was dropped took its colon with it, and nothing adds any.
    if form.count(b":") != data.count(b":"):
        raise ValueError("a member's name is repeated")
    return form


def _by_orjson(data: bytes, marks: bytes) -> bytes | None:
    """The canonical form of a document of short integers without repeated names; ``None``: left to Python's parser.

    That is where orjson is missing, and where it refuses the document: it takes neither lone surrogates nor, by the
    option, integers past 53 bits, which both have a canonical form, and all that Python's parser refuses.
    """
    if (orjson := _orjson()) is None:
        return None
    try:
        form: bytes = orjson.dumps(orjson.loads(data), option=orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER)
    except (ValueError, TypeError):  # it could not be parsed, or not be written
        return None
    # Of members of one name only the last was kept, and each that was dropped took its quotes with it.
    if len(_marks(form)) != len(marks) or _NO_INTEGER.search(b",%b," % form.translate(_AROUND, _DROPPED)):
        return None
    return form


def _written(document: object) -> bytes:
    """The canonical form of what Python's parser made. orjson writes the same, but for lone surrogates."""
    if (orjson := _orjson()) is not None:
        with suppress(TypeError):
            form: bytes = orjson.dumps(document, lambda number: orjson.Fragment(number.form), orjson.OPT_SORT_KEYS)
            return form
    return utf8(_ENCODER.encode(document))


@cache
def _orjson() -> Any:
    """The module of the extra ``orjson``, if it is installed."""
    with suppress(ImportError):
        return import_module("orjson")
    return None


def _remove(node: Any, path: tuple[str, ...]) -> None:
    with suppress(LookupError, TypeError):  # where there is no such member
        for depth, token in enumerate(path, 1):
            is_index = isinstance(node, list) and re.fullmatch("0|[1-9][0-9]{0,17}", token)
            place: Any = int(token) if is_index else token
            if depth < len(path):
                node = node[place]
            elif is_index:
                node[place] = None  # taken out, it would give those behind it other pointers
            else:
                del node[place]


def _unique_members(members: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(members)
    if len(unique) != len(members):
        raise ValueError("a member's name is repeated")
    return unique


class _Number(tuple[float, str]):
    """A number that is no short integer: NaN, and its significant digits and exponent. orjson asks for its form."""

    __slots__ = ()

    @property
    def form(self) -> str:
        return f'[NaN,"{self[1]}"]'


def _number(text: str) -> int | _Number:
    """The one form of a number, however it is spelled: a short ``int``, or its significant digits and exponent."""
    mantissa, _, power = text.lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    if not power and len(text) <= _INT_DIGITS:  # the usual case, for speed; what follows gives the same
        fraction = fraction.rstrip("0")
        return _Number((math.nan, f"{int(whole + fraction)}e-{len(fraction)}")) if fraction else int(whole)
    sign = "-" if whole.startswith("-") else ""
    digits = (whole + fraction).lstrip("-0")
    significant = digits.rstrip("0")
    if not significant:
        return 0
    # Exponents may have thousands of digits: Decimal adds them as they are, and nothing is expanded.
    exponent = _EXPONENTS.add(Decimal(power or 0), len(digits) - len(significant) - len(fraction))
    if 0 <= exponent <= _INT_DIGITS - len(significant):
        return int(sign + significant + "0" * int(exponent))
    return _Number((math.nan, f"{sign}{significant}e{exponent}"))


# int(), as parse_constant, refuses NaN and Infinity with a ValueError.
# The first two decoders keep the last of members of one name.
_LAST: dict[str, Any] = {"parse_float": _number, "parse_constant": int}
_QUICK_LAST, _EXACT_LAST = json.JSONDecoder(**_LAST), json.JSONDecoder(parse_int=_number, **_LAST)
_HOOKS = _LAST | {"object_pairs_hook": _unique_members}
_QUICK, _EXACT = json.JSONDecoder(**_HOOKS), json.JSONDecoder(parse_int=_number, **_HOOKS)
_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, sort_keys=True, separators=(",", ":"))


def _plain(value: object, depth: int) -> object:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, bytes):
        return math.inf, sha256(value).hexdigest()
    number = Decimal(float.__repr__(value)) if isinstance(value, float) else value
    number = Decimal(number) if isinstance(number, int) else number  # str(int) gives up after some thousand digits
    if isinstance(number, Decimal) and number.is_finite():
        return _number(str(number))
    if isinstance(value, (list, tuple)) and depth < MAX_DEPTH:
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, dict) and depth < MAX_DEPTH and all(isinstance(name, str) for name in value):
        return {name: _plain(item, depth + 1) for name, item in value.items()}
    raise TypeError(
        f"A fingerprint can't be made of this {type(value).__name__}: give bytes, str, None, bool, finite numbers, or "
        f"lists, tuples and dicts (with str keys) of these, up to {MAX_DEPTH} levels."
    )
