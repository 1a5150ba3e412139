"""What the words of SQL statements tell about what they do."""

from __future__ import annotations

import pytest

from flask_idempotency.statements import parts

READS = [
    "SELECT * FROM charge",
    "select 1",
    "  \n\t(SELECT 1)",
    "-- INSERT\nSELECT 1",
    "/* a comment * of ** two\nlines */ /**/ SELECT 1",
    "SELECT * FROM charge FOR UPDATE",
    "SELECT deleted, updated, insert_date FROM charge",
    "SELECT pointo FROM charge",
    "VALUES (1)",
    "TABLE charge",
    "SHOW timezone",
    "RESET ALL",
    "PRAGMA foreign_keys = ON",
    "SAVEPOINT sa_savepoint_1",
    "ROLLBACK TO SAVEPOINT sa_savepoint_1",
    "rollback work to sa_savepoint_1",
    "BEGIN IMMEDIATE",
    "START TRANSACTION",
    "DECLARE c CURSOR FOR SELECT 1",
    "FETCH 10 FROM c",
    "CLOSE c",
    "LOCK TABLE charge",
    "DISCARD ALL",
    "DESCRIBE charge",
    "EXPLAIN SELECT 1",
    "EXPLAIN DELETE FROM charge",
    "EXPLAIN ANALYZE SELECT 1",
    "WITH a AS (SELECT 1) SELECT * FROM a",
    "WITH a AS (SELECT * FROM charge FOR UPDATE) SELECT * FROM a",
    "WITH a AS (SELECT * FROM charge FOR NO KEY  UPDATE) SELECT * FROM a",
    "WITH a AS (SELECT * FROM charge WHERE action = 'delete') SELECT \"update\", `merge`, [insert], a.delete FROM a",
    "PREPARE one AS INSERT INTO charge VALUES (1)",
    "SELECT 1;",
    "SELECT 1; ; SELECT 2",
    "",
    " -- nothing",
]
WRITES = {
    "INSERT INTO charge (amount) VALUES (4242)": "INSERT INTO charge",
    'insert\ninto  "order" (amount) VALUES (4242)': 'insert into "order"',
    "INSERT OR IGNORE INTO charge VALUES (4242)": "INSERT OR IGNORE INTO charge",
    "UPDATE charge SET card = 4242": "UPDATE charge",
    "DELETE FROM shop.charge WHERE card = '4242'": "DELETE FROM shop.charge",
    "MERGE INTO charge USING a ON true": "MERGE INTO charge",
    "/* 4242 */ INSERT INTO charge VALUES (4242)": "INSERT INTO charge",
    "CREATE TABLE charge (id integer)": "CREATE TABLE",
    "CALL settle('4242')": "CALL settle",
    "CALL '4242'": "CALL",
    "TRUNCATE charge": "TRUNCATE charge",
    "COPY charge FROM STDIN": "COPY charge",
    "EXPLAIN ANALYZE DELETE FROM charge": "EXPLAIN ANALYZE",
    "explain (analyse) update charge SET card = 4242": "explain",
    "SELECT * INTO copy FROM charge": "SELECT",
    "SELECT id Into copy FROM charge": "SELECT id",
    "WITH a AS (SELECT 1) INSERT INTO charge SELECT * FROM a": "WITH a",
    "WITH a AS (INSERT INTO charge VALUES (1) RETURNING id) SELECT * FROM a": "WITH a",
    "(WITH a AS (UPDATE charge SET amount = 1 RETURNING id) SELECT * FROM a FOR UPDATE)": "WITH a",
    "WITH a AS (DELETE FROM charge RETURNING id) SELECT * FROM a": "WITH a",
    "WITH a AS (SELECT 1) MERGE INTO charge USING a ON true": "WITH a",
    "WITH a AS (SELECT 1) SELECT * INTO copy FROM a": "WITH a",
    "SELECT 1; INSERT INTO charge VALUES (4242)": "INSERT INTO charge",
    "'4242'": "a statement",
}
ENDS = {
    "COMMIT": ["commit"],
    "end transaction": ["commit"],
    "PREPARE TRANSACTION 'one'": ["commit"],
    "ROLLBACK": ["rollback"],
    "ABORT": ["rollback"],
    "ROLLBACK AND CHAIN": ["rollback"],
    "RELEASE SAVEPOINT sa_savepoint_1": ["release"],
    "BEGIN; INSERT INTO charge VALUES (1); COMMIT;": ["write", "commit"],
}
SETTINGS = ["SET TIME ZONE 'UTC'", "set local app.tenant = 'a'", "SELECT set_config('app.tenant', 'a', true)"]


