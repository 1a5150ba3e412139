"""An atomic view where nothing guards it: what it asks for is done when it has been answered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.apps import Shop


@pytest.mark.parametrize(
    ("config", "method"), [({"enabled": False}, "POST"), ({}, "PUT")], ids=["switched off", "another method"]
)
def test_after_commit_without_a_guard(make_light: Callable[..., Shop], config: dict[str, bool], method: str) -> None:
    """Switched off, or for a method that is not guarded, the view runs as it is: its function is called at the end."""
    shop = make_light(**config)
    called: list[str] = []

    @shop.app.route("/orders", methods=["POST", "PUT"])
    @shop.idempotency.required(atomic=True)
    def create_order() -> tuple[str, int]:
        shop.idempotency.after_commit(lambda: called.append("after the commit"))
        assert [] == called
        return "", 201

    answer = shop.client.open("/orders", method=method, headers={"X-Tenant": "acme"})
    assert (201, ["after the commit"]) == (answer.status_code, called)


def test_after_commit_in_another_view(light: Shop) -> None:
    """Where no atomic guard stands on the view, there is no commit to wait for, and asking for it is an error."""

    @light.app.post("/orders")
    def create_order() -> str:
        with pytest.raises(RuntimeError, match="for atomic views"):
            light.idempotency.after_commit(lambda: None)
        return "refused"

    assert "refused" == light.client.post("/orders").text
