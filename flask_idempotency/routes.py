"""The app's routes as the extension sees them: which are guarded, and which only look it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

from werkzeug.routing import Rule

from .config import overlay
from .errors import ConfigurationError
from .guard import Guard, calls_handlers, dispatches_alone
from .marks import BELOW, EXEMPT, GUARD, MAKES, View, chain, is_covered, mark_of
from .paths import covers_all
from .policy import Policy
from .reading import UNSAFE_METHODS
from .state import AppState
from .store import SQLAlchemyStore

#: What a rule lets through that names no methods.
_ANY_METHOD: Final = frozenset({"GET"}) | UNSAFE_METHODS


def guard_of(view: View, method: str | None = None) -> Guard | None:
    """The guard that stands on a view function, or on the method of its view class; ``None`` if none does."""
    return next(guards_of(view, method), None)


def guards_of(view: View, method: str | None) -> Iterator[Guard]:
    """All guards that a request of the method passes on its way to the view's own code, the outermost first."""
    own = mark_of(view, GUARD)
    if own is not None:
        yield own
    if not hasattr(view, "view_class"):
        return
    handler = _handler(view, method)
    for marked in (mark_of(_dispatcher(view), GUARD), mark_of(handler, GUARD)):
        if marked is not None:
            yield marked
    yield from reversed(_to_come(view, method, handler))


def surely_met(view: View, method: str | None) -> bool:
    """Whether every request of the method meets the view's own guard, if there is one: not where it stands on a handler
    of a class that chooses in a way of its own what it calls.
    """
    around = mark_of(view, GUARD) or mark_of(_dispatcher(view), GUARD)
    return around is not None or calls_handlers(getattr(view, "view_class", None))


def exempted(view: View, method: str | None = None) -> bool:
    """Whether ``exempt`` stands on the view, its class, or the class's method."""
    view_class = getattr(view, "view_class", None)
    # On the class itself: what inherits from an exempt class is guarded until it says otherwise.
    return any(mark_of(one, EXEMPT) for one in (view, view_class, _dispatcher(view), _handler(view, method)))


def find_problems(state: AppState) -> Iterator[tuple[str, ConfigurationError]]:
    """What only the complete app shows: decorators that guard nothing, and options that don't go together.

    Each with the endpoint concerned, in the order of the routes.
    """
    live = live_guards(state)
    for endpoint, view, methods in _routes(state):
        try:
            for problem in _problems(state, endpoint, view, methods, live):
                yield endpoint, ConfigurationError(problem)
        except ConfigurationError as error:  # options that contradict each other, each of them right alone
            yield endpoint, error


def _problems(state: AppState, endpoint: str, view: View, methods: set[str], live: set[int]) -> Iterator[str]:
    left_out = any(_left_out(function, live) for function in _unguarded(view, methods))
    if left_out and not _protected(state, endpoint, methods):
        yield (
            f"The view of {endpoint!r} is registered without its guard: the decorator of Flask-Idempotency stands "
            "above the route's decorator, where it guards nothing. Put it directly below @app.post(…)."
        )
    found = [_useless(state, endpoint, guarded, guard) for guarded, guard in _guards(view, methods)]
    found.append(_not_protectable(state, endpoint, view, methods))
    found += [_contradiction(state, endpoint, view, method) for method in sorted(methods)]
    yield from dict.fromkeys(problem for problem in found if problem)


def _protected(state: AppState, endpoint: str, methods: set[str]) -> bool:
    """Whether all paths of an endpoint are protected: then a view whose guard belongs to another app is right here."""
    policies = _policies(state, endpoint, state.extension.bare)
    if not all(methods & state.policy.methods <= one.methods for one in policies):
        return False
    near = [one for one in state.extension.protections if one.nearness(state.app, endpoint) is not None]
    rules = list(state.app.url_map.iter_rules(endpoint))
    return any(one.paths is None or all(covers_all(rule, one.paths) for rule in rules) for one in near)


def _unguarded(view: View, methods: set[str]) -> Iterator[Any]:
    """The view, and its class's methods, as far as no guard stands on them and they are not exempt."""
    if mark_of(view, GUARD) is None and not exempted(view):
        yield view
    for method in methods:
        if guard_of(view, method) is None and not exempted(view, method):
            yield _handler(view, method)


def live_guards(state: AppState) -> set[int]:
    """The identities of all guards that stand on a registered view."""
    return {id(guard) for _, view, methods in _routes(state) for _, guard in _guards(view, methods)}


def inert_below(view: View, method: str, live: set[int]) -> bool:
    """Whether a guard that is registered nowhere was put on a function that an unguarded view wraps.

    It may stand above the decorator of a toolkit that registers a wrapper, and gives back what it wraps. Or the
    function is one that several views share, on several apps: so this is no reason to refuse to serve.
    """
    links = [one for outermost in (view, _handler(view, method)) for one in chain(outermost)]
    return any(_left_out(one, live) for one in links)