@pytest.mark.parametrize("statement", READS)
def test_reads(statement: str) -> None:
    """What is known to read, and what only sets something up, has no effect."""
    assert [] == parts(statement)


@pytest.mark.parametrize("statement", SETTINGS)
def test_settings(statement: str) -> None:
    """What makes a setting, which a rollback would undo, writes nothing and is told from what reads."""
    assert ["setting"] == [part.effect for part in parts(statement)]


@pytest.mark.parametrize("statement", WRITES)
def test_writes(statement: str) -> None:
    """What is not known to read writes, and is called by its first words, among which are no values."""
    assert [("write", WRITES[statement])] == [(part.effect, part.words) for part in parts(statement)]


@pytest.mark.parametrize("statement", ENDS)
def test_ends(statement: str) -> None:
    """A transaction's end by hand is told from a savepoint's, also among several statements."""
    assert ENDS[statement] == [part.effect for part in parts(statement)]


UNREACHED = [
    "IF 1 = 1 THEN INSERT INTO charge VALUES (1); ELSE SET @no = 1; ROLLBACK; END IF",
    "BEGIN NOT ATOMIC INSERT INTO charge VALUES (1); IF 1 = 0 THEN ROLLBACK; END IF; END",
    "INSERT INTO note (text) VALUES ('BEGIN; ROLLBACK')",
    "INSERT INTO charge VALUES (1); ROLLBACK",
]


@pytest.mark.parametrize("implicit", [True, False])
@pytest.mark.parametrize("statement", UNREACHED)
def test_a_rollback_behind_a_semicolon(statement: str, implicit: bool) -> None:
    """A rollback that may be a part of a block, or of a text, drops no write; at the beginning it is one."""
    effects = [part.effect for part in parts(statement, implicit)]
    assert "write" in effects
    assert "rollback" not in effects
    assert ["rollback", "write"] == [part.effect for part in parts("ROLLBACK; DELETE FROM charge", implicit)]


def test_the_words_of_a_statement_with_settings() -> None:
    """A statement with settings of its own is called as without them."""
    (part,) = parts("SET STATEMENT max_statement_time=5 FOR INSERT INTO charge VALUES (4242)", implicit=True)
    assert "INSERT INTO charge" == part.words


@pytest.mark.parametrize("text", ["\\'" * 50_000, "/*" * 50_000, '"' * 50_001, "FOR SET STATEMENT " * 500])
def test_no_setting_takes_long(text: str) -> None:
    """A setting, whatever is in it, is passed in linear time: the test ends."""
    assert parts(f"SET STATEMENT {text}", implicit=True)


def test_long_names_are_cut() -> None:
    """The words for a log are no longer than a line."""
    (part,) = parts(f"UPDATE {'x' * 1000} SET amount = 1")
    assert 100 == len(part.words)


@pytest.mark.parametrize(
    "text", ["-- " * 50_000, "/*" * 50_000, "/**/" * 50_000 + "1", " (" * 50_000, "(--\n" * 50_000]
)
def test_no_text_takes_long(text: str) -> None:
    """A beginning of blanks, comments and parentheses, however long, is passed in linear time: the test ends."""
    assert len(parts(text)) in (0, 1)


