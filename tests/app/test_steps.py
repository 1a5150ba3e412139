"""Steps and derived keys of views that call other systems: what a later attempt finds of an earlier one."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Response, copy_current_request_context, stream_with_context
from werkzeug.test import TestResponse

from flask_idempotency import Idempotency
from flask_idempotency.errors import ClaimLost, SecretGone, StepError, StoreError, WriterHeld
from flask_idempotency.steps import MAX_DEPTH
from tests.support.apps import Shop, close, events, make_shop, new_key, statements, until
from tests.support.barrier import background
from tests.support.proxy import CuttingProxy

Make = Callable[..., Shop]
View = Callable[[], Any]


class Crash(BaseException):
    """Ends a request as a killed process would: nothing is recorded, nothing released."""


class Provider:
    """Another system, which does a thing once per idempotency key, and counts how often it is asked to."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def charge(self, key: str = "") -> dict[str, Any]:
        """Charge, and tell how many charges there were."""
        self.asked.append(key)
        return {"charge": len(self.asked)}


@pytest.fixture
def provider() -> Provider:
    """A provider that nobody has asked for anything."""
    return Provider()


def operation(shop: Shop, view: View, rule: str = "/operations", **options: Any) -> View:
    """Guard a view, with these options, and put it under a rule."""
    view.__name__ = f"view_{rule.strip('/').replace('-', '_')}"
    guarded: View = shop.app.post(rule)(shop.idempotency.required(**options)(view))
    return guarded


def ask(shop: Shop, key: str | None, rule: str = "/operations", tenant: str = "acme", body: Any = None) -> TestResponse:
    """Ask for an operation."""
    headers = {"X-Tenant": tenant} | ({} if key is None else {"Idempotency-Key": key})
    return shop.client.post(rule, json=body, headers=headers)


def crashed(shop: Shop, key: str, **how: Any) -> None:
    """Ask for an operation that ends by a crash, and let its lease run out."""
    with pytest.raises(Crash):
        ask(shop, key, **how)
    shop.shift(31)


def row(shop: Shop) -> dict[str, Any]:
    """The one row of the table of keys."""
    (found,) = shop.rows()
    return found


def attempts(shop: Shop) -> int:
    """How many attempts there were before the one that runs."""
    assert shop.idempotency.current is not None
    return shop.idempotency.current.attempts


