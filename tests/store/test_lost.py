"""Connections that break: before a statement, after it, and for good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import sqlalchemy as sa

from flask_idempotency.claim import Claim, Status, Stored
from flask_idempotency.errors import StoreError
from flask_idempotency.heartbeat import Settlement
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.testing import ANSWER, ask, claimed, stored
from tests.store.support import count, opened, row, shift
from tests.support.barrier import background
from tests.support.postgres import Postgres
from tests.support.proxy import CuttingProxy

STEPS = {"charge": '{"id": "ch_1"}'}


@pytest.fixture(params=[False, True], ids=["postgresql", "portable"])
def tcp_store(request: pytest.FixtureRequest, tcp_url: str) -> Iterator[SQLAlchemyStore]:
    """A store whose every message a proxy can lose; connected already."""
    with opened(tcp_url, portable=request.param) as store:
        claimed(store, ask(key="warm-up"))
        yield store


@pytest.mark.scenario(75)
@pytest.mark.parametrize("lose", ["lose_reply", "lose_request"])
def test_a_claim_whose_connection_breaks(tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy, lose: str) -> None:
    """Whether its INSERT was carried out or not, the caller holds the claim, and the row is its own."""
    rule = getattr(cutting_proxy, lose)("INSERT INTO")
    asking = ask()
    claim = claimed(tcp_store, asking)
    assert rule.count == 1
    assert stored(tcp_store, ask()).token == claim.token == asking.token
    assert row(tcp_store).attempts == 1
    assert tcp_store.record(claim, ANSWER, 3600)


@pytest.mark.scenario(75)
@pytest.mark.parametrize("lose", ["lose_reply", "lose_request"])
def test_a_record_whose_connection_breaks(tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy, lose: str) -> None:
    """Whether its UPDATE was carried out or not, the answer is recorded, once, and the holder knows it."""
    claim = claimed(tcp_store, ask())
    rule = getattr(cutting_proxy, lose)("response_body=")
    assert tcp_store.record(claim, ANSWER, 3600)
    assert rule.count == 1
    assert stored(tcp_store, ask()).recorded == ANSWER


@pytest.mark.scenario(75)
@pytest.mark.parametrize("lose", ["lose_reply", "lose_request"])
def test_a_takeover_whose_connection_breaks(tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy, lose: str) -> None:
    """Whether its UPDATE was carried out or not, the caller holds the claim, taken over once."""
    claimed(tcp_store, ask())
    shift(tcp_store, 31)
    seen = stored(tcp_store, ask())
    getattr(cutting_proxy, lose)("fencing_token=")
    asking = ask()
    claim = tcp_store.take(asking, seen)
    assert claim is not None
    assert (claim.token, claim.attempts) == (asking.token, 2)
    assert row(tcp_store).attempts == 2


@pytest.mark.scenario(75)
def test_a_takeover_lost_to_another(tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy) -> None:
    """A caller whose takeover broke off, and who finds another's token after it, holds nothing."""
    claimed(tcp_store, ask())
    shift(tcp_store, 31)
    seen = stored(tcp_store, ask())
    assert tcp_store.take(ask(), seen) is not None
    rule = cutting_proxy.lose_reply("fencing_token=")
    assert tcp_store.take(ask(), seen) is None
    # The portable back end looks first, and has no need to try.
    assert rule.count in (0, 1)


@pytest.mark.scenario(75)
@pytest.mark.parametrize("lose", ["lose_reply", "lose_request"])
def test_a_release_whose_connection_breaks(tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy, lose: str) -> None:
    """Whether its DELETE was carried out or not, the key is free, and the holder knows it."""
    claim = claimed(tcp_store, ask())
    getattr(cutting_proxy, lose)("DELETE")
    assert tcp_store.release(claim)
    assert claimed(tcp_store, ask()).attempts == 1


@pytest.mark.scenario(75)
@pytest.mark.parametrize("statement", ["DELETE", "UPDATE"])
@pytest.mark.parametrize("lose", ["lose_reply", "lose_request"])
def test_a_release_with_steps_whose_connection_breaks(
    tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy, lose: str, statement: str
) -> None:
    """Whichever of its two statements was carried out, the key is released with its steps, and the holder knows it."""
    claim = claimed(tcp_store, ask())
    tcp_store.keep_steps(claim, STEPS)
    rule = getattr(cutting_proxy, lose)(statement)
    assert tcp_store.release(claim)
    assert rule.count == 1
    found = row(tcp_store)
    assert (found.status, found.fencing_token, found.attempts, found.steps) == ("released", claim.token, 1, STEPS)