IMPLICIT = {
    "CREATE TABLE charge (id integer)": ["write", "commit"],
    "/* 4242 */ truncate charge": ["write", "commit"],
    "CALL settle('4242')": ["write", "commit"],
    "EXECUTE one": ["write", "commit"],
    "DROP INDEX one ON charge": ["write", "commit"],
    "BEGIN NOT ATOMIC INSERT INTO charge VALUES (1)": ["write", "commit"],
    "CREATE TEMPORARY TABLE charge (id integer)": ["write"],
    "CREATE TEMPORARY SEQUENCE numbers": ["write", "commit"],
    "create or replace temporary table charge (id integer)": ["write"],
    "DROP TEMPORARY TABLE charge": ["write"],
    "BEGIN": ["commit"],
    "begin work": ["commit"],
    "BEGIN INSERT INTO charge VALUES (1)": ["write", "commit"],
    "BEGIN /* a block */ NOT ATOMIC INSERT INTO charge VALUES (1)": ["write", "commit"],
    "DECLARE amount NUMBER": ["write", "commit"],
    "IF 1 = 1 THEN INSERT INTO charge VALUES (1)": ["write", "commit"],
    "a: LOOP INSERT INTO charge VALUES (1)": ["write", "commit"],
    "CHECK TABLE charge": ["write", "commit"],
    "CACHE INDEX charge IN other": ["write", "commit"],
    "LOAD INDEX INTO CACHE charge": ["write", "commit"],
    "RESET QUERY CACHE": ["write", "commit"],
    "BACKUP STAGE START": ["write", "commit"],
    "what no version knows yet": ["write", "commit"],
    "# a comment\nDROP TABLE charge": ["write", "commit"],
    "# a comment\nSELECT 1": [],
    "# nothing": [],
    "/*!40000 DROP TABLE charge */": ["write", "commit"],
    "CHECKSUM TABLE charge": [],
    "HANDLER charge OPEN": [],
    "KILL QUERY 1": [],
    "DESCRIBE charge": [],
    "DESC ANALYZE UPDATE charge SET amount = 1": ["write"],
    "DO book(1)": ["write"],
    "START TRANSACTION": ["commit"],
    "LOCK TABLES charge WRITE": ["commit"],
    "UNLOCK TABLES": ["commit"],
    "SET autocommit = 1": ["commit"],
    "set session AUTOCOMMIT=1": ["commit"],
    "SET autocommit = book(1)": ["write", "commit"],
    "SET NAMES utf8mb4": ["setting"],
    "SET CHARACTER SET utf8mb4": ["setting"],
    "SET @amount := 1, @password = 2": ["setting"],
    "SET SESSION sql_mode = ''": ["setting"],
    "SET @@global.read_only = 1": ["setting"],
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED": ["setting"],
    "SET ROLE NONE": ["setting"],
    "SET @amount = book(1)": ["write"],
    "SET @amount = (SELECT book (1))": ["write"],
    "SET PASSWORD = ''": ["write", "commit"],
    "SET @amount = 1, PASSWORD FOR shop = ''": ["write", "commit"],
    "SET DEFAULT ROLE NONE": ["write", "commit"],
    "SET STATEMENT max_statement_time=5 FOR SELECT 1": [],
    "SET STATEMENT max_statement_time=5 FOR INSERT INTO charge VALUES (1)": ["write"],
    "set /* FOR SELECT */ statement sql_mode=' FOR SELECT', a=\"FOR\" for UPDATE charge SET amount = 1": ["write"],
    "SET STATEMENT max_statement_time=5 FOR CREATE TABLE charge (id integer)": ["write", "commit"],
    "SET STATEMENT max_statement_time=book(1) FOR SELECT 1": ["write"],
    "SET STATEMENT max_statement_time=5 FOR SET STATEMENT a=1 FOR DELETE FROM charge": ["write"],
    "SET STATEMENT max_statement_time=5 FOR SET autocommit=1": ["commit"],
    "SET STATEMENT max_statement_time=5": ["write", "commit"],
    "XA BEGIN 'one'": [],
    "XA END 'one'": [],
    "XA RECOVER": [],
    "XA PREPARE 'one'": ["commit"],
    "xa commit 'one'": ["commit"],
    "XA ROLLBACK 'one'": ["rollback"],
    "XA something": ["write", "commit"],
    "INSERT INTO charge VALUES (1)": ["write"],
    "INSERT INTO charge VALUES (1) ON DUPLICATE KEY UPDATE amount = 2": ["write"],
    "REPLACE INTO `charge` VALUES (1)": ["write"],
    "LOAD DATA INFILE 'charges' INTO TABLE charge": ["write", "commit"],
    "SELECT `update` FROM `into_the_blue`": [],
    "SELECT * FROM charge LOCK IN SHARE MODE": [],
    "ROLLBACK TO SAVEPOINT sa_savepoint_1": [],
    "SAVEPOINT sa_savepoint_1": [],
    "COMMIT": ["commit"],
}


@pytest.mark.parametrize("statement", IMPLICIT)
def test_databases_that_commit_by_themselves(statement: str) -> None:
    """Where what changes a schema is committed at once, and commits what was before it, both are told."""
    assert IMPLICIT[statement] == [part.effect for part in parts(statement, implicit=True)]


@pytest.mark.parametrize("comment", ["/*! INSERT INTO charge VALUES (1) */", "/*M!100100 DELETE FROM charge */"])
def test_comments_that_are_carried_out(comment: str) -> None:
    """A comment that MySQL or MariaDB carries out is no comment, and may be anything."""
    assert ["write"] == [part.effect for part in parts(comment)]
    assert ["write", "commit"] == [part.effect for part in parts(comment, implicit=True)]
