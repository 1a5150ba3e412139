"""What an SQL statement does to its transaction, as far as its words tell."""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, TypeAlias

Effect: TypeAlias = Literal["write", "commit", "rollback", "release", "setting"]

#: Blanks, comments and opening parentheses, then the first word. It matches every text, so it never has to go back.
#: A comment that begins with an exclamation mark is one that MySQL and MariaDB carry out.
_BEGINNING: Final = re.compile(r"(?:[\s(]|--[^\n]*|/\*(?!M?!)(?:[^*]|\*(?!/))*\*/)*(\w*)")
#: What begins with one of these changes nothing.
_READS: Final = frozenset(
    {
        "BEGIN", "CLOSE", "DEALLOCATE", "DECLARE", "DISCARD", "FETCH", "LISTEN", "LOCK", "MOVE", "PRAGMA", "RESET",
        "SAVEPOINT", "SHOW", "START", "TABLE", "UNLISTEN", "UNLOCK", "USE", "VALUES"
    }
)  # fmt: skip
#: Here it takes a second look. All else writes.
_UNCLEAR: Final = frozenset(
    {
        "ABORT", "COMMIT", "DESC", "DESCRIBE", "END", "EXPLAIN", "PREPARE", "RELEASE", "ROLLBACK", "SELECT", "SET",
        "WITH"
    }
)  # fmt: skip
#: MySQL, MariaDB and Oracle commit by themselves before and after most of what they understand, and a list of it is
#: never complete: each version has more, and a block or a procedure may be anything. So what begins with none of these
#: counts as committed. These commit no more than on any other database,
_COMMITS_NOTHING: Final = frozenset(
    {
        "COMMIT", "DEALLOCATE", "DELETE", "DESC", "DESCRIBE", "DO", "EXPLAIN", "INSERT", "MERGE", "PREPARE", "RELEASE",
        "REPLACE", "ROLLBACK", "SAVEPOINT", "SELECT", "SHOW", "TABLE", "UPDATE", "USE", "VALUES", "WITH"
    }
)  # fmt: skip
#: these are of MySQL alone, and only read,
_MYSQL_READS: Final = frozenset({"CHECKSUM", "GET", "HANDLER", "HELP", "KILL", "RESIGNAL", "SIGNAL"})
#: these commit what was before, and write nothing,
_COMMITTING: Final = frozenset({"BEGIN", "LOCK", "START", "UNLOCK"})
#: unless a block begins;
_BLOCK: Final = re.compile(r"BEGIN\b(?!(?:\s+WORK)?\s*\Z)", re.IGNORECASE)
#: and a temporary table (a temporary sequence is another thing) is made and dropped within the transaction.
_TEMPORARY: Final = re.compile(r"(?:CREATE\s+(?:OR\s+REPLACE\s+)?|DROP\s+)TEMPORARY\s+TABLES?\b", re.IGNORECASE)
_XA: Final = re.compile(r"XA\s+(?:(COMMIT|PREPARE)|(ROLLBACK)|(?:START|BEGIN|END|RECOVER)\b)", re.IGNORECASE)
#: MySQL's comments, which can begin with a hash.
_MYSQL_BEGINNING: Final = re.compile(r"(?:[\s(]|--[^\n]*|#[^\n]*|/\*(?!M?!)(?:[^*]|\*(?!/))*\*/)*(\w*)")
#: Quoted names and values, and comments but those that are carried out. One without an end matches as well, so that
#: none is looked at twice.
_QUOTED: Final = re.compile(
    r"'(?:[^'\\]|\\.)*'?|\"(?:[^\"\\]|\\.)*\"?|`[^`]*`?|/\*(?!M?!)(?:[^*]|\*(?!/))*(?:\*/)?|(?:--\s|#)[^\n]*", re.DOTALL
)
#: What SET sets without a commit: variables, and the character set, role or transaction of the session.
_SETTING: Final = re.compile(
    r"SET\s+(?:(?:GLOBAL|SESSION|LOCAL|PERSIST(?:_ONLY)?)\s+)?"
    r"(?:@|(?:NAMES|CHARSET|CHARACTER\s+SET|TRANSACTION|ROLE|CONSTRAINTS?)\b|[\w.]+\s*:?=)",
    re.IGNORECASE,
)
_PASSWORD: Final = re.compile(r"(?<!@)\bPASSWORD\b", re.IGNORECASE)
_AUTOCOMMIT: Final = re.compile(r"\bautocommit\b", re.IGNORECASE)
#: MariaDB's settings for one statement, which follows. Further ones are passed over.
_SET_FOR: Final = re.compile(r"SET\s+STATEMENT\b.*?\bFOR\b(?![\s(]*SET\b)", re.IGNORECASE | re.DOTALL)
_INTO: Final = re.compile(r"\bINTO\b", re.IGNORECASE)
#: A lock of rows (FOR UPDATE), or else (in the group) a word that changes something and is no quoted name or value.
_CHANGE: Final = re.compile(
    r"\bFOR\s+(?:NO\s+KEY\s+)?UPDATE\b|(?<![\"'`.\[])\b(INSERT|UPDATE|DELETE|MERGE|INTO)\b", re.IGNORECASE
)
_ANALYZE: Final = re.compile(r"\bANALY[ZS]E\b", re.IGNORECASE)
_TO: Final = re.compile(r"\bTO\b", re.IGNORECASE)
_PREPARED: Final = re.compile(r"PREPARE\s+TRANSACTION\b", re.IGNORECASE)
_PIECEMEAL: Final = re.compile(r"(?:CALL|DO|EXEC|EXECUTE)\b", re.IGNORECASE)
#: The words that are no values: up to the table's name, or the first one and a second that is a plain name.
_WORDS: Final = re.compile(
    r"(?:(?:INSERT|REPLACE|MERGE)\s+(?:OR\s+\w+\s+|IGNORE\s+)?INTO|UPDATE|DELETE\s+FROM)\s+[\w.$\"`\[\]]+"
    r"|\w+(?:\s+[A-Za-z_]\w*)?",
    re.IGNORECASE,
)