def names(seen: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The names of events."""
    return [name for name, _ in seen]


# What a later attempt finds


@pytest.mark.scenario(13)
@pytest.mark.parametrize("way", ["crash", "release", "asks again", "view's own"])
def test_a_later_attempt_goes_on(make: Make, provider: Provider, way: str) -> None:
    """After a crash and after a release, a step that was done is not done again, and the view knows that it resumes."""
    shop, done = make(on_error="release"), []

    def view() -> Any:
        current = shop.idempotency.current
        assert current is not None
        done.append((current.attempts, current.takeover, shop.idempotency.step("charge", provider.charge)))
        if len(done) == 1 and way == "crash":
            raise Crash
        if len(done) == 1 and way == "view's own":
            current.release()
            return {}, 201
        if len(done) == 1:
            return {}, 503 if way == "release" else 409
        return {"mail": shop.idempotency.step("mail", lambda: "sent")}, 201

    operation(shop, view)
    key = new_key()
    if way == "crash":
        crashed(shop, key)
    else:
        ask(shop, key)
        assert ("released", {"charge": '{"charge": 1}'}) == (row(shop)["status"], row(shop)["steps"])
    answer = ask(shop, key)
    assert (201, {"mail": "sent"}) == (answer.status_code, answer.json)
    assert [(0, False, {"charge": 1}), (1, way == "crash", {"charge": 1})] == done
    assert 1 == len(provider.asked)
    assert {"charge": '{"charge": 1}', "mail": '"sent"'} == row(shop)["steps"]
    assert ("completed", 2) == (row(shop)["status"], row(shop)["attempts"])
    assert "true" == ask(shop, key).headers["Idempotent-Replay"]
    assert 2 == len(done)


def test_a_result_is_stored_at_once(make: Make) -> None:
    """Before the view's next line the result is in the table."""
    shop = make()

    def view() -> Any:
        shop.idempotency.step("charge", lambda: 7)
        assert {"charge": "7"} == row(shop)["steps"]
        return {}, 201

    operation(shop, view)
    assert 201 == ask(shop, new_key()).status_code


def test_a_run_after_a_release_is_no_takeover(make: Make) -> None:
    """A released key is nobody's: even past the lease the next run takes nothing over, and waits for nothing."""
    shop = make(on_error="release")

    def view() -> Any:
        shop.idempotency.step("charge", lambda: 7)
        return {}, 201 if attempts(shop) else 503

    operation(shop, view)
    for wait in (0, 31):
        key = new_key()
        with events(shop.app) as seen:
            ask(shop, key)
            shop.shift(wait)
            ask(shop, key)
        assert ["released", "executed"] == names(seen)
        assert 2 == seen[1][1]["attempts"]


@pytest.mark.parametrize("kept", ["steps", "derived keys"])
def test_a_release_keeps_the_row(make: Make, kept: str) -> None:
    """Once steps or derived keys were used, a released key is for the same request only: another one gets 422."""
    shop = make(on_error="release")

    def view() -> Any:
        if kept == "steps":
            shop.idempotency.step("charge", lambda: 7)
        else:
            shop.idempotency.derive_key("charge")
        return {}, 201 if attempts(shop) else 503

    operation(shop, view)
    key = new_key()
    assert 503 == ask(shop, key, body=1).status_code
    assert ("released", 1) == (row(shop)["status"], row(shop)["attempts"])
    assert 422 == ask(shop, key, body=2).status_code
    assert 201 == ask(shop, key, body=1).status_code
    assert ("completed", 2) == (row(shop)["status"], row(shop)["attempts"])


def test_a_release_without_steps_leaves_nothing(make: Make) -> None:
    """Where no step was stored and no key derived, a release deletes the row, though a step was tried."""
    shop = make(on_error="release")

    def view() -> Any:
        shop.idempotency.step("charge", lambda: 1 / 0)

    operation(shop, view)
    assert 500 == ask(shop, new_key()).status_code
    assert [] == shop.rows()


@pytest.mark.parametrize("way", ["prune", "expiry", "released"])
def test_results_end_with_their_key(make: Make, provider: Provider, way: str) -> None:
    """A key past its retention, recorded or released, pruned or not, is new: its steps are done anew."""
    shop, derived = make(on_error="release", retention=3600), []

    def view() -> Any:
        derived.append(shop.idempotency.derive_key("charge"))
        shop.idempotency.step("charge", provider.charge)
        return {}, 503 if way == "released" else 201

    operation(shop, view)
    key = new_key()
    ask(shop, key)
    shop.shift(3601)
    if way == "prune":
        with shop.app.app_context():
            assert 1 == shop.idempotency.prune().deleted
        assert [] == shop.rows()
    ask(shop, key)
    assert 2 == len(provider.asked)
    assert {"charge": '{"charge": 2}'} == row(shop)["steps"]
    assert 1 == row(shop)["attempts"]


# Names and results


def test_names_are_unique_in_a_request(make_light: Make, provider: Provider) -> None:
    """A name's second use is an error, whether the first one's function returned, raised, or gave no JSON."""
    shop, found = make_light(), []

    def view() -> Any:
        for number, function in enumerate([provider.charge, lambda: 1 / 0, object]):
            for again in (function, provider.charge):
                try:
                    shop.idempotency.step(f"step {number}", again)
                except (StepError, ZeroDivisionError) as error:
                    found.append((number, str(error)))
        return {}, 201

    operation(shop, view)
    assert 201 == ask(shop, new_key()).status_code
    assert 1 == len(provider.asked)
    assert [0, 1, 1, 2, 2] == [number for number, _ in found]
    for number in (0, 2, 4):
        assert "was used before in this request: give each step a name of its own" in found[number][1]


def test_a_step_that_raises_stores_nothing(make: Make, provider: Provider) -> None:
    """What a step's function raises escapes as it is, and the next attempt calls the function again."""
    shop, raised = make(on_error="release"), []
    failure = LookupError("no such card")

    def view() -> Any:
        def function() -> Any:
            provider.charge()
            if len(provider.asked) == 1:
                raise failure
            return len(provider.asked)

        shop.idempotency.derive_key("charge")  # so that there is a row to look at
        try:
            return {"n": shop.idempotency.step("charge", function)}, 201
        except LookupError as error:
            raised.append(error)
            raise

    operation(shop, view)
    key = new_key()
    assert 500 == ask(shop, key).status_code
    assert [failure] == raised
    assert row(shop)["steps"] is None
    assert {"n": 2} == ask(shop, key).json


def nested(levels: int) -> Any:
    """A list in a list and so on."""
    return functools.reduce(lambda inner, _: [inner], range(levels - 1), [])


CIRCULAR: list[Any] = []
CIRCULAR.append(CIRCULAR)
NO_JSON = {
    "object": object(),
    "set": {1},
    "bytes": b"1",
    "decimal key": {(1, 2): 3},
    "nan": float("nan"),
    "infinity": [float("-inf")],
    "circle": CIRCULAR,
    "huge": 10**5000,
    "very deep": nested(100_000),
    "deep": {"a": nested(MAX_DEPTH)},
}


@pytest.mark.parametrize("result", NO_JSON.values(), ids=NO_JSON.keys())
def test_a_result_that_is_no_json(light: Shop, result: Any) -> None:
    """It is an error that says that the step was carried out, and nothing is stored."""
    caught: list[StepError] = []

    def view() -> Any:
        try:
            shop.idempotency.step("charge", lambda: result)
        except StepError as error:
            caught.append(error)
        return {}, 201

    shop = light
    operation(shop, view)
    assert 201 == ask(shop, new_key()).status_code
    assert "'charge' was carried out, but its result can't be kept, since it is no JSON" in str(caught[0])
    assert "Return what the later steps need as plain data" in str(caught[0])
    assert row(shop)["steps"] is None


RESULTS = [
    (None, None),
    (False, False),
    (0, 0),
    ("", ""),
    ([], []),
    ({}, {}),
    ((1, (2, 3)), [1, [2, 3]]),
    ({2: "a", None: "b", True: "c"}, {"2": "a", "null": "b", "true": "c"}),
    (0.1, 0.1),
    (-0.0, -0.0),
    (1e308, 1e308),
    (5e-324, 5e-324),
    (2**53 + 1, 2**53 + 1),
    (-(10**4000), -(10**4000)),
    ("grüße ✉ 🎉", "grüße ✉ 🎉"),
    ("\ud83d", "\ud83d"),
    ("a\0b\x1f\u2028\ufeff\"'\\ %s %(a)s :b", "a\0b\x1f\u2028\ufeff\"'\\ %s %(a)s :b"),
    (nested(MAX_DEPTH), nested(MAX_DEPTH)),
    (['[{"' * 100, '\\"[' * 100], ['[{"' * 100, '\\"[' * 100]),
    ({"\0\ud800": ["\udfff"]}, {"\0\ud800": ["\udfff"]}),
]


def test_the_first_result_is_the_later_ones(make: Make) -> None:
    """What the step returns the first time, every later attempt gets: the function's value as JSON gives it."""
    shop, seen = make(), []

    def view() -> Any:
        first = attempts(shop) == 0
        for number, (result, _) in enumerate(RESULTS):
            seen.append(shop.idempotency.step(str(number), (lambda result=result: result) if first else Crash))
        if first:
            raise Crash
        return {}, 201

    operation(shop, view)
    key = new_key()
    crashed(shop, key)
    assert 201 == ask(shop, key).status_code
    expected = [repr(one) for _, one in RESULTS]  # by which 0 and False, 0.0 and -0.0 differ
    assert expected * 2 == [repr(one) for one in seen]


def test_a_result_is_the_views_own(light: Shop) -> None:
    """What the view does to a result it was given changes nothing of what is stored."""
    mine: dict[str, Any] = {"ids": [1]}

    def view() -> Any:
        first = light.idempotency.step("charge", lambda: mine)
        first["ids"].append(2)
        light.idempotency.step("mail", lambda: None)
        return {}, 201

    operation(light, view)
    assert 201 == ask(light, new_key()).status_code
    assert ([1], '{"ids": [1]}') == (mine["ids"], row(light)["steps"]["charge"])


def test_names_of_any_printable_text(make: Make) -> None:
    """Whatever is printable names a step; names that differ in case, accents or blanks are several."""
    given = ["a", "A", "a ", " a", "á", "a\u0301", "🎉", "a'b\"c\\d", "%(x)s :y ?", "x" * 1000, "steps", "null"]
    shop, seen = make(), []

    def view() -> Any:
        for number, name in enumerate(given):
            seen.append(shop.idempotency.step(name, (lambda number=number: number) if len(seen) < 12 else Crash))
        if len(seen) == 12:
            raise Crash
        return {}, 201

    operation(shop, view)
    key = new_key()
    crashed(shop, key)
    assert 201 == ask(shop, key).status_code
    assert [*range(12), *range(12)] == seen


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "\x7f", "\ud800", "\u200b", "\xa0", 7, None, b"charge"])
def test_what_is_no_name(light: Shop, provider: Provider, name: Any) -> None:
    """A name that could not be shown or stored is refused before anything is done, in a step and in a derived key."""
    found: list[str] = []

    def view() -> Any:
        for call in (
            lambda: light.idempotency.step(name, provider.charge),
            lambda: light.idempotency.derive_key(name),
        ):
            with statements() as sent, pytest.raises(StepError) as caught:
                call()
            assert [] == sent
            found.append(str(caught.value))
        return {}, 201

    operation(light, view)
    assert 201 == ask(light, new_key()).status_code
    assert [f"{name!r} is no name: it must be a text of printable characters that is not empty."] * 2 == found
    assert [] == provider.asked


