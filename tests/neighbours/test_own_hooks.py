"""The app's own hooks as neighbours: they can tell a replay from a run, by which the view has left something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask, Response, g

from flask_idempotency import Idempotency
from tests.neighbours.five import Work, by_tenant, case_of, the_five
from tests.support.apps import Shop, new_key, send

Beside = Callable[..., tuple[Shop, Work]]


@pytest.mark.scenario(46, 71)
@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
def test_hooks_that_expect_what_the_view_left(beside: Beside, order: str, atomic: bool) -> None:
    """Hooks of every kind, registered on either side, count what the view has sold, and no replay twice."""
    sold: dict[str, list[int]] = {"after": [], "teardown": []}

    def ran(app: Flask) -> bool:
        idempotency: Idempotency = app.extensions["idempotency"].extension
        return idempotency.current is not None and not idempotency.current.replay

    def add_hooks(app: Flask) -> None:
        @app.after_request
        def after(response: Response) -> Response:
            if response.status_code == 201 and ran(app):
                sold["after"].append(g.order)
            return response

        @app.teardown_request
        def teardown(error: BaseException | None) -> None:
            if "order" in g and ran(app):
                sold["teardown"].append(g.order)

    shop, work = beside(**{order: [add_hooks]})
    by_tenant(shop)

    @shop.app.post("/charges")
    @shop.idempotency.required(atomic=atomic)
    def view() -> Any:
        answer = work.asked()
        g.order = work.runs
        return answer

    the_five(case_of(shop, work, atomic=atomic))
    key = new_key()
    before = {kind: len(orders) for kind, orders in sold.items()}
    answers = [send(shop, key, "/charges", json={"amount": 1}) for _ in range(3)]
    assert [201] * 3 == [one.status_code for one in answers]
    expected = [work.runs]
    assert (expected, expected) == (sold["after"][before["after"] :], sold["teardown"][before["teardown"] :])
    # The view's own failures are no sales.
    assert sold["after"] == sold["teardown"]
    assert len(sold["after"]) == len(set(sold["after"]))
