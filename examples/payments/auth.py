"""Who is calling: bearer tokens, and the scope that a tenant's idempotency keys belong to."""

from __future__ import annotations

import hashlib
import secrets

from flask import g, request
from sqlalchemy import select
from werkzeug.datastructures import WWWAuthenticate
from werkzeug.exceptions import Unauthorized

from .extensions import db, idempotency
from .models import ApiCredential, Tenant


def authenticate() -> None:
    """Find the tenant that the bearer token belongs to. A replay has to pass here as well.

    :raises Unauthorized: there is no token, or it is not one of ours (any more).
    """
    authorization = request.authorization
    if authorization is not None and authorization.type == "bearer" and authorization.token:
        g.tenant_id = db.session.scalar(
            select(ApiCredential.tenant_id).where(ApiCredential.token_hash == hash_token(authorization.token))
        )
        if g.tenant_id is not None:
            return
    raise Unauthorized("Send a valid API token: Authorization: Bearer …", www_authenticate=WWWAuthenticate("bearer"))


@idempotency.scope_loader
def current_tenant() -> int:
    """Keys belong to the tenant, not to the token: a retry with a renewed token is still a retry."""
    tenant_id: int = g.tenant_id
    return tenant_id


def issue_token(name: str) -> str:
    """A new token for a tenant, who is added if new. Nobody can read it again later, so hand it over at once."""
    tenant = db.session.scalar(select(Tenant).where(Tenant.name == name)) or Tenant(name=name)
    token = secrets.token_urlsafe(32)
    db.session.add(ApiCredential(tenant=tenant, token_hash=hash_token(token)))
    db.session.commit()
    return token


def hash_token(token: str) -> str:
    """The form in which a token is stored. It is random and long, so it needs no salt and no slow hash."""
    return hashlib.sha256(token.encode()).hexdigest()