def test_what_is_no_function(light: Shop) -> None:
    """A value in the function's place is refused before the claim is proven."""

    def view() -> Any:
        with statements() as sent, pytest.raises(StepError, match="'charge' is given dict, not a function"):
            light.idempotency.step("charge", {"charge": 1})  # type: ignore[arg-type]
        assert [] == sent
        return {}, 201

    operation(light, view)
    assert 201 == ask(light, new_key()).status_code


# The claim's proof


def taken_over(shop: Shop, key: str) -> None:
    """Let a claim's lease run out, and another request take it over and end."""
    shop.shift(31)
    assert 201 == background(ask, shop, key).result(20).status_code


@pytest.mark.scenario(79)
@pytest.mark.parametrize("call", ["step", "derive_key"])
def test_a_claim_that_was_lost_before(make: Make, provider: Provider, call: str) -> None:
    """A holder that was taken over does nothing more, however often it tries, and says that it lost, once."""
    shop, lost = make(), []
    key = new_key()
    calls: dict[str, Callable[[str], Any]] = {
        "step": lambda name: shop.idempotency.step(name, provider.charge),
        "derive_key": shop.idempotency.derive_key,
    }

    def view() -> Any:
        if attempts(shop) == 1:
            return {"won": True}, 201
        taken_over(shop, key)
        for number in range(3):
            with pytest.raises(ClaimLost, match="no longer this request's") as caught:
                calls[call](f"charge {number}")
            lost.append((caught.value, names(seen).count("claim_lost")))
        raise lost[0][0]

    operation(shop, view)
    with events(shop.app) as seen:
        assert 500 == ask(shop, key).status_code
    assert [1, 1, 1] == [told for _, told in lost]
    assert [] == provider.asked
    assert ["taken_over", "executed", "claim_lost"] == names(seen)
    assert {"won": True} == ask(shop, key).json
    assert (None, None) == (row(shop)["steps"], row(shop)["secret_id"])


@pytest.mark.scenario(79)
def test_a_claim_that_the_renewal_found_lost(make: Make, provider: Provider) -> None:
    """It is ClaimLost for the view's next step, too, where the renewing thread was the first to find out."""
    shop = make(lock_timeout=0.3)
    key = new_key()

    def view() -> Any:
        changed = sa.update(shop.table).values(fencing_token="another")
        with events(shop.app) as seen:
            shop.execute(changed)
            until(lambda: "claim_lost" in names(seen))
        for call in (
            lambda: shop.idempotency.step("charge", provider.charge),
            lambda: shop.idempotency.derive_key("charge"),
        ):
            with pytest.raises(ClaimLost):
                call()
        return {}, 201

    operation(shop, view)
    with events(shop.app) as seen:
        assert 201 == ask(shop, key).status_code
    assert ["claim_lost"] == names(seen)
    assert [] == provider.asked


