"""The table through Flask-Migrate, as users' projects do it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flask_migrate
import pytest
import sqlalchemy as sa
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency
from flask_idempotency.counting import write_counts
from flask_idempotency.errors import StoreError
from flask_idempotency.store.table import COUNTS, build_table
from tests.support.apps import TIMES, close, new_key
from tests.support.mariadb import MariaDB, earlier_table

# Flask-Migrate's own template still asks Flask-SQLAlchemy in the old way first.
pytestmark = pytest.mark.filterwarnings("ignore:'get_engine' is deprecated:DeprecationWarning")

PAGE = Path(__file__).parents[2] / "docs/explanation/sizing.md"
CONVENTION = {
    "ix": "index_of_%(table_name)s_%(column_0_N_name)s",
    "uq": "unique_%(table_name)s_%(column_0_name)s",
    "pk": "key_of_%(table_name)s",
}


class Project:
    """A project with an app and a folder of migrations."""

    def __init__(
        self,
        url: str,
        folder: Path,
        metadata: sa.MetaData | None = None,
        migrate: flask_migrate.Migrate | None = None,
        **config: object,
    ) -> None:
        self.app = Flask("project")
        self.app.config.update(SQLALCHEMY_DATABASE_URI=url, **config)
        self.db = SQLAlchemy(self.app, metadata=metadata)
        self.idempotency = Idempotency(self.app, self.db)
        self.folder = folder / "migrations"
        (migrate or flask_migrate.Migrate()).init_app(self.app, self.db, directory=str(self.folder))

        @self.app.post("/orders")
        @self.idempotency.required(scope="tests")
        def order() -> tuple[str, int]:
            return "done", 201

    def init(self, multidb: bool = False) -> None:
        with self.app.app_context():
            flask_migrate.init(multidb=multidb)
        # Its logging set-up would switch off the loggers that other tests of this process look at.
        env = self.folder / "env.py"
        text = env.read_text()
        assert "fileConfig(config.config_file_name)" in text
        env.write_text(text.replace("fileConfig(config.config_file_name)", ""))

    def migrate(self) -> list[Path]:
        """Run ``flask db migrate`` and say which versions there are."""
        with self.app.app_context():
            flask_migrate.migrate()
        return sorted((self.folder / "versions").glob("*.py"))

    def upgrade(self) -> None:
        with self.app.app_context():
            flask_migrate.upgrade()

    def downgrade(self) -> None:
        with self.app.app_context():
            flask_migrate.downgrade(revision="base")

    def indexes(self, bind: str | None = None, schema: str | None = None) -> dict[str | None, tuple[list[str], bool]]:
        """The indexes of the table in the database, by name: their columns, and whether they are unique."""
        with self.app.app_context():
            found = sa.inspect(self.db.engines[bind]).get_indexes("idempotency_keys", schema=schema)
        return {one["name"]: ([str(c) for c in one["column_names"]], bool(one["unique"])) for one in found}

    def columns(self) -> list[str]:
        """The columns of the table in the database, in their order."""
        with self.app.app_context():
            return [one["name"] for one in sa.inspect(self.db.engine).get_columns("idempotency_keys")]

    def tables(self, bind: str | None = None, schema: str | None = None) -> list[str]:
        with self.app.app_context():
            return sa.inspect(self.db.engines[bind]).get_table_names(schema=schema)


@pytest.fixture
def projects() -> Iterator[list[Project]]:
    """Projects whose connections are given back at the end."""
    made: list[Project] = []
    yield made
    for one in made:
        close(one.app)


@pytest.mark.scenario(67)
def test_one_migration_then_none(database_url: str, tmp_path: Path, projects: list[Project]) -> None:
    """The first migration creates the table, the second finds nothing to do, and downgrade takes it away."""
    projects.append(Project(database_url, tmp_path))
    check_one_migration_then_none(projects[0])


@pytest.mark.scenario(67)
@pytest.mark.parametrize("dialect", ["mysql", "mariadb"])
@pytest.mark.parametrize("collation", ["latin1_swedish_ci", "utf8mb4_general_ci"])
def test_one_migration_on_mariadb(
    mariadb_server: MariaDB, dialect: str, collation: str, tmp_path: Path, projects: list[Project]
) -> None:
    """So it is on MariaDB, by either dialect of SQLAlchemy, whatever the database's default collation is."""
    with mariadb_server.database(collation.partition("_")[0], collation) as name:
        projects.append(Project(mariadb_server.url(name, dialect), tmp_path))
        check_one_migration_then_none(projects[0])


