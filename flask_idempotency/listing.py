"""The app's routes as plain data: which are guarded, how, and what is wrong with them. No request is served for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from flask import Blueprint
from werkzeug.routing import Rule

from .errors import ConfigurationError
from .guard import Guard, nearest_last
from .marks import View
from .outside import bypassed, without_scope
from .paths import are_few, covers_all, examples
from .policy import Policy
from .protection import Protection, guard_around
from .reading import SAFE_METHODS
from .routes import (
    exempted,
    find_problems,
    guards_of,
    inert_below,
    live_guards,
    methods_of,
    surely_met,
)
from .signals import worded
from .state import AppState
from .tabular import table

#: The methods of which none may be forgotten.
CHECKED: Final = ("PATCH", "POST")

#: What becomes of requests: a guard of the view's own, ``required`` or ``optional``; one of ``protect()``; a guard for
#: some paths of the rule only; none, on purpose; none; none, since the method changes nothing.
REQUIRED, OPTIONAL, PROTECTED = "required", "optional", "protected"
PARTLY, EXEMPT, UNGUARDED, SAFE = "in part", "exempt", "unguarded", "safe"

#: Said where nothing holds of what the rest of a listing says.
DISABLED: Final = "IDEMPOTENCY_ENABLED is off: nothing is guarded."


@dataclass(frozen=True)
class Route:
    """Methods of one rule that are treated alike.

    :ivar host: the rule's host or subdomain; empty where it has none.
    :ivar options: those that differ from the app's or from the package's, as JSON can hold them.
    :ivar problems: what makes the guard useless. An app with one of them may refuse to serve.
    :ivar warnings: what to look at.
    """

    rule: str
    host: str
    methods: tuple[str, ...]
    endpoint: str
    state: str
    options: dict[str, Any]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Listing:
    """All routes of an app.

    :ivar enabled: whether anything is guarded at all, ``IDEMPOTENCY_ENABLED``.
    :ivar options: what the app's configuration changes for all routes.
    :ivar warnings: what concerns no single route.
    """

    enabled: bool
    options: dict[str, Any]
    routes: tuple[Route, ...]
    warnings: tuple[str, ...]


def list_routes(state: AppState) -> Listing:
    """Every route of an app, by path. Opens no connection."""
    problems: dict[str, list[str]] = {}
    for endpoint, error in find_problems(state):
        problems.setdefault(endpoint, []).append(str(error))
    routes: list[Route] = []
    useful: set[Protection] = set()
    # What redirects, or only builds URLs, runs no view.
    rules = [one for one in state.app.url_map.iter_rules() if not (one.build_only or one.redirect_to)]
    for rule in sorted(rules, key=lambda one: (one.rule, _host(one), one.endpoint)):
        view = state.app.view_functions.get(rule.endpoint)
        if view is not None:
            coverings = coverings_of(state, rule)
            useful.update(*coverings)
            routes += _rows(state, rule, view, coverings, problems.get(rule.endpoint, []))
    live = live_guards(state)
    found = tuple(_suspected(state, one, live) for one in routes)
    app_wide = _differing(state.policy, Policy())
    return Listing(state.settings.enabled, app_wide, found, tuple(_idle(state, useful)))


def findings(listing: Listing, ignored: Iterable[str] = ()) -> list[str]:
    """What has to be mended: a sentence for each ``POST`` and ``PATCH`` that is forgotten, and for each problem.

    :param ignored: patterns, as of file names, of endpoints that may be unguarded: ``admin.*``; with a method before
        them for this method alone: ``PATCH carts.*``.
    """
    patterns = tuple(ignored)
    found = [] if listing.enabled else [DISABLED]
    for route in listing.routes:
        for method in sorted(set(CHECKED) & set(route.methods)):
            let_be = any(_matches(f"{method} {route.endpoint}", one) for one in patterns)
            if route.state in (UNGUARDED, PARTLY) and not let_be:
                found.append(f"{method} {route.host}{route.rule} ({route.endpoint}) is {_lacking(route)}.")
        found += route.problems
    return list(dict.fromkeys(found))


def _lacking(route: Route) -> str:
    if route.state == UNGUARDED:
        return "not guarded"
    begin = re.escape(route.rule.partition("<")[0])
    return (
        "guarded for some of its paths, and perhaps not for all. Let an expression of protect(paths=…) be found in "
        f"what all of them begin with, ^{begin} for example, and look at nothing behind it; or protect without paths"
    )


def described(listing: Listing, wrong: list[str], ignored: Iterable[str]) -> Iterator[str]:
    """What the check found, for people, line by line; its warnings too, which change no exit status.

    :param wrong: the findings.
    :param ignored: the patterns that they were found with.
    """
    yield from wrong
    yield from _grouped(listing)
    methods = [f"{method} {route.endpoint}" for route in listing.routes for method in route.methods]
    for pattern in ignored:
        if not any(_matches(one, pattern) for one in methods):
            yield f"Warning: --ignore {pattern!r} matches no route."
    number = sum(len(set(CHECKED) & set(route.methods)) for route in listing.routes)
    if not wrong:
        yield f"Nothing is forgotten: {number} {'route' if number == 1 else 'routes'} with POST or PATCH."
    else:
        yield (
            f"{len(wrong)} {'finding' if len(wrong) == 1 else 'findings'}. A route is guarded by @idempotency.required "
            "or optional, or by protect(); unguarded on purpose with @idempotency.exempt, or --ignore."
        )


def drawn(listing: Listing) -> Iterator[str]:
    """The routes as a table for people, line by line."""
    rows = [
        (one.host + one.rule, " ".join(one.methods), one.endpoint, one.state, _spelled(_own(one, listing.options)))
        for one in listing.routes
    ]
    yield from table(("route", "methods", "endpoint", "guard", "options"), rows)
    if listing.options:
        yield f"Set for the app: {_spelled(listing.options)}"
    if not listing.enabled:
        yield DISABLED
    yield from dict.fromkeys(problem for route in listing.routes for problem in route.problems)
    yield from _grouped(listing)


def _own(route: Route, app_wide: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in route.options.items() if name not in app_wide or app_wide[name] != value}


def _spelled(options: dict[str, Any]) -> str:
    return worded({name: ",".join(value) if isinstance(value, list) else value for name, value in options.items()})


def _grouped(listing: Listing) -> Iterator[str]:
    """Each warning once, with the endpoints concerned."""
    concerned: dict[str, list[str]] = {}
    for route in listing.routes:
        for text in route.warnings:
            concerned.setdefault(text, []).append(route.endpoint)
    yield from (f"Warning: {text}" for text in listing.warnings)
    for text, endpoints in concerned.items():
        yield f"Warning: {', '.join(dict.fromkeys(endpoints))}: {text}"


def _matches(method_and_endpoint: str, pattern: str) -> bool:
    return fnmatchcase(method_and_endpoint, pattern if " " in pattern else f"* {pattern}")


def _rows(
    state: AppState, rule: Rule, view: View, coverings: list[tuple[Protection, ...]], problems: list[str]
) -> Iterator[Route]:
    methods = methods_of(rule)
    bare = Route(rule.rule, _host(rule), (), rule.endpoint, UNGUARDED, {}, tuple(problems), ())
    alike: dict[str, tuple[list[str], Route]] = {}
    for method in sorted(methods - {"HEAD", "OPTIONS"}) or sorted(methods):  # Flask adds these two
        try:
            row = _treated(state, view, method, coverings, bare)
        except ConfigurationError:  # options that contradict each other: one of the problems already
            row = bare
        alike.setdefault(repr(row), ([], row))[0].append(method)
    for found, row in alike.values():
        yield replace(row, methods=tuple(found))


def _treated(state: AppState, view: View, method: str, coverings: list[tuple[Protection, ...]], bare: Route) -> Route:
    """How requests of one method of a route are treated."""
    if method in SAFE_METHODS:
        return replace(bare, state=SAFE)
    own = list(guards_of(view, method))
    if not own and exempted(view, method):
        return replace(bare, state=EXEMPT)
    chosen = [guard_met(state, view, own, method, one) for one in coverings]
    guarding = [one for one in chosen if one is not None]
    if not guarding:
        return replace(bare, warnings=_overlooked(state, own, method, coverings))
    guard, policy = guarding[-1]
    kind = (REQUIRED if guard.required else OPTIONAL) if own else PROTECTED
    options = {} if own or guard.required else {"required": False}
    return replace(
        bare,
        state=kind if len(guarding) == len(chosen) else PARTLY,
        options=options | _differing(policy, Policy()) | _differing(policy, state.policy),
        problems=(*bare.problems, *without_scope(state, guard, bare.endpoint, view, method, policy)),
        warnings=(
            *bypassed(guard, view, method, protected=guard not in own),
            *_perhaps_unmet(guard, own, view, method),
        ),
    )


def _perhaps_unmet(guard: Guard, own: list[Guard], view: View, method: str) -> tuple[str, ...]:
    """That a request may go by a guard on a handler, where the class chooses what it calls."""
    if guard not in own or surely_met(view, method):
        return ()
    dispatcher = view.view_class.dispatch_request  # type: ignore[attr-defined]
    return (
        f"{dispatcher.__module__}.{dispatcher.__qualname__} chooses what a request runs: what it calls beside the "
        "decorated method is not guarded. Put the guard into the class's `decorators`, or protect() around it.",
    )


def _overlooked(
    state: AppState, own: list[Guard], method: str, coverings: list[tuple[Protection, ...]]
) -> tuple[str, ...]:
    """That there is a guard, which does not look at this method."""
    guards = own or ([state.extension.bare] if coverings[-1] else [])
    if not guards or method not in CHECKED:
        return ()
    names = ", ".join(sorted(guards[0].policy_under(state, coverings[-1]).methods))
    return (f"The guard looks at {names} only. Name {method} too, with methods=[…] or in IDEMPOTENCY_METHODS.",)


def _suspected(state: AppState, route: Route, live: set[int]) -> Route:
    """The route with a warning if the view has no guard though somebody seems to have meant to put one there."""
    view = state.app.view_functions.get(route.endpoint)
    methods = set(CHECKED) & set(route.methods)
    if (
        route.state not in (UNGUARDED, PROTECTED)
        or view is None
        or not any(inert_below(view, one, live) for one in methods)
    ):
        return route
    text = (
        "A decorator of Flask-Idempotency is on a function that the view wraps, and guards nothing there. Put it "
        "directly below the route's decorator."
    )
    return route if route.problems else replace(route, warnings=(*route.warnings, text))


def guard_met(
    state: AppState, view: View, own: list[Guard], method: str, covering: tuple[Protection, ...]
) -> tuple[Guard, Policy] | None:
    """The guard that a request under these protections meets, with its policy; ``None`` if it meets none."""
    guards = own
    if covering and not (own and surely_met(view, method)) and not exempted(view, method):
        guards = [guard_around(state.extension, own[0] if own else None, covering)]
    policies = ((guard, guard.policy_under(state, covering)) for guard in guards)
    return next(((guard, policy) for guard, policy in policies if method in policy.methods), None)


def coverings_of(state: AppState, rule: Rule) -> list[tuple[Protection, ...]]:
    """The protections that requests of a rule fall under: one set where it is the same for all of its paths."""
    app = state.app
    near = nearest_last(
        app, rule.endpoint, [one for one in state.extension.protections if one.nearness(app, rule.endpoint) is not None]
    )
    patterns = [one.paths for one in near if one.paths is not None]
    if not patterns:
        return [near]
    found = {
        tuple(one for one in near if one.paths is None or one.paths.search(path)) for path in examples(rule, patterns)
    }
    if not are_few(rule):
        # Examples prove nothing of the paths that were not tried.
        found.add(tuple(one for one in near if one.paths is None or covers_all(rule, one.paths)))
    return sorted(found, key=len)


def _idle(state: AppState, useful: set[Protection]) -> Iterator[str]:
    """The calls of ``protect()`` that cover nothing here."""
    for one in state.extension.protections:
        if one in useful:
            continue
        if isinstance(one.target, Blueprint):
            what = f"protect() stands on the blueprint {one.target.name!r}"
            registered = one.target in state.app.blueprints.values()
            # Not an error: one object may serve several apps, and the blueprint be another one's.
            yield f"{what}, which is not registered on this app." if not registered else f"{what} and covers no route."
        elif one.target is state.app:
            shown = f"paths={one.paths.pattern!r}" if one.paths else ""
            yield f"protect({shown}) on the app covers no route."


def _differing(policy: Policy, base: Policy) -> dict[str, Any]:
    """The options in which a policy differs, as JSON can hold them."""
    pairs = ((one.name, getattr(policy, one.name)) for one in fields(Policy))
    return {name: _plain(value) for name, value in pairs if value != getattr(base, name)}


def _plain(value: Any) -> Any:
    if isinstance(value, (frozenset, tuple)):
        return sorted(value) if isinstance(value, frozenset) else list(value)
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _host(rule: Rule) -> str:
    return rule.host or rule.subdomain or ""