@pytest.mark.scenario(79)
def test_a_claim_that_is_lost_in_the_function(make: Make, provider: Provider) -> None:
    """Where another request took over while the function ran, its result is dropped, and the other's stays."""
    shop = make()
    key = new_key()

    def view() -> Any:
        def function() -> str:
            provider.charge()
            if attempts(shop) == 0:
                taken_over(shop, key)
            return f"of attempt {attempts(shop)}"

        return {"charge": shop.idempotency.step("charge", function)}, 201

    operation(shop, view)
    with events(shop.app) as seen:
        assert 500 == ask(shop, key).status_code
    assert 2 == len(provider.asked)
    assert ["taken_over", "executed", "claim_lost"] == names(seen)
    assert {"charge": '"of attempt 1"'} == row(shop)["steps"]
    assert {"charge": "of attempt 1"} == ask(shop, key).json


def test_steps_renew_the_lease(make: Make) -> None:
    """A view that only calls steps keeps its claim, though no thread renews it: each proof and each storing does."""
    shop, rivals = make(), []
    key = new_key()

    def older() -> None:
        shop.shift(20)
        rivals.append(background(ask, shop, key).result(20).status_code)
        return None

    def view() -> Any:
        for number in range(3):
            shop.idempotency.step(f"step {number}", older)  # the proof is 20 s old when the rival asks
            older()  # so is the storing
            shop.shift(5)
        shop.idempotency.derive_key("charge")
        older()
        return {}, 201

    operation(shop, view)
    assert 201 == ask(shop, key).status_code
    assert [409] * 7 == rivals
    assert 1 == row(shop)["attempts"]


def test_a_lease_that_ran_out_unnoticed_begins_anew(make: Make, provider: Provider) -> None:
    """Where nobody took over, a step proves the claim past its lease, and from then on a rival gets 409."""
    shop = make()
    key = new_key()

    def view() -> Any:
        shop.shift(31)
        shop.idempotency.step("charge", provider.charge)
        return {"rival": background(ask, shop, key).result(20).status_code}, 201

    operation(shop, view)
    assert {"rival": 409} == ask(shop, key).json
    assert 1 == len(provider.asked)


# What it costs


def costing(shop: Shop, seen: dict[str, list[str]]) -> None:
    """A view that notes the statements of the parts of a step."""

    def function() -> None:
        seen["proof"] = [*noted]
        noted.clear()

    noted: list[str] = []

    def view() -> Any:
        nonlocal noted
        for _ in range(2):  # connections are open then
            shop.idempotency.step(new_key(), lambda: None)
        with statements() as noted:
            shop.idempotency.step("charge", function)
            seen["store"] = [*noted]
            noted.clear()
            shop.idempotency.derive_key("charge")
            seen["first key"] = [*noted]
            noted.clear()
            shop.idempotency.derive_key("mail")
            seen["next key"] = [*noted]
        return {}, 201

    operation(shop, view)
    assert 201 == ask(shop, new_key()).status_code


def test_what_a_step_costs(make: Make) -> None:
    """One statement proves and renews, one stores, one notes the secret; SQLite takes one more for each that tells."""
    shop, seen = make(), {}
    costing(shop, seen)
    told = ["UPDATE", "SELECT"] if is_sqlite(shop) else ["UPDATE"]
    expected = {"proof": told, "store": ["UPDATE"], "first key": told, "next key": []}
    assert expected == {part: [one.split()[0] for one in sent] for part, sent in seen.items()}


def is_sqlite(shop: Shop) -> bool:
    """Whether a shop is on SQLite."""
    with shop.app.app_context():
        return shop.db.engine.dialect.name == "sqlite"


@pytest.fixture
def far(tcp_url: str) -> Iterator[Shop]:
    """A shop on PostgreSQL behind the proxy, once for each driver."""
    shop = make_shop(tcp_url, on_error="release")
    yield shop
    close(shop.app)


def test_what_a_step_costs_at_the_server(far: Shop, cutting_proxy: CuttingProxy) -> None:
    """Two statements in two round trips arrive for a step, with no BEGIN, COMMIT or ping beside them."""
    seen: list[Any] = []

    def view() -> Any:
        far.idempotency.step("warm", lambda: None)
        before = cutting_proxy.round_trips
        with cutting_proxy.counting() as sent:
            far.idempotency.step("charge", lambda: None)
        seen.extend([cutting_proxy.round_trips - before, [one.split()[0] for one in sent]])
        return {}, 201

    operation(far, view)
    assert 201 == ask(far, new_key()).status_code
    assert [2, ["UPDATE", "UPDATE"]] == seen


# Threads and coroutines


def test_steps_in_two_threads(make: Make) -> None:
    """Steps of one request that run at the same time, in threads of their own, are both kept."""
    shop, barrier, results = make(), threading.Barrier(2, timeout=20), []

    def view() -> Any:
        def step(name: str) -> Any:
            def function() -> str:
                barrier.wait()  # both have proven, none has stored
                return name

            return shop.idempotency.step(name, function if attempts(shop) == 0 else Crash)

        asked = [background(copy_current_request_context(step), name) for name in ("charge", "mail")]
        results.append([one.result(20) for one in asked])
        if attempts(shop) == 0:
            raise Crash
        return {}, 201

    operation(shop, view)
    key = new_key()
    crashed(shop, key)
    assert 201 == ask(shop, key).status_code
    assert [["charge", "mail"]] * 2 == results


