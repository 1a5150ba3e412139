"""``flask idempotency stats``, ``list``, ``show`` and ``delete``, as people and scripts see them."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from flask.cli import ScriptInfo
from fsspec.implementations.memory import MemoryFileSystem

from flask_idempotency import overview
from flask_idempotency.drawing import MIGRATE, NOT_COUNTED, bytes_of
from flask_idempotency.state import get_state
from flask_idempotency.store.table import COUNTS
from tests.support.apps import Shop, alter, command, guard, new_key, send
from tests.support.bodies import UNRELIABLE, Unreliable


def run(shop: Shop, *words: str, answer: str | None = None) -> tuple[int, str]:
    """The command's exit status and output."""
    return command(shop.app, *words, answer=answer)


def lines(shop: Shop, *words: str) -> list[str]:
    """What a command that must succeed prints."""
    status, output = run(shop, *words)
    assert 0 == status, output
    return output.splitlines()


def loaded(shop: Shop, *words: str) -> Any:
    """The JSON that it prints, on one line."""
    (line,) = lines(shop, *words, "--json")
    return json.loads(line)


def fill(shop: Shop) -> None:
    """Keys on two routes and of two tenants, one held, one stale, one past its retention; and one of a route gone."""
    guard(shop, lambda: "refunded", "/refunds")
    shop.charge("old-0001")
    shop.shift(90_000)
    shop.charge("charge-1")
    shop.charge("charge-2", tenant="evil corp")
    alter(shop, "charge-2", status="held")
    send(shop, "refund-1", "/refunds")
    send(shop, "refund-2", "/refunds")
    alter(shop, "refund-2", status="in_progress", lock_timeout=0.000001, completed_at=None, response_status=None)
    send(shop, "gone-001", "/refunds")
    alter(shop, "gone-001", request_path="/credits")


def counts(shop: Shop) -> None:
    """The keys of refunds came again more often than those of charges."""
    alter(shop, "refund-1", replays=9, early_replays=4, late_replays=3, conflicts=2, mismatches=1)
    alter(shop, "charge-1", replays=3, early_replays=3)
    alter(shop, "gone-001", mismatches=1)


