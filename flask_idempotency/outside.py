"""Guards that stand outside of other decorators, and so, perhaps, of what checks credentials."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .guard import Guard, own_code
from .marks import GUARD, MAKES, View, chain, mark_of
from .policy import Policy
from .routes import method_decorators
from .state import AppState


def without_scope(
    state: AppState, guard: Guard, endpoint: str, view: View, method: str, policy: Policy
) -> tuple[str, ...]:
    """That every request with a key is turned away, since nothing can say whose it is."""
    # Whatever is below has not looked at the Authorization header yet, so that this last resort is refused.
    known = policy.scope or state.extension.loader or hasattr(state.app, "login_manager")
    if known or not guard.above(view, method):
        return ()
    return (
        f"Every request to {endpoint!r} that has a key gets 401, since nothing says whose it is: its guard stands "
        "outside of what checks credentials, where the Authorization header is no scope. Register a scope loader, "
        "@idempotency.scope_loader.",
    )


def bypassed(guard: Guard, view: View, method: str, *, protected: bool) -> tuple[str, ...]:
    """That there are decorators below the guard, which a replay does not pass."""
    names = [_named(one) for one in _below(guard, view, method, protected=protected)]
    # Functions of the package itself: another guard, or what protect() has put before the view since.
    others = ", ".join(dict.fromkeys(one for one in names if not one.startswith(f"{__package__}.")))
    if not others:
        return ()
    return (
        f"A replay does not pass what lies below the guard: {others}. What checks credentials belongs above the guard, "
        "into the scope loader or into a before_request function.",
    )


def _below(guard: Guard, view: View, method: str, *, protected: bool) -> Iterator[Any]:
    view_class = getattr(view, "view_class", None)
    to_come = method_decorators(view, method)
    makers = [place for place, one in enumerate(to_come) if mark_of(one, MAKES) is not None]
    inside = protected
    for outermost in (view, getattr(view_class, "dispatch_request", None), getattr(view_class, method.lower(), None)):
        links = list(chain(outermost))
        marked = [place for place, one in enumerate(links) if mark_of(one, GUARD) is guard]
        # The guard's own function is the last one with its mark: those above have copied it.
        if inside or marked:
            yield from links[marked[-1] + 1 if marked else 0 : -1]
        inside = inside or (bool(marked) and outermost is view)
    if inside:
        yield from () if view_class is None else own_code(view_class)
        yield from to_come
    elif makers and not marked:
        # One that a toolkit will put on the method: it covers the method's decorators, and those listed before it.
        yield from (*links[:-1], *to_come[: makers[-1]])


def _named(function: Any) -> str:
    """What a decorator put before a view, as a reader can find it: by where it was written, not as what it poses."""
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{type(function).__module__}.{type(function).__qualname__}"
    name = getattr(code, "co_qualname", code.co_name)
    return f"{function.__globals__.get('__name__', '')}.{name.partition('.<locals>')[0]}"
