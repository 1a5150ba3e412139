"""Flask-Admin on the same app: its own views, which send no keys, and a guarded view among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import request
from flask_admin import Admin, BaseView, expose
from flask_admin.contrib.sqla import ModelView

from tests.neighbours.five import Work, by_tenant, case_of, sender, the_five
from tests.neighbours.toolkits import post
from tests.support.apps import Shop, new_key

Beside = Callable[..., tuple[Shop, Work]]


def administered(beside: Beside, order: str = "before", **options: Any) -> tuple[Shop, Work]:
    """An app with Flask-Admin on it, which edits the charges, and a route for the app's own clients."""
    admins: list[Admin] = []
    shop, work = beside(**{order: [lambda app: admins.append(Admin(app))]}, **options)
    by_tenant(shop)
    admins[0].add_view(ModelView(shop.Charge, shop.db))
    shop.app.extensions["admin of this test"] = admins[0]
    return shop, work


@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_the_five(beside: Beside, order: str, atomic: bool) -> None:
    """The five hold of the app's own route, whichever of the two was set up first, in both modes."""
    shop, work = administered(beside, order)
    shop.app.post("/charges")(shop.idempotency.required(atomic=atomic)(work.asked))
    the_five(case_of(shop, work, atomic=atomic))


def form(shop: Shop, amount: object) -> int:
    """Send Flask-Admin's form for a new charge; the status."""
    return shop.client.post("/admin/charge/new/", data={"amount": amount}).status_code


def test_its_forms_need_no_key(beside: Beside) -> None:
    """Flask-Admin's forms work as before, once for each time they are sent, and nothing of them is stored."""
    shop, work = administered(beside)
    shop.app.post("/charges")(shop.idempotency.required(work.asked))
    assert ([302, 302], 2) == ([form(shop, 7) for _ in range(2)], shop.charges())
    (identity,) = {row.id for row in shop.execute(shop.Charge.__table__.select().limit(1))}
    assert 302 == shop.client.post("/admin/charge/delete/", data={"id": identity}).status_code
    assert (1, []) == (shop.charges(), shop.rows())


def test_a_form_that_fails_leaves_the_session_usable(beside: Beside) -> None:
    """What Flask-Admin rolls back in its own session is over when the next guarded request comes."""
    shop, work = administered(beside)
    shop.app.post("/charges")(shop.idempotency.required(atomic=True)(work.asked))
    assert 200 == form(shop, "much")  # the form again, with what is wrong
    assert (201, 1) == (post(shop, new_key()).status_code, shop.charges())


def _by_paths(shop: Shop) -> None:
    shop.idempotency.protect(shop.app, paths=r"^/(?!admin/)")


def _by_exempt(shop: Shop) -> None:
    shop.idempotency.protect(shop.app)
    for endpoint, view in shop.app.view_functions.items():
        if endpoint.startswith(("admin.", "charge.")):
            shop.idempotency.exempt(view)


@pytest.mark.parametrize("leave_out", [_by_paths, _by_exempt])
def test_left_out_of_a_protected_app(beside: Beside, leave_out: Callable[[Shop], None]) -> None:
    """In a protected app Flask-Admin's views are left out by their paths or by ``exempt``; no other view is."""
    shop, work = administered(beside)
    shop.app.post("/charges")(work.asked)
    leave_out(shop)
    assert (302, 1, []) == (form(shop, 7), shop.charges(), shop.rows())
    assert 400 == post(shop, None).status_code
    the_five(case_of(shop, work))


def test_in_a_protected_app(beside: Beside) -> None:
    """Unless they are left out, its forms are guarded like all others: they get 400 and change nothing."""
    shop, _ = administered(beside)
    shop.idempotency.protect(shop.app)
    assert (400, 0) == (form(shop, 7), shop.charges())


@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
def test_the_five_on_a_view_of_its(beside: Beside, atomic: bool) -> None:
    """The five hold of a view within Flask-Admin, guarded below ``expose``; whom ``is_accessible`` refuses gets 403."""
    shop, work = administered(beside)

    class Desk(BaseView):
        def is_accessible(self) -> bool:
            return "X-Tenant" in request.headers

        @expose("/")
        def index(self) -> str:
            return "charges"

        @expose("/charges", methods=["POST"])
        @shop.idempotency.required(atomic=atomic)
        def create(self) -> tuple[dict[str, int], int]:
            return work.asked()

    shop.app.extensions["admin of this test"].add_view(Desk(endpoint="desk", url="/desk"))
    callers = [sender(shop.app, headers, "/desk/charges") for headers in ({"X-Tenant": "acme"}, {"X-Tenant": "emca"})]
    refused = [sender(shop.app, None, "/desk/charges")]
    the_five(
        case_of(
            shop,
            work,
            good=callers[0],
            other=callers[1],
            refused=refused,
            refusals=frozenset({403}),
            atomic=atomic,
        )
    )


def test_routes_name_its_views(beside: Beside) -> None:
    """``flask idempotency routes --check`` names its unguarded forms, and not those of a route that is guarded."""
    shop, work = administered(beside)
    shop.app.post("/charges")(shop.idempotency.required(work.asked))
    told = shop.app.test_cli_runner().invoke(args=["idempotency", "routes", "--check"])
    assert 1 == told.exit_code
    assert "charge.create_view" in told.output
    told = shop.app.test_cli_runner().invoke(args=["idempotency", "routes", "--check", "--ignore", "charge.*"])
    assert 0 == told.exit_code, told.output


def test_two_admins(beside: Beside) -> None:
    """Two of Flask-Admin's objects on one app change nothing either."""
    shop, work = administered(beside, "after")
    Admin(shop.app, url="/back", endpoint="back")
    shop.app.post("/charges")(shop.idempotency.required(work.asked))
    the_five(case_of(shop, work))