def test_one_name_in_two_threads(light: Shop, provider: Provider) -> None:
    """Of two threads that use one name at the same time, one is refused."""

    def view() -> Any:
        def step() -> str:
            try:
                light.idempotency.step("charge", provider.charge)
            except StepError:
                return "refused"
            return "done"

        asked = [background(copy_current_request_context(step)) for _ in range(2)]
        return sorted(one.result(20) for one in asked), 201

    operation(light, view)
    assert ["done", "refused"] == ask(light, new_key()).json
    assert 1 == len(provider.asked)


def test_steps_within_steps(make_light: Make, provider: Provider) -> None:
    """A step's function may derive keys and take further steps."""
    shop, keys = make_light(), []

    def view() -> Any:
        def function() -> Any:
            keys.append(shop.idempotency.derive_key("charge"))
            return [shop.idempotency.step("inner", provider.charge)]

        return shop.idempotency.step("outer", function), 201

    operation(shop, view)
    assert [{"charge": 1}] == ask(shop, new_key()).json
    assert {"inner": '{"charge": 1}', "outer": '[{"charge": 1}]'} == row(shop)["steps"]


class Callable_:
    """An object that is called as a coroutine function."""

    async def __call__(self) -> int:
        return 1


async def coroutine() -> int:
    """A coroutine function."""
    return 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "function",
    [coroutine, functools.partial(coroutine), lambda: coroutine(), Callable_()],
    ids=["function", "partial", "lambda", "object"],
)
def test_a_coroutine_is_no_step(light: Shop, function: Any) -> None:
    """Whatever gives a coroutine is refused, with the way that serves in a coroutine, and stores nothing."""

    async def view() -> Any:
        with (
            statements() as sent,
            pytest.raises(StepError, match=r"await asyncio\.to_thread\(idempotency\.step, name, function\)"),
        ):
            light.idempotency.step("charge", function)
        # What can be told from the function itself is told before anything is done.
        assert [] == sent or not inspect.iscoroutinefunction(function)
        return {}, 201

    operation(light, view)
    assert 201 == ask(light, new_key()).status_code
    assert row(light)["steps"] is None


def test_steps_of_a_coroutine(make: Make, provider: Provider) -> None:
    """An async view takes its steps in threads, and a later attempt gets their results."""
    shop, results = make(), []

    async def view() -> Any:
        step, derive = shop.idempotency.step, shop.idempotency.derive_key
        key = await asyncio.to_thread(derive, "charge")
        charged = await asyncio.to_thread(step, "charge", functools.partial(provider.charge, key))
        results.append((key, charged))
        if len(results) == 1:
            raise Crash
        return {}, 201

    operation(shop, view)
    key = new_key()
    crashed(shop, key)
    assert 201 == ask(shop, key).status_code
    assert results[0] == results[1]
    assert [results[0][0]] == provider.asked


# A database that is in the way, or gone


def test_a_step_beside_uncommitted_work(sqlite_url: str, provider: Provider) -> None:
    """On SQLite, where the view's own uncommitted writes keep the keys out, a step says at once what to do."""
    shop = make_shop(sqlite_url, on_error="release")
    caught: list[str] = []

    def view() -> Any:
        session = shop.db.session
        session.execute(sa.insert(shop.Charge.__table__).values(amount=1))
        for call in (
            lambda: shop.idempotency.step("charge", provider.charge),
            lambda: shop.idempotency.derive_key("charge"),
        ):
            with pytest.raises(
                WriterHeld, match=r"Commit or roll back \(db\.session\.commit\(\)\) before step"
            ) as held:
                call()
            caught.append(str(held.value))
        session.rollback()
        shop.idempotency.derive_key("charge")
        return shop.idempotency.step("late", provider.charge), 201

    operation(shop, view)
    assert {"charge": 1} == ask(shop, new_key()).json
    assert not any("carried out" in one for one in caught)
    close(shop.app)


def test_a_step_that_leaves_uncommitted_work(sqlite_url: str, provider: Provider) -> None:
    """On SQLite, a function that leaves uncommitted writes is told so; its result is not stored."""
    shop, caught = make_shop(sqlite_url, on_error="release"), []

    def view() -> Any:
        def function() -> Any:
            if attempts(shop) == 0:
                shop.db.session.execute(sa.insert(shop.Charge.__table__).values(amount=1))
            return provider.charge()

        shop.idempotency.derive_key("charge")
        try:
            return shop.idempotency.step("charge", function), 201
        except WriterHeld as error:
            caught.append(str(error))
            raise

    operation(shop, view)
    key = new_key()
    assert 500 == ask(shop, key).status_code
    assert "The step 'charge' was carried out, and its result is not stored. SQLite has one writer" in caught[0]
    assert ("released", None) == (row(shop)["status"], row(shop)["steps"])
    assert {"charge": 2} == ask(shop, key).json
    close(shop.app)