def _left_out(function: Any, live: set[int]) -> bool:
    below = mark_of(function, BELOW)
    return below is not None and id(below) not in live


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
    policies = _policies(state, endpoint, state.extension.bare)
    return _not_atomic(state, endpoint) if any(one.atomic and bare & one.methods for one in policies) else None


def _contradiction(state: AppState, endpoint: str, view: View, method: str) -> str | None:
    """Why what stands on a view can't all hold for a method: the outermost guard is met first, and it alone counts."""
    handler = _handler(view, method)
    to_come = list(reversed(_to_come(view, method, handler)))
    links = [one for outermost in (view, _dispatcher(view), handler) for one in chain(outermost)]
    marked = [one for one in (mark_of(link, GUARD) for link in links) if one is not None]
    standing = list({id(one): one for one in (*marked, *to_come)}.values())
    looking = [one for one in standing if any(method in other.methods for other in _policies(state, endpoint, one))]
    if mark_of(handler, EXEMPT) and (to_come or looking):
        return (
            f"The view of {endpoint!r} is guarded for all of its methods, and @idempotency.exempt on its "
            f"{method.lower()}() can't take one out. Put the guard on the methods that need it."
        )
    if not any(_differs(one, looking[0]) for one in looking[1:]):
        return None
    return (
        f"The view of {endpoint!r} has several guards for {method}, which say different things, and the outermost "
        "alone counts. Leave one of them, or give them the same options."
    )


def _differs(inner: Guard, outer: Guard) -> bool:
    """Whether an inner guard asks for something that the outer one does not do."""
    nothing = object()
    options = inner.options.items()
    return inner.required != outer.required or any(outer.options.get(name, nothing) != one for name, one in options)


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


def methods_of(rule: Rule) -> set[str]:
    """The methods that a rule lets through."""
    return set(_ANY_METHOD if rule.methods is None else rule.methods)


def _routes(state: AppState) -> Iterator[tuple[str, View, set[str]]]:
    """Each endpoint once, with its view and all methods of its rules."""
    methods: dict[str, set[str]] = {}
    for rule in state.app.url_map.iter_rules():
        methods.setdefault(rule.endpoint, set()).update(methods_of(rule))
    for endpoint, found in methods.items():
        view = state.app.view_functions.get(endpoint)
        if view is not None:
            yield endpoint, view, found


def _guards(view: View, methods: set[str]) -> Iterator[tuple[set[str], Guard]]:
    """The guards on a view, each with the methods that it sees."""
    for guard in (mark_of(view, GUARD), mark_of(_dispatcher(view), GUARD)):
        if guard is not None:
            yield methods, guard
    for method in methods:
        handler = _handler(view, method)
        guard = mark_of(handler, GUARD)
        if guard is not None:
            yield {method}, guard
        for guard in _to_come(view, method, handler):
            by_method = isinstance(_decorators_to_come(view), Mapping)
            yield {method} if by_method else methods, guard


def _handler(view: View, method: str | None) -> Any:
    view_class = getattr(view, "view_class", None)
    return None if view_class is None or method is None else getattr(view_class, method.lower(), None)


def _dispatcher(view: View) -> Any:
    return getattr(getattr(view, "view_class", None), "dispatch_request", None)


def _decorators_to_come(view: View) -> Any:
    """What Flask-RESTful and Flask-RESTX put on a resource's methods when they are called: a list, or one by method."""
    view_class = getattr(view, "view_class", None)
    return getattr(view_class, "method_decorators", ()) if _reads_list(view_class) else ()


def _reads_list(view_class: Any) -> bool:
    """Whether a class's ``dispatch_request`` knows of ``method_decorators``. Flask's own does not."""
    if dispatches_alone(view_class):
        return False
    defined = [vars(base).get("dispatch_request") for base in view_class.__mro__]
    codes = (getattr(one, "__code__", None) for outermost in defined for one in chain(outermost))
    return any("method_decorators" in code.co_names for code in codes if code is not None)


def method_decorators(view: View, method: str | None) -> Sequence[Any]:
    """Those for one method, the innermost first."""
    decorators = _decorators_to_come(view)
    found = decorators.get((method or "").lower(), ()) if isinstance(decorators, Mapping) else decorators
    return tuple(found)


def _to_come(view: View, method: str | None, handler: Any) -> list[Guard]:
    """The guards among a resource's ``method_decorators``, the innermost first."""
    found: list[Guard] = []
    for place, decorator in enumerate(() if handler is None else method_decorators(view, method)):
        made_of = mark_of(decorator, MAKES)
        if made_of is not None:
            owner, options, required = made_of
            outside = place > 0 or is_covered(handler)
            found.append(Guard(owner or decorator.__self__, options, required=required, outside=outside))
    return found
