"""What a fingerprint costs, as a multiple of ``json.loads`` and SHA-256 of the same bytes.

``python -m benchmarks fingerprint``. The bounds of documents of 200 B and 10 kB are judged in the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from io import BytesIO
from typing import Final
from urllib.parse import urlencode

from flask_idempotency import canonical
from flask_idempotency.fingerprint import Message, fingerprint

from .interleaved import interleaved, timed
from .report import Report, Target

#: Sizes in bytes, and the bounds of the small ones: without orjson, and with it.
SIZES: Final = {"200 B": 200, "10 kB": 10_000, "1 MB": 1_000_000}
BOUNDS: Final = {"python": Target(at_most=1.5), "orjson": Target(at_most=1.0)}
#: The module of the extra, if it is installed; :func:`measured` puts it out of the way and back.
ORJSON: Final = canonical._orjson()

Body = tuple[str, bytes]


def document(size: int) -> bytes:
    """An order as APIs send them, of about so many bytes: half of it names, integers and texts without an escape."""
    item = {"sku": "A-1001", "quantity": 2, "price": 1999, "note": "gift wrap, please", "tags": ["new", "eu"]}
    count = max(1, (size - 100) // 92)
    order = {"customer": "cus_9s6XKzkNRiz8i3", "currency": "eur", "capture": True, "items": [item] * count}
    return json.dumps(order).encode()


def bodies(size: int) -> dict[str, Body]:
    """The same amount of JSON, of JSON with amounts that are no integers, of a form and of a multipart form."""
    amounts = document(size).replace(b"1999", b"19.99")
    pairs = urlencode([(f"name{number}", "a value & more") for number in range(max(1, size // 28))]).encode()
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * size + b"\r\n--b--\r\n"
    return {
        "json": ("application/json", document(size)),
        "json with decimals": ("application/json", amounts),
        "form": ("application/x-www-form-urlencoded", pairs),
        "multipart": ("multipart/form-data; boundary=b", part),
    }


def variants(size: int) -> dict[str, Callable[[], object]]:
    """What is measured, by name; the first is the base."""
    plain = document(size)
    found: dict[str, Callable[[], object]] = {"base": lambda: (json.loads(plain), sha256(plain).hexdigest())}
    for name, (kind, body) in bodies(size).items():
        message = Message(
            method="POST", path="/orders", query=b"", content_type=kind, body=BytesIO(body), max_form_memory_size=None
        )
        for way in BOUNDS if kind.endswith("json") else ("python",):
            if way == "python" or ORJSON:
                found[f"{name}, {way}"] = measured(message, way)
    return found


def measured(message: Message, way: str) -> Callable[[], object]:
    """The fingerprint by one way: with orjson, or as where it is not installed."""
    found = ORJSON if way == "orjson" else None

    def call() -> object:
        vars(canonical)["_orjson"] = lambda: found
        return fingerprint(message)

    return call


def main(quick: bool) -> int:
    """Measure, print and write ``fingerprint.json``; returns the exit status, which no figure decides on."""
    report = Report("fingerprint")
    for label, size in SIZES.items():
        calls = max(1, (20_000 if quick else 400_000) // size)
        found = interleaved(
            {name: timed(call, calls=calls) for name, call in variants(size).items()}, 2 if quick else 15
        )
        base, rows = found.pop("base"), []
        for name, series in found.items():
            ratio = series.ratio(base)
            bound = BOUNDS[name.rpartition(", ")[2]] if name.startswith("json,") and size < 1_000_000 else None
            rows.append((name, ratio, bound.verdict(ratio.median) if bound else ""))
        microseconds = base.spread().median * 1e6
        title = f"{label}: of json.loads + SHA-256 ({microseconds:.1f} µs)"
        report.table(title, ("body", "ratio", "bound"), rows)
    report.write()
    return 0
