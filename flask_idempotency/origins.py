"""Cross-origin headers of a replay: they answer to one request's ``Origin`` (Fetch standard, "CORS protocol").

The first client's are no answer to a retry from another origin, whose browser would refuse it. So those that the app
makes for the retry stand, wherever it makes them: Flask-CORS does it in hooks and around error handlers, which leave an
answer alone that has them already. Recorded ones are therefore taken off a replay on its way out, and come back at the
end where nobody has made others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flask import Response
from werkzeug.datastructures import Headers
from werkzeug.http import parse_set_header

_PREFIX: Final = "access-control-"
_ALLOWED: Final = "access-control-allow-origin"

#: What a browser lets one origin do, and must not let another.
_FOR_ONE: Final = frozenset({_ALLOWED, "access-control-allow-credentials"})

_VARIES: Final = ("Vary", "Origin")

Header = tuple[str, str]


def take_off(response: Response) -> list[Header]:
    """Take off the cross-origin headers, and return them; and that the answer varies by the origin, if it does."""
    taken = [header for header in response.headers if _name(header).startswith(_PREFIX)]
    for name, _ in taken:
        response.headers.remove(name)
    varies = any("origin" in parse_set_header(value) for value in response.headers.getlist("Vary"))
    return [*taken, _VARIES] if varies else taken


def put_on(response: Response, own: Sequence[Header], recorded: Sequence[Header], origin: str | None) -> None:
    """Let a replay have its own request's cross-origin headers. Hooks around the extension may have made some.

    :param own: what hooks had made for this request before the record was put over it.
    :param recorded: all headers of the record.
    :param origin: the request's ``Origin``. What the record allows to another one comes back for nobody else.
    """
    response.headers.extend([header for header in own if _name(header) not in response.headers])
    if _VARIES in own:
        response.vary.add("Origin")  # beside what the record varies by
    allowed = [value for name, value in recorded if name.lower() == _ALLOWED]
    fits = origin is None or "*" in allowed or origin in allowed
    made = {_name(header) for header in response.headers}
    # At the places where they stood, since a replay's headers have the order of the first answer's.
    headers = list(response.headers)
    for place, header in enumerate(recorded):
        name = _name(header)
        if name.startswith(_PREFIX) and name not in made and (fits or name not in _FOR_ONE):
            headers.insert(place, header)
    response.headers = Headers(headers)


def _name(header: Header) -> str:
    return header[0].lower()