@pytest.mark.scenario(57, 67)
def test_a_table_of_before_on_mariadb(
    mariadb_server: MariaDB, mariadb_database: str, tmp_path: Path, projects: list[Project]
) -> None:
    """A table of version 0.2 gets exact keys by a migration, which keeps its rows; times are altered by hand."""
    mariadb_server.execute(earlier_table("utf8mb4_general_ci"), database=mariadb_database)
    project = Project(mariadb_server.url(mariadb_database), tmp_path)
    projects.append(project)
    client = project.app.test_client()
    assert 201 == client.post("/orders", headers={"Idempotency-Key": "key-0000000a"}).status_code
    assert 503 == client.post("/orders", headers={"Idempotency-Key": "KEY-0000000A"}).status_code
    project.init()
    (script,) = project.migrate()
    text = script.read_text()
    found = set(re.findall(r"batch_op\.alter_column\('(\w+)'", text))
    assert {"scope", "key", "response_body", "lock_timeout"} == found
    times = "".join(
        f"    op.alter_column('idempotency_keys', '{name}', type_=mysql.DATETIME(fsp=6),"
        f" nullable={name == 'completed_at'})\n"
        for name in TIMES
    )
    script.write_text(text.replace("def upgrade():\n", f"def upgrade():\n{times}"))
    project.upgrade()
    assert 1 == len(project.migrate())
    answers = [client.post("/orders", headers={"Idempotency-Key": key}) for key in ("key-0000000a", "KEY-0000000A")]
    assert [(201, "true"), (201, None)] == [(one.status_code, one.headers.get("Idempotent-Replay")) for one in answers]
    query = "SELECT count(*) FROM information_schema.columns WHERE table_schema = %s AND column_type = 'datetime(6)'"
    assert [(5,)] == mariadb_server.execute(query, mariadb_database)


def check_one_migration_then_none(project: Project) -> None:
    """There and back again."""
    project.init()
    assert 1 == len(project.migrate())
    project.upgrade()
    assert 1 == len(project.migrate())
    assert {(("scope", "key"), True), (("expires_at",), False)} == {
        (tuple(columns), unique) for columns, unique in project.indexes().values()
    }
    client = project.app.test_client()
    headers = {"Idempotency-Key": new_key()}
    assert [201, 201] == [client.post("/orders", headers=headers).status_code for _ in range(2)]
    project.downgrade()
    assert "idempotency_keys" not in project.tables()


@pytest.mark.scenario(67)
@pytest.mark.one_database
@pytest.mark.parametrize("deployed_first", [False, True])
def test_from_the_shape_of_0_4(
    database_url: str, tmp_path: Path, projects: list[Project], deployed_first: bool
) -> None:
    """One migration adds the columns of counts and keeps the rows, before or after requests of this release have come;
    then there is none; and its downgrade takes the columns away, and nothing else.
    """
    columns = [column.name for column in build_table(sa.MetaData()).c]
    project = Project(database_url, tmp_path, IDEMPOTENCY_COUNT_REPLAYS=True)
    projects.append(project)
    with project.app.app_context(), project.db.engine.begin() as connection:
        project.db.metadata.create_all(connection)
        for name in COUNTS:
            connection.execute(sa.text(f"ALTER TABLE idempotency_keys DROP COLUMN {name}"))
    client, headers = project.app.test_client(), {"Idempotency-Key": new_key()}
    assert 201 == client.post("/orders", headers=headers).status_code
    if deployed_first:
        assert "true" == client.post("/orders", headers=headers).headers["Idempotent-Replay"]
        with pytest.raises(StoreError, match="flask db upgrade"):
            write_counts(project.app)
    project.init()
    (script,) = project.migrate()
    added = r"add_column\(sa\.Column\('(\w+)', sa\.Integer\(\), nullable=True\)"
    assert list(COUNTS) == re.findall(added, script.read_text())
    project.upgrade()
    assert 1 == len(project.migrate())
    assert columns == project.columns()
    assert "true" == client.post("/orders", headers=headers).headers["Idempotent-Replay"]
    assert 1 == write_counts(project.app)
    project.downgrade()
    assert columns[: -len(COUNTS)] == project.columns()
    assert "true" == client.post("/orders", headers=headers).headers["Idempotent-Replay"]
    with pytest.raises(StoreError, match="flask db upgrade"):
        write_counts(project.app)  # and nothing is written at the process's exit, which would be said in the log


