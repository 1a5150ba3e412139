"""Cross-origin headers of a replay: they answer to one request's ``Origin`` (Fetch standard, "CORS protocol").

The first client's are no answer to a retry from another origin, whose browser would refuse it. So those that the app
makes for the retry stand, wherever it makes them: Flask-CORS does it in hooks and around error handlers, which leave an
answer alone that has them already. Recorded ones are therefore left off a replay on its way out. At the end they come
back where nobody has made others, and only for the origin that the record allows, if it allows one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from flask import Response
from werkzeug.datastructures import Headers
from werkzeug.http import parse_set_header

_PREFIX: Final = "access-control-"
_ALLOWED: Final = "access-control-allow-origin"

#: What no script may get by an answer to another origin: leave to send cookies.
_CREDENTIALS: Final = "access-control-allow-credentials"

_VARIES: Final = ("Vary", "Origin")

Header = tuple[str, str]


def left_off(headers: Iterable[Header]) -> list[Header]:
    """The headers without the cross-origin ones."""
    return [header for header in headers if not _name(header).startswith(_PREFIX)]


def made_of(headers: Iterable[Header]) -> list[Header]:
    """The cross-origin headers; and that the answer varies by the origin, if it does."""
    made, varies = [], False
    for name, value in headers:
        if name.lower().startswith(_PREFIX):
            made.append((name, value))
        elif name.lower() == "vary":
            varies = varies or "origin" in parse_set_header(value)
    return [*made, _VARIES] if varies else made


def put_on(response: Response, own: Sequence[Header], recorded: Sequence[Header], origin: str | None) -> None:
    """Let a replay have its own request's cross-origin headers. Hooks around the extension may have made some.

    :param own: what hooks had made for this request before the record was put over it.
    :param recorded: all headers of the record.
    :param origin: the request's ``Origin``. What the record allows to another one comes back for nobody else.
    """
    if not own and not any(_name(header).startswith((_PREFIX, "vary")) for header in (*response.headers, *recorded)):
        return  # nobody speaks of origins
    response.headers.extend([header for header in own if _name(header) not in response.headers])
    headers = list(response.headers)
    if _VARIES in own:
        headers.append(_VARIES)  # beside what the record varies by
    allowed = [value for name, value in recorded if name.lower() == _ALLOWED]
    fits = origin is None or "*" in allowed or origin in allowed
    # A record that allows nobody was made within the hook that does; its headers, the view's say, are for all.
    keep_off = {_name(header) for header in headers} | (set() if fits else {_CREDENTIALS})
    # At the places where they stood, since a replay's headers have the order of the first answer's.
    for place, header in enumerate(recorded if fits or not allowed else ()):
        if _name(header).startswith(_PREFIX) and _name(header) not in keep_off:
            headers.insert(place, header)
    response.headers = Headers(list(_varying_once(headers)))


def _varying_once(headers: Sequence[Header]) -> Iterator[Header]:
    """Say once that the answer varies by the origin: the record may say it, and a hook again."""
    said = False
    for name, value in headers:
        if name.lower() != "vary":
            yield name, value
            continue
        varies = "origin" in parse_set_header(value)
        again, said = said and varies, said or varies
        others = ", ".join(one for one in parse_set_header(value) if one.lower() != "origin")
        if others or not again:
            yield name, others if again else value


def _name(header: Header) -> str:
    return header[0].lower()
