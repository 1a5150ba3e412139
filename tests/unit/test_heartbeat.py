"""The thread that renews claims, over a real store in an SQLite file."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotency.claim import Asking, Claim
from flask_idempotency.heartbeat import Heartbeat, Settlement
from flask_idempotency.recorded import Recorded
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.threads import threads_run
from tests.store.support import count, execute, opened, row, shift
from tests.support.apps import until
from tests.support.server import ROOT

ANSWER = Recorded(201, (("Content-Type", "text/plain"),), b"made")
#: A lease that is renewed every 0.1 s.
LEASE = 0.3

numbers = itertools.count(1)


def asking(lock_timeout: float = LEASE, key: str = "key-00000001") -> Asking:
    """A request for a claim."""
    token = f"token-{next(numbers)}"
    return Asking("acme", key, "POST", "/charges", "a" * 64, 1, token, 3600.0, lock_timeout)


def claimed(store: SQLAlchemyStore, lock_timeout: float = LEASE, key: str = "key-00000001") -> Claim:
    """A claim that was just taken."""
    claim = store.claim(asking(lock_timeout, key))
    assert isinstance(claim, Claim)
    return claim


def taken_over(store: SQLAlchemyStore, claim: Claim) -> Claim:
    """Let the lease run out, and take the claim over as another process would."""
    shift(store, claim.lock_timeout + 1)
    wanted = asking(60.0, claim.key)
    found = store.claim(wanted)
    assert not isinstance(found, Claim)
    taken = store.take(wanted, found)
    assert taken is not None
    return taken


def threads() -> list[threading.Thread]:
    """The threads that renew claims, of all heartbeats."""
    return [one for one in threading.enumerate() if one.name == "flask-idempotency"]


@contextmanager
def renewals(store: SQLAlchemyStore, before: Callable[[], None] = lambda: None) -> Iterator[list[tuple[Any, int]]]:
    """The store's renewals meanwhile, as (parameters, thread); ``before`` is called before each is sent."""
    seen: list[tuple[Any, int]] = []

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        if statement.startswith(f"UPDATE {store.table.fullname} SET locked_at"):
            before()
            seen.append((parameters, threading.get_ident()))

    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)


@contextmanager
def table_gone(store: SQLAlchemyStore) -> Iterator[None]:
    """A database that can't carry out any call."""
    name = store.table.fullname
    execute(store, f"ALTER TABLE {name} RENAME TO moved_away")
    try:
        yield
    finally:
        execute(store, f"ALTER TABLE moved_away RENAME TO {name}")


def forbidden() -> None:
    """A callback that must not be called."""
    raise AssertionError("The claim was said to be lost.")


@pytest.fixture
def store(sqlite_url: str) -> Iterator[SQLAlchemyStore]:
    """An empty store in an SQLite file."""
    with opened(sqlite_url) as one:
        yield one


@pytest.fixture
def heartbeat() -> Iterator[Heartbeat]:
    """A heartbeat of its own."""
    one = Heartbeat()
    yield one
    for live in list(one._live.values()):
        one._live.pop(live.claim.token, None)


def test_starts_with_the_first_claim(store: SQLAlchemyStore, heartbeat: Heartbeat) -> None:
    """No thread runs before a claim is kept; one does from then on, which never keeps a process alive."""
    before = threads()
    claim = claimed(store)
    assert before == threads()
    heartbeat.keep(store, claim, forbidden)
    (thread,) = set(threads()) - set(before)
    assert thread.daemon


def test_one_thread_and_one_statement_for_all(store: SQLAlchemyStore, heartbeat: Heartbeat) -> None:
    """Every renewal is one statement for all claims, sent by one thread."""
    before = threads()
    claims = [claimed(store, key=f"key-0000000{number}") for number in range(5)]
    with renewals(store) as seen:
        for claim in claims:
            heartbeat.keep(store, claim, forbidden)
        until(lambda: len(seen) >= 3)
    assert all(claim.token in parameters for parameters, _ in seen for claim in claims)
    assert 1 == len({thread for _, thread in seen}) == len(set(threads()) - set(before))


