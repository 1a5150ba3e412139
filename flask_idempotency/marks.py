"""Marks on view functions: which is guarded, which lies below a guard, which is exempt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from types import FunctionType, MethodType
from typing import Any, Final
from weakref import WeakKeyDictionary

View = Callable[..., Any]

#: On a guarded view and, since ``functools.wraps`` copies it, on what wraps one: its guard.
GUARD: Final = "__idempotency_guard__"
#: On the function below a guard, so that one registered without its guard can be told.
BELOW: Final = "__idempotency_below__"
#: On a view that ``exempt`` was put on.
EXEMPT: Final = "__idempotency_exempt__"
#: On a decorator that makes a guard: what it makes it of, for toolkits that put it on a method at each call.
MAKES: Final = "__idempotency_makes__"

#: Marks of methods of objects, which can have no attributes of their own. A toolkit may decorate one for each request.
_methods: Final[dict[str, MutableMapping[Any, Any]]] = {BELOW: WeakKeyDictionary(), EXEMPT: {}}


def put_mark(function: Any, name: str, value: Any) -> None:
    """Mark a view function."""
    if isinstance(function, MethodType):
        _methods[name][function] = value
    elif hasattr(function, "__dict__"):
        setattr(function, name, value)


def mark_of(function: Any, name: str) -> Any:
    """The mark on a view function; ``None`` if it has none."""
    own = _methods.get(name, {}).get(function) if isinstance(function, MethodType) else None
    return own or getattr(function, "__dict__", {}).get(name)


def chain(function: Any) -> Iterator[Any]:
    """A function, what it wraps, what that wraps, and so on."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def is_covered(view: View) -> bool:
    """Whether a view's own function lies below something else that may check credentials first."""
    return hasattr(view, "__wrapped__") or not isinstance(view, (FunctionType, MethodType))
