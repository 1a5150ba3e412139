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
        "BEGIN", "CLOSE", "DEALLOCATE", "DECLARE", "DESC", "DESCRIBE", "DISCARD", "FETCH", "LISTEN", "LOCK",
        "MOVE", "PRAGMA", "RESET", "SAVEPOINT", "SHOW", "START", "TABLE", "UNLISTEN", "UNLOCK", "USE",
        "VALUES"
    }
)  # fmt: skip
#: Here it takes a second look. All else writes.
_UNCLEAR: Final = frozenset(
    {
        "ABORT", "COMMIT", "END", "EXPLAIN", "PREPARE", "RELEASE", "ROLLBACK", "SELECT", "SET", "WITH"
    }
)  # fmt: skip
#: Before and after these, MySQL, MariaDB and Oracle commit by themselves. A procedure, and a statement whose text is a
#: value, may be anything.
_COMMITTED: Final = frozenset(
    {
        "ALTER", "ANALYZE", "CALL", "CHANGE", "CREATE", "DROP", "EXECUTE", "FLUSH", "GRANT", "INSTALL", "OPTIMIZE",
        "RENAME", "REPAIR", "REVOKE", "STOP", "TRUNCATE", "UNINSTALL"
    }
)  # fmt: skip
#: Before these, which write nothing.
_COMMITTING: Final = frozenset({"BEGIN", "LOCK", "START", "UNLOCK"})
#: But not for a temporary table; and more in a block of MariaDB's than in a transaction's beginning.
_TEMPORARY: Final = re.compile(r"(?:CREATE\s+(?:OR\s+REPLACE\s+)?|DROP\s+)TEMPORARY\b", re.IGNORECASE)
_BLOCK: Final = re.compile(r"BEGIN\s+NOT\s+ATOMIC\b", re.IGNORECASE)
_AUTOCOMMIT: Final = re.compile(r"\bautocommit\b", re.IGNORECASE)
_XA: Final = re.compile(r"XA\s+(?:(COMMIT|PREPARE)|(ROLLBACK)|(?:START|BEGIN|END|RECOVER)\b)", re.IGNORECASE)
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

    A semicolon within a text ends a statement too: the rest of the text then looks like a write.

    :param implicit: the database commits by itself around what changes a schema, as MySQL, MariaDB and Oracle do.
    """
    found = []
    for text in statement.split(";") if ";" in statement else (statement,):
        match = _BEGINNING.match(text)
        assert match is not None
        word = match[1].upper()
        own = _implicit_effects(word, text[match.start(1) :]) if implicit else None
        if own is not None:
            found += [Part(effect, text[match.start(1) :]) for effect in own]
            continue
        nothing = not word and match.end() == len(text)  # but blanks and comments
        effect = _second_look(word, text) if word in _UNCLEAR else None if word in _READS or nothing else "write"
        if effect is not None:
            found.append(Part(effect, text[match.start(1) :]))
    return found


def _implicit_effects(word: str, text: str) -> list[Effect] | None:
    """What a database that commits by itself makes of it; ``None``: what any other does."""
    if word in _COMMITTED:
        return None if _TEMPORARY.match(text) else ["write", "commit"]
    if word in _COMMITTING:
        return ["write", "commit"] if _BLOCK.match(text) else ["commit"]
    if word == "SET":
        return ["commit"] if _AUTOCOMMIT.search(text) else None
    if word == "XA":
        match = _XA.match(text)
        return None if match is None else ["commit"] if match[1] else ["rollback"] if match[2] else []
    return None


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
