"""The app's routes as the extension sees them: which are guarded, and which only look it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from .config import overlay
from .errors import ConfigurationError
from .guard import Guard
from .marks import BELOW, EXEMPT, GUARD, View, mark_of
from .policy import Policy
from .state import AppState
from .store import SQLAlchemyStore


def guard_of(view: View, method: str | None = None) -> Guard | None:
    """The guard that stands on a view function, or on the method of its view class; ``None`` if none does."""
    guard: Guard | None = mark_of(view, GUARD) or mark_of(_handler(view, method), GUARD)
    return guard


def exempted(view: View, method: str | None = None) -> bool:
    """Whether ``exempt`` stands on the view, its class, or the class's method."""
    view_class = getattr(view, "view_class", None)
    # On the class itself: what inherits from an exempt class is guarded until it says otherwise.
    return any(mark_of(one, EXEMPT) for one in (view, view_class, _handler(view, method)))


def find_problem(state: AppState) -> ConfigurationError | None:
    """What only the complete app shows: a decorator that guards nothing. ``None`` if all is well."""
    routes = list(_routes(state))
    live = {id(guard) for _, view, methods in routes for _, guard in _guards(view, methods)}
    for endpoint, view, methods in routes:
        below = mark_of(view, BELOW)
        if below is not None and mark_of(view, GUARD) is None and id(below) not in live and not exempted(view):
            return ConfigurationError(
                f"The view of {endpoint!r} is registered without its guard: the decorator of Flask-Idempotency stands "
                "above the route's decorator, where it guards nothing. Put it directly below @app.post(…)."
            )
        for guarded, guard in _guards(view, methods):
            problem = _useless(state, endpoint, guarded, guard)
            if problem:
                return ConfigurationError(problem)
        problem = _not_protectable(state, endpoint, view, methods)
        if problem:
            return ConfigurationError(problem)
    return None


def _useless(state: AppState, endpoint: str, methods: set[str], guard: Guard) -> str | None:
    if guard.owner is not state.extension:
        return (
            f"The view of {endpoint!r} is guarded by an Idempotency object that is not the one initialised on the app "
            f"{state.app.name!r}. Use one object for both."
        )
    policies = [policy for policy in _policies(state, endpoint, guard) if methods & policy.methods]
    if any(policy.atomic for policy in policies):
        return _not_atomic(state, endpoint)
    if policies:
        return None
    names = ", ".join(sorted(methods - {"HEAD", "OPTIONS"}))
    return (
        f"The guard on the view of {endpoint!r} guards nothing: its methods are {names}, and none of them is among "
        f"IDEMPOTENCY_METHODS. Name them, methods=[…], or take the decorator away."
    )


def _not_protectable(state: AppState, endpoint: str, view: View, methods: set[str]) -> str | None:
    """What is wrong with the guard that a protection will put before a view that has none of its own, if it does."""
    bare = {method for method in methods if guard_of(view, method) is None and not exempted(view, method)}
    if not any(one.nearness(state.app, endpoint) is not None for one in state.extension.protections):
        return None
    policies = _policies(state, endpoint, Guard(state.extension, {}, required=True, outside=True))
    return _not_atomic(state, endpoint) if any(one.atomic and bare & one.methods for one in policies) else None


def _not_atomic(state: AppState, endpoint: str) -> str | None:
    """Why atomic mode can't work here; ``None`` if it can."""
    store = state.store
    if not isinstance(store, SQLAlchemyStore) or inspect.getattr_static(state.db, "session", None) is None:
        why = "its record and db.session need one database: Flask-SQLAlchemy's, and no store of another kind"
    elif state.settings.bind_key is not None:
        why = (
            "the table is on a bind of its own (IDEMPOTENCY_BIND_KEY), and the record must be in db.session's database"
        )
    elif not store.supports_atomic:
        why = "it works on PostgreSQL and SQLite, and the app's database is neither"
    else:
        return None
    return f"The view of {endpoint!r} has atomic=True, which can't work here: {why}."


def _policies(state: AppState, endpoint: str, guard: Guard) -> Iterator[Policy]:
    """What can hold for a guard: protections of some paths may cover the request, or not."""
    inside = [(one.nearness(state.app, endpoint), one) for one in state.extension.protections]
    near = sorted(((at, one) for at, one in inside if at is not None), key=itemgetter(0))
    whole = [one for _, one in near if one.paths is None]
    yield overlay(state.policy, *(one.options for one in whole), guard.options)
    for _, extra in near:
        if extra.paths is not None:
            options = (one.options for _, one in near if one.paths is None or one is extra)
            yield overlay(state.policy, *options, guard.options)


def _routes(state: AppState) -> Iterator[tuple[str, View, set[str]]]:
    """Each endpoint once, with its view and all methods of its rules."""
    methods: dict[str, set[str]] = {}
    for rule in state.app.url_map.iter_rules():
        methods.setdefault(rule.endpoint, set()).update(rule.methods or ())
    for endpoint, found in methods.items():
        view = state.app.view_functions.get(endpoint)
        if view is not None:
            yield endpoint, view, found


def _guards(view: View, methods: set[str]) -> Iterator[tuple[set[str], Guard]]:
    """The guards on a view, each with the methods that it sees."""
    guard = mark_of(view, GUARD)
    if guard is not None:
        yield methods, guard
    for method in methods:
        guard = mark_of(_handler(view, method), GUARD)
        if guard is not None:
            yield {method}, guard


def _handler(view: View, method: str | None) -> Any:
    view_class = getattr(view, "view_class", None)
    return None if view_class is None or method is None else getattr(view_class, method.lower(), None)
