"""The five without a neighbour, so that what is found beside one is its doing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.neighbours.five import Work, by_tenant, case_of, the_five
from tests.support.apps import Shop


@pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
def test_the_five(beside: Callable[..., tuple[Shop, Work]], atomic: bool) -> None:
    """The five hold of an app on its own, in both modes."""
    shop, work = beside()
    by_tenant(shop)
    shop.app.post("/charges")(shop.idempotency.required(atomic=atomic)(work.asked))
    the_five(case_of(shop, work, atomic=atomic))
