"""What a benchmark found: Markdown tables on the terminal, and a JSON file that names the versions measured with."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from .interleaved import Spread

#: Where the JSON files go, below the folder that the benchmark is started in; ``BENCH_OUTPUT`` names another.
OUTPUT: Final = Path(os.environ.get("BENCH_OUTPUT", "build/benchmarks"))

PACKAGES: Final = (
    "Flask-Idempotency",
    "Flask",
    "Werkzeug",
    "Flask-SQLAlchemy",
    "SQLAlchemy",
    "psycopg2-binary",
    "psycopg",
    "gunicorn",
    "redis",
    "orjson",
)


@dataclass(frozen=True)
class Target:
    """A bound for a ratio: at most, or at least."""

    at_most: float | None = None
    at_least: float | None = None

    def met(self, value: float) -> bool:
        """Whether a value keeps the bound."""
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    def verdict(self, value: float) -> str:
        """The bound, and whether a value keeps it, as a cell of a table."""
        bound = f"≤ {self.at_most:g}" if self.at_most is not None else f"≥ {self.at_least:g}"
        return f"{bound} {'met' if self.met(value) else 'NOT MET'}"


@dataclass
class Report:
    """The tables of one benchmark, printed as they come and written as ``<name>.json`` at the end."""

    name: str
    tables: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, Any] = field(default_factory=lambda: versions())

    def table(self, title: str, heads: Sequence[str], rows: Iterable[Sequence[object]], **data: object) -> None:
        """Print a table and keep it.

        :param rows: cells, each a text, a number or a :class:`Spread`.
        :param data: what the JSON file has beside the cells: all samples, say.
        """
        kept = [list(row) for row in rows]
        print(f"\n{title}\n", flush=True)
        print("\n".join(lines(heads, [[shown(cell) for cell in row] for row in kept])), flush=True)
        self.tables.append({"title": title, "heads": list(heads), "rows": kept, **data})

    def write(self, folder: Path = OUTPUT) -> Path:
        """Write everything as JSON and return where it went."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        content = {"name": self.name, "versions": self.versions, "tables": self.tables}
        path.write_text(json.dumps(content, indent=2, default=plain, ensure_ascii=False) + "\n")
        print(f"\nWritten to {path}", flush=True)
        return path


def plain(value: object) -> object:
    """A dataclass as JSON has it."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def shown(cell: object) -> str:
    """A cell's text: numbers with three digits, a spread with its quartiles in brackets."""
    if isinstance(cell, Spread):
        return f"{number(cell.median)} [{number(cell.low)}–{number(cell.high)}]"
    return number(cell) if isinstance(cell, float) else str(cell)


def number(value: float) -> str:
    """A number with at least three digits that count."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def lines(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, aligned: its first column to the left, all others to the right."""
    cells = [list(heads), *(list(row) for row in rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        first, *others = zip(row, widths, strict=True)
        return " | ".join(["| " + first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"

    first, *others = widths
    rule = " | ".join(["| " + "-" * first, *("-" * (width - 1) + ":" for width in others)]) + " |"
    return [line(cells[0]), rule, *map(line, cells[1:])]


def versions(**more: str) -> dict[str, Any]:
    """What was measured with what: Python, the machine's cores, and the packages that are installed.

    :param more: further ones: the servers' own.
    """
    found: dict[str, Any] = {"Python": platform.python_version(), "system": platform.platform()}
    found["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {**found, **more}


def duration(quantity: Spread, unit: float) -> Spread:
    """A spread of seconds in another unit: 1e-3 for milliseconds."""
    values: Mapping[str, float] = asdict(quantity)
    return Spread(**{name: value / unit for name, value in values.items()})
