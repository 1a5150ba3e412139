"""How a replay leaves the guard: as the view's own answer where nothing is above, else past whatever is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import pytest
from flask.views import MethodView

from tests.support.apps import Shop, new_key

#: What a function above the guard has got from it.
Got = list[Any]


def view() -> tuple[str, int]:
    """A view."""
    return "made", 201


def noting(function: Callable[..., Any], got: Got) -> Callable[..., Any]:
    """A function around another that makes an answer of its own of what that returns."""

    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        got.append(function(*args, **kwargs))
        return "null"

    return around


def alone(shop: Shop, got: Got) -> None:
    """The guard is what Flask calls."""
    shop.app.post("/x")(shop.idempotency.required(view))


def protected(shop: Shop, got: Got) -> None:
    """The guard of a protection."""
    shop.idempotency.protect(shop.app, paths="^/x$")
    shop.app.post("/x")(view)


def protected_twice(shop: Shop, got: Got) -> None:
    """The view's own guard, below what a protection has put in its place."""
    shop.idempotency.protect(shop.app, paths="^/x$")
    alone(shop, got)


def around_a_class(shop: Shop, got: Got) -> None:
    """A guard around a view class."""

    class X(MethodView):
        decorators = (shop.idempotency.required,)

        def post(self) -> tuple[str, int]:
            return view()

    shop.app.add_url_rule("/x", view_func=X.as_view("x"))


def below_a_decorator(shop: Shop, got: Got) -> None:
    """A decorator above the guard."""
    shop.app.post("/x")(noting(shop.idempotency.required(view), got))


def below_a_class(shop: Shop, got: Got) -> None:
    """A guard on a method, below what dispatches to it."""

    class X(MethodView):
        @shop.idempotency.required
        def post(self) -> tuple[str, int]:
            return view()

        def dispatch_request(self, **kwargs: Any) -> Any:
            return noting(super().dispatch_request, got)(**kwargs)

    shop.app.add_url_rule("/x", view_func=X.as_view("x"))


def below_the_app(shop: Shop, got: Got) -> None:
    """An app that does something to what its views return."""
    alone(shop, got)
    shop.app.dispatch_request = noting(shop.app.dispatch_request, got)  # type: ignore[method-assign]


def replaced(shop: Shop, got: Got) -> None:
    """A toolbar that puts a view of its own above a protected one, in each request."""
    protected(shop, got)

    @shop.app.before_request
    def put_above() -> None:
        shop.app.view_functions["view"] = noting(shop.app.view_functions["view"], got)



OUTERMOST: Final = (alone, protected, protected_twice, around_a_class)
BELOW: Final = (below_a_decorator, below_a_class, below_the_app, replaced)


def replay(shop: Shop, make: Callable[[Shop, Got], None]) -> tuple[Got, list[str]]:
    """Replay ``/x``; returns what those above the guard got then, and the exceptions that Flask handled."""
    got: Got = []
    handled: list[str] = []
    make(shop, got)
    original = shop.app.handle_user_exception

    def handle(*args: Any) -> Any:
        handled.append(type(args[-1]).__name__)
        return original(*args)

    shop.app.handle_user_exception = handle  # type: ignore[method-assign, assignment]
    headers = {"Idempotency-Key": new_key(), "X-Tenant": "acme"}
    first = shop.client.post("/x", json={}, headers=headers)
    assert 201 == first.status_code or got
    got.clear()
    again = shop.client.post("/x", json={}, headers=headers)
    assert ("true", first.status_code, first.data) == (
        again.headers.get("Idempotent-Replay"),
        again.status_code,
        again.data,
    )
    return got, handled


@pytest.mark.parametrize("make", OUTERMOST)
def test_nothing_is_above(light: Shop, make: Callable[[Shop, Got], None]) -> None:
    """Where Flask itself takes what the guard returns, a replay is returned: no exception is raised and handled."""
    assert ([], []) == replay(light, make)


@pytest.mark.parametrize("make", BELOW)
def test_something_is_above(light: Shop, make: Callable[[Shop, Got], None]) -> None:
    """Whatever stands above the guard does not get a replay for the view's own value."""
    assert ([], ["Replayed"]) == replay(light, make)