@pytest.mark.scenario(67)
def test_naming_convention(database_url: str, tmp_path: Path, projects: list[Project]) -> None:
    """Index names follow the metadata's naming convention, and the second migration is empty all the same."""
    project = Project(database_url, tmp_path, sa.MetaData(naming_convention=CONVENTION))
    projects.append(project)
    project.init()
    project.migrate()
    project.upgrade()
    assert 1 == len(project.migrate())
    assert {
        "index_of_idempotency_keys_scope_key": (["scope", "key"], True),
        "index_of_idempotency_keys_expires_at": (["expires_at"], False),
    } == project.indexes()


@pytest.mark.scenario(67)
def test_schema(postgres_url: str, tmp_path: Path, projects: list[Project]) -> None:
    """The table lives in the metadata's schema, and is found there by requests."""
    project = Project(postgres_url, tmp_path, sa.MetaData(schema="shop"))
    projects.append(project)
    with project.app.app_context(), project.db.engine.begin() as connection:
        connection.execute(sa.text("CREATE SCHEMA shop"))
    with project.app.app_context():
        project.db.create_all()
    assert ["idempotency_keys"] == project.tables(schema="shop")
    headers = {"Idempotency-Key": new_key()}
    answers = [project.app.test_client().post("/orders", headers=headers) for _ in range(2)]
    assert [None, "true"] == [one.headers.get("Idempotent-Replay") for one in answers]


def test_bind_key(sqlite_url: str, postgres_url: str, tmp_path: Path, projects: list[Project]) -> None:
    """With a bind key the table is created, migrated and used on that bind alone."""
    config = {"SQLALCHEMY_BINDS": {"keys": postgres_url}, "IDEMPOTENCY_BIND_KEY": "keys"}
    project = Project(sqlite_url, tmp_path, **config)
    projects.append(project)
    project.init(multidb=True)
    project.migrate()
    project.upgrade()
    assert "idempotency_keys" not in project.tables()
    assert "idempotency_keys" in project.tables(bind="keys")
    headers = {"Idempotency-Key": new_key()}
    answers = [project.app.test_client().post("/orders", headers=headers) for _ in range(2)]
    assert [None, "true"] == [one.headers.get("Idempotent-Replay") for one in answers]


@pytest.mark.parametrize("left_out", [False, True])
def test_partitions(postgres_url: str, tmp_path: Path, projects: list[Project], left_out: bool) -> None:
    """Partitions made as the docs show are left out of later migrations by the docs' function, and not without it."""
    shown: dict[str, Any] = {}
    page = PAGE.read_text()
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S):
        exec(code, shown)
    project = Project(postgres_url, tmp_path, migrate=shown["migrate"] if left_out else None)
    projects.append(project)
    project.init()
    project.migrate()
    project.upgrade()
    (ddl,) = re.findall(r"<!-- partitions: .*? -->\n```postgresql\n(.*?)^```$", page, re.M | re.S)
    with project.app.app_context(), project.db.engine.begin() as connection:
        connection.execute(sa.text(ddl))
    texts = [version.read_text() for version in project.migrate()]
    assert len(texts) == (1 if left_out else 2)
    dropped = re.findall(r"drop_\w+\([^']*'((?:idempotency_keys_p|ix_idempotency_keys_id)\d*)'", "".join(texts))
    assert len(dropped) == (0 if left_out else 16 + 1)


@pytest.mark.scenario(68)
def test_migration_skipped(
    database_url: str, tmp_path: Path, projects: list[Project], caplog: pytest.LogCaptureFixture
) -> None:
    """Without the table a guarded request gets 503 and does not run, and the log says to run the migration."""
    project = Project(database_url, tmp_path)
    projects.append(project)
    answer = project.app.test_client().post("/orders", headers={"Idempotency-Key": new_key()})
    assert 503 == answer.status_code
    assert "2" == answer.headers["Retry-After"]
    assert "flask db upgrade" in caplog.text