@pytest.mark.scenario(75)
def test_a_release_with_steps_that_is_repeated_later(tcp_url: str, cutting_proxy: CuttingProxy) -> None:
    """A release that was carried out, and whose caller got an error, is known to be done when it is repeated."""
    with opened(tcp_url) as store:
        for over in (False, True):
            asking = ask(key=f"key-{over}")
            claim = claimed(store, asking)
            store.keep_steps(claim, STEPS)
            settlement = Settlement(asking, None, 0.0, lambda held: None)
            rule = cutting_proxy.lose_reply("UPDATE", times=2)
            with pytest.raises(StoreError):
                settlement.write(store, claim)
            assert rule.count == 2
            if over:
                assert store.take(ask(key=claim.key), stored(store, asking)) is not None
            # Once the next attempt has the key, nothing tells the release from a takeover.
            assert settlement.write(store, claim) != over


@pytest.mark.scenario(75)
@pytest.mark.parametrize("lose", ["lose_reply", "lose_request"])
def test_a_step_whose_connection_breaks(tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy, lose: str) -> None:
    """Whether its UPDATE was carried out or not, each call of a step, and a hold, ends as if nothing had happened."""
    claim = claimed(tcp_store, ask())
    calls: list[tuple[Callable[[], object], object]] = [
        (lambda: tcp_store.resume(claim), {}),
        (lambda: tcp_store.keep_steps(claim, STEPS), True),
        (lambda: tcp_store.note_secret(claim, "secret-1"), "secret-1"),
        (lambda: tcp_store.resume(claim), STEPS),
        (lambda: tcp_store.hold(claim), True),
    ]
    for call, expected in calls:
        rule = getattr(cutting_proxy, lose)("UPDATE")
        assert call() == expected
        assert rule.count == 1
    assert stored(tcp_store, ask()).status is Status.HELD


def held_key(store: SQLAlchemyStore, steps: bool) -> Stored:
    """A key that waits for a person."""
    claim = claimed(store, ask())
    if steps:
        store.keep_steps(claim, STEPS)
    store.hold(claim)
    return stored(store, ask())


@pytest.mark.scenario(73, 75)
@pytest.mark.parametrize("lose", ["lose_reply", "lose_request"])
def test_settling_while_the_connection_breaks(
    tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy, lose: str
) -> None:
    """Whether its UPDATE was carried out or not, the key is settled, and whoever settles it knows it."""
    seen = held_key(tcp_store, steps=False)
    rule = getattr(cutting_proxy, lose)("UPDATE")
    assert tcp_store.settle(seen, ANSWER, 3600, "new-token")
    assert rule.count == 1
    found = stored(tcp_store, ask())
    assert (found.token, found.recorded) == ("new-token", ANSWER)


@pytest.mark.scenario(73, 75)
@pytest.mark.parametrize("statement", ["DELETE", "UPDATE"])
@pytest.mark.parametrize("lose", ["lose_reply", "lose_request"])
def test_freeing_while_the_connection_breaks(
    tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy, lose: str, statement: str
) -> None:
    """Whichever of its statements was carried out, the key is free, and whoever freed it knows it."""
    for steps in (False, True) if statement == "DELETE" else (True,):
        seen = held_key(tcp_store, steps)
        rule = getattr(cutting_proxy, lose)(statement)
        assert tcp_store.free(seen, 3600, "new-token")
        assert rule.count == 1
        found = tcp_store.find("tenant-1", "key-00000001")
        assert (found and (found.status, found.token)) == ((Status.RELEASED, "new-token") if steps else None)


@pytest.mark.scenario(73, 75)
@pytest.mark.parametrize("statement", ["DELETE", "UPDATE"])
def test_settling_lost_to_another(tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy, statement: str) -> None:
    """Whoever settles or frees what another has settled is told so, also where the connection breaks."""
    seen = held_key(tcp_store, steps=True)
    assert tcp_store.settle(seen, ANSWER, 3600, "the-other")
    cutting_proxy.lose_reply(statement)
    assert not tcp_store.free(seen, 3600, "new-token")
    cutting_proxy.lose_reply("UPDATE")
    assert not tcp_store.settle(seen, ANSWER, 3600, "new-token")
    assert stored(tcp_store, ask()).token == "the-other"


