"""Flask-SQLAlchemy-Lite in the place of Flask-SQLAlchemy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flask_migrate
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from flask import Flask, request
from flask_sqlalchemy_lite import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from flask_idempotency import Idempotency
from flask_idempotency.errors import ConfigurationError
from flask_idempotency.state import get_state
from tests.neighbours.five import AFTER_COMMIT, BEFORE_COMMIT, Broken, Case, Work, sender, the_five
from tests.support.apps import new_key

MODES = pytest.mark.parametrize("atomic", [False, True], ids=["default", "atomic"])
DATABASES = pytest.mark.parametrize("url", ["sqlite_url", "postgres_url", "psycopg_url"], indirect=True)


class Shop:
    """An app on Flask-SQLAlchemy-Lite with a guarded route, its models, and its work.

    :ivar db: the neighbour's object.
    """

    def __init__(self, engines: dict[str, Any], *, model: Any = None, late: bool = False, **config: Any) -> None:
        class Base(DeclarativeBase):
            pass

        class Charge(Base):
            __tablename__ = "charge"
            id: Mapped[int] = mapped_column(primary_key=True)
            amount: Mapped[int]

        class Database(SQLAlchemy):
            metadata = (model or Charge).metadata

        self.app = Flask("lite")
        self.app.config.update(SQLALCHEMY_ENGINES=engines, SECRET_KEY="a secret of tests", **config)
        self.metadata, self.Charge = Database.metadata, model or Charge
        self.db = Database(None if late else self.app)
        self.idempotency = Idempotency(self.app, self.db if late else None)
        if late:
            self.db.init_app(self.app)
        self.idempotency.scope_loader(lambda: request.headers.get("X-Tenant"))
        self.work = Work(self.db, self.Charge)

    def create_all(self) -> None:
        """Make all tables, as an app does."""
        with self.app.app_context():
            self.metadata.create_all(self.db.engine)

    def guard(self, path: str, view: Callable[..., Any], **options: Any) -> None:
        """Add a guarded view."""
        guarded = self.idempotency.required(**options)(view)
        self.app.add_url_rule(path, path, guarded, methods=["POST"])

    def post(self, key: str, path: str = "/x", amount: int = 100) -> Any:
        """A request of the tenant ``acme``."""
        headers = {"Idempotency-Key": key, "X-Tenant": "acme"}
        return self.app.test_client().post(path, json={"amount": amount}, headers=headers)

    def select(self, table: sa.Table, engine: str = "default") -> list[Any]:
        """What is committed in a table, seen from a connection of its own."""
        with self.app.app_context(), self.db.get_engine(engine).connect() as connection:
            return list(connection.execute(sa.select(table)))

    @property
    def keys(self) -> sa.Table:
        """The table of keys."""
        store: Any = get_state(self.app).store
        return store.table  # type: ignore[no-any-return]

    def close(self) -> None:
        """Give back all connections."""
        store: Any = get_state(self.app).store
        store.close()
        with self.app.app_context():
            for engine in self.db.engines.values():
                engine.dispose()


Make = Callable[..., Shop]


@pytest.fixture
def make() -> Iterator[Make]:
    """A function that makes shops; their connections are given back at the end."""
    shops: list[Shop] = []

    def build(*engines: str, **options: Any) -> Shop:
        names = dict(zip(("default", "other"), engines, strict=False))
        shops.append(Shop(names, **options))
        return shops[-1]

    yield build
    for shop in shops:
        shop.close()


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """SQLAlchemy's URL of a fresh database, of the kind that the test names."""
    return str(request.getfixturevalue(request.param))


@pytest.mark.one_database
@DATABASES
@MODES
@pytest.mark.parametrize("late", [False, True], ids=["found on the app", "passed, initialised later"])
def test_the_five(make: Make, url: str, atomic: bool, late: bool) -> None:
    """The five hold in both modes, whichever of the two is initialised first; the table is in the app's metadata."""
    shop = make(url, late=late)
    shop.create_all()
    shop.guard("/charges", shop.work.asked, atomic=atomic)
    work, keys = shop.work, shop.keys
    assert keys is shop.metadata.tables["idempotency_keys"]
    the_five(
        Case(
            runs=lambda: work.runs,
            fail=work.fail,
            rows=lambda: shop.select(keys),
            good=sender(shop.app, {"X-Tenant": "acme"}),
            other=sender(shop.app, {"X-Tenant": "emca"}),
            refused=[sender(shop.app)],
            atomic=atomic,
        )
    )


