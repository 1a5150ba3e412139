"""Which endpoint a stored path belongs to. The app's URL map says so; the table keeps paths alone, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flask import Flask
from werkzeug.exceptions import HTTPException
from werkzeug.routing import BaseConverter, Map, Rule

#: How long a path is that may have been cut: the width of the column.
CUT: Final = 500


class Endpoints:
    """The app's routes as they are now. A rule's host or subdomain does not count, since no path has one.

    The app's own converters are not called, which may look into a database: their regular expressions are used.
    """

    def __init__(self, app: Flask) -> None:
        theirs = app.url_map
        self._map = Map(
            [_anywhere(rule) for rule in theirs.iter_rules()],
            strict_slashes=theirs.strict_slashes,
            merge_slashes=theirs.merge_slashes,
            redirect_defaults=False,
            converters=_quiet(theirs.converters),
        )
        self._adapter = self._map.bind("localhost")
        self._root = str(app.config["APPLICATION_ROOT"]).rstrip("/")

    def at(self, method: str, path: str) -> str | None:
        """The endpoint that a request for this path reaches; ``None``: there is none, or it can't be told.

        :param path: as it is stored: with the script root, which counts if it is ``APPLICATION_ROOT``.
        """
        cut = len(path) >= CUT
        found = self._matched(method, path, cut)
        if found is None and self._root and path.startswith(f"{self._root}/"):
            found = self._matched(method, path[len(self._root) :], cut)
        return found

    def below(self, method: str, path: str) -> str | None:
        """The same, with whatever the path begins with as the script root: the shortest with which there is one."""
        _, *segments = path.split("/")
        for place in range(1, len(segments)):
            found = self._matched(method, "/" + "/".join(segments[place:]), len(path) >= CUT)
            if found is not None:
                return found
        return None

    def _matched(self, method: str, path: str, cut: bool) -> str | None:
        if cut:
            return self._beginning(method, path)
        try:
            endpoint, _ = self._adapter.match(path, method)
        except HTTPException:  # no such path, another method, or a redirect
            return None
        return str(endpoint)

    def _beginning(self, method: str, path: str) -> str | None:
        """The endpoint of a path whose end is not known, if no other one's paths begin so."""
        found = {
            rule.endpoint
            for rule in self._map.iter_rules()
            if "<" in rule.rule
            and path.startswith(rule.rule.partition("<")[0])
            and (rule.methods is None or method in rule.methods)
        }
        return str(found.pop()) if len(found) == 1 else None


def _anywhere(rule: Rule) -> Rule:
    copy = rule.empty()
    copy.host = copy.subdomain = None
    return copy


def _quiet(converters: Mapping[str, Any]) -> dict[str, type[BaseConverter]]:
    return {name: _quieted(converter) for name, converter in converters.items()}


def _quieted(converter: Any) -> Any:
    if not isinstance(converter, type) or converter.__module__ == BaseConverter.__module__:
        return converter
    return type(converter.__name__, (converter,), {"to_python": lambda self, value: value})
