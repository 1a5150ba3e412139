"""The blueprint: who may see it, which pages it has, and the headers that all of them carry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from flask import Blueprint, Response, abort, current_app
from werkzeug.wrappers import Response as AnyResponse

from ...errors import ConfigurationError
from . import releasing, views
from .refusals import HANDLERS

#: Nothing runs, and nothing is fetched but the style sheet: what clients wrote can't become more than text, even where
#: an escape was forgotten.
_CSP: Final = (
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)

_HEADERS: Final = {
    "Content-Security-Policy": _CSP,
    "Cache-Control": "no-store",
    # Addresses hold keys and scopes. To the app itself they may go: Flask-WTF asks for them where there is TLS.
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}

Authorize = Callable[[], Any]


@dataclass(frozen=True)
class Options:
    """What one console may show and do."""

    authorize: Authorize
    writable: bool
    bodies: bool


class ConsoleBlueprint(Blueprint):
    """A console, with its options."""

    options: Options


def console_blueprint(
    *,
    authorize: Authorize | None = None,
    writable: bool = False,
    bodies: bool = False,
    url_prefix: str = "/idempotency",
    name: str = "idempotency_console",
) -> Blueprint:
    """A blueprint with pages on the keys of the app that it is registered on.

    :param authorize: called without arguments before every request of the blueprint, those for its style sheet
        included; may be a coroutine function. ``True`` lets the request pass; what is false is a 403. A response, or
        a tuple as a view may return it, is the answer; so is what it aborts with. Anything else is an error.
    :param writable: whether keys can be released here.
    :param bodies: whether recorded bodies and the results of steps can be seen, and bodies downloaded.
    :param url_prefix: where the pages are.
    :param name: the blueprint's name, which its endpoints begin with.
    :raises ConfigurationError: ``authorize`` is missing, or an argument is of a wrong type.
    """
    if not callable(authorize):
        raise ConfigurationError(
            "console_blueprint(authorize=…) needs a function that says whether the current request may see the console."
        )
    for option, value in {"writable": writable, "bodies": bodies}.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"console_blueprint({option}={value!r}): it must be True or False.")
    blueprint = ConsoleBlueprint(
        name, __name__, url_prefix=url_prefix, static_folder="static", static_url_path="/static"
    )
    blueprint.options = Options(authorize, writable, bodies)
    blueprint.before_request(lambda: _authorized(authorize))
    blueprint.after_request(_with_headers)
    for error, handler in HANDLERS.items():
        blueprint.register_error_handler(error, handler)
    _add_pages(blueprint)
    return blueprint


def _add_pages(blueprint: ConsoleBlueprint) -> None:
    blueprint.add_url_rule("/", view_func=views.overview, strict_slashes=False)
    blueprint.add_url_rule("/endpoints", view_func=views.endpoints)
    blueprint.add_url_rule("/keys", view_func=views.keys)
    blueprint.add_url_rule("/live", view_func=views.live)
    blueprint.add_url_rule("/stale", view_func=views.stale)
    blueprint.add_url_rule("/held", view_func=views.held)
    blueprint.add_url_rule("/keys/<scope>/<key>", view_func=views.key)
    # What is not allowed has no address.
    if blueprint.options.bodies:
        blueprint.add_url_rule("/keys/<scope>/<key>/body", view_func=views.body)
    if blueprint.options.writable:
        blueprint.add_url_rule("/keys/<scope>/<key>/release", view_func=releasing.confirm)
        blueprint.add_url_rule("/keys/<scope>/<key>/release", view_func=releasing.release, methods=["POST"])


def _authorized(authorize: Authorize) -> Any:
    """What is answered in the place of a page; ``None`` lets it be shown."""
    said = current_app.ensure_sync(authorize)()
    if said is True:
        return None
    if not said:
        abort(403)
    if isinstance(said, (AnyResponse, tuple)):
        return said
    # Taken for a yes, a mistake would open the console: a coroutine that nobody awaits is true, too.
    raise TypeError(
        f"authorize() of the idempotency console returned {type(said).__name__}. It returns True or False, or a "
        "response in the place of the page."
    )


def _with_headers(response: Response) -> Response:
    response.headers.update(_HEADERS)
    return response