@pytest.mark.one_database
@DATABASES
def test_atomic_leaves_all_or_nothing(make: Make, url: str) -> None:
    """What an atomic view has committed goes with a failure, and stays with the record."""
    shop = make(url)
    shop.create_all()
    shop.guard("/x", shop.work.asked, atomic=True)
    key = new_key()
    shop.work.fail(AFTER_COMMIT)
    assert 500 == shop.post(key).status_code
    assert ([], []) == (shop.select(shop.Charge.__table__), shop.select(shop.keys))
    assert [201, 201] == [shop.post(key).status_code for _ in range(2)]
    assert (1, 1) == (len(shop.select(shop.Charge.__table__)), len(shop.select(shop.keys)))


def test_in_memory(make: Make) -> None:
    """On SQLite in memory, where the neighbour shares one connection, a retry gets the answer, in both modes."""
    shop = make("sqlite://")
    shop.create_all()
    modes = {"/default": False, "/atomic": True}
    for path, atomic in modes.items():
        shop.guard(path, shop.work.asked, atomic=atomic)
    for path in modes:
        key = new_key()
        answers = [shop.post(key, path) for _ in range(2)]
        assert [None, "true"] == [one.headers.get("Idempotent-Replay") for one in answers]


def test_metadata_of_its_own(sqlite_url: str) -> None:
    """Where the neighbour's object has no metadata, the table has metadata of its own, from which it is created."""
    app = Flask("lite")
    app.config.update(SQLALCHEMY_ENGINES={"default": sqlite_url}, IDEMPOTENCY_SCOPE="acme")
    db = SQLAlchemy(app)
    idempotency = Idempotency(app)
    app.post("/x")(idempotency.required(lambda: "x"))
    store: Any = get_state(app).store
    with app.app_context():
        store.table.metadata.create_all(db.engine)
    headers = {"Idempotency-Key": new_key()}
    answers = [app.test_client().post("/x", headers=headers) for _ in range(2)]
    assert [None, "true"] == [one.headers.get("Idempotent-Replay") for one in answers]
    store.close()
    with app.app_context():
        db.engine.dispose()


def test_one_base_and_several_apps(make: Make, sqlite_url: str) -> None:
    """Apps that a factory makes with one declarative base share the table in its metadata."""

    class Base(DeclarativeBase):
        pass

    class Charge(Base):
        __tablename__ = "charge"
        id: Mapped[int] = mapped_column(primary_key=True)
        amount: Mapped[int]

    shops = [make(sqlite_url, model=Charge) for _ in range(2)]
    assert shops[0].keys is shops[1].keys
    shops[0].create_all()
    key = new_key()
    for shop in shops:
        shop.guard("/x", lambda: "x")
    assert [None, "true"] == [shop.post(key).headers.get("Idempotent-Replay") for shop in shops]


def test_the_database_is_as_the_metadata_says(make: Make, sqlite_url: str) -> None:
    """Alembic, however it is run, finds nothing to do after create_all()."""
    shop = make(sqlite_url)
    shop.create_all()
    with shop.app.app_context(), shop.db.engine.connect() as connection:
        assert [] == compare_metadata(MigrationContext.configure(connection), shop.metadata)


@pytest.mark.scenario(67)
def test_flask_migrate(make: Make, sqlite_url: str, tmp_path: Path) -> None:
    """Flask-Migrate with the neighbour's object makes the table in one migration, and finds nothing to do after it."""
    shop = make(sqlite_url)
    folder = tmp_path / "migrations"
    flask_migrate.Migrate(shop.app, shop.db, directory=str(folder))
    with shop.app.app_context():
        flask_migrate.init()
        env = folder / "env.py"  # whose logging set-up would switch off the loggers of other tests
        env.write_text(env.read_text().replace("fileConfig(config.config_file_name)", ""))
        flask_migrate.migrate()
        flask_migrate.upgrade()
        flask_migrate.migrate()
    assert 1 == len(list((folder / "versions").glob("*.py")))
    assert [] == shop.select(shop.keys)


def test_another_engine(make: Make, sqlite_url: str, tmp_path: Path) -> None:
    """``IDEMPOTENCY_BIND_KEY`` names one of several engines: the table is there, with metadata of its own."""
    shop = make(sqlite_url, f"sqlite:///{tmp_path / 'other.sqlite'}", IDEMPOTENCY_BIND_KEY="other")
    shop.create_all()
    with shop.app.app_context():
        assert ["charge"] == sa.inspect(shop.db.engine).get_table_names()
        shop.keys.metadata.create_all(shop.db.get_engine("other"))
    shop.guard("/x", shop.work.asked)
    key = new_key()
    assert [201, 201] == [shop.post(key).status_code for _ in range(2)]
    assert (1, 1) == (len(shop.select(shop.keys, "other")), shop.work.runs)


def test_another_engine_and_atomic(make: Make, sqlite_url: str, tmp_path: Path) -> None:
    """A table on another engine than the session's can't be atomic with it: an error before the first request."""
    shop = make(sqlite_url, f"sqlite:///{tmp_path / 'other.sqlite'}", IDEMPOTENCY_BIND_KEY="other", TESTING=True)
    shop.guard("/x", shop.work.asked, atomic=True)
    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_BIND_KEY"):
        shop.post(new_key())