class Part(NamedTuple):
    """One statement that is not known to read: what it does to the transaction, and its text from the first word."""

    effect: Effect
    text: str

    @property
    def words(self) -> str:
        """The first words, up to the table's name, for a log: no values are among them."""
        found = _WORDS.match(self.text)
        return " ".join(found[0].split())[:100] if found else "a statement"

    @property
    def piecemeal(self) -> bool:
        """Whether a part of its work may be committed although it fails: a procedure can commit."""
        return _PIECEMEAL.match(self.text) is not None


def parts(statement: str, implicit: bool = False) -> list[Part]:
    """What a statement, or several with semicolons between them, does to its transaction; empty if it only reads.

    A semicolon within a text, or within a block, ends a statement too: the rest of the text then looks like a write.
    So a rollback behind a semicolon may be none, or never be reached, and what was written before it stays written.

    :param implicit: the database commits by itself around what changes a schema, as MySQL, MariaDB and Oracle do.
    """
    if ";" not in statement:
        return _parts_of(statement, implicit)
    first, *others = statement.split(";")
    found = _parts_of(first, implicit)
    for text in others:
        found += [part for part in _parts_of(text, implicit) if part.effect != "rollback"]
    return found


def _parts_of(text: str, implicit: bool) -> list[Part]:
    match = (_MYSQL_BEGINNING if implicit else _BEGINNING).match(text)
    assert match is not None
    word, text = match[1].upper(), text[match.start(1) :]
    if not text:  # blanks and comments
        return []
    if implicit and word not in _COMMITS_NOTHING:
        return _set_parts(text) if word == "SET" else [Part(effect, text) for effect in _implicit_effects(word, text)]
    effect = _second_look(word, text) if word in _UNCLEAR else None if word in _READS else "write"
    return [] if effect is None else [Part(effect, text)]


def _implicit_effects(word: str, text: str) -> list[Effect]:
    """What a database that commits by itself makes of it."""
    if word in _MYSQL_READS:
        return []
    if word in _COMMITTING and not _BLOCK.match(text):
        return ["commit"]
    if word == "XA" and (match := _XA.match(text)):
        return ["commit"] if match[1] else ["rollback"] if match[2] else []
    return ["write"] if _TEMPORARY.match(text) else ["write", "commit"]


def _set_parts(text: str) -> list[Part]:
    """``SET``, where it may call a function that writes, commit what was before, and carry out another statement."""
    bare = _QUOTED.sub(lambda match: " " * len(match[0]), text)
    setting = _SET_FOR.match(bare)
    # Also where it is quoted: what is quoted depends on settings of the session, too.
    called = [Part("write", text)] if "(" in (text[: setting.end()] if setting else text) else []
    if setting:
        return called + _parts_of(text[setting.end() :], True)
    if _AUTOCOMMIT.search(text):
        return [*called, Part("commit", text)]
    if _PASSWORD.search(bare) or not _SETTING.match(bare):
        return [Part("write", text), Part("commit", text)]
    return called or [Part("setting", text)]


def _second_look(word: str, text: str) -> Effect | None:
    if word == "SELECT":
        # Most statements come here, so the costly search is for those alone that it may find something in.
        lower = text.lower()
        if "into" in lower and _INTO.search(text):
            return "write"
        return "setting" if "set_config" in lower else None
    if word == "SET":
        return "setting"
    if word in ("COMMIT", "END"):
        return "commit"
    if word in ("ROLLBACK", "ABORT"):
        return None if _TO.search(text) else "rollback"  # TO a savepoint
    if word == "RELEASE":
        return "release"
    if word == "PREPARE":
        return "commit" if _PREPARED.search(text) else None
    changes = any(match[1] for match in _CHANGE.finditer(text))
    return "write" if changes and (word == "WITH" or _ANALYZE.search(text)) else None
