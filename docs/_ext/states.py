"""The states of a key, and what leads from one to the next, as a picture and as a table.

The picture is a file, so that the pages build without a network and can be read without scripts. Draw it again, and
write the table, after a change::

    .venv/bin/python docs/_ext/tables.py

``tests/test_states.py`` does in every state all that a store can do, and compares what came of it with these lists.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

PICTURE = Path(__file__).resolve().parents[1] / "_static" / "states.svg"

#: The key that is not in the table, beside the values of ``Status``.
NONE: Final = "(no row)"


class Step(NamedTuple):
    """One change of a key: the states on both sides, the store's method, and when that does it."""

    before: str
    after: str
    method: str
    when: str


STEPS: Final = (
    Step(NONE, "in_progress", "claim", "a request asks: the first one"),
    Step("in_progress", "completed", "record", "the answer is complete"),
    Step("in_progress", NONE, "release", "the answer asks for another try, or the view failed, nothing committed"),
    Step("in_progress", "released", "release", "the same, where steps or a derived key were used"),
    Step("in_progress", "held", "hold", "the view failed and has committed something"),
    Step("in_progress", "in_progress", "take", "a retry, once the lease is over: the takeover"),
    Step("in_progress", "completed", "settle", "somebody records an answer, once the lease is over, or by force"),
    Step("in_progress", NONE, "free", "somebody releases it, once the lease is over, or by force"),
    Step("in_progress", "released", "free", "the same, where steps or a derived key were used"),
    Step("in_progress", NONE, "prune", "lease and retention are over"),
    Step("held", "completed", "settle", "somebody records an answer"),
    Step("held", NONE, "free", "somebody releases it"),
    Step("held", "released", "free", "the same, where steps or a derived key were used"),
    Step("released", "in_progress", "take", "a retry of the same request; any request, once the retention is over"),
    Step("released", "completed", "settle", "somebody records an answer"),
    Step("released", NONE, "prune", "the retention is over"),
    Step("completed", "in_progress", "take", "any request, once the retention is over"),
    Step("completed", NONE, "free", "somebody releases it by force"),
    Step("completed", "released", "free", "the same, where steps or a derived key were used"),
    Step("completed", NONE, "prune", "the retention is over"),
)

#: Where the boxes stand: the middle of each.
_BOXES: Final = {
    NONE: (110, 240),
    "in_progress": (400, 90),
    "completed": (690, 240),
    "held": (690, 40),
    "released": (400, 390),
}
_WIDTH, _HEIGHT = 130, 44

#: How each arrow goes: from where, to where, and where its words stand.
_ARROWS: Final = {
    (NONE, "in_progress"): ("M 110 218 V 80 H 335", (120, 72)),
    ("in_progress", NONE): ("M 335 104 H 150 V 218", (158, 122)),
    ("in_progress", "in_progress"): ("M 370 68 V 34 H 430 V 68", (378, 26)),
    ("in_progress", "held"): ("M 465 74 H 545 V 40 H 625", (490, 68)),
    ("in_progress", "completed"): ("M 465 98 H 668 V 218", (490, 116)),
    ("held", "completed"): ("M 730 62 V 218", (738, 130)),
    ("held", NONE): ("M 645 62 V 176 H 165 V 218", (512, 170)),
    ("held", "released"): ("M 655 62 V 196 H 440 V 368", (448, 214)),
    ("completed", NONE): ("M 625 250 H 175", (190, 264)),
    ("completed", "in_progress"): ("M 625 230 H 415 V 112", (512, 244)),
    ("completed", "released"): ("M 700 262 V 398 H 465", (600, 416)),
    ("released", "completed"): ("M 465 380 H 670 V 262", (545, 372)),
    ("released", NONE): ("M 335 390 H 110 V 262", (120, 382)),
    ("released", "in_progress"): ("M 380 368 V 112", (388, 300)),
    ("in_progress", "released"): ("M 360 112 V 368", (258, 330)),
}


def drawn() -> str:
    """The picture, as SVG. Each arrow carries the methods that go along it."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 430" role="img" font-family="sans-serif">',
        "<title>The states of a key, and the calls of the store that lead from one to the next</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M 0 0 L 8 4 L 0 8 z" fill="#345"/></marker></defs>',
        '<rect width="820" height="430" rx="8" fill="#fff"/>',
    ]
    for (before, after), (path, (x, y)) in _ARROWS.items():
        methods = ", ".join(dict.fromkeys(one.method for one in STEPS if (one.before, one.after) == (before, after)))
        parts.append(
            f'<g data-before="{escape(before)}" data-after="{escape(after)}">'
            f'<path d="{path}" fill="none" stroke="#345" stroke-width="1.3" marker-end="url(#head)"/>'
            f'<text x="{x}" y="{y}" font-size="13" fill="#123" stroke="#fff" stroke-width="4" paint-order="stroke">'
            f"{methods}</text></g>"
        )
    for name, (x, y) in _BOXES.items():
        dash = ' stroke-dasharray="5 3"' if name == NONE else ""
        parts.append(
            f'<rect x="{x - _WIDTH // 2}" y="{y - _HEIGHT // 2}" width="{_WIDTH}" height="{_HEIGHT}" rx="8" '
            f'fill="#eef4fa" stroke="#345" stroke-width="1.5"{dash}/>'
            f'<text class="state" x="{x}" y="{y + 5}" font-size="15" text-anchor="middle" fill="#123">'
            f"{escape(name)}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])
