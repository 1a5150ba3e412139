"""Who asks, and under which key: found with Flask, in the app's own way where it has one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from flask import Request, current_app
from werkzeug.datastructures import Authorization
from werkzeug.local import LocalProxy

from . import body
from . import scope as scopes
from .errors import ScopeMissing
from .key import parse_header, storable
from .policy import Policy
from .state import AppState

if TYPE_CHECKING:
    from .guard import Guard

#: Schemes whose credential is the same on every attempt. Others (Digest, signatures) change with each, so a
#: retry would be another caller.
_STEADY: Final = frozenset({"basic", "bearer"})

#: What a header, a parameter of query or path, a cookie, a form's field or a JSON member is called that carries a
#: credential. What has another name is none: an account's
#: id must not be another scope on the retry, which brings a cookie with it that the first answer set.
_NAMED_SECRET: Final = re.compile("key|token|secret|auth|passw|session|^sid$", re.IGNORECASE)

#: What is shorter is no credential but a name, whatever it is called.
_SHORTEST_SECRET: Final = 16

#: Headers that carry a credential in one of many schemes, and all headers that carry one, as WSGI names them. A scope
#: that equals one of their values is kept as its hash.
_AUTHORIZATION: Final = frozenset({"HTTP_AUTHORIZATION", "HTTP_PROXY_AUTHORIZATION"})
_SECRET: Final = _AUTHORIZATION | {"HTTP_X_API_KEY", "HTTP_API_KEY", "HTTP_X_AUTH_TOKEN", "HTTP_X_ACCESS_TOKEN"}

#: Parameters of an Authorization header that name somebody or something, and prove nothing.
_NAMES: Final = frozenset({"username", "realm"})


def find_key(request: Request, policy: Policy) -> str | None:
    """The key in its stored form; ``None`` where there is none.

    :raises KeyInvalid: there is one, and it is not valid.
    """
    if policy.key is not None:
        text = scopes.as_text(call(policy.key, request), "A key must be what the client sends on every retry")
        return None if text is None else storable(text)
    header = request.headers.get(policy.header)
    return None if header is None else parse_header(header, policy.key_min_length)


def find_scope(request: Request, state: AppState, guard: Guard, policy: Policy) -> str:
    """The scope in its stored form (contract, section 3, in its order).

    :raises ScopeMissing: the caller can't be told.
    """
    if isinstance(policy.scope, str):
        return scopes.fixed(policy.scope)
    loader = policy.scope or state.extension.loader
    if loader is not None:

        def proves(text: str) -> bool:
            return _is_credential(text, request, policy.header)

        scope: str | None = call(loader, request, lambda value: scopes.from_loader(value, proves))
        if scope is None:
            if guard.above_others(request):
                state.warn_once(
                    f"A caller of {request.endpoint} is turned away: the scope loader names nobody. Its guard stands "
                    "outside of the view's decorators, so if one of them finds out who calls, that is too late. Do it "
                    "in the loader or in a before_request function; `flask idempotency routes` names such decorators."
                )
            raise ScopeMissing()
        return scope
    return _from_login() or _from_authorization(request, state, guard)


def call(function: Callable[..., Any], request: Request, then: Callable[[Any], Any] = lambda value: value) -> Any:
    """Call what the app handed in: with the request if it takes an argument, else without.

    :param then: makes of its value what is returned, while what the function has parsed of the body is still there.
    """
    sync = current_app.ensure_sync(function)
    takes = _looked_up if isinstance(function, Hashable) else _takes_argument
    with body.lent(request):
        value = sync(request) if takes(function) else sync()
        # A proxy of None is no value; its text would be one that all such callers share.
        return then(value._get_current_object() if isinstance(value, LocalProxy) else value)


def _takes_argument(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.kind in positional and one.default is one.empty for one in parameters)


_looked_up: Final = lru_cache(maxsize=512)(_takes_argument)


def _from_login() -> str | None:
    """Flask-Login's user, where that extension is active and somebody is logged in."""
    if not hasattr(current_app, "login_manager"):
        return None
    from flask_login import current_user  # type: ignore[import-untyped]

    return scopes.from_user(current_user.get_id()) if current_user.is_authenticated else None