class TestStats:
    """How many keys there are, and who retries most."""

    def test_at_a_glance(self, shop: Shop) -> None:
        """Keys are counted by status, age and endpoint, and what waits for somebody is said with what to do."""
        fill(shop)
        counts(shop)
        found = lines(shop, "stats")
        assert ["status       keys", "in_progress     1", "completed       4", "held            1"] == found[:4]
        assert ["released        0", "", "stored           keys", "within a minute     5"] == found[4:8]
        assert ["within an hour      0", "within a day        0", "within a week       1"] == found[8:11]
        assert ["before              0", "", "endpoint       keys"] == found[11:14]
        assert ["/refunds          2", "create_charge     3", "(none)            1", ""] == found[14:18]
        assert found[18].startswith("6 keys, ")
        assert "KiB with their indexes. The oldest was stored at 20" in found[18]
        assert "Asked for again: 12 replays (7 under 5 s, 3 over 30 s), 2 conflicts, 2 mismatches." == found[19]
        assert "1 key held, waiting for a person: flask idempotency list --status held." == found[20]
        assert "1 claim past its lease: flask idempotency list --stale." == found[21]
        assert "1 key past its retention, which flask idempotency prune deletes." == found[22]
        assert [NOT_COUNTED] == found[23:]

    def test_as_json(self, shop: Shop) -> None:
        """One line of JSON has the same figures."""
        fill(shop)
        found = loaded(shop, "stats")
        size, oldest = found.pop("bytes"), found.pop("oldest")
        assert size > 4096
        assert oldest.endswith("Z")
        assert {
            "keys": 6,
            "by_status": {"in_progress": 1, "completed": 4, "held": 1, "released": 0},
            "unknown": 0,
            "stale": 1,
            "expired": 1,
            "by_age": [
                {"younger_than": seconds, "keys": keys}
                for seconds, keys in ((60, 5), (3600, 0), (86400, 0), (604800, 1), (None, 0))
            ],
            "by_endpoint": [
                {"endpoint": "create_charge", "keys": 3},
                {"endpoint": "/refunds", "keys": 2},
                {"endpoint": "(none)", "keys": 1},
            ],
            "counts": {"replays": 0, "conflicts": 0, "mismatches": 0, "early": 0, "late": 0},
        } == found

    def test_who_retries_most(self, light: Shop) -> None:
        """Endpoints, and scopes, come with those first for whose keys most requests came, and what that means."""
        fill(light)
        counts(light)
        assert [
            "endpoint       keys  retried  replays  under 5 s  over 30 s  conflicts  mismatches",
            "/refunds          2        1        9          4          3          2           1",
            "create_charge     3        1        3          3          0          0           0",
            "(none)            1        1        0          0          0          0           1",
            "",
            "Replays under 5 s after the recording: a network's hiccups, mostly.",
            "Replays over 30 s: an aggressive client, which retries although it has been answered.",
            "Mismatches: a bug of the client's, which sends one key with two requests.",
            NOT_COUNTED,
        ] == lines(light, "stats", "--by", "endpoint")
        scopes = lines(light, "stats", "--by", "scope")[1:3]
        assert ["acme            5", '"evil corp"     1'] == [line[:17] for line in scopes]
        found = loaded(light, "stats", "--by", "scope")
        none = {"keys": 1, "retried": 0, "replays": 0, "conflicts": 0, "mismatches": 0, "early": 0, "late": 0}
        assert ("scope", {"scope": "evil corp", **none}) == (found["by"], found["found"][1])
        assert 12 == found["found"][0]["replays"]

    def test_counting_is_on(self, make_light: Callable[..., Shop]) -> None:
        """With IDEMPOTENCY_COUNT_REPLAYS nobody is told to set it, and what was counted is shown."""
        shop = make_light(count_replays=True)
        for _ in range(3):
            shop.charge("charge-1")
        counting = get_state(shop.app).counting
        assert counting is not None
        counting.write()
        found = lines(shop, "stats", "--by", "endpoint")
        assert "create_charge     1        1        2          2          0          0           0" == found[1]
        assert found[-1].startswith("Mismatches: ")

    def test_an_app_that_is_mounted(self, light: Shop) -> None:
        """Where no path is one of the app's as it stands, all are looked for below a mount point."""
        fill(light)
        light.execute(light.table.update().values(request_path=sa.literal("/v1") + light.table.c.request_path))
        found = loaded(light, "stats", "--by", "endpoint")["found"]
        assert {"create_charge": 3, "/refunds": 2, "(none)": 1} == {one["endpoint"]: one["keys"] for one in found}
        alter(light, "charge-1", request_path="/charges")
        found = loaded(light, "stats", "--by", "endpoint")["found"]
        assert {"create_charge": 1, "(none)": 5} == {one["endpoint"]: one["keys"] for one in found}

    def test_an_empty_table(self, light: Shop) -> None:
        """Where nothing is stored yet, zero is the answer."""
        assert lines(light, "stats")[-2].startswith("0 keys, ")
        assert [] == loaded(light, "stats", "--by", "scope")["found"]

    def test_a_table_of_the_older_shape(self, light: Shop) -> None:
        """Where the columns of counts are missing, the figures are there, and so is what to do about it."""
        fill(light)
        for name in COUNTS:
            light.execute(sa.text(f"ALTER TABLE idempotency_keys DROP COLUMN {name}"))
        assert [MIGRATE] == lines(light, "stats", "--by", "scope")[-1:]
        assert "flask db upgrade" in lines(light, "stats")[-1]
        assert 6 == len(lines(light, "list", "--json"))

    @pytest.mark.parametrize(
        ("number", "text"),
        [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (5 * 2**30, "5.0 GiB"), (2**50, "1024.0 TiB")],
    )
    def test_sizes(self, number: int, text: str) -> None:
        """Sizes have the unit in which people read them."""
        assert text == bytes_of(number)


