"""``flask idempotency prune`` and its function."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable

import pytest
import sqlalchemy as sa
from flask.cli import ScriptInfo

from flask_idempotency import signals
from tests.support.apps import Shop, command, events, new_key


def run(shop: Shop, *words: str) -> tuple[int, str]:
    """The command's exit status and output."""
    return command(shop.app, "prune", *words)


def fill(shop: Shop, count: int) -> None:
    for _ in range(count):
        assert 201 == shop.charge(new_key()).status_code


def test_prune_deletes_what_is_past_retention(shop: Shop) -> None:
    """Keys past their retention go, younger ones stay, and one line says how many went."""
    fill(shop, 3)
    shop.shift(90_000)
    young = new_key()
    shop.charge(young)
    status, output = run(shop)
    assert 0 == status
    assert re.fullmatch(r"Pruned 3 keys in 1 batch and \d+\.\d s\.\n", output)
    assert [young] == [row["key"] for row in shop.rows()]


def test_batches(shop: Shop) -> None:
    """Each batch deletes at most its size, and --max-batches ends the run early."""
    fill(shop, 7)
    shop.shift(90_000)
    status, output = run(shop, "--batch-size", "2", "--max-batches", "2", "--json")
    done = json.loads(output)
    assert (0, 4, 2) == (status, done["deleted"], done["batches"])
    with shop.app.app_context():
        rest = shop.idempotency.prune(batch_size=2)
    assert (3, 2) == (rest.deleted, rest.batches)
    assert [] == shop.rows()


def test_dry_run(shop: Shop) -> None:
    """A dry run counts and deletes nothing."""
    fill(shop, 2)
    shop.shift(90_000)
    assert (0, "Would prune 2 keys.\n") == run(shop, "--dry-run")
    assert 2 == json.loads(run(shop, "--dry-run", "--json")[1])["deleted"]
    assert 2 == len(shop.rows())


@pytest.mark.scenario(61)
def test_live_claim_survives(make: Callable[..., Shop]) -> None:
    """A claim that is alive is never pruned, however short its retention, and its answer is recorded."""
    shop = make(retention=1)

    @shop.app.post("/slow")
    @shop.idempotency.required
    def slow() -> tuple[str, int]:
        # What a pause past the retention would leave, with the lease renewed all along.
        shop.execute(sa.text("UPDATE idempotency_keys SET expires_at = created_at"))
        with shop.app.app_context():
            assert 0 == shop.idempotency.prune().deleted
        return "done", 201

    headers = {"Idempotency-Key": new_key(), "X-Tenant": "acme"}
    assert [201, 201] == [shop.client.post("/slow", headers=headers).status_code for _ in range(2)]
    assert ["completed"] == [row["status"] for row in shop.rows()]


@pytest.mark.scenario(63)
def test_correct_without_pruning(shop: Shop) -> None:
    """Past its retention a key is new again, pruned or not."""
    key = new_key()
    shop.charge(key)
    shop.shift(90_000)
    again = shop.charge(key, amount=900)
    assert (201, None) == (again.status_code, again.headers.get("Idempotent-Replay"))
    assert 2 == shop.charges()
    assert [(900, 1)] == [(json.loads(row["response_body"])["amount"], row["attempts"]) for row in shop.rows()]


@pytest.mark.parametrize("words", [["--batch-size", "0"], ["--max-batches", "0"], ["--pause", "-1"], ["--fast"]])
def test_wrong_usage(light: Shop, words: list[str]) -> None:
    """A wrong option ends with exit status 2."""
    assert 2 == run(light, *words)[0]


def test_missing_table(shop: Shop) -> None:
    """Without the table the command fails with exit status 1 and says to run the migration."""
    shop.execute(sa.schema.DropTable(shop.table))
    status, output = run(shop)
    assert 1 == status
    assert "flask db upgrade" in output


@pytest.mark.parametrize("command", ["prune", "list"])
def test_output_is_closed(light: Shop, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """A scheduler that starts programs with their output closed gets the command's work, and nothing is printed."""
    fill(light, 2)
    light.shift(90_000)
    monkeypatch.setattr(sys, "stdout", None)
    info = ScriptInfo(create_app=lambda: light.app)
    light.app.cli.main(["idempotency", command], obj=info, standalone_mode=False)
    assert (0 if command == "prune" else 2) == len(light.rows())


def test_pruned_is_signalled(light: Shop) -> None:
    """One signal tells how many keys went, in how many batches and how long it took."""
    fill(light, 2)
    light.shift(90_000)
    with events(light.app) as seen, light.app.app_context():
        done = light.idempotency.prune(batch_size=1)
    assert [("pruned", {"deleted": 2, "batches": 2, "duration": done.duration})] == seen
    assert signals.PRUNE.name == "idempotency.prune"


def test_wrong_numbers_are_refused(light: Shop) -> None:
    """The function refuses numbers that make no sense."""
    with light.app.app_context(), pytest.raises(ValueError, match="batch_size"):
        light.idempotency.prune(batch_size=0)
