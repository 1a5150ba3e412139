"""Puts what was measured into the documentation: ``python -m benchmarks.page FILE …``, JSON files of ``report``.

The tables of a report called ``paths`` go between the comments ``paths`` and ``end of paths`` of the page; those of
several files of one name (each of another database, say) one after the other. Targets stay behind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from .interleaved import Spread
from .report import lines, shown

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "performance.md"

#: What a reader of the page has no use for.
LEFT_OUT: Final = "target"


def filled(text: str, reports: Sequence[dict[str, Any]]) -> str:
    """The text of a page with the reports' tables in their places; a report without a place is an error."""
    for name in dict.fromkeys(report["name"] for report in reports):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        above, opened, rest = text.partition(begin)
        _, closed, below = rest.partition(end)
        if not opened or not closed:
            raise ValueError(f"the page has no place for {name!r}: {begin.strip()} … {end.strip()}")
        text = f"{above}{begin}\n{section([one for one in reports if one['name'] == name])}\n{end}{below}"
    return text


def section(reports: Sequence[dict[str, Any]]) -> str:
    """The tables of some reports, and what they were measured on."""
    tables = [f"### {one['title']}\n\n{table(one)}\n" for report in reports for one in report["tables"]]
    versions = dict.fromkeys(pair for report in reports for pair in report["versions"].items() if pair[0] != "system")
    return "\n".join([*tables, "Measured with " + ", ".join(f"{name} {version}" for name, version in versions) + ".\n"])


def table(found: dict[str, Any]) -> str:
    """One table, without its targets."""
    kept = [place for place, head in enumerate(found["heads"]) if head != LEFT_OUT]
    rows = [[cell(row[place]) for place in kept] for row in found["rows"]]
    return "\n".join(lines([found["heads"][place] for place in kept], rows))


def cell(value: Any) -> str:
    """The text of a cell that was read from JSON."""
    return shown(Spread(**value) if isinstance(value, dict) else value)


if __name__ == "__main__":
    measured = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    PAGE.write_text(filled(PAGE.read_text(), measured))
