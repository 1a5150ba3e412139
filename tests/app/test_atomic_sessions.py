"""Atomic mode and the app's session: what hooks loaded, pools, binds, contexts, events, and every way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
from flask import Flask, Response, g, request
from flask_login import LoginManager, UserMixin, current_user
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy.track_modifications import models_committed
from sqlalchemy.orm import Session

from flask_idempotency import Idempotency
from flask_idempotency.errors import ConfigurationError, WorkPending
from tests.support.apps import Shop, assert_replayed, close, guard, make_shop, new_key, send
from tests.support.barrier import together
from tests.support.charges import add, amounts, charge

pytestmark = pytest.mark.one_driver


# What hooks loaded, and what they left


@pytest.fixture
def accounts(atomic: Shop) -> Shop:
    """A shop with an account and its entries, which a hook loads into ``g`` before each view."""

    class Account(UserMixin, atomic.db.Model):  # type: ignore[name-defined]
        id = sa.Column(sa.Integer, primary_key=True)
        balance = sa.Column(sa.Integer, nullable=False)
        entries = sa.orm.relationship("Entry", back_populates="account", order_by="Entry.id")

    class Entry(atomic.db.Model):  # type: ignore[name-defined]
        id = sa.Column(sa.Integer, primary_key=True)
        amount = sa.Column(sa.Integer, nullable=False)
        account_id = sa.Column(sa.ForeignKey("account.id"))
        account = sa.orm.relationship(Account, back_populates="entries")

    with atomic.app.app_context():
        atomic.db.create_all()
        atomic.db.session.add(Account(balance=100, entries=[Entry(amount=40), Entry(amount=60)]))
        atomic.db.session.commit()
    atomic.runs = [Account, Entry]

    @atomic.app.before_request
    def load() -> None:
        g.account = atomic.db.session.get(Account, 1)

    return atomic


def ledger(shop: Shop) -> tuple[int, list[int]]:
    """The account's balance and entries, as committed."""
    account, entry = (model.__table__ for model in shop.runs)
    entries = shop.execute(sa.select(entry.c.amount).order_by(entry.c.id))
    return shop.execute(sa.select(account.c.balance))[0][0], [row[0] for row in entries]


def test_objects_that_hooks_loaded(accounts: Shop) -> None:
    """They stay attached and as loaded: lazily loading, modified and committed in the view and in later hooks."""
    shop, entry = accounts, accounts.runs[1]

    @shop.app.after_request
    def later(response: Response) -> Response:
        if response.status_code < 300:
            g.account.balance += 1
        return response

    def view() -> tuple[str, int]:
        assert g.account in shop.db.session
        assert "balance" in g.account.__dict__  # not loaded anew
        seen = [one.amount for one in g.account.entries]
        g.account.entries.append(entry(amount=5))
        g.account.balance += 5
        if "Commit" in request.headers:
            shop.db.session.commit()
        return f"{seen} {g.account.balance}", int(request.headers.get("Status", 201))

    guard(shop, view)
    failing = send(shop, new_key(), headers={"Status": "503", "Commit": "1"})
    assert ("[40, 60] 105", 503, (100, [40, 60])) == (failing.text, failing.status_code, ledger(shop))
    for balance, headers in [(106, {"Commit": "1"}), (112, {})]:
        assert 201 == send(shop, new_key(), headers=headers).status_code
        assert balance == ledger(shop)[0]
    assert [40, 60, 5, 5] == ledger(shop)[1]


def test_the_user_of_flask_login(accounts: Shop) -> None:
    """Flask-Login's ``current_user``, loaded through ``db.session`` before the view, can be used and changed in it."""
    shop, account = accounts, accounts.runs[0]
    login = LoginManager(shop.app)
    login.request_loader(lambda asked: shop.db.session.get(account, 1))
    shop.idempotency.scope_loader(lambda: str(current_user.id))

    def view() -> str:
        current_user.balance -= len(current_user.entries)
        shop.db.session.commit()
        return str(current_user.balance)

    guard(shop, view)
    key = new_key()
    first = send(shop, key)
    assert ("98", 98) == (first.text, ledger(shop)[0])
    assert_replayed(send(shop, key), first)


