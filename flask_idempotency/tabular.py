"""Tables for people, on a terminal or in a log."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

#: What a terminal, and a page of a CI's log, shows without a second line.
WIDTH: Final = 120

#: Cells wider than this do not widen their column: they push aside what is on their own line.
_WIDEST: Final = 50

_INDENT: Final = " " * 4


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table. Nothing is cut: where a line would be too wide, its last cell goes below it."""
    cells = [heads, *rows]
    columns = list(zip(*cells, strict=True))[:-1]
    widths = [max(len(cell) for cell in column if len(cell) <= _WIDEST) for column in columns]
    lines = []
    for *others, last in cells:
        begin = "  ".join(cell.ljust(width) for cell, width in zip(others, widths, strict=True))
        if len(begin) + 2 + len(last) <= WIDTH:
            lines.append(f"{begin}  {last}".rstrip())
        else:
            lines += [begin.rstrip(), *textwrap.wrap(last, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)]
    return lines


def figures(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table of numbers, each with a name before them."""
    cells = [heads, *rows]
    first, *others = zip(*cells, strict=True)
    width = max(len(cell) for cell in first if len(cell) <= _WIDEST)
    widths = [max(map(len, column)) for column in others]
    return [
        "  ".join([name.ljust(width), *(one.rjust(size) for one, size in zip(numbers, widths, strict=True))])
        for name, *numbers in cells
    ]


def pairs(found: Iterable[tuple[str, str]]) -> list[str]:
    """Names, and what there is to say of each."""
    found = list(found)
    width = max((len(name) for name, _ in found), default=0)
    return [f"{name.ljust(width)}  {value}".rstrip() for name, value in found]
