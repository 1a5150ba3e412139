"""The filters of the list of keys, between a query and the store's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...claim import Status
from ...store.survey import Filters

#: The largest number of a row that every database knows.
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Asked:
    """What a query asks for.

    :ivar filters: what the store is asked for.
    :ivar before: the list goes on after this id; ``None``: it begins.
    :ivar problems: what the query says that can't be; nothing is looked for then.
    """

    filters: Filters
    before: int | None
    problems: tuple[str, ...]

    def arguments(self) -> dict[str, str]:
        """The query again, without its place in the list."""
        one = self.filters
        texts = {"scope": one.scope, "key": one.key, "status": one.status and one.status.value, "path": one.path}
        return {**{name: text for name, text in texts.items() if text}, **({"stale": "1"} if one.stale else {})}


def asked(query: Mapping[str, str]) -> Asked:
    """Read a query. An empty value is none."""
    problems = []
    given = {name: query.get(name, "") for name in ("scope", "key", "path")}
    status = query.get("status", "")
    if status not in ("", *(one.value for one in Status)):
        problems.append("There is no such status.")
        status = ""
    filters = Filters(
        scope=given["scope"] or None,
        key=given["key"] or None,
        status=Status(status) if status else None,
        path=given["path"] or None,
        stale=query.get("stale", "") not in ("", "0"),
    )
    before = place(query)
    if before is None and query.get("before"):
        problems.append("There is no such place in the list.")
    return Asked(filters, before, tuple(problems))


def place(query: Mapping[str, str]) -> int | None:
    """After which id a list goes on; ``None`` at its beginning, or where the query names no id."""
    text = query.get("before", "")
    before = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
    return before if 0 < before <= _LARGEST else None