@pytest.mark.scenario(2, 15)
def test_a_kept_claim_outlives_its_lease(store: SQLAlchemyStore, heartbeat: Heartbeat) -> None:
    """A claim that is kept holds longer than its lease; one that is not kept does not."""
    kept, left = claimed(store, 1.0), claimed(store, 1.0, key="key-00000002")
    heartbeat.keep(store, kept, forbidden)
    until(lambda: (found := store.find("acme", left.key)) and found.stale)
    found = store.find("acme", kept.key)
    assert found is not None
    assert not found.stale
    assert row(store, kept.key).locked_at > row(store, left.key).locked_at


def test_a_dropped_claim_is_renewed_no_more(store: SQLAlchemyStore, heartbeat: Heartbeat) -> None:
    """Renewals go on without the claim that was dropped, and end with the last one."""
    dropped, kept = claimed(store), claimed(store, key="key-00000002")
    heartbeat.keep(store, dropped, forbidden)
    heartbeat.keep(store, kept, forbidden)
    heartbeat.drop(dropped)
    with renewals(store) as seen:
        until(lambda: len(seen) >= 2)
        assert not any(dropped.token in parameters for parameters, _ in seen)
        heartbeat.drop(kept)
        # What is being sent at this moment may still arrive.
        threading.Event().wait(0.05)
        sent = len(seen)
        threading.Event().wait(0.3)
        assert sent == len(seen)


def test_a_shorter_lease_is_renewed_in_time(store: SQLAlchemyStore, heartbeat: Heartbeat) -> None:
    """A thread that waits for a long lease's renewal wakes up for a shorter one that comes later."""
    heartbeat.keep(store, claimed(store, 60.0), forbidden)
    short = claimed(store, key="key-00000002")
    with renewals(store) as seen:
        threading.Event().wait(0.05)
        heartbeat.keep(store, short, forbidden)
        until(lambda: len(seen) >= 2, 2.0)