@pytest.mark.parametrize("how", ["commit", "flush"])
def test_objects_after_a_failure(accounts: Shop, how: str) -> None:
    """After the rollback an object that a hook loaded shows what the database has, to an error's hooks too."""
    shop, seen = accounts, []

    @shop.app.teardown_request
    def later(error: BaseException | None) -> None:
        seen.append(g.account.balance)

    def view() -> tuple[str, int]:
        g.account.balance = 0
        getattr(shop.db.session, how)()
        return "x", 500

    guard(shop, view)
    assert 500 == send(shop, new_key()).status_code
    assert [100] == seen


LEFT: dict[str, Callable[[Shop], Any]] = {
    "added": add,
    "flushed": lambda shop: (add(shop), shop.db.session.flush()),
    "changed": lambda shop: setattr(g.account, "balance", 7),
    "deleted": lambda shop: shop.db.session.delete(g.account.entries[0]),
    "statement": lambda shop: shop.db.session.execute(sa.update(shop.runs[0]).values(balance=7)),
    "text": lambda shop: shop.db.session.execute(sa.text("UPDATE account SET balance = 7")),
    "savepoint": lambda shop: (shop.db.session.begin_nested(), add(shop), shop.db.session.flush()),
}


@pytest.mark.parametrize("left", LEFT)
def test_uncommitted_writes_of_a_hook(accounts: Shop, left: str, caplog: pytest.LogCaptureFixture) -> None:
    """What a hook wrote and did not commit is no part of the operation: an error that names the hook, nothing run."""
    shop, runs = accounts, []

    @shop.app.before_request
    def audit_request() -> None:
        LEFT[left](shop)

    guard(shop, lambda: runs.append("x") or "x")
    assert 500 == send(shop, new_key()).status_code
    assert "audit_request" in caplog.text
    assert "commit or roll them back" in caplog.text
    shop.app.testing = True
    with pytest.raises(WorkPending, match="audit_request"):
        send(shop, new_key())
    assert ([], [], (100, [40, 60])) == (runs, shop.rows(), ledger(shop))


SETTINGS = {
    "SET LOCAL app.tenant = 'a'": 1,
    "SET app.tenant = 'a'": 1,
    "SELECT set_config('app.tenant', 'a', true)": 1,
    "SELECT current_setting('app.tenant', true)": 0,
}