def _from_authorization(request: Request, state: AppState, guard: Guard) -> str:
    scheme, _, credential = request.headers.get("Authorization", "").strip().partition(" ")
    if not credential.strip():
        raise ScopeMissing()
    if scheme.lower() not in _STEADY:
        state.warn_once(
            "Callers are turned away whose Authorization header has another scheme than Basic or Bearer, since it "
            "changes with each attempt. Register a loader that names the account, with @idempotency.scope_loader."
        )
        raise ScopeMissing(
            f"Callers with the scheme {scheme[:20]} can't be told apart by their Authorization header, which changes "
            "with each attempt. This API needs a scope loader that names the account."
        )
    if guard.above_others(request):
        # A decorator below, jwt_required say, has not looked at the credential yet. Were its hash a scope, a
        # revoked token would still open the record.
        state.warn_once(
            f"Callers of {request.endpoint} are turned away: its guard stands above what checks credentials, so the "
            "Authorization header alone does not tell who they are. Register a loader with @idempotency.scope_loader, "
            "and check credentials in it or in a before_request function; or put the guard below that decorator."
        )
        raise ScopeMissing(
            "The caller is not known yet where the key is looked up. This API needs a scope loader, and credentials "
            "have to be checked in it or in a before_request function."
        )
    state.warn_once(
        "Keys are scoped by a hash of the Authorization header, for want of a scope loader: a refreshed token is a "
        "new scope, in which a retry runs again. Register one with @idempotency.scope_loader."
    )
    return scopes.from_authorization(f"{scheme.lower()} {credential.strip()}")


def _is_credential(text: str, request: Request, key_header: str) -> bool:
    """Whether a text is what this request proves who it is with. Such a one is never stored as it is."""
    bare = text.strip()
    if not bare:
        return False
    environ = request.environ  # a look there takes a tenth of the time that one among the headers takes
    found = {environ[name] for name in _SECRET if name in environ}
    found.update(*(_spelled(environ[name]) for name in _AUTHORIZATION if name in environ))
    if any(_is_bare(bare, value) for value in found):
        return True
    if len(text) < _SHORTEST_SECRET:
        return False
    sent = (request.headers.items(), request.args.items(multi=True), request.cookies.items(multi=True))
    # A view's argument may be anything; its text is what a loader gives that returns it.
    return any(
        _is_bare(bare, str(value)) and name.lower() != key_header.lower() and _NAMED_SECRET.search(name)
        for name, value in chain(*sent, (request.view_args or {}).items(), _parsed(request))
    )


def _is_bare(text: str, value: str) -> bool:
    """Whether a value is that text, but for blanks around it and a scheme before it."""
    return text in value and text in (value.strip(), value.split(None, 1)[-1].strip())


def _spelled(header: str) -> set[str]:
    """What of an Authorization header is secret, in each form in which Werkzeug gives it."""
    try:
        authorization = Authorization.from_header(header)
    except ValueError:  # Basic, and not in ASCII: nobody can have any other form of it than the header's
        authorization = None
    if authorization is None:
        return set()
    name, password = authorization.username or "", authorization.password or ""
    # Werkzeug spells the scheme in its own way, whatever the client did.
    found = {str(authorization), authorization.token or "", password, f"{name}:{password}"}
    found.add(f"{authorization.type} {str(authorization).partition(' ')[2]}")
    # Without a password the name is the secret, as in Stripe's Basic scheme; elsewhere it names the account.
    if authorization.type == "basic" and not password:
        found.add(name)
    return found | {value for name, value in authorization.parameters.items() if value and name not in _NAMES}


def _parsed(request: Request) -> Iterator[tuple[str, str]]:
    """The fields and members of a body that somebody has parsed already, by name. Nothing is read for it."""
    if "form" in request.__dict__:
        yield from request.form.items(multi=True)
    # Of what get_json() keeps there are two, as it is called with silent=True or not.
    left: list[Any] = list(request.__dict__.get("_cached_json", ()))
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield from ((name, one) for name, one in value.items() if isinstance(one, str))
        if isinstance(value, (dict, list)):
            left.extend(value.values() if isinstance(value, dict) else value)
