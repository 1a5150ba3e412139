"""Examples of the paths that a rule has, to hold the regular expressions of protected paths against."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator
from itertools import chain, islice, product, takewhile
from math import prod
from typing import Any, Final

from werkzeug.routing import BaseConverter, Rule
from werkzeug.routing.converters import NumberConverter, ValidationError

#: Values of many forms. With those made from the expressions themselves they meet what people write there: classes of
#: characters, lengths, a name that is left out.
_VALUES: Final = (
    "x",
    "X1-y_z",
    "a b",
    "é",
    "x/y",
    "x/y/z",
    "1.5",
    "-1",
    "-1.5",
    "0" * 20,
    "7d2f0a1c-52b0-4c5e-9a55-0f9f3e2b1c4d",
    "7D2F0A1C-52B0-4C5E-9A55-0F9F3E2B1C4D",
    *string.printable[:95],
)

#: Lengths that values are made of, beside those that a converter names.
_LENGTHS: Final = (*range(2, 9), 16, 32, 64, 300)

#: How many paths are made of the short lists of several variables.
_COMBINED: Final = 500


#: What can make an expression that is found in a text be missing in a longer one: whatever looks ahead, an end or a
#: border of a word, and what gives nothing back. Flags and plain groups do not. It may see too much.
_LOOKS_AHEAD: Final = re.compile(r"\(\?(?!:|P<|[aimsux]+\))|\$|\\[bBZz]|[*+?}]\+")


def covers_all(rule: Rule, pattern: re.Pattern[str]) -> bool:
    """Whether the expression is sure to be found in each path of a rule: in all that there are, or in what they begin
    with, whatever follows.
    """
    if are_few(rule):
        return all(pattern.search(path) for path in examples(rule, [pattern]))
    trace = _trace(rule)
    begin = "".join(text for _, text in takewhile(lambda part: not part[0], trace))
    return _LOOKS_AHEAD.search(pattern.pattern) is None and pattern.search(begin) is not None


def are_few(rule: Rule) -> bool:
    """Whether :func:`examples` gives all paths that a rule has."""
    items = [getattr(rule._converters[name], "items", None) for dynamic, name in _trace(rule) if dynamic]
    return all(isinstance(one, set) for one in items) and prod(map(len, filter(None, items))) <= _COMBINED


def examples(rule: Rule, patterns: Iterable[re.Pattern[str]]) -> Iterator[str]:
    """Paths of the rule: all that it has, if it has no variables; else many, chosen for the expressions.

    :param rule: a rule of an app's map.
    :param patterns: the regular expressions that the paths are for: the words in them are tried as values.
    """
    texts = [re.sub(r"\\[A-Za-z]", " ", one.pattern) for one in patterns]  # without classes as \d
    words = sorted({word for text in texts for word in re.findall(r"\w+", text)})
    trace = _trace(rule)
    names = [name for dynamic, name in trace if dynamic]
    # The list of a variable begins with a plain value, then the words.
    lists = [_values(rule._converters[name], words) for name in names]
    short = product(*(lists if are_few(rule) else (values[: len(words) + 1] for values in lists)))
    one_at_a_time = (
        tuple(value if place == at else other[0] for at, other in enumerate(lists))
        for place, values in enumerate(lists)
        for value in values
    )
    for chosen in chain(islice(short, _COMBINED), one_at_a_time):
        values = iter(chosen)
        path = "".join(next(values) if dynamic else text for dynamic, text in trace)
        yield path
        if not rule.strict_slashes and len(path) > 1:
            yield path[:-1] if path.endswith("/") else f"{path}/"


def _trace(rule: Rule) -> list[tuple[bool, str]]:
    """A rule's path in parts: whether each is a variable, and its text or name."""
    return rule._trace[rule._trace.index((False, "|")) + 1 :]


def _values(converter: BaseConverter, words: list[str]) -> list[str]:
    """Values that the converter lets through; all that are known, if it lets none of them through."""
    items = getattr(converter, "items", None)
    if isinstance(items, set):  # any(…)
        return sorted(items)
    lengths = {*_LENGTHS, *(int(number) for number in re.findall(r"\d{1,3}", converter.regex))}
    numbers = [getattr(converter, name, None) for name in ("min", "max")]
    candidates = dict.fromkeys(
        [
            "x",
            *words,
            *(form.format(word) for word in words for form in ("{}x", "x{}", "{}/x", "x/{}")),
            *_VALUES,
            *(character * length for length in sorted(lengths) for character in "x7"),
            *re.findall(r"\w+", converter.regex),
            *(str(number) for number in numbers if number is not None),
        ]
    )
    return [value for value in candidates if _lets_through(converter, value)] or list(candidates)


def _lets_through(converter: Any, value: str) -> bool:
    if re.fullmatch(converter.regex, value) is None:
        return False
    if not isinstance(converter, NumberConverter):
        return True  # an app's own may look into its database
    try:
        converter.to_python(value)
    except ValidationError:
        return False
    return True
