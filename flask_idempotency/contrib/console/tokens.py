"""Proof that a form came from a page of this console: a signed token, bound to the session and to what was shown."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Any, Final

from flask import current_app, request, session
from itsdangerous import BadData, URLSafeTimedSerializer

#: Seconds that a form may stay open.
MAX_AGE: Final = 3_600

#: Where the session keeps what tokens are bound to.
_IN_SESSION: Final = "_idempotency_console"

_SALT: Final = "flask-idempotency-console"


class SecretMissing(Exception):
    """The app has no secret key, so that nothing can be signed, and no session be kept."""


def made(seen: Sequence[Any]) -> str:
    """A token for a form that shows ``seen``, which JSON can hold.

    :raises SecretMissing: the app has no secret key.
    """
    signer = _signer()
    nonce = session.get(_IN_SESSION)
    if not isinstance(nonce, str):
        nonce = session[_IN_SESSION] = secrets.token_urlsafe(24)
    return str(signer.dumps([nonce, list(seen)]))


def seen_in(token: str) -> list[Any] | None:
    """What the form showed; ``None`` where the token is not one of this session, or too old.

    :raises SecretMissing: the app has no secret key.
    """
    # Browsers say where a form comes from. The session's cookie may be one that they send from everywhere: SameSite is
    # the app's own setting.
    if request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
        return None
    try:
        nonce, seen = _signer().loads(token, max_age=MAX_AGE)
    except BadData:
        return None
    own = session.get(_IN_SESSION)
    if not isinstance(own, str) or not hmac.compare_digest(own, nonce):
        return None
    return list(seen)


def _signer() -> URLSafeTimedSerializer:
    secret = current_app.secret_key
    if not secret:
        raise SecretMissing
    # The newest comes last; the others still verify.
    keys = [*(current_app.config.get("SECRET_KEY_FALLBACKS") or ()), secret]
    how = {"key_derivation": "hmac", "digest_method": hashlib.sha256}
    return URLSafeTimedSerializer(keys, salt=_SALT, signer_kwargs=how)
