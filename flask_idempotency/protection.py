"""Protected blueprints and paths: whose views are guarded without a decorator of their own."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from flask import Blueprint, Flask, Request, current_app, request

from .errors import OptionError
from .guard import Guard, covering_of
from .marks import EXEMPT, GUARD, View, mark_of
from .routes import exempted, guard_of, surely_met
from .state import AppState

if TYPE_CHECKING:
    from .extension import Idempotency

#: On a protected blueprint or app: the objects that protect it.
_PROTECTED_BY: Final = "__idempotency_protected_by__"


@dataclass(frozen=True, eq=False)
class Protection:
    """A blueprint, or paths of an app, of which every guarded method's view is guarded.

    :ivar required: whether a request without a key is refused, or runs unguarded.
    """

    target: Blueprint | Flask
    paths: re.Pattern[str] | None
    required: bool
    options: Mapping[str, Any]

    def covers(self, app: Flask, asked: Request) -> bool:
        """Whether the request falls under it."""
        inside = self.nearness(app, asked.endpoint) is not None
        return inside and (self.paths is None or self.paths.search(asked.path) is not None)

    def nearness(self, app: Flask, endpoint: str | None) -> tuple[int, bool] | None:
        """How near it is to an endpoint, the nearest being the greatest; ``None`` if the endpoint is outside.

        The app is farther than a blueprint, an outer blueprint than one nested in it, the whole than some paths.
        """
        if isinstance(self.target, Flask):
            return (0, self.paths is not None) if self.target is app else None
        names = (endpoint or "").split(".")[:-1]
        for depth in range(len(names), 0, -1):
            if app.blueprints.get(".".join(names[:depth])) is self.target:
                return depth, self.paths is not None
        return None


def keep_with(target: Blueprint | Flask, owner: Idempotency) -> None:
    """Let an object live as long as what it protects: signals refer to their receivers weakly."""
    vars(target).setdefault(_PROTECTED_BY, []).append(owner)


def pattern(paths: object) -> re.Pattern[str] | None:
    """What was given as ``paths``, compiled.

    :raises OptionError: it is no regular expression.
    """
    if paths is None or (isinstance(paths, re.Pattern) and isinstance(paths.pattern, str)):
        return paths
    try:
        if isinstance(paths, str):
            return re.compile(paths)
    except re.error as error:
        raise OptionError(f"protect(paths=…): {paths!r} is no regular expression: {error}.") from error
    raise OptionError(f"protect(paths=…): {paths!r} won't do: it must be a regular expression, as text or compiled.")


def wrap_protected(state: AppState, endpoint: str) -> None:
    """Put a guard before the view that is about to run, if a protection covers the request."""
    owner = state.extension
    # From a hook of the request itself, it does not matter in which order views and protections came, and the
    # wrapped view still runs after every before_request function.
    asked: Request = request._get_current_object()  # type: ignore[attr-defined]
    if asked.method not in state.policy.methods and not any(one.options for one in owner.protections):
        return
    if not any(one.covers(state.app, asked) for one in owner.protections):
        return
    with owner.wrapping:
        view = state.app.view_functions[endpoint]
        # Looked at each time: an extension may have put another view in its place.
        if view is not state.protected.get(endpoint):
            state.app.view_functions[endpoint] = state.protected[endpoint] = _protected(owner, view)


def guard_around(owner: Idempotency, own: Guard | None, covering: Sequence[Protection]) -> Guard:
    """The guard that a protection puts before a view.

    :param own: the guard on a handler that the view may call, or not. What it says holds for either.
    """
    options, required = ({}, covering[-1].required) if own is None else (own.options, own.required)
    return Guard(owner, options, required=required, outside=True)


def is_guarded(state: AppState, asked: Request) -> bool:
    """Whether the view that the request asks for has a guard, which looks at requests of its method."""
    view = state.app.view_functions.get(asked.endpoint or "")
    if view is None:
        return False
    guard = guard_of(view, asked.method)
    if guard is None:
        covered = any(one.covers(state.app, asked) for one in state.extension.protections)
        if not covered or exempted(view, asked.method):
            return False
        guard = state.extension.bare
    return asked.method in guard.policy(state, asked).methods


def _protected(owner: Idempotency, view: View) -> View:
    guarded: dict[tuple[str, bool], View] = {}
    inner = guard_of(view)

    # With its name: other extensions know a view by that.
    @functools.wraps(view)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        asked: Request = request._get_current_object()  # type: ignore[attr-defined]
        app: Flask = current_app._get_current_object()  # type: ignore[attr-defined]
        own = guard_of(view, asked.method)
        covering = covering_of(owner, app, asked)
        met = own is not None and surely_met(view, asked.method)
        # An app may mark this function, as its view, when it has served already.
        if met or exempted(view, asked.method) or mark_of(chosen, EXEMPT) or not covering:
            return app.ensure_sync(view)(*args, **kwargs)
        put = guard_around(owner, own, covering)
        # One for each kind of request: a guard remembers what its options come to.
        kind = asked.method if own else "", put.required
        if kind not in guarded:
            guarded[kind] = put.wrap(view)
        return app.ensure_sync(guarded[kind])(*args, **kwargs)

    if inner is not None:
        setattr(chosen, GUARD, inner)
    return chosen
