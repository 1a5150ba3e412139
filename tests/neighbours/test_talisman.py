"""Beside Flask-Talisman: what it sends to HTTPS touches no claim, and its headers are those of now or of then."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask, render_template_string
from flask_talisman import Talisman

from tests.neighbours.five import Send, Work, by_tenant, case_of, sender, the_five
from tests.neighbours.views import STANDINGS, add_view
from tests.support.apps import Shop, new_key

Beside = Callable[..., tuple[Shop, Work]]

POLICY = "content-security-policy"


def set_up(app: Flask) -> None:
    """HTTPS is forced, and scripts need a nonce, which is another for each request."""
    policy = {"default-src": "'self'", "script-src": "'self'"}
    Talisman(app, content_security_policy=policy, content_security_policy_nonce_in=["script-src"])


def app_with(beside: Beside, order: str, **how: Any) -> tuple[Shop, Work]:
    shop, work = beside(**{order: [set_up]})
    by_tenant(shop)
    add_view(shop, work, **how)
    return shop, work


def secure(shop: Shop, tenant: str | None = "acme") -> Send:
    return sender(shop.app, {"X-Tenant": tenant} if tenant else None, base_url="https://localhost")


def test_the_five(beside: Beside, order: str) -> None:
    """The five hold in either order; HSTS and the other constant headers are on every answer."""
    shop, work = app_with(beside, order)
    fresh = frozenset({POLICY}) if order == "before" else frozenset()
    good, other, nobody = secure(shop), secure(shop, "emca"), secure(shop, None)
    the_five(case_of(shop, work, good=good, other=other, refused=[nobody], fresh=fresh))
    key = new_key()
    answers = [good(key, 100), good(key, 100), good(key, 900), nobody(key, 100)]
    assert [201, 201, 422, 401] == [one.status for one in answers]
    for name in ("Strict-Transport-Security", "X-Content-Type-Options", "X-Frame-Options", POLICY):
        assert [1] * 4 == [len(one.header(name)) for one in answers], name


@pytest.mark.scenario(50)
def test_sent_to_https(beside: Beside, order: str) -> None:
    """A plain request is sent to HTTPS without a claim and without the replay; there the key runs, once."""
    shop, work = app_with(beside, order)
    key, plain = new_key(), sender(shop.app, {"X-Tenant": "acme"})
    for expected in ([], [key]):
        answer = plain(key, 100)
        assert (302, False) == (answer.status, answer.replayed)
        assert ["https://localhost/charges"] == answer.header("Location")
        assert expected == [row["key"] for row in shop.rows()]
        secure(shop)(key, 100)
    assert 1 == work.runs


@pytest.mark.parametrize("standing", STANDINGS)
def test_a_view_with_a_policy_of_its_own(beside: Beside, order: str, standing: str) -> None:
    """The options of a decorated view hold on either side of the guard, on the first answer and on a replay."""
    talismans: list[Talisman] = []
    shop, work = beside(**{order: [lambda app: talismans.append(Talisman(app))]})
    by_tenant(shop)
    own = talismans[0](frame_options="DENY", force_https=False)
    add_view(shop, work, view=lambda: work.asked(), **{standing: [own]})
    key = new_key()
    answers = [sender(shop.app, {"X-Tenant": "acme"})(key, 100) for _ in range(2)]
    assert [(201, False, ["DENY"]), (201, True, ["DENY"])] == [
        (one.status, one.replayed, one.header("X-Frame-Options")) for one in answers
    ]


def test_the_nonce(beside: Beside, order: str) -> None:
    """A replayed page has the first nonce. Set up after the extension the header of the replay has it, too, so that the
    page's scripts run; set up before, the header has the retry's own."""

    def page() -> tuple[str, int]:
        return render_template_string("<script nonce='{{ csp_nonce() }}'>ready()</script>"), 201

    shop, _ = app_with(beside, order, view=page)
    key = new_key()
    first, again = (secure(shop)(key, 100) for _ in range(2))
    assert (True, first.body) == (again.replayed, again.body)
    of_the_page = re.findall(rb"nonce='(\S+)'", first.body)[0].decode()
    of_the_headers = [re.findall(r"'nonce-(\S+)'", one.header(POLICY)[0])[0] for one in (first, again)]
    assert [True, order == "after"] == [one == of_the_page for one in of_the_headers]
