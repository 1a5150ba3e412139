"""A recorded answer as a page shows it: as text, never as what it says that it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from werkzeug.http import HTTP_STATUS_CODES, parse_options_header

from ...bodies import BodyStore
from ...coding import suited
from ...errors import BodyLost, BodyStoreError
from ...recorded import Elsewhere, Recorded

#: Characters of a body that a page shows. More is a download.
SHOWN: Final = 64 * 1024

_TEXTUAL: Final = ("application/json", "application/xml", "application/x-www-form-urlencoded", "application/x-ndjson")


@dataclass(frozen=True)
class Shown:
    """What a page says of an answer.

    :ivar text: the body, where it is text and may be seen.
    :ivar note: what there is to say of the body in its place, or beside it.
    :ivar download: whether there is a body to download.
    """

    status: str
    headers: tuple[tuple[str, str], ...]
    text: str | None
    note: str
    download: bool


def shown(recorded: Recorded, bodies: bool) -> Shown:
    """An answer, its body only with ``bodies``."""
    reason = recorded.reason or HTTP_STATUS_CODES.get(recorded.status, "")
    answer = Shown(f"{recorded.status} {reason}".rstrip(), recorded.headers, None, "", False)
    body = recorded.body
    if body is None:
        return replace(answer, note="The answer could not be kept, so that retries get 409.")
    if body == b"":
        return replace(answer, note="The body is empty.")
    size = body.size if isinstance(body, Elsewhere) else len(body)
    where = " in the body store" if isinstance(body, Elsewhere) else ""
    if not bodies:
        return replace(answer, note=f"{size} bytes{where}, which this console does not show.")
    text = None if isinstance(body, Elsewhere) else _text(recorded)
    answer = replace(answer, note=f"{size} bytes{where}.", download=True)
    if text is None:
        return answer
    if len(text) > SHOWN:
        answer = replace(answer, note=f"{answer.note} The first {SHOWN} characters:")
    return replace(answer, text=text[:SHOWN])


def pieces(recorded: Recorded, store: BodyStore | None) -> Iterator[bytes] | None:
    """The body's bytes as they are stored; ``None`` where there are none.

    :raises BodyStoreError: they lie in the body store and can't be had.
    """
    body = recorded.body
    if not isinstance(body, Elsewhere):
        return None if body is None else iter([body])
    if store is None:
        raise BodyStoreError("The body is in a body store, and IDEMPOTENCY_BODY_STORE is not set.")
    return _begun(store.chunks(body))


def _begun(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The same, read as far as to know that it is there, while there still is a status to say otherwise with."""
    try:
        first = next(chunks, b"")
    except BodyLost as error:
        raise BodyStoreError(str(error)) from error

    def all_of_them() -> Iterator[bytes]:
        yield first
        yield from chunks

    return all_of_them()


def _text(recorded: Recorded) -> str | None:
    """A body that is text, as text; ``None`` where it is none, or in a coding that can't be undone here."""
    plain = suited(recorded, "identity, *;q=0")
    if plain is None or plain[1] is not None:
        return None
    body = plain[0].body
    kind, options = parse_options_header(next((v for n, v in recorded.headers if n.lower() == "content-type"), ""))
    textual = kind.startswith("text/") or kind in _TEXTUAL or kind.endswith(("+json", "+xml"))
    if not textual or not isinstance(body, bytes):
        return None
    try:
        return body.decode(options.get("charset", "utf-8"))
    except (LookupError, ValueError):
        return None