class TestList:
    """Which keys there are."""

    def test_the_table(self, light: Shop) -> None:
        """A key has a line with its time, state, answer, request, scope and key, those stored last first."""
        fill(light)
        found = lines(light, "list")
        assert "stored                status              answer  request        scope        key" == found[0]
        assert [
            "completed           200     POST /credits  acme         gone-001",
            "in_progress, stale          POST /refunds  acme         refund-2",
            "completed           200     POST /refunds  acme         refund-1",
            'held                        POST /charges  "evil corp"  charge-2',
            "completed           201     POST /charges  acme         charge-1",
            "completed, expired  201     POST /charges  acme         old-0001",
        ] == [line[22:] for line in found[1:]]
        assert all(line[19] == "Z" for line in found[1:])

    def test_filters(self, light: Shop) -> None:
        """Each option leaves out what it does not name, and all of them together."""
        fill(light)
        for words, keys in (
            (["--scope", "evil corp"], ["charge-2"]),
            (["--status", "held"], ["charge-2"]),
            (["--path", "/re"], ["refund-2", "refund-1"]),
            (["--key", "charge"], ["charge-2", "charge-1"]),
            (["--stale"], ["refund-2"]),
            (["--limit", "2"], ["gone-001", "refund-2"]),
            (["--scope", "acme", "--status", "completed", "--path", "/charges", "--limit", "1"], ["charge-1"]),
        ):
            assert keys == [json.loads(line)["key"] for line in lines(light, "list", "--json", *words)], words

    def test_as_json(self, light: Shop) -> None:
        """Each line is an object with all that is known of one key."""
        fill(light)
        counts(light)
        one = loaded(light, "list", "--key", "refund-1")
        times = {name: one.pop(name) for name in list(one) if name.endswith("_at")}
        assert all(time.endswith("Z") and len(time) == 24 for time in times.values())
        assert {"created_at", "updated_at", "locked_at", "completed_at", "expires_at"} == set(times)
        assert one.pop("id") > 0
        assert {
            "scope": "acme",
            "key": "refund-1",
            "status": "completed",
            "method": "POST",
            "path": "/refunds",
            "attempts": 1,
            "stale": False,
            "expired": False,
            "stale_policy": "reexecute",
            "lock_timeout": 30,
            "response_status": 200,
            "counts": {"replays": 9, "conflicts": 2, "mismatches": 1, "early": 4, "late": 3},
            "problem": None,
        } == one

    def test_pages(self, light: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        """More than a page are read page by page, and shown in as many tables."""
        fill(light)
        monkeypatch.setattr(overview, "PAGE", 2)
        keys = ["gone-001", "refund-2", "refund-1", "charge-2", "charge-1", "old-0001"]
        assert keys == [json.loads(line)["key"] for line in lines(light, "list", "--json")]
        assert keys[:5] == [json.loads(line)["key"] for line in lines(light, "list", "--json", "--limit", "5")]
        assert ["key", *keys[:2], "key", *keys[2:4], "key", keys[4]] == [
            line.split()[-1] for line in lines(light, "list", "--limit", "5")
        ]

    def test_nothing(self, light: Shop) -> None:
        """No key is no error, and no line of JSON."""
        assert ["There is no such key."] == lines(light, "list", "--scope", "nobody")
        assert [] == lines(light, "list", "--json", "--scope", "nobody")

    def test_a_corrupt_row(self, light: Shop) -> None:
        """It is listed with what can be read of it, and what is wrong stands below the table."""
        fill(light)
        alter(light, "charge-1", status="melted")
        found = lines(light, "list", "--path", "/charges")
        assert 5 == len(found)
        assert "unreadable                  POST /charges  acme         charge-1" == found[2][22:]
        assert "unknown status 'melted'" in found[4]
        one = loaded(light, "list", "--key", "charge-1")
        assert (None, "charge-1") == (one["status"], one["key"])
        assert "melted" in one["problem"]
        assert "1 row of unknown status: corrupt, or of a later version." in lines(light, "stats")


def pairs(found: list[str]) -> list[tuple[str, str]]:
    """What ``show`` has said of a key; times are left out."""
    split = [(line[:14].strip(), line[14:].strip()) for line in found]
    return [(name, value) for name, value in split if not (value.startswith("20") and value.endswith("Z"))]


class TestShow:
    """One key."""

    def test_in_full(self, shop: Shop) -> None:
        """Its request, attempts, lease, steps, counts and answer are there, and the times of what happened."""

        def pay() -> Any:
            shop.idempotency.step("the charge", lambda: {"id": "ch_é"})
            shop.idempotency.derive_key("mail")
            return "paid", "201 Paid It", {"Location": "/payments/1"}

        guard(shop, pay, "/payments")
        send(shop, "payment-1", "/payments")
        alter(shop, "payment-1", replays=1, conflicts=1)
        found = lines(shop, "show", "acme", "payment-1")
        (row,) = shop.rows()
        assert [
            ("scope", "acme"),
            ("key", "payment-1"),
            ("status", "completed"),
            ("request", "POST /payments"),
            ("fingerprint", f"{row['request_fingerprint']}, version {row['fingerprint_version']}"),
            ("attempts", "1"),
            ("lease", "30 s, then reexecute"),
            ("asked again", "1 replay (0 under 5 s, 0 over 30 s), 1 conflict, 0 mismatches"),
            ("secret", row["secret_id"]),
            ("step", '"the charge" = {"id": "ch_\\u00e9"}'),
            ("answer", "201 Paid It"),
            *(("header", f"{name}: {value}") for name, value in row["response_headers"][1:]),
            ("body", "4 bytes"),
        ] == pairs(found)
        named = [line[:14].strip() for line in found if line.endswith("Z") and line[14:16] == "20"]
        assert ["stored", "sign of life", "recorded", "kept until"] == named
        assert ("header", "Location: /payments/1") in pairs(found)
        assert ["", "paid"] == lines(shop, "show", "acme", "payment-1", "--body")[-2:]

    def test_as_json(self, light: Shop) -> None:
        """One line of JSON has the same, steps as what they are; the body only where it is asked for."""
        guard(light, lambda: (light.idempotency.step("charge", lambda: {"id": 7}), 201), "/payments")
        send(light, "payment-1", "/payments")
        found = loaded(light, "show", "acme", "payment-1")
        assert ("payment-1", {"charge": {"id": 7}}) == (found["key"], found["steps"])
        answer = found["answer"]
        assert (201, None, {"bytes": 9}) == (answer["status"], answer["reason"], answer["body"])
        assert ["Content-Type", "application/json"] in answer["headers"]
        assert 64 == len(found["fingerprint"])
        found = loaded(light, "show", "acme", "payment-1", "--body")
        assert {"bytes": 9, "text": '{"id":7}\n'} == found["answer"]["body"]

    def test_bodies_of_any_kind(self, light: Shop) -> None:
        """A text is shown as one; of anything else its bytes are, as far as a person reads them."""
        bodies = [b"", "é\tx\r\ny\n".encode(), bytes(range(256)) * 5, b"\x1b[31mred"]
        guard(light, lambda: bodies[len(light.rows()) - 1])
        for number, _ in enumerate(bodies):
            send(light, f"body-{number:04}")
        assert "0 bytes" == lines(light, "show", "acme", "body-0000", "--body")[-1][14:]
        assert ["", "é    x", "y"] == lines(light, "show", "acme", "body-0001", "--body")[-3:]
        dumped = lines(light, "show", "acme", "body-0002", "--body")[-65:]
        assert "00000020  20 21 22 23 24 25 26 27 28 29 2a 2b 2c 2d 2e 2f   !\"#$%&'()*+,-./" == dumped[2]
        assert "… 256 bytes binary more" == dumped[64]
        assert "00000000  1b 5b 33 31 6d 72 65 64" == lines(light, "show", "acme", "body-0003", "--body")[-1][:33]
        assert {"bytes": 8, "base64": "G1szMW1yZWQ="} == loaded(light, "show", "acme", "body-0003", "--body")["answer"][
            "body"
        ]

    def test_a_body_elsewhere(self, with_bodies: Shop) -> None:
        """Where a body lies in the body store, it is said where; one that was not kept is said to be none."""
        send(with_bodies, "large-001")
        (name,) = [path.rpartition("/")[2] for path in MemoryFileSystem.store]
        body = lines(with_bodies, "show", "acme", "large-001", "--body")[-1]
        assert f"5000 bytes, in the body store as {name}, SHA-256 " in body
        found = loaded(with_bodies, "show", "acme", "large-001", "--body")["answer"]["body"]
        assert (5000, name, 64) == (found["bytes"], found["name"], len(found["sha256"]))
        alter(with_bodies, "large-001", response_headers=sa.null())
        assert "not kept" == lines(with_bodies, "show", "acme", "large-001")[-1][14:]
        assert None is loaded(with_bodies, "show", "acme", "large-001")["answer"]["body"]

    def test_a_key_without_an_answer(self, light: Shop) -> None:
        """A claim past its lease says so, and what waits for a person has no end."""
        fill(light)
        left = lines(light, "show", "acme", "refund-2")
        assert ("lease", "1e-06 s (over), then reexecute") in pairs(left)
        assert "kept until    it is settled" not in left
        alter(light, "refund-2", stale_policy="reject")
        assert "kept until    it is settled" in lines(light, "show", "acme", "refund-2")
        held = lines(light, "show", "evil corp", "charge-2")
        assert "kept until    it is settled" in held
        assert not [line for line in held if line.startswith(("answer", "body"))]
        assert None is loaded(light, "show", "evil corp", "charge-2")["answer"]
        assert "status        completed, expired" in lines(light, "show", "acme", "old-0001")

    def test_no_such_key(self, light: Shop) -> None:
        """A key that is not there, or that none could be, ends with exit status 1."""
        for words in (("acme", "nothing-1"), ("nobody", "charge-1"), ("a" * 256, "x"), ("acme", "")):
            status, output = run(light, "show", *words)
            assert 1 == status
            assert "There is no such key in this scope." in output

    def test_a_corrupt_row(self, light: Shop) -> None:
        """A row that can't be read is a failure that says what is wrong with it."""
        light.charge("charge-1")
        alter(light, "charge-1", attempts=0)
        status, output = run(light, "show", "acme", "charge-1")
        assert 1 == status
        assert "can't be read: attempts is not a number" in output


@pytest.fixture
def with_bodies(make_light: Callable[..., Shop], tmp_path: Path) -> Iterator[Shop]:
    """A shop with a body store, and a guarded view whose answer is too large for the table."""
    shop = make_light(body_store=f"memory:{tmp_path.name}", max_body=1000)
    guard(shop, lambda: b"x" * 5000)
    yield shop
    MemoryFileSystem.store.clear()


class TestDelete:
    """Erasure of a scope."""

    def test_it_asks_first(self, shop: Shop) -> None:
        """Nothing is deleted until the answer is yes; then all keys of the scope are, and no other's."""
        fill(shop)
        for answer in ("n\n", "\n", ""):
            status, output = run(shop, "delete", "--scope", "acme", answer=answer)
            assert 1 == status
            assert "All keys of acme will be deleted, and their retries run again." in output
            assert 6 == len(shop.rows())
        status, output = run(shop, "delete", "--scope", "acme", answer="y\n")
        assert 0 == status
        assert "Deleted 5 keys in 0." in output
        assert ["evil corp"] == [row["scope"] for row in shop.rows()]

    def test_for_scripts(self, light: Shop, caplog: pytest.LogCaptureFixture) -> None:
        """With --yes it does not ask, with --json it prints one object; the log says what was erased."""
        fill(light)
        found = loaded(light, "delete", "--scope", "evil corp", "--yes")
        assert found.pop("duration") >= 0
        assert {"deleted": 1, "bodies": 0, "left": 0} == found
        (record,) = [one for one in caplog.records if getattr(one, "event", "") == "idempotency.erase"]
        assert ("evil corp", 1) == (vars(record)["scope"], vars(record)["deleted"])
        status, output = run(light, "delete", "--scope", "evil corp", "--yes", "--json")
        assert 1 == status
        assert "There is no key in this scope." in output

    def test_one_key(self, shop: Shop) -> None:
        """With --key one key is deleted, after a question that names it; one that is not there is an error."""
        fill(shop)
        words = ("delete", "--scope", "acme", "--key", "charge-1")
        status, output = run(shop, *words, answer="n\n")
        assert (1, 6) == (status, len(shop.rows()))
        assert "The key charge-1 of acme will be deleted, and its retry runs again." in output
        status, output = run(shop, *words, answer="y\n")
        assert (0, 5) == (status, len(shop.rows()))
        assert "charge-1" not in [row["key"] for row in shop.rows()]
        status, output = run(shop, *words, "--yes")
        assert 1 == status
        assert "There is no such key in this scope." in output

    def test_the_question_is_no_json(
        self, light: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """What a script reads holds no question."""
        light.charge("charge-1")
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
        args = ["idempotency", "delete", "--scope", "acme", "--json"]
        info = ScriptInfo(create_app=lambda: light.app)
        light.app.cli.main(args, obj=info, standalone_mode=False)
        output, errors = capsys.readouterr()
        assert 1 == json.loads(output)["deleted"]
        assert "Delete them?" in errors

    def test_bodies_go_too(self, with_bodies: Shop) -> None:
        """What lies in the body store is deleted with its key, and that of others stays."""
        for number in range(3):
            send(with_bodies, f"large-{number:03}")
        send(with_bodies, "large-003", headers={"X-Tenant": "other"})
        assert 4 == len(MemoryFileSystem.store)
        assert lines(with_bodies, "delete", "--scope", "acme", "--yes")[-1].startswith(
            "Deleted 3 keys, and 3 bodies in the body store in "
        )
        assert 1 == len(MemoryFileSystem.store)

    def test_bodies_that_stay(self, make_light: Callable[..., Shop], caplog: pytest.LogCaptureFixture) -> None:
        """A body that can't be deleted is a failure that says what deletes it later; the keys are gone."""
        shop = make_light(body_store=UNRELIABLE, max_body=1000)
        guard(shop, lambda: b"x" * 5000)
        try:
            send(shop, "large-001")
            Unreliable.failing.add("rm")
            status, output = run(shop, "delete", "--scope", "acme", "--yes")
            assert 1 == status
            assert "Deleted 1 key in " in output
            assert "1 body in the body store could not be deleted" in output
            assert "prune --body-store" in output
            assert "s3cret" not in caplog.text
            assert "of an erased key could not be deleted" in caplog.text
            assert [] == shop.rows()
        finally:
            Unreliable.failing.clear()
            Unreliable.store.clear()

    def test_batches(self, light: Shop) -> None:
        """A scope goes batch by batch, and progress is told after each."""
        for _ in range(5):
            light.charge(new_key())
        told: list[int] = []
        with light.app.app_context():
            done = overview.erase(get_state(light.app), "acme", batch_size=2, progress=told.append)
        assert (5, [2, 2, 1]) == (done.deleted, told)


class Only:
    """A store without overviews: the calls of the protocol, passed on to another store."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name in ("stats", "tally", "listed", "detail", "erase"):
            raise AttributeError(name)
        return getattr(self._store, name)


COMMANDS = (
    ("stats",),
    ("stats", "--by", "scope"),
    ("list",),
    ("list", "--json"),
    ("show", "acme", "charge-1"),
    ("delete", "--scope", "acme", "--yes"),
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_what_is_in_the_way(light: Shop, make_light: Callable[..., Shop], words: tuple[str, ...]) -> None:
    """Without the table each command says to migrate, with a store that can't be looked over, that; both with 1."""
    other = make_light(store=Only(get_state(light.app).store))
    status, output = run(other, *words)
    assert 1 == status
    lacking = "stats, tally, listed, detail, erase" if words[0] == "delete" else "stats, tally, listed, detail"
    assert f"The app's store, Only, can't be looked over: it lacks {lacking}. See " in output
    light.execute(sa.schema.DropTable(light.table))
    status, output = run(light, *words)
    assert 1 == status
    assert "flask db upgrade" in output


@pytest.mark.parametrize(
    "words",
    ["stats --by key", "list --limit 0", "list --status melted", "show acme", "delete", "delete --scope", "list acme"],
)
def test_wrong_usage(light: Shop, words: str) -> None:
    """A wrong option, or an argument too few, ends with exit status 2."""
    assert 2 == run(light, *words.split())[0]


def test_nothing_stored_drives_a_terminal(light: Shop) -> None:
    """Line breaks, escapes and text that runs backwards, wherever a row has them, are shown as what they are."""
    evil = "a\nstatus  completed\x1b[2J\x07\x7f\x9b\u202e"
    light.charge("charge-1")
    headers = [["X-Evil", evil], [evil, "x"]]
    alter(light, "charge-1", response_headers=[[":status", evil], *headers], response_body=evil.encode())
    alter(light, "charge-1", steps={evil: json.dumps(evil, ensure_ascii=False)}, scope=evil, request_path=evil)
    light.execute(light.table.update().values({"key": evil}))
    shown = 0
    for words in (["list"], ["stats"], ["stats", "--by", "scope"], ["show", evil, evil, "--body"]):
        output = "\n".join(lines(light, *words))
        assert all(one.isprintable() or one == "\n" for one in output)
        assert not any(line.startswith("status  completed") for line in output.splitlines())
        shown += output.count("2J")
    assert shown >= 9
    assert json.loads(lines(light, "list", "--json")[0])["key"] == evil


#: Several commands, one after the other, each announced by a line of its own.
SCRIPT = """
import sys
from flask.cli import ScriptInfo
from flask_idempotency import overview
from tests.support.apps import make_shop

app = make_shop(sys.argv[1]).app
overview.erase.__kwdefaults__["batch_size"] = 20
for words in sys.argv[2:]:
    print("$", words)
    args = ["idempotency", *words.split()]
    app.cli.main(args, obj=ScriptInfo(create_app=lambda: app), standalone_mode=False)
"""


def on_terminal(url: str, *commands: str, **environment: str) -> list[str]:
    """What each of the commands prints on a terminal of 24 lines."""
    master, slave = pty.openpty()
    size = {"LINES": "24", "COLUMNS": "120", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, url, *commands],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, **size, **environment},
    )
    os.close(slave)
    output = b""
    try:
        while chunk := os.read(master, 65536):
            output += chunk
    except OSError:  # Linux says so that the other side is closed
        pass
    os.close(master)
    assert 0 == process.wait(30), output
    return re.split(r"^\$ .*\n", output.decode().replace("\r\n", "\n"), flags=re.M)[1:]


def test_on_a_terminal(light: Shop, sqlite_url: str) -> None:
    """A long list goes through the pager, a short one does not; an erasure shows its progress."""
    for _ in range(30):
        light.charge(new_key())
    commands = ("list", "list --limit 3", "delete --scope acme --yes")
    long, short, erased = on_terminal(sqlite_url, *commands, PAGER="sed s,^,paged:,")
    assert 31 == long.count("paged:") == len(long.splitlines())
    assert (0, 4) == (short.count("paged:"), len(short.splitlines()))
    assert "Deleting" in erased
    assert "20 keys" in erased
    assert "Deleted 30 keys in " in erased
    assert [] == light.rows()