def test_no_database_at_the_proof(far: Shop, cutting_proxy: CuttingProxy, provider: Provider) -> None:
    """Where the database is gone, the claim can't be proven: an error, and the function is not called."""

    def view() -> Any:
        far.idempotency.derive_key("charge")
        if attempts(far) == 0:
            with cutting_proxy.gone(), pytest.raises(StoreError) as caught:
                far.idempotency.step("charge", provider.charge)
            assert not isinstance(caught.value, WriterHeld)
            assert [] == provider.asked
            raise caught.value
        return far.idempotency.step("charge", provider.charge), 201

    operation(far, view)
    key = new_key()
    assert 500 == ask(far, key).status_code
    assert {"charge": 1} == ask(far, key).json


@pytest.mark.scenario(13)
def test_no_database_at_the_storing(far: Shop, cutting_proxy: CuttingProxy, provider: Provider) -> None:
    """Where the result can't be stored, the retry calls the function again, with the same derived key."""

    def view() -> Any:
        key = far.idempotency.derive_key("charge")

        def function() -> Any:
            if attempts(far) == 0:
                cutting_proxy.go_away()
            return provider.charge(key)

        try:
            return far.idempotency.step("charge", function), 201
        except StoreError:
            cutting_proxy.come_back()
            raise

    operation(far, view)
    key = new_key()
    assert 500 == ask(far, key).status_code
    assert {"charge": 2} == ask(far, key).json
    assert provider.asked[0] == provider.asked[1]


@pytest.mark.parametrize("part", ["steps", "secret_id"])
def test_a_reply_that_is_lost(far: Shop, cutting_proxy: CuttingProxy, provider: Provider, part: str) -> None:
    """Where a statement's reply is lost, it is repeated, and the function is called once."""
    key = new_key()

    def view() -> Any:
        rule = cutting_proxy.lose_reply(f"SET {part}" if part == "steps" else "secret_id=coalesce")
        derived = far.idempotency.derive_key("charge")
        charged = far.idempotency.step("charge", functools.partial(provider.charge, derived))
        assert rule.happened
        return charged, 201

    operation(far, view)
    assert {"charge": 1} == ask(far, key).json
    assert {"charge": '{"charge": 1}'} == row(far)["steps"]


# Without a claim


@pytest.mark.parametrize("atomic", [False, True])
def test_without_a_key(light: Shop, provider: Provider, atomic: bool) -> None:
    """On an optional route without a key, in either mode, steps are just done, and derived keys are fresh each time."""

    @light.app.post("/optional")
    @light.idempotency.optional(atomic=atomic)
    def view() -> Any:
        step, derive = light.idempotency.step, light.idempotency.derive_key
        same = object()
        assert same is step("charge", lambda: same)  # not even JSON
        return [step("charge", provider.charge), derive("charge"), derive("charge")], 201

    answers = [ask(light, None, "/optional").json for _ in range(2)]
    assert [{"charge": 1}, {"charge": 2}] == [answer[0] for answer in answers]
    assert 4 == len({str(uuid.UUID(key)) for answer in answers for key in answer[1:]})
    assert [] == light.rows()


def test_without_a_store(make: Make, provider: Provider) -> None:
    """Where the app runs without a claim while the store fails, steps are just done, and keys derived as ever."""
    shop = make(on_store_error="execute")

    def view() -> Any:
        step, derive = shop.idempotency.step, shop.idempotency.derive_key
        return [step("charge", provider.charge), step("charge", provider.charge), derive("a"), derive("a")], 201

    operation(shop, view)
    shop.execute(sa.text("DROP TABLE idempotency_keys"))
    key = new_key()
    answers = [ask(shop, one).json for one in (key, key, new_key())]
    assert [{"charge": 1}, {"charge": 2}] == answers[0][:2]
    first, second, other = ({uuid.UUID(one) for one in answer[2:]} for answer in answers)
    assert (1, True, True) == (len(first), first == second, first != other)


def test_derived_with_and_without_a_store(make: Make) -> None:
    """A key that was derived while no claim could be had is the one that the next attempt derives under its claim."""
    shop = make(on_store_error="execute")
    operation(shop, lambda: (shop.idempotency.derive_key("a"), 201))
    key = new_key()
    shop.execute(sa.text("ALTER TABLE idempotency_keys RENAME TO elsewhere"))
    without = ask(shop, key).text
    shop.execute(sa.text("ALTER TABLE elsewhere RENAME TO idempotency_keys"))
    assert without == ask(shop, key).text
    assert 1 == len(shop.rows())


@pytest.mark.parametrize("call", ["step", "derive_key"])
@pytest.mark.parametrize("where", ["hook", "decorator"])
def test_before_the_guard(make_light: Make, provider: Provider, where: str, call: str) -> None:
    """In a hook or a decorator that runs before a guarded view's guard they are refused; elsewhere they just run."""
    shop, done = make_light(), []
    shop.app.testing = True

    def early() -> None:
        if call == "step":
            done.append(shop.idempotency.step("charge", provider.charge))
        else:
            done.append(uuid.UUID(shop.idempotency.derive_key("charge")))

    def above(view: View) -> View:
        @functools.wraps(view)
        def wrapper() -> Any:
            if where == "decorator":
                early()
            return view()

        return wrapper

    if where == "hook":
        shop.app.before_request(early)
    shop.app.add_url_rule("/guarded", "guarded", above(shop.idempotency.required(lambda: "x")), methods=["POST", "GET"])
    shop.app.add_url_rule("/plain", "plain", above(lambda: "x"), methods=["POST"])
    with pytest.raises(StepError, match="no claim is held yet"):
        ask(shop, new_key(), "/guarded")
    assert ([], [], []) == (done, provider.asked, shop.rows())
    assert (200, 1) == (ask(shop, new_key(), "/plain").status_code, len(done))
    assert (200, 2) == (shop.client.get("/guarded").status_code, len(done))  # a method that is not guarded


