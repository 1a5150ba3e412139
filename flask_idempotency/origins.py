"""Cross-origin headers of a replay: they answer to one request's ``Origin`` (Fetch standard, "CORS protocol").

The first client's are no answer to a retry from another origin, whose browser would refuse it. So those that the app
makes for the retry stand, wherever it makes them: Flask-CORS does it in hooks and around error handlers, which leave an
answer alone that has them already. Recorded ones are therefore taken off a replay on its way out, and come back at the
end where nobody has made others and they fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flask import Response
from werkzeug.datastructures import Headers

_PREFIX: Final = "access-control-"
_ALLOWED: Final = "Access-Control-Allow-Origin"
_VARIES: Final = ("Vary", "Origin")

Header = tuple[str, str]


def take_off(response: Response) -> list[Header]:
    """Take the headers off a response that answer to an origin, and return them; and that it varies by it, if so."""
    taken = [header for header in response.headers if _answers_to_origin(header)]
    for name, _ in taken:
        response.headers.remove(name)
    return [*taken, _VARIES] if taken and "origin" in response.vary else taken


def put_on(response: Response, own: Sequence[Header], recorded: Sequence[Header], origin: str | None) -> None:
    """Let a replay have the headers that answer to its request's origin.

    :param own: what hooks made for this request, and the record was put over.
    :param recorded: all headers of the record.
    :param origin: the request's ``Origin``. What the record allows to another one is no answer to it.
    """
    if _ALLOWED in response.headers:
        return  # hooks around the extension have made them
    if own:
        response.headers.extend([header for header in own if header != _VARIES])
        if _VARIES in own:
            response.vary.add("Origin")  # and to what the record varies by, once
    elif origin is None or any(value in ("*", origin) for value in _allows(recorded)):
        _put_back(response, recorded)


def _put_back(response: Response, recorded: Sequence[Header]) -> None:
    """Put the recorded ones where they stood, since a replay's headers have the order of the first answer's."""
    headers = list(response.headers)
    for place, header in enumerate(recorded):
        if _answers_to_origin(header):
            headers.insert(place, header)
    response.headers = Headers(headers)


def _answers_to_origin(header: Header) -> bool:
    return header[0].lower().startswith(_PREFIX)


def _allows(headers: Sequence[Header]) -> list[str]:
    return [value for name, value in headers if name.lower() == _ALLOWED.lower()]