@pytest.mark.parametrize(("statement", "warnings"), SETTINGS.items())
def test_settings_of_a_hook(postgres_url: str, statement: str, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    """A setting in the transaction that ends before the view is told once, with the event to make it in."""
    shop = make_shop(postgres_url, atomic=True)
    shop.app.before_request(lambda: shop.db.session.execute(sa.text(statement)) and None)
    guard(shop, lambda: (add(shop), "x")[1])
    try:
        assert [200, 200] == [send(shop, new_key()).status_code for _ in range(2)]
        assert warnings == caplog.text.count("after_begin")
    finally:
        close(shop.app)


@pytest.mark.parametrize("how", ["ended", "after_begin"])
def test_settings_that_are_no_loss(postgres_url: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """A setting whose transaction the hook itself has ended is not told, nor one made in ``after_begin``."""
    shop, seen = make_shop(postgres_url, atomic=True), []
    setting = sa.text("SET LOCAL app.tenant = 'a'")

    def hook() -> None:
        if how == "ended":
            shop.db.session.execute(setting)
            shop.db.session.rollback()
        else:
            shop.db.session.scalar(sa.select(shop.Charge.id))

    def view() -> str:
        seen.append(shop.db.session.scalar(sa.text("SELECT current_setting('app.tenant', true)")))
        return "x"

    shop.app.before_request(hook)
    if how == "after_begin":
        sa.event.listen(shop.db.session, "after_begin", lambda session, _, connection: connection.execute(setting))
    guard(shop, view)
    try:
        assert (200, 1) == (send(shop, new_key()).status_code, len(seen))
        assert ("a" if how == "after_begin" else "") == (seen[0] or "")
        assert "after_begin" not in caplog.text
    finally:
        close(shop.app)


@pytest.mark.parametrize("how", ["committed", "rolled back", "same value", "savepoint", "read", "expired"])
def test_what_a_hook_may_leave(accounts: Shop, how: str) -> None:
    """Writes that are committed or rolled back, and reads of any kind, are no hindrance."""
    shop = accounts

    @shop.app.before_request
    def audit_request() -> None:
        if how == "same value":
            g.account.balance = 100
        elif how == "savepoint":
            shop.db.session.begin_nested()
            shop.db.session.scalar(sa.select(shop.Charge.id))
        elif how == "expired":
            shop.db.session.expire_all()
        elif how != "read":
            add(shop, 1)
            shop.db.session.flush()
            shop.db.session.commit() if how == "committed" else shop.db.session.rollback()

    guard(shop, lambda: (add(shop, g.account.balance), "x")[1])
    key = new_key()
    first = send(shop, key)
    assert 200 == first.status_code
    assert ([1] if how == "committed" else []) + [100] == amounts(shop)
    assert_replayed(send(shop, key), first)


# Pools


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.scenario(16, 20)
def test_small_pools(database_url: str, size: int) -> None:
    """With a pool of one or two, ten parallel requests whose hooks load through ``db.session`` succeed."""
    options = {"pool_size": size, "max_overflow": 0, "pool_timeout": 20}
    shop = make_shop(database_url, engine_options=options, atomic=True)

    @shop.app.before_request
    def load() -> None:
        g.charges = shop.db.session.query(shop.Charge).count()

    @shop.app.after_request
    def later(response: Response) -> Response:
        response.headers["X-Charges"] = str(shop.db.session.query(shop.Charge).count())
        return response

    def view() -> tuple[str, int]:
        charge(shop)
        return str(shop.db.session.query(shop.Charge).count()), 201

    guard(shop, view)
    keys = [new_key() for _ in range(10)]
    answers = together(10, lambda number: send(shop, keys[number]))
    assert [201] * 10 == [one.status_code for one in answers]
    assert 10 == shop.charges() == len(shop.rows())
    for answer, retry in zip(answers, together(10, lambda number: send(shop, keys[number])), strict=True):
        assert_replayed(retry, answer)
    with shop.app.app_context():
        assert 0 == shop.db.engine.pool.checkedout()  # type: ignore[attr-defined]
    close(shop.app)


# Every way out


class Watched:
    """The sessions that views of a shop had, and whether each is as it was."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.sessions: list[Session] = []

    def view(self) -> tuple[str, int]:
        """Do what the header asks for."""
        self.sessions.append(self.shop.db.session())
        charge(self.shop)
        how = request.headers.get("How", "201")
        if how == "raise":
            raise ZeroDivisionError
        if how == "exit":
            raise SystemExit
        if how == "commit":
            self.shop.db.session.add(self.shop.Charge(amount=None))
        if how == "remove":
            self.shop.db.session.remove()
        return "x", int(how) if how.isdigit() else 201

    def restored(self) -> bool:
        """Whether all sessions are bound as usual, and give no connection away."""
        return bool(self.sessions) and all(
            "get_bind" not in vars(one) and one.join_transaction_mode == "conditional_savepoint"
            for one in self.sessions
        )


WAYS = ["201", "402", "429", "503", "raise", "exit", "commit", "remove"]


@pytest.fixture(params=["memory", "sqlite", "postgresql-psycopg3"])
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    """A shop whose view goes every way out."""
    fixtures = {"sqlite": "sqlite_url", "postgresql-psycopg3": "psycopg_url"}
    name = fixtures.get(request.param)
    shop = make_shop("sqlite://" if name is None else request.getfixturevalue(name), atomic=True)
    found = Watched(shop)
    guard(shop, found.view)
    yield found
    close(shop.app)


@pytest.mark.parametrize("context", ["none", "client", "app", "request"])
@pytest.mark.parametrize("testing", [False, True])
def test_the_session_afterwards(watched: Watched, testing: bool, context: str) -> None:
    """On every way out, in every context of a test, the session is as it was, and works in the next request."""
    shop, kept = watched.shop, 0
    shop.app.testing = testing
    contexts = {"client": shop.client, "app": shop.app.app_context(), "request": shop.app.test_request_context()}
    client: Any = contexts["client"] if context == "client" else None

    def go(how: str, key: str) -> None:
        try:
            send(shop, key, headers={"How": how}, client=client or shop.client)
        except (ZeroDivisionError, SystemExit):
            assert how == "exit" or testing
        assert watched.restored()

    with contexts.get(context, nullcontext()):
        for how in WAYS:
            key = new_key()
            go(how, key)
            go(how, key)
            go("201", new_key())
            kept += 2 if how in ("201", "402") else 1
            assert (kept, kept) == (shop.charges(), len(shop.rows()))
        if context != "none":
            assert kept == shop.db.session.query(shop.Charge).count()
            charge(shop, 7)
            shop.db.session.remove()
            assert kept + 1 == shop.charges()


def test_without_the_wrapper(watched: Watched) -> None:
    """In a bare request context, where hooks alone see the request's end, work and record are kept or not as ever."""
    shop, kept = watched.shop, 0

    def go(how: str, key: str) -> int:
        headers = {"Idempotency-Key": key, "X-Tenant": "acme", "How": how}
        with shop.app.test_request_context("/x", method="POST", headers=headers):
            return shop.app.full_dispatch_request().status_code

    for how in WAYS:
        if how in ("raise", "exit"):
            with pytest.raises((ZeroDivisionError, SystemExit)):
                go(how, new_key())
        else:
            assert (int(how) if how.isdigit() else 500) == go(how, new_key())
        assert watched.restored()
        kept += 1 if how in ("201", "402") else 0
        assert (kept, kept) == (shop.charges(), len(shop.rows()))


def test_conflicts_leave_the_session_alone(make: Callable[..., Shop]) -> None:
    """A duplicate that is turned away, or replayed, leaves its hooks a session that works."""
    shop, seen = make(atomic=True), []

    @shop.app.after_request
    def later(response: Response) -> Response:
        session = shop.db.session()
        seen.append((response.status_code, "get_bind" in vars(session), session.query(shop.Charge).count()))
        return response

    guard(shop, lambda: (charge(shop), ("x", 201))[1])
    key = new_key()
    for body in ({"a": 1}, {"a": 1}, {"a": 2}):
        send(shop, key, json=body)
    assert [(201, True, 1), (201, False, 1), (422, False, 1)] == seen


# Work elsewhere


@pytest.fixture(params=["sqlite", "postgresql-psycopg2"])
def audited(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """A shop with a second database, on the bind ``audit``."""
    url = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    app = Flask("shop")
    app.config.update(
        SQLALCHEMY_DATABASE_URI=url,
        SQLALCHEMY_BINDS={"audit": f"sqlite:///{tmp_path / 'audit.sqlite'}"},
        SQLALCHEMY_TRACK_MODIFICATIONS=True,
        IDEMPOTENCY_ATOMIC=True,
        IDEMPOTENCY_SCOPE="acme",
    )
    db = SQLAlchemy(app)

    class Charge(db.Model):  # type: ignore[name-defined]
        id = sa.Column(sa.Integer, primary_key=True)
        amount = sa.Column(sa.Integer, nullable=False)

    class Audit(db.Model):  # type: ignore[name-defined]
        __bind_key__ = "audit"
        id = sa.Column(sa.Integer, primary_key=True)

    shop = Shop(app, Idempotency(app, db), db, Charge, [Audit])
    with app.app_context():
        db.create_all()
    yield shop
    close(app)


def audits(shop: Shop) -> int:
    """How many lines are committed in the other database."""
    with shop.app.app_context(), shop.db.engines["audit"].connect() as connection:
        return int(connection.scalar(sa.select(sa.func.count()).select_from(shop.runs[0].__table__)) or 0)


@pytest.mark.parametrize("status", [201, 503])
@pytest.mark.parametrize("commits", [True, False])
def test_other_binds_go_their_own_way(audited: Shop, commits: bool, status: int) -> None:
    """Work on other binds is committed where the view commits, whatever comes after; else with the operation's."""
    seen: list[int] = []

    def view() -> tuple[str, int]:
        add(audited)
        audited.db.session.add(audited.runs[0]())
        if commits:
            audited.db.session.commit()
        seen.append(audits(audited))
        return "x", status

    guard(audited, view)
    assert status == send(audited, new_key()).status_code
    assert [1 if commits else 0] == seen
    assert (1 if status == 201 else 0) == audited.charges() == len(audited.rows())
    assert (1 if commits or status == 201 else 0) == audits(audited)


def test_uncommitted_writes_on_another_bind(audited: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """What a hook wrote to another bind and did not commit is not lost without a word: an error that names it."""

    @audited.app.before_request
    def audit_request() -> None:
        audited.db.session.add(audited.runs[0]())
        audited.db.session.flush()

    guard(audited, lambda: "x")
    assert 500 == send(audited, new_key()).status_code
    assert "audit_request" in caplog.text


def test_the_signals_of_flask_sqlalchemy(audited: Shop) -> None:
    """``models_committed`` is sent for each commit in the view as ever, and for what the extension commits."""
    seen: list[list[tuple[int, str]]] = []

    def note(sender: Any, changes: list[tuple[Any, str]]) -> None:
        seen.append([(one.amount, what) for one, what in changes])

    def view() -> str:
        charge(audited, 1)
        add(audited, 2)
        return "x"

    guard(audited, view)
    with models_committed.connected_to(note, audited.app):
        assert 200 == send(audited, new_key()).status_code
    assert [[(1, "insert")], [(2, "insert")]] == seen


def test_session_events(atomic: Shop) -> None:
    """Events of the session are fired for the view's commits and rollbacks, in their order."""
    seen: list[str] = []
    factory = atomic.db.session.session_factory
    names = ["after_begin", "before_commit", "after_commit", "after_rollback"]
    for name in names:
        sa.event.listen(factory, name, lambda *_, name=name: seen.append(name))

    def view() -> str:
        seen.clear()
        charge(atomic)
        add(atomic)
        atomic.db.session.flush()
        atomic.db.session.rollback()
        return "x"

    guard(atomic, view)
    assert 200 == send(atomic, new_key()).status_code
    commit = ["before_commit", "after_begin", "after_commit"]
    assert [*commit, "after_begin", "after_rollback"] == seen


def test_nested_app_contexts(postgres_url: str) -> None:
    """An app context within the view has a session of its own, whose commits are outside of the operation."""
    shop = make_shop(postgres_url, atomic=True)

    def view() -> tuple[str, int]:
        add(shop, 1)
        shop.db.session.flush()
        with shop.app.app_context():
            assert "get_bind" not in vars(shop.db.session())
            assert len(amounts(shop)) == shop.db.session.query(shop.Charge).count()
            charge(shop, 2)
        assert "get_bind" in vars(shop.db.session())
        return "x", int(request.headers["Status"])

    guard(shop, view)
    assert 503 == send(shop, new_key(), headers={"Status": "503"}).status_code
    assert [2] == amounts(shop)
    assert 201 == send(shop, new_key(), headers={"Status": "201"}).status_code
    assert [1, 2, 2] == amounts(shop)
    close(shop.app)


@pytest.mark.parametrize("works", [False, True])
def test_a_session_that_is_removed(make: Callable[..., Shop], works: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A view that removes its session is told so before another one does any work; all is rolled back."""
    shop = make(atomic=True)

    def view() -> tuple[str, int]:
        charge(shop, 1)
        shop.db.session.remove()
        if works:
            charge(shop, 2)
        return "x", 201

    guard(shop, view)
    key = new_key()
    for _ in range(2):
        assert (500, [], []) == (send(shop, key).status_code, amounts(shop), shop.rows())
    assert "db.session.remove()" in caplog.text


def test_a_session_that_is_closed(atomic: Shop) -> None:
    """Closing the session gives up what is not committed, and lets go of its objects; it can be used on."""

    def view() -> str:
        charge(atomic, 1)
        add(atomic, 2)
        atomic.db.session.flush()
        atomic.db.session.close()
        charge(atomic, 3)
        return "x"

    guard(atomic, view)
    assert 200 == send(atomic, new_key()).status_code
    assert [1, 3] == amounts(atomic)


# Where atomic mode can't work


def problem(app: Flask, path: str = "/x") -> str:
    """What the first request of an app is told."""
    app.testing = True
    with pytest.raises(ConfigurationError) as caught:
        app.test_client().get(path)
    with pytest.raises(ConfigurationError):
        app.test_client().post(path, headers={"Idempotency-Key": new_key(), "X-Tenant": "acme"})
    return str(caught.value)


@pytest.mark.parametrize("where", ["decorator", "configuration", "protect"])
@pytest.mark.scenario(21)
def test_a_table_on_another_bind(tmp_path: Path, where: str) -> None:
    """A table on a bind of its own can't be in the session's transaction: an error before any request is served."""
    app, runs = Flask("shop"), []
    app.config.update(
        SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path / 'one.sqlite'}",
        SQLALCHEMY_BINDS={"keys": f"sqlite:///{tmp_path / 'two.sqlite'}"},
        IDEMPOTENCY_BIND_KEY="keys",
        IDEMPOTENCY_ATOMIC=where == "configuration",
    )
    db = SQLAlchemy(app)
    idempotency = Idempotency(app, db)

    def view() -> str:
        runs.append("x")
        return "x"

    if where == "protect":
        idempotency.protect(app, atomic=True)
    guarded = (
        view if where == "protect" else idempotency.required(**({"atomic": True} if where == "decorator" else {}))(view)
    )
    app.add_url_rule("/x", "x", guarded, methods=["GET", "POST"])
    assert "IDEMPOTENCY_BIND_KEY" in problem(app)
    assert [] == runs
    close(app)


def test_a_plain_engine(sqlite_url: str) -> None:
    """An engine without a session has no work that could be part of the operation: an error before any request."""

    engine = sa.create_engine(sqlite_url)
    app = Flask("shop")
    idempotency = Idempotency(app, engine)
    app.add_url_rule("/x", "x", idempotency.required(atomic=True)(lambda: "x"), methods=["POST"])
    assert "db.session" in problem(app)
    engine.dispose()


def test_a_session_that_is_no_scoped_one(database_url: str) -> None:
    """An object with engines by name and one plain session for each context serves, as Flask-SQLAlchemy-Lite's does."""
    app, engine = Flask("shop"), sa.create_engine(database_url)
    sessions: list[Session] = []

    class Lite:
        engines: ClassVar = {"default": engine}
        metadata = sa.MetaData()

        @property
        def session(self) -> Session:
            if "session" not in g:
                g.session = Session(engine)
                sessions.append(g.session)
            return g.session  # type: ignore[no-any-return]

    db = Lite()
    charges = sa.Table("charge", db.metadata, sa.Column("amount", sa.Integer))
    app.config["IDEMPOTENCY_SCOPE"] = "acme"
    idempotency = Idempotency(app, db)
    app.teardown_appcontext(lambda error: g.session.close() if "session" in g else None)

    @app.post("/x")
    @idempotency.required(atomic=True)
    def view() -> tuple[str, int]:
        db.session.execute(sa.insert(charges).values(amount=1))
        db.session.commit()
        return "x", int(request.headers["Status"])

    db.metadata.create_all(engine)
    key = new_key()
    for status in ("503", "201", "201"):
        answer = app.test_client().post("/x", headers={"Idempotency-Key": key, "Status": status})
        assert int(status) == answer.status_code
    assert "true" == answer.headers["Idempotent-Replay"]
    with engine.connect() as connection:
        assert [(1,)] == list(connection.execute(sa.select(charges)))
    assert not any("get_bind" in vars(one) for one in sessions)
    engine.dispose()


def test_no_further_app_context(light: Shop) -> None:
    """An atomic request pushes no app context of its own: what the app does at a context's end is done once."""
    ends: list[object] = []
    light.app.teardown_appcontext(ends.append)
    guard(light, lambda: "x", atomic=True)
    send(light, new_key())  # the first one looks for the engine
    ends.clear()
    assert [200, 200] == [send(light, key).status_code for key in (new_key(), new_key())]
    assert [None, None] == ends