@pytest.mark.parametrize("exempt", [False, True])
def test_before_a_protected_view(light: Shop, exempt: bool) -> None:
    """A hook before a view that ``protect`` guards is refused as well, and not before one that is exempt."""
    light.app.testing = True
    light.app.before_request(lambda: light.runs.append(light.idempotency.derive_key("a")))

    def view() -> str:
        return "x"

    light.app.add_url_rule("/p", "p", light.idempotency.exempt(view) if exempt else view, methods=["POST"])
    light.idempotency.protect(light.app)
    if exempt:
        assert (200, 1) == (ask(light, new_key(), "/p").status_code, len(light.runs))
    else:
        with pytest.raises(StepError, match="no claim is held yet"):
            ask(light, new_key(), "/p")


def test_without_a_guard(make_light: Make, provider: Provider) -> None:
    """Where the app has switched the extension off, steps are just done, and derived keys are fresh."""
    shop = make_light(enabled=False)
    operation(shop, lambda: ([shop.idempotency.step("charge", provider.charge), shop.idempotency.derive_key("a")], 201))
    key = new_key()
    answers = [ask(shop, key).json for _ in range(2)]
    assert [{"charge": 1}, {"charge": 2}] == [answer[0] for answer in answers]
    assert 2 == len({uuid.UUID(answer[1]) for answer in answers})


def test_in_a_stream(light: Shop, provider: Provider) -> None:
    """While an answer is streamed its claim is held, and steps are taken and kept as in the view."""

    def view() -> Any:
        def parts() -> Iterator[str]:
            yield "charged: "
            yield str(light.idempotency.step("charge", provider.charge)["charge"])

        return Response(stream_with_context(parts()), 201)

    operation(light, view)
    key = new_key()
    assert ["charged: 1"] * 2 == [ask(light, key).text for _ in range(2)]
    assert {"charge": '{"charge": 1}'} == row(light)["steps"]


def test_outside_of_requests(provider: Provider) -> None:
    """Outside of any request, and of any app, steps are just done, and derived keys are fresh."""
    idempotency = Idempotency()
    assert [{"charge": 1}, {"charge": 2}] == [idempotency.step("charge", provider.charge) for _ in range(2)]
    assert 2 == len({uuid.UUID(idempotency.derive_key("charge")) for _ in range(2)})


def test_in_a_replays_hooks(light: Shop, provider: Provider) -> None:
    """In the hooks of a replay a step is an error and is not done; in those of the first run it is done."""
    found: list[Any] = []

    @light.app.after_request
    def hook(response: Response) -> Response:
        for call in (
            lambda: light.idempotency.step("hook", provider.charge),
            lambda: light.idempotency.derive_key("hook"),
        ):
            try:
                found.append(call())
            except StepError as error:
                found.append(str(error))
        return response

    operation(light, lambda: ({}, 201))
    key = new_key()
    for _ in range(2):
        assert 201 == ask(light, key).status_code
    assert {"charge": 1} == found[0]
    assert uuid.UUID(found[1])
    assert ["Steps and derived keys belong into the guarded view: no claim is held here."] * 2 == found[2:]
    assert 1 == len(provider.asked)


def test_after_the_end(light: Shop, provider: Provider) -> None:
    """A thread that outlives its request takes no steps under a claim that has ended."""
    gone, late = threading.Event(), []

    def view() -> Any:
        @copy_current_request_context
        def after() -> None:
            gone.wait(20)
            light.idempotency.step("charge", provider.charge)

        late.append(background(after))
        return {}, 201

    operation(light, view)
    assert 201 == ask(light, new_key()).status_code
    gone.set()
    assert isinstance(late[0].exception(20), StepError)
    assert [] == provider.asked


# Derived keys


def derived(shop: Shop, key: str, rule: str = "/derive", **how: Any) -> dict[str, str]:
    """What a view gets for two names."""
    if not any(str(one) == rule for one in shop.app.url_map.iter_rules()):

        def view() -> Any:
            return {name: shop.idempotency.derive_key(name) for name in ("charge", "mail")}, 201

        operation(shop, view, rule)
    answer: dict[str, str] = ask(shop, key, rule, **how).json  # type: ignore[assignment]
    return answer


def test_what_a_derived_key_depends_on(make_light: Make) -> None:
    """Names, keys, scopes and secrets each make another key; each is a UUID of 36 characters."""
    shop, key = make_light(), new_key()
    found = [derived(shop, key), derived(shop, new_key()), derived(shop, key, tenant="other")]
    other = make_light()
    other.app.secret_key = "another secret"
    other.execute(sa.delete(other.table))
    found.append(derived(other, key))
    keys = [one for each in found for one in each.values()]
    assert (8, {36}) == (len(set(keys)), {len(one) for one in keys})
    assert all(uuid.UUID(one) for one in keys)


def test_the_same_on_every_attempt(make: Make) -> None:
    """A derived key stays the same after a crash, after a release, and once the key's whole row is gone."""
    shop, found = make(on_error="release"), []

    def view() -> Any:
        found.append(shop.idempotency.derive_key("charge"))
        if len(found) == 1:
            raise Crash
        return {}, 503 if len(found) == 2 else 201

    operation(shop, view)
    key = new_key()
    crashed(shop, key)
    ask(shop, key)
    assert 201 == ask(shop, key).status_code
    shop.execute(sa.delete(shop.table))
    assert 201 == ask(shop, key).status_code
    assert (4, 1) == (len(found), len(set(found)))


