"""Beside Flask-HTTPAuth: Basic, Token, Digest and several at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import md5
from itertools import count
from typing import Any

import pytest
from flask import Blueprint
from flask_httpauth import HTTPBasicAuth, HTTPDigestAuth, HTTPTokenAuth, MultiAuth
from werkzeug.datastructures import WWWAuthenticate

from tests.neighbours.five import Answer, Send, Work, answer_of, case_of, sender, the_five
from tests.neighbours.views import add_view
from tests.support.apps import Shop, new_key

Beside = Callable[..., tuple[Shop, Work]]

PASSWORDS = {"acme": "open sesame", "emca": "open barley"}
TOKENS = {"token-one": "acme", "token-two": "acme", "token-other": "emca"}


def basic() -> HTTPBasicAuth:
    """Basic, by name and password."""
    auth = HTTPBasicAuth()
    auth.verify_password(lambda name, password: name if PASSWORDS.get(name) == password else None)
    return auth


def tokens(**how: Any) -> HTTPTokenAuth:
    """A token, for which there may be a new one."""
    auth = HTTPTokenAuth(**how)
    auth.verify_token(TOKENS.get)
    return auth


def by_password(shop: Shop, name: str, password: str | None = None) -> Send:
    return sender(shop.app, auth=(name, password or PASSWORDS[name]))


def by_token(shop: Shop, token: str, scheme: str = "Bearer") -> Send:
    return sender(shop.app, {"Authorization": f"{scheme} {token}"})


def app_with(beside: Beside, auth: Any, *, loader: bool = True, standing: str = "above") -> tuple[Shop, Work]:
    shop, work = beside()
    if loader:
        shop.idempotency.scope_loader(auth.current_user)
    add_view(shop, work, **{standing: [auth.login_required]})
    return shop, work


@pytest.mark.parametrize("loader", [True, False], ids=["loader", "no loader"])
def test_the_five_with_basic(beside: Beside, loader: bool) -> None:
    """The five hold with names and passwords; without a loader the scope is their hash."""
    shop, work = app_with(beside, basic(), loader=loader)
    wrong = by_password(shop, "acme", "open wheat")
    good, other = by_password(shop, "acme"), by_password(shop, "emca")
    the_five(case_of(shop, work, good=good, other=other, refused=[sender(shop.app), wrong]))
    assert loader == all(row["scope"] in PASSWORDS for row in shop.rows())


@pytest.mark.parametrize("loader", [True, False], ids=["loader", "no loader"])
@pytest.mark.scenario(32, 48)
def test_the_five_with_tokens(beside: Beside, loader: bool) -> None:
    """They hold with bearer tokens; with a loader another token of the account gets the replay, without it runs."""
    shop, work = app_with(beside, tokens(), loader=loader)
    good, other = by_token(shop, "token-one"), by_token(shop, "token-other")
    the_five(case_of(shop, work, good=good, other=other, refused=[sender(shop.app), by_token(shop, "token-gone")]))
    key = new_key()
    assert [False, loader] == [by_token(shop, one)(key, 100).replayed for one in ("token-one", "token-two")]


@pytest.mark.parametrize(
    ("how", "header"),
    [({"scheme": "Token"}, ("Authorization", "Token {}")), ({"header": "X-API-Key"}, ("X-API-Key", "{}"))],
    ids=["another scheme", "another header"],
)
def test_tokens_elsewhere(beside: Beside, how: dict[str, str], header: tuple[str, str]) -> None:
    """With another scheme, or in another header, a token needs a loader: without one the answer says so."""
    name, shape = header
    auth = tokens(**how)
    shop, work = app_with(beside, auth, loader=False)
    good, other, wrong = (
        sender(shop.app, {name: shape.format(one)}) for one in ("token-one", "token-other", "token-gone")
    )
    turned_away = good(new_key(), 100)
    assert (401, "scope-missing") == (turned_away.status, turned_away.problem)
    shop.idempotency.scope_loader(auth.current_user)
    the_five(case_of(shop, work, good=good, other=other, refused=[sender(shop.app), wrong]))


def digest(shop: Shop, name: str, password: str | None = None) -> Send:
    """A caller by Digest (RFC 7616), whose Authorization header is another on each request.

    It answers the challenge of its first request, and counts on from there.
    """
    client = shop.app.test_client()
    counted = count(1)
    challenges: list[WWWAuthenticate] = []

    def hashed(*parts: str) -> str:
        return md5(":".join(parts).encode()).hexdigest()

    def authorization() -> str:
        if not challenges:
            challenges.append(client.post("/charges").www_authenticate)
        asked, number, own = challenges[0], f"{next(counted):08x}", new_key()
        secret = hashed(name, asked["realm"], password or PASSWORDS[name])
        proof = hashed(secret, asked["nonce"], number, own, "auth", hashed("POST", "/charges"))
        quoted = {"username": name, "uri": "/charges", "cnonce": own, "response": proof}
        quoted |= {one: asked[one] for one in ("realm", "nonce", "opaque")}
        return f"Digest qop=auth, nc={number}, " + ", ".join(f'{key}="{value}"' for key, value in quoted.items())

    def send(key: str, amount: int) -> Answer:
        headers = {"Idempotency-Key": key, "Authorization": authorization()}
        return answer_of(client.post("/charges", json={"amount": amount}, headers=headers))

    return send


def digests() -> HTTPDigestAuth:
    auth = HTTPDigestAuth()
    auth.get_password(PASSWORDS.get)
    return auth


def test_the_five_with_digest(beside: Beside) -> None:
    """They hold with Digest, given a loader: the header changes with each attempt, the name stays."""
    shop, work = app_with(beside, digests())
    callers = {
        "good": digest(shop, "acme"),
        "other": digest(shop, "emca"),
        "refused": [sender(shop.app), digest(shop, "acme", "open wheat")],
    }
    the_five(case_of(shop, work, **callers))


def test_digest_without_a_loader(beside: Beside, caplog: pytest.LogCaptureFixture) -> None:
    """Without a loader nobody is told apart by a header that changes: 401 for the client, a warning for the app."""
    shop, work = app_with(beside, digests(), loader=False)
    with caplog.at_level(logging.WARNING, "flask_idempotency"):
        answer = digest(shop, "acme")(new_key(), 100)
    assert (401, "scope-missing") == (answer.status, answer.problem)
    assert (0, []) == (work.runs, shop.rows())
    assert "changes with each attempt" in caplog.text
    assert "@idempotency.scope_loader" in caplog.text


@pytest.mark.scenario(78)
def test_the_five_with_several_at_once(beside: Beside) -> None:
    """They hold with MultiAuth; a retry that proves the same account in another way gets the replay."""
    auth = MultiAuth(basic(), tokens())
    shop, work = app_with(beside, auth)
    good, other = by_password(shop, "acme"), by_token(shop, "token-other")
    the_five(case_of(shop, work, good=good, other=other, refused=[sender(shop.app), by_token(shop, "token-gone")]))
    key = new_key()
    assert [False, True] == [send(key, 100).replayed for send in (good, by_token(shop, "token-one"))]


def test_a_role_that_is_missing(beside: Beside) -> None:
    """Who lost the role between two attempts gets the package's own 403, and no replay."""
    auth, roles = basic(), {"acme": "till"}
    auth.get_user_roles(roles.get)
    shop, work = beside()
    shop.idempotency.scope_loader(auth.current_user)
    add_view(shop, work, above=[auth.login_required(role="till")])
    send, key = by_password(shop, "acme"), new_key()
    first = send(key, 100)
    roles["acme"] = "guest"
    for sent in (key, new_key()):
        answer = send(sent, 100)
        assert (403, False) == (answer.status, answer.replayed)
    roles["acme"] = "till"
    assert first.body == send(key, 100).body
    assert 1 == work.runs


@pytest.mark.scenario(74)
def test_below_the_guard(beside: Beside) -> None:
    """Below the guard login_required comes too late: without a loader it is refused, and nothing runs."""
    shop, work = app_with(beside, basic(), loader=False, standing="below")
    answer = by_password(shop, "acme")(new_key(), 100)
    assert (401, "scope-missing") == (answer.status, answer.problem)
    assert (0, []) == (work.runs, shop.rows())


@pytest.mark.scenario(74)
def test_the_five_under_protect(beside: Beside) -> None:
    """For a protected blueprint login_required stands on its before_request function; the five hold."""
    auth = basic()
    shop, work = beside()
    shop.idempotency.scope_loader(auth.current_user)
    api = Blueprint("api", __name__)
    shop.idempotency.protect(api)
    api.before_request(auth.login_required(lambda: None))
    api.post("/charges")(work.asked)
    shop.app.register_blueprint(api)
    wrong = by_password(shop, "acme", "open wheat")
    good, other = by_password(shop, "acme"), by_password(shop, "emca")
    the_five(case_of(shop, work, good=good, other=other, refused=[sender(shop.app), wrong]))
