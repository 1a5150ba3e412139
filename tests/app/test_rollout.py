"""Keys are introduced step by step: optional first, with an event for each request that comes without one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Blueprint
from flask.views import MethodView
from werkzeug.test import TestResponse

from flask_idempotency.errors import OptionError
from tests.support.apps import Shop, assert_replayed, events, new_key


def send(shop: Shop, path: str, key: str | None = None, method: str = "POST", **headers: str) -> TestResponse:
    """A request of the tenant ``acme``, with or without a key."""
    given = {} if key is None else {"Idempotency-Key": key}
    return shop.client.open(path, method=method, headers={"X-Tenant": "acme", **given, **headers})


def reasons(seen: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The reasons of the events ``unguarded`` among those seen."""
    return [fields["reason"] for name, fields in seen if name == "unguarded"]


def counting(shop: Shop) -> Callable[[], str]:
    """A view whose answers are all different."""

    def view() -> str:
        shop.runs.append("x")
        return f"run {len(shop.runs)}"

    return view


@pytest.fixture
def api(light: Shop) -> Blueprint:
    """A blueprint with one view, which a test protects before it is registered."""
    blueprint = Blueprint("api", __name__)
    blueprint.post("/x", endpoint="x")(counting(light))
    return blueprint


@pytest.mark.scenario(31)
@pytest.mark.parametrize("order", ["protect first", "register first"])
def test_a_protected_blueprint_that_takes_old_clients(light: Shop, api: Blueprint, order: str) -> None:
    """With required=False requests without a key run and are told of, others are guarded, an empty one is 400."""
    if order == "protect first":
        light.idempotency.protect(api, required=False)
    light.app.register_blueprint(api)
    if order == "register first":
        light.idempotency.protect(api, required=False)
    with events(light.app) as seen:
        assert ["run 1", "run 2"] == [send(light, "/x").text for _ in range(2)]
        assert [] == light.rows()
        key = new_key()
        first = send(light, "/x", key)
        assert_replayed(send(light, "/x", key), first)
        assert 400 == send(light, "/x", "").status_code
    assert ["no-key", "no-key"] == reasons(seen)
    assert 3 == len(light.runs)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("near_first", [True, False])
def test_the_nearer_protection_says_whether_a_key_is_required(
    light: Shop, api: Blueprint, near: bool, near_first: bool
) -> None:
    """A blueprint's required holds over the app's, in whichever order the two calls come."""
    calls = [(api, near), (light.app, not near)]
    for target, required in calls if near_first else reversed(calls):
        light.idempotency.protect(target, required=required)
    light.app.register_blueprint(api)
    assert (400 if near else 200) == send(light, "/x").status_code


def test_a_protection_of_some_paths_is_nearer_than_that_of_all(light: Shop, api: Blueprint) -> None:
    """One view on two paths requires a key on the path that a nearer call names, and takes old clients on the other."""
    api.add_url_rule("/y", "x", methods=["POST"])
    light.idempotency.protect(api, paths="^/y")
    light.idempotency.protect(api, required=False)
    light.app.register_blueprint(api)
    assert [200, 400, 200] == [send(light, path).status_code for path in ("/x", "/y", "/x")]


@pytest.mark.parametrize("value", ["false", None, 0])
def test_a_required_that_is_neither_true_nor_false(light: Shop, api: Blueprint, value: Any) -> None:
    """A value that only looks like one is refused: it must not decide silently."""
    with pytest.raises(OptionError, match=r"protect\(required=…\)"):
        light.idempotency.protect(api, required=value)


# The event


@pytest.mark.scenario(31)
def test_requests_that_are_not_told_of(light: Shop) -> None:
    """A key, a method that is not guarded, an exempt view, and a required key that is missing make no such event."""
    view = light.idempotency.optional(counting(light))
    light.app.add_url_rule("/x", "x", view, methods=["POST", "PUT", "GET"])
    light.app.post("/exempt", endpoint="exempt")(light.idempotency.exempt(counting(light)))
    with events(light.app) as seen:
        asked = [
            send(light, "/x", new_key()),
            send(light, "/x", method="PUT"),
            send(light, "/x", method="GET"),
            send(light, "/exempt"),
            send(light, "/charges"),
        ]
    assert [200, 200, 200, 200, 400] == [one.status_code for one in asked]
    assert [] == reasons(seen)