@pytest.mark.scenario(80)
def test_a_secret_that_is_rotated(make: Make, provider: Provider) -> None:
    """With the old secret among the fallbacks, a key begun under it goes on with its keys; a new key takes the new."""
    shop = make()

    def view() -> Any:
        provider.charge(shop.idempotency.derive_key("charge"))
        if len(provider.asked) == 1:
            raise Crash
        return {}, 201

    operation(shop, view)
    key = new_key()
    crashed(shop, key)
    noted = row(shop)["secret_id"]
    shop.app.config.update(SECRET_KEY="a new secret", SECRET_KEY_FALLBACKS=["an older one", "a secret of tests"])
    assert 201 == ask(shop, key).status_code
    assert provider.asked[0] == provider.asked[1]
    assert noted == row(shop)["secret_id"]
    assert 201 == ask(shop, new_key()).status_code
    assert 2 == len({one["secret_id"] for one in shop.rows()})


@pytest.mark.scenario(80)
def test_a_secret_that_is_gone(make: Make, provider: Provider) -> None:
    """Without the old secret a key begun under it gets no other keys, but an error that says what to do."""
    shop, caught = make(on_error="release"), []

    def view() -> Any:
        try:
            provider.charge(shop.idempotency.derive_key("charge"))
        except SecretGone as error:
            caught.append(str(error))
            raise
        if len(provider.asked) == 1:
            raise Crash
        return {}, 201

    operation(shop, view)
    key = new_key()
    crashed(shop, key)
    shop.app.config.update(SECRET_KEY="a new secret", SECRET_KEY_FALLBACKS=["an older one"])
    for number in (1, 2):
        assert 500 == ask(shop, key).status_code
        assert number == len(caught)
    assert "Put the old secret into SECRET_KEY_FALLBACKS" in caught[0]
    assert 1 == len(provider.asked)
    shop.app.config["SECRET_KEY_FALLBACKS"] = ["a secret of tests"]
    assert 201 == ask(shop, key).status_code
    assert provider.asked[0] == provider.asked[1]


def test_no_secret(light: Shop, provider: Provider) -> None:
    """An app without a secret can't derive keys, and is told so; its steps go on."""
    light.app.secret_key = None
    light.app.config["SECRET_KEY_FALLBACKS"] = []

    def view() -> Any:
        with pytest.raises(StepError, match="needs the app's SECRET_KEY, which is not set"):
            light.idempotency.derive_key("charge")
        return light.idempotency.step("charge", provider.charge), 201

    operation(light, view)
    assert {"charge": 1} == ask(light, new_key()).json
    assert row(light)["secret_id"] is None


def test_a_secret_as_bytes(make_light: Make) -> None:
    """A secret of bytes that are no text serves, and one secret as text and as bytes derives the same keys."""
    shop, key = make_light(), new_key()
    found = []
    for secret in ("gehört mir", "gehört mir".encode(), b"\xff\x00\xfe"):
        shop.app.secret_key = secret
        found.append(derived(shop, key))
        shop.execute(sa.delete(shop.table))
    assert found[0] == found[1] != found[2]


def test_a_secret_is_kept_to_itself(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the secret nor a key derived from it is in the table or the log, whatever happens."""
    shop, secret = make(on_error="release"), "t0p-s3cret"
    shop.app.secret_key = secret
    found: list[str] = []

    def view() -> Any:
        found.append(shop.idempotency.derive_key("charge"))
        raise Crash if len(found) == 1 else LookupError

    operation(shop, view)
    key = new_key()
    with caplog.at_level(logging.DEBUG, "flask_idempotency"):
        crashed(shop, key)
        ask(shop, key)
        shop.app.secret_key = "another"
        ask(shop, key)
    logged = caplog.text + repr([vars(record) for record in caplog.records if record.name == "flask_idempotency"])
    assert "idempotency.takeover" in logged
    kept = repr(shop.rows())
    for text in (secret, secret.encode().hex(), *found):
        assert text not in kept
        assert text not in logged
    assert re.fullmatch("[0-9a-f]{16}", row(shop)["secret_id"])


def test_a_secret_is_noted_first(make: Make) -> None:
    """Before a derived key leaves, the table says which secret it was made of."""
    shop = make()

    def view() -> Any:
        assert row(shop)["secret_id"] is None
        shop.idempotency.derive_key("charge")
        return {"noted": row(shop)["secret_id"]}, 201

    operation(shop, view)
    answer = ask(shop, new_key())
    assert row(shop)["secret_id"] == answer.get_json()["noted"] is not None


# Atomic mode


@pytest.mark.parametrize("call", ["step", "derive_key"])
def test_no_steps_in_atomic_mode(make: Make, provider: Provider, call: str) -> None:
    """In an atomic view a step or derived key is refused before anything is done, and the view's work rolled back."""
    shop, caught = make(), []

    def view() -> Any:
        shop.db.session.add(shop.Charge(amount=1))
        shop.db.session.commit()
        try:
            if call == "step":
                shop.idempotency.step("charge", provider.charge)
            else:
                shop.idempotency.derive_key("charge")
        except StepError as error:
            caught.append(str(error))
            raise
        return {}, 201

    operation(shop, view, atomic=True)
    with events(shop.app) as seen:
        assert 500 == ask(shop, new_key()).status_code
    assert "Call other systems in a view without atomic=True" in caught[0]
    assert [] == provider.asked
    assert (0, []) == (shop.charges(), shop.rows())
    assert ["released"] == names(seen)