@pytest.mark.scenario(11)
def test_a_failed_renewal_is_repeated(
    store: SQLAlchemyStore, heartbeat: Heartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    """A renewal that fails is a warning, is repeated soon, and loses nothing once it gets through."""
    claim = claimed(store, 4.5)
    heartbeat.keep(store, claim, forbidden)
    with renewals(store) as seen:
        with table_gone(store):
            until(lambda: "Renewing 1 claim failed and is repeated" in caplog.text)
            failed = len(seen)
        first = row(store).locked_at
        # A tenth of the lease, not a third.
        until(lambda: row(store).locked_at > first, 1.4)
        assert len(seen) > failed
    assert heartbeat.holds(claim.token)
    assert {"WARNING"} == {record.levelname for record in caplog.records}


@pytest.mark.scenario(11)
def test_an_outage_is_told_once_a_claim(
    store: SQLAlchemyStore, heartbeat: Heartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    """However often renewals fail, an outage is told once, and again only with a claim that has not met it; so is the
    next one.
    """
    first, second = claimed(store), claimed(store, key="key-00000002")

    def told() -> list[str]:
        return [record.getMessage().partition(" failed")[0] for record in caplog.records]

    with renewals(store) as seen:

        def fail_some_more() -> None:
            sofar = len(seen)
            until(lambda: len(seen) >= sofar + 3)

        heartbeat.keep(store, first, forbidden)
        with table_gone(store):
            fail_some_more()
            assert ["Renewing 1 claim"] == told()
            heartbeat.keep(store, second, forbidden)
            fail_some_more()
            assert ["Renewing 1 claim", "Renewing 2 claims"] == told()
        before = row(store).locked_at
        until(lambda: row(store).locked_at > before)
        with table_gone(store):
            fail_some_more()
    assert ["Renewing 1 claim", "Renewing 2 claims", "Renewing 2 claims"] == told()


@pytest.mark.scenario(12)
def test_a_lost_claim_is_told_once(store: SQLAlchemyStore, heartbeat: Heartbeat) -> None:
    """A renewal that finds the claim taken over tells it once, and renews it no more; the others go on."""
    claim, other = claimed(store), claimed(store, 60.0, key="key-00000002")
    new = taken_over(store, claim)
    told: list[str] = []
    heartbeat.keep(store, claim, lambda: told.append("lost"))
    heartbeat.keep(store, other, forbidden)
    until(lambda: told)
    assert not heartbeat.holds(claim.token)
    assert not heartbeat.settling(claim)
    third = claimed(store, key="key-00000003")
    with renewals(store) as seen:
        heartbeat.keep(store, third, forbidden)
        until(lambda: len(seen) >= 2)
        assert all(other.token in parameters and third.token in parameters for parameters, _ in seen)
        assert not any(claim.token in parameters for parameters, _ in seen)
    assert ["lost"] == told
    assert new.token == row(store).fencing_token


@pytest.mark.scenario(11)
def test_a_renewal_in_flight_while_the_answer_is_recorded(store: SQLAlchemyStore, heartbeat: Heartbeat) -> None:
    """A renewal that arrives after the recording neither changes the record nor takes the claim for lost."""
    claim = claimed(store)
    arrived, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        arrived.set()
        go_on.wait(5)

    with renewals(store, hold) as seen:
        heartbeat.keep(store, claim, forbidden)
        assert arrived.wait(5)
        assert heartbeat.settling(claim)
        assert store.record(claim, ANSWER, 3600.0)
        recorded = row(store)
        go_on.set()
        until(lambda: len(seen) >= 2)  # the first one's reply has been dealt with
    assert heartbeat.holds(claim.token)
    assert recorded == row(store)


@pytest.mark.scenario(59)
@pytest.mark.parametrize("answer", [ANSWER, None], ids=["record", "release"])
def test_what_could_not_be_written_is_repeated(
    store: SQLAlchemyStore, heartbeat: Heartbeat, answer: Recorded | None
) -> None:
    """A postponed write is repeated until it succeeds, told once, and the claim is renewed no more."""
    claim = claimed(store, 1.0)
    told: list[bool] = []
    with table_gone(store):
        heartbeat.keep(store, claim, forbidden)
        assert heartbeat.settling(claim)
        settlement = Settlement(asking(), answer, 3600.0, told.append)
        heartbeat.postpone(claim, settlement)
        assert settlement is heartbeat.postponed(store, "acme", claim.key)
        threading.Event().wait(0.3)
        assert heartbeat.holds(claim.token)
    until(lambda: told)
    assert [True] == told
    assert not heartbeat.holds(claim.token)
    assert heartbeat.postponed(store, "acme", claim.key) is None
    assert (1, "completed") == (count(store), row(store).status) if answer else 0 == count(store)


@pytest.mark.scenario(59)
def test_a_request_for_a_postponed_key_tries_at_once(store: SQLAlchemyStore, heartbeat: Heartbeat) -> None:
    """Whoever asks for a key whose answer is still to be written has it written, not waiting for the next beat."""
    claim = claimed(store, 3600.0)
    told: list[bool] = []
    heartbeat.keep(store, claim, forbidden)
    heartbeat.settling(claim)
    heartbeat.postpone(claim, Settlement(asking(), ANSWER, 3600.0, told.append))
    assert heartbeat.postponed(store, "acme", claim.key) is None
    assert [True] == told
    assert "completed" == row(store).status


@pytest.mark.scenario(59)
def test_what_is_postponed_is_not_dropped(store: SQLAlchemyStore, heartbeat: Heartbeat) -> None:
    """An answer that is known and waits to be written is written, whatever becomes of the request that made it."""
    claim = claimed(store, 1.0)
    told: list[bool] = []
    heartbeat.keep(store, claim, forbidden)
    heartbeat.settling(claim)
    with table_gone(store):
        heartbeat.postpone(claim, Settlement(asking(), ANSWER, 3600.0, told.append))
        heartbeat.drop(claim)
        assert heartbeat.holds(claim.token)
    until(lambda: told)
    assert ([True], "completed") == (told, row(store).status)


@pytest.mark.scenario(12, 59)
@pytest.mark.parametrize("answer", [ANSWER, None], ids=["record", "release"])
def test_a_postponed_write_of_a_lost_claim(
    store: SQLAlchemyStore, heartbeat: Heartbeat, answer: Recorded | None
) -> None:
    """What could not be written in time, and was taken over since, is told as lost and changes nothing."""
    claim = claimed(store)
    told: list[bool] = []
    with table_gone(store):
        heartbeat.keep(store, claim, forbidden)
        heartbeat.settling(claim)
        heartbeat.postpone(claim, Settlement(asking(), answer, 3600.0, told.append))
        heartbeat.postponed(store, "acme", claim.key)
        execute(store, "UPDATE moved_away SET fencing_token = 'another', attempts = attempts + 1")
    until(lambda: told)
    assert [False] == told
    assert ("another", "in_progress") == (row(store).fencing_token, row(store).status)


@pytest.mark.scenario(75)
def test_a_release_that_was_carried_out_is_not_lost(store: SQLAlchemyStore, heartbeat: Heartbeat) -> None:
    """A release whose reply was lost, and whose repetition finds nothing, has succeeded and harms no new claim."""
    for reclaimed in (False, True):
        claim = claimed(store, 60.0)
        told: list[bool] = []
        heartbeat.keep(store, claim, forbidden)
        heartbeat.settling(claim)
        settlement = Settlement(asking(), None, 0.0, told.append)
        with table_gone(store):
            heartbeat.postpone(claim, settlement)
            heartbeat.postponed(store, "acme", claim.key)
        assert store.release(claim)
        if reclaimed:
            claimed(store, 60.0)
        heartbeat.postponed(store, "acme", claim.key)
        assert [True] == told
        assert int(reclaimed) == count(store)


@pytest.mark.parametrize("what", ["a write", "a look for what was never heard of"])
def test_a_store_that_hangs_does_not_keep_a_processor_busy(
    what: str, store: SQLAlchemyStore, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While what is repeated takes its time, the thread that renews waits for the next renewal, and not in a loop."""
    claim, beats = claimed(store, 1.0), []
    arrived, go_on = threading.Event(), threading.Event()
    beat = heartbeat._beat
    monkeypatch.setattr(heartbeat, "_beat", lambda: (beats.append(1), beat()))

    def hang(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        looks = f"FROM {store.table.fullname}" in statement and "SET" not in statement
        if looks or statement.startswith(f"UPDATE {store.table.fullname} SET status"):
            arrived.set()
            go_on.wait(10)

    heartbeat.keep(store, claim, forbidden)
    sa.event.listen(sa.Engine, "before_cursor_execute", hang)
    try:
        if what == "a write":
            heartbeat.settling(claim)
            heartbeat.postpone(claim, Settlement(asking(), ANSWER, 3600.0, lambda held: None))
        else:
            heartbeat.give_up(store, asking(60.0, key="key-00000002"))
        assert arrived.wait(5)
        before = len(beats)
        threading.Event().wait(0.5)
        assert len(beats) - before < 10
    finally:
        go_on.set()
        sa.event.remove(sa.Engine, "before_cursor_execute", hang)


def test_in_memory_there_is_nothing_to_renew(heartbeat: Heartbeat) -> None:
    """SQLite's memory is this process's alone: no thread runs over the app's own connection."""
    before = threads()
    with opened("sqlite://", memory=True) as store:
        claim = claimed(store)
        heartbeat.keep(store, claim, forbidden)
        assert heartbeat.holds(claim.token)
        heartbeat.drop(claim)
    assert before == threads()


class Faulty(SQLAlchemyStore):
    """A third party's store with a fault in it."""

    def renew(self, claims: Sequence[Claim]) -> set[str]:
        raise ZeroDivisionError


def test_one_stores_fault_is_not_the_others(
    store: SQLAlchemyStore, heartbeat: Heartbeat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An app whose store raises what it must not leaves the claims of the process's other apps renewed."""
    engine, metadata = sa.create_engine(f"sqlite:///{tmp_path / 'other.sqlite'}"), sa.MetaData()
    faulty = Faulty(engine, metadata)
    metadata.create_all(engine)
    heartbeat.keep(faulty, claimed(faulty), forbidden)
    heartbeat.keep(store, claimed(store), forbidden)
    with renewals(store) as seen:
        until(lambda: len(seen) >= 3)
    assert any(record.levelname == "ERROR" and record.exc_info for record in caplog.records)
    faulty.close()
    engine.dispose()


def test_an_unforeseen_failure_of_a_postponed_write(
    store: SQLAlchemyStore, heartbeat: Heartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    """A postponed write that raises what it must not is logged, and the claims are renewed all the same."""
    claim, other = claimed(store), claimed(store, key="key-00000002")

    def fault(held: bool) -> None:
        raise ZeroDivisionError

    heartbeat.keep(store, other, forbidden)
    heartbeat.keep(store, claim, forbidden)
    heartbeat.settling(claim)
    with renewals(store) as seen:
        heartbeat.postpone(claim, Settlement(asking(), ANSWER, 3600.0, fault))
        until(lambda: "ZeroDivisionError" in caplog.text)
        since = len(seen)
        until(lambda: len(seen) >= since + 2)
    assert heartbeat.holds(other.token)
    assert "completed" == row(store).status


UWSGI = {
    "nothing": ({}, False),
    "enable-threads": ({"enable-threads": True}, True),
    "as bytes": ({b"enable-threads": b"true"}, True),
    "in a file": ({"enable-threads": b"1"}, True),
    "off in a file": ({"enable-threads": b"false"}, False),
    "threads": ({"threads": b"4"}, True),
    "gevent": ({"gevent": b"100"}, True),
    "another": ({"processes": b"4"}, False),
}


def uwsgi(options: dict[Any, Any], version: tuple[Any, ...] = (2, 0, 26, 0, b"")) -> types.ModuleType:
    """The module that uWSGI puts into its interpreters."""
    module = types.ModuleType("uwsgi")
    module.opt = options  # type: ignore[attr-defined]
    module.version_info = version  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("name", list(UWSGI))
def test_threads_under_uwsgi(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under uWSGI before 2.0.27 threads run only with an option that switches them on; elsewhere they always do."""
    options, expected = UWSGI[name]
    assert threads_run()
    monkeypatch.setitem(sys.modules, "uwsgi", uwsgi(options))
    assert expected is threads_run()
    # Since that version the option changes nothing, whatever its value.
    monkeypatch.setitem(sys.modules, "uwsgi", uwsgi(options, (2, 0, 27, 0, b"")))
    assert threads_run()


def test_uwsgi_without_threads_is_an_error(
    store: SQLAlchemyStore, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where threads do not run, the first claim is logged as an error that names the option; the next ones are not."""
    monkeypatch.setitem(sys.modules, "uwsgi", uwsgi({}))
    assert not caplog.records
    for number in range(3):
        heartbeat.keep(store, claimed(store, 60.0, key=f"key-0000000{number}"), forbidden)
    (record,) = caplog.records
    assert logging.ERROR == record.levelno
    assert "--enable-threads" in record.getMessage()


SCRIPT = """
    import os, sys, threading, time
    import sqlalchemy as sa
    from flask_idempotency.claim import Asking, Claim
    from flask_idempotency.heartbeat import heartbeat
    from flask_idempotency.store import SQLAlchemyStore
    from tests.support.apps import until

    engine, metadata = sa.create_engine(sys.argv[1]), sa.MetaData()
    store = SQLAlchemyStore(engine, metadata)
    metadata.create_all(engine)

    def lost():
        print("lost", flush=True)

    def keep(key, lease=1.0):
        claim = store.claim(Asking("acme", key, "POST", "/", "a" * 64, 1, "token-of-" + key, 3600.0, lease))
        assert isinstance(claim, Claim), claim
        heartbeat.keep(store, claim, lost)
        return claim

    def threads():
        return [one for one in threading.enumerate() if one.name == "flask-idempotency"]

    def stale(key):
        return store.find("acme", key).stale
"""


def run(script: str, url: str) -> str:
    """Run a program with that beginning, and return what it printed."""
    program = textwrap.dedent(SCRIPT) + textwrap.dedent(script)
    # Python 3.12 and later warn of what some of them are about: a fork beside threads.
    warnings = "-Wignore:This process:DeprecationWarning"
    command = [sys.executable, warnings, "-c", program, url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout


def test_survives_fork(sqlite_url: str) -> None:
    """A child renews its own claims by a thread of its own and none of its parent's, whose thread goes on."""
    said = run(
        """
        parents = keep("of-the-parent")
        assert len(threads()) == 1
        child = os.fork()
        if child == 0:
            assert threads() == [] and not heartbeat.holds(parents.token)
            seen = []
            sa.event.listen(sa.Engine, "before_cursor_execute", lambda *rest: seen.append(str(rest[3])))
            keep("of-the-child")
            assert len(threads()) == 1
            renewals = lambda: sum("token-of-" in one for one in seen)
            until(lambda: renewals() > 4)
            assert not any("token-of-of-the-parent" in one for one in seen)
            print("renewed", flush=True)
            # The parent's claim is alive by the parent alone, for longer than its lease.
            assert not stale("of-the-parent") and not stale("of-the-child")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not stale("of-the-parent")
        until(lambda: stale("of-the-child"))
        print("over")
        """,
        sqlite_url,
    )
    assert ["renewed", "over"] == said.split()


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's fork() is called by its name")
def test_survives_a_fork_that_python_is_not_told_of(sqlite_url: str) -> None:
    """A child that a server forked by itself, as uWSGI does, renews its own claims on connections of its own."""
    said = run(
        """
        import ctypes
        ran = []
        os.register_at_fork(after_in_child=lambda: ran.append(True))
        parents = keep("of-the-parent")
        first = heartbeat._thread
        connected = []
        sa.event.listen(sa.Engine, "connect", lambda *rest: connected.append(os.getpid()))
        with heartbeat._changed:
            child = ctypes.PyDLL(None).fork()
        if child == 0:
            assert ran == []
            keep("of-the-child")
            assert not heartbeat.holds(parents.token) and heartbeat._thread is not first
            row = lambda: store.find("acme", "of-the-child").age_seconds
            older = row()
            def renewed():
                global older
                before, older = older, row()
                return older < before
            until(renewed)
            assert os.getpid() in connected
            print("renewed", flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not stale("of-the-parent")
        until(lambda: stale("of-the-child"))
        print("over")
        """,
        sqlite_url,
    )
    assert ["renewed", "over"] == said.split()


def test_a_fork_while_the_lock_is_held(sqlite_url: str) -> None:
    """A child that is forked while another thread changes the list of claims can take claims all the same."""
    said = run(
        """
        keep("of-the-parent", 60.0)
        with heartbeat._changed:
            child = os.fork()
        if child == 0:
            keep("of-the-child", 60.0)
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        held = threading.Event()
        go_on = threading.Event()
        def hold():
            with heartbeat._changed:
                held.set()
                go_on.wait()
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        child = os.fork()
        if child == 0:
            keep("of-the-second-child", 60.0)
            os._exit(0)
        go_on.set()
        print(os.waitpid(child, 0)[1])
        """,
        sqlite_url,
    )
    assert ["0", "0"] == said.split()


def test_never_keeps_the_process_alive(sqlite_url: str) -> None:
    """A program ends though a claim of its is alive, and leaves the claim to its lease."""
    said = run("keep('live'); print(stale('live'))", sqlite_url)
    assert ["False"] == said.split()


def test_a_receiver_that_exits(store: SQLAlchemyStore, heartbeat: Heartbeat, caplog: pytest.LogCaptureFixture) -> None:
    """A receiver of ``claim_lost`` that wants to end the process ends neither renewals nor what others are told."""
    first, second = claimed(store), claimed(store, key="key-00000002")
    told: list[str] = []

    def end() -> None:
        raise SystemExit

    taken_over(store, first)
    heartbeat.keep(store, first, end)
    heartbeat.keep(store, second, lambda: told.append("lost"))
    until(lambda: "SystemExit" in caplog.text)
    with renewals(store) as seen:
        until(lambda: len(seen) >= 2)
    assert [] == told
    execute(store, "UPDATE {table} SET fencing_token = 'another' WHERE key = 'key-00000002'")
    until(lambda: told)