def test_an_engine_that_is_missing(make: Make, sqlite_url: str) -> None:
    """A bind key without an engine of that name is an error that names it."""
    shop = make(sqlite_url, IDEMPOTENCY_BIND_KEY="keys", TESTING=True)
    shop.guard("/x", shop.work.asked)
    with pytest.raises(ConfigurationError, match="no bind 'keys'"):
        shop.post(new_key())


def test_work_on_other_engines(make: Make, sqlite_url: str, tmp_path: Path) -> None:
    """In an atomic view a named session, and a model of another engine, go their own ways, as other binds do."""
    shop = make(sqlite_url, f"sqlite:///{tmp_path / 'other.sqlite'}")
    shop.create_all()

    class Base(DeclarativeBase):
        pass

    class Note(Base):
        __tablename__ = "note"
        id: Mapped[int] = mapped_column(primary_key=True)

    with shop.app.app_context():
        Base.metadata.create_all(shop.db.get_engine("other"))
        shop.db.sessionmaker.configure(binds={Note: shop.db.get_engine("other")})

    def view() -> Any:
        for session in (shop.db.session, shop.db.get_session("other")):
            session.add(Note())
            session.commit()
        return shop.work.asked()

    shop.guard("/x", view, atomic=True)
    key = new_key()
    shop.work.fail(BEFORE_COMMIT)
    assert [500, 201, 201] == [shop.post(key).status_code for _ in range(3)]
    assert (1, 4) == (len(shop.select(shop.Charge.__table__)), len(shop.select(Note.__table__, "other")))


@MODES
@pytest.mark.parametrize("inner_atomic", [False, True], ids=["default within", "atomic within"])
def test_a_request_within_a_view(make: Make, postgres_url: str, atomic: bool, inner_atomic: bool) -> None:
    """A guarded request that a view makes in an app context of its own has a session of its own, and goes its way."""
    shop = make(postgres_url)
    shop.create_all()
    inner = new_key()

    def outer() -> Any:
        shop.db.session.add(shop.Charge(amount=1))
        shop.db.session.flush()
        with shop.app.app_context():
            assert 201 == shop.post(inner, "/inner").status_code
        shop.db.session.commit()
        return "x", 201

    shop.guard("/inner", shop.work.asked, atomic=inner_atomic)
    shop.guard("/outer", outer, atomic=atomic)
    key = new_key()
    assert [201, 201] == [shop.post(key, "/outer").status_code for _ in range(2)]
    assert [100, 1] == sorted((row.amount for row in shop.select(shop.Charge.__table__)), reverse=True)


def test_a_streamed_answer(make: Make, sqlite_url: str) -> None:
    """The session's rows can be streamed, and the replay has them all."""
    shop = make(sqlite_url)
    shop.create_all()
    shop.guard("/x", lambda: (str(number) for number in range(3)))
    key = new_key()
    assert ["012", "012"] == [shop.post(key).text for _ in range(2)]


@pytest.mark.parametrize("where", [None, BEFORE_COMMIT, AFTER_COMMIT])
def test_work_in_an_async_session(make: Make, psycopg_url: str, where: str | None) -> None:
    """What a coroutine commits with the neighbour's async session counts: a failure after that is held."""
    shop = make(psycopg_url, SQLALCHEMY_ASYNC_ENGINES={"default": psycopg_url})
    shop.create_all()
    fails = [where]

    async def view() -> Any:
        failing = fails.pop() if fails else None
        async with shop.db.async_sessionmaker() as session:
            if failing == BEFORE_COMMIT:
                raise Broken
            session.add(shop.Charge(amount=100))
            await session.commit()
        await shop.db.async_engine.dispose()
        if failing == AFTER_COMMIT:
            raise Broken
        return {"made": True}, 201

    shop.guard("/x", view)
    key = new_key()
    expected = {None: [201, 201], BEFORE_COMMIT: [500, 201], AFTER_COMMIT: [500, 409]}[where]
    assert expected == [shop.post(key).status_code for _ in range(2)]
    assert 1 == len(shop.select(shop.Charge.__table__))


def test_async_engines_alone() -> None:
    """Without an engine that is not async the extension has no database, and the error says what to add."""
    app = Flask("lite")
    app.config.update(TESTING=True, SQLALCHEMY_ASYNC_ENGINES={"default": "postgresql+psycopg://"})
    SQLAlchemy(app)
    idempotency = Idempotency(app)
    app.post("/x")(idempotency.required(lambda: "x"))
    with pytest.raises(ConfigurationError, match=r'SQLALCHEMY_ENGINES\["default"\]'):
        app.test_client().post("/x")