@pytest.mark.scenario(11)
@pytest.mark.parametrize("lose", ["lose_reply", "lose_request"])
def test_a_renewal_whose_connection_breaks(tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy, lose: str) -> None:
    """One dropped connection does not cost a claim."""
    claim = claimed(tcp_store, ask())
    shift(tcp_store, 20)
    getattr(cutting_proxy, lose)("SET locked_at=")
    assert tcp_store.renew([claim]) == {claim.token}
    assert stored(tcp_store, ask()).age_seconds < 10


@pytest.mark.scenario(59)
def test_a_server_that_restarts(tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy) -> None:
    """Connections that died while they were idle are replaced, and no caller notices."""
    claims = [claimed(tcp_store, ask(key=f"key-{number}")) for number in range(3)]
    cutting_proxy.cut()
    assert all(tcp_store.record(claim, ANSWER, 3600) for claim in claims)
    cutting_proxy.cut()
    assert stored(tcp_store, ask(key="key-0")).recorded == ANSWER


@pytest.mark.scenario(59)
def test_a_session_that_is_terminated(postgres_server: Postgres, postgres_url: str) -> None:
    """Sessions that an administrator ends are replaced, too."""
    with opened(postgres_url) as store:
        claim = claimed(store, ask())
        assert postgres_server.disconnect(str(sa.make_url(postgres_url).database)) > 0
        assert store.record(claim, ANSWER, 3600)


@pytest.mark.scenario(59)
def test_a_server_that_is_gone(tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy) -> None:
    """Without a server every call ends in a store error, and all of it works again when the server is back."""
    claim = claimed(tcp_store, ask())
    with cutting_proxy.gone():
        for call in (
            lambda: tcp_store.claim(ask()),
            lambda: tcp_store.record(claim, ANSWER, 3600),
            lambda: tcp_store.renew([claim]),
            lambda: tcp_store.prune(10),
        ):
            with pytest.raises(StoreError, match="could not answer") as caught:
                call()
            assert isinstance(caught.value.__cause__, sa.exc.OperationalError)
    assert stored(tcp_store, ask()).status is Status.IN_PROGRESS
    assert tcp_store.record(claim, ANSWER, 3600)


@pytest.mark.scenario(59, 75)
def test_a_statement_is_repeated_once(tcp_store: SQLAlchemyStore, cutting_proxy: CuttingProxy) -> None:
    """When the second reply is lost too the caller gets an error; asking again later, it finds its claim."""
    rule = cutting_proxy.lose_reply("INSERT INTO", times=2)
    asking = ask()
    try:
        found = tcp_store.claim(asking)
    except StoreError:
        assert rule.count == 2
        found = tcp_store.claim(asking)
    assert isinstance(found, Claim)
    assert found.token == asking.token
    assert count(tcp_store) == 2


@pytest.mark.scenario(75)
def test_a_commit_whose_connection_breaks(tcp_url: str, cutting_proxy: CuttingProxy) -> None:
    """Where a statement is committed by another one, that one's reply may be lost, too."""
    with opened(tcp_url, portable=True) as store:
        rule = cutting_proxy.lose_reply("COMMIT")
        claim = claimed(store, ask())
        assert rule.count == 1
        rule = cutting_proxy.lose_reply("COMMIT")
        assert store.record(claim, ANSWER, 3600)
        assert rule.count == 1
        assert stored(store, ask()).recorded == ANSWER
        other = claimed(store, ask(key="other"))
        cutting_proxy.lose_reply("COMMIT")
        assert store.release(other)
        assert count(store) == 1


@pytest.mark.scenario(75)
def test_a_late_reply_of_a_claim(tcp_url: str, cutting_proxy: CuttingProxy) -> None:
    """A claim whose reply was longer on its way than its lease, and was taken over meanwhile, is not given out."""
    with opened(tcp_url) as store:
        rule = cutting_proxy.hold_reply("INSERT INTO")
        slow = background(store.claim, ask(lock_timeout=0.3))
        rule.wait()
        seen = stored(store, ask())
        while not seen.stale:
            seen = stored(store, ask())
        taken = store.take(ask(), seen)
        assert taken is not None
        rule.release()
        found = slow.result(10)
        assert not isinstance(found, Claim)
        assert found.token == taken.token
        assert not store.release(replace(taken, token=seen.token))