def test_nothing_is_told_of_an_app_that_is_switched_off(make_light: Callable[..., Shop]) -> None:
    """With ENABLED off it was said at the start; requests are not counted."""
    shop = make_light(enabled=False)
    shop.app.post("/x")(shop.idempotency.optional(counting(shop)))
    with events(shop.app) as seen:
        assert 200 == send(shop, "/x").status_code
    assert [] == seen


def test_a_request_is_told_of_once(light: Shop) -> None:
    """Two guards on the way to one view, and a view that calls another guarded one, make one event a request."""

    class Resource(MethodView):
        decorators = [light.idempotency.optional]  # noqa: RUF012

        @light.idempotency.optional
        def post(self) -> str:
            return str(inner())

    inner = light.idempotency.optional(counting(light))
    light.app.add_url_rule("/x", view_func=Resource.as_view("x"))
    with events(light.app) as seen:
        assert ["run 1", "run 2"] == [send(light, "/x").text for _ in range(2)]
    assert ["no-key", "no-key"] == reasons(seen)


@pytest.mark.scenario(72)
@pytest.mark.parametrize("reason", ["no-key", "store-unavailable"])
def test_how_loud_it_is(light: Shop, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """A client that sends no key is information; a store that is away is a warning, and an error of the recording's."""
    light.app.post("/x")(light.idempotency.optional(on_store_error="execute")(counting(light)))
    light.execute(sa.text("DROP TABLE idempotency_keys"))
    with caplog.at_level(logging.INFO, "flask_idempotency"), events(light.app) as seen:
        answer = send(light, "/x", None if reason == "no-key" else new_key())
    assert "run 1" == answer.text
    assert [reason] == reasons(seen)
    found = {one.levelname for one in caplog.records if getattr(one, "event", "") == "idempotency.unguarded"}
    assert {"INFO" if reason == "no-key" else "WARNING"} == found
    others = {one.levelname for one in caplog.records if getattr(one, "event", "") == "idempotency.record_failed"}
    assert (set() if reason == "no-key" else {"ERROR"}) == others


def test_a_store_that_is_away_is_told_of_after_a_missing_key(light: Shop) -> None:
    """Where a view without a key calls one that finds a key of its own, the missing store is told of as well."""
    inner = light.idempotency.required(key=lambda: "order-1001", on_store_error="execute")(counting(light))
    light.app.post("/x", endpoint="x")(light.idempotency.optional(lambda: inner()))
    light.execute(sa.text("DROP TABLE idempotency_keys"))
    with events(light.app) as seen:
        assert "run 1" == send(light, "/x").text
    assert ["no-key", "store-unavailable"] == reasons(seen)


def test_what_is_said_of_the_client(light: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """Its own name for itself is logged, cut and on one line; nothing that it proves who it is with."""
    light.app.post("/x", endpoint="x")(light.idempotency.optional(counting(light)))
    named = 'till/1.0 "shop" event=forged ' + 300 * "x"
    sent = {"Authorization": "Bearer s3cret-1", "Cookie": "session=s3cret-2", "X-Api-Key": "s3cret-3"}
    with caplog.at_level(logging.INFO, "flask_idempotency"):
        send(light, "/x", **sent, **{"User-Agent": named})
        light.client.post("/x", headers={"User-Agent": ""})
    first, second = [one for one in caplog.records if getattr(one, "event", "") == "idempotency.unguarded"]
    assert (named[:200], "") == (first.user_agent, second.user_agent)  # type: ignore[attr-defined]
    assert 'endpoint=x reason=no-key user_agent="till/1.0 \\"shop\\" event=forged' in first.getMessage()
    assert "s3cret" not in first.getMessage() + repr(vars(first))
