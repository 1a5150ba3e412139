"""How a page is made of a template. The app's own environment has no part in it: its delimiters, its escaping and its
templates may be others."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, Final, cast

from flask import Response, current_app, request, url_for
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...drawing import bytes_of, printable
from .addresses import packed

_environment: Final = Environment(
    loader=PackageLoader("flask_idempotency.contrib.console"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page(template: str, status: int = 200, **values: Any) -> Response:
    """A page, with what every template may use."""
    made = _environment.get_template(template).render(
        url_for=url_for, endpoint=request.endpoint, options=options(), **values
    )
    return current_app.response_class(made, status, mimetype="text/html")


def options() -> Any:
    """What the console whose page was asked for may show and do."""
    blueprint: Any = current_app.blueprints[cast(str, request.blueprint)]
    return blueprint.options


def message(status: int, title: str, *paragraphs: str) -> Response:
    """A page that says something in words."""
    return page("message.html", status, title=title, paragraphs=paragraphs)


def visible(text: object) -> str:
    """A text without characters that can't be seen, or that change how others are shown: they are spelled out."""
    return printable(str(text))


def visible_lines(text: str) -> str:
    """The same for a text of several lines."""
    return "".join(one if one in "\n\t" else printable(one) for one in text.replace("\r\n", "\n"))


def moment(when: datetime | None) -> str | Markup:
    """A time, for people and for programs."""
    if when is None:
        return "unknown"
    utc = when.astimezone(timezone.utc)
    return Markup('<time datetime="{}">{} UTC</time>').format(
        utc.isoformat(timespec="milliseconds"), utc.strftime("%Y-%m-%d %H:%M:%S")
    )


def duration(seconds: float) -> str:
    """Seconds, as people read them."""
    minutes, rest = divmod(abs(seconds), 60)
    if minutes == 0:
        text = f"{rest:.3f} s" if rest < 10 else f"{rest:.1f} s"
    else:
        hours, left = divmod(int(minutes), 60)
        days, hours = divmod(hours, 24)
        parts = [f"{days} d"] * (days > 0) + [f"{hours} h"] * (hours > 0) + [f"{left} min"] * (left > 0 and days == 0)
        text = " ".join(parts)
    return f"-{text}" if seconds < 0 else text


_environment.filters.update(
    visible=visible, visible_lines=visible_lines, moment=moment, duration=duration, size=bytes_of, packed=packed
)
