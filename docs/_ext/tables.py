"""The reference's tables, as Markdown, from the package's own tables. Needs no Sphinx, so that the tests can read them.

What the package can't know (what a column is for, say) stands here; the tests see to it that nothing is left out.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

import click
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from flask_idempotency import cli, config, errors, signals
from flask_idempotency.store.table import build_table

#: What each column of the table of keys holds.
COLUMNS = {
    "id": "primary key",
    "scope": "the scope in its stored form",
    "key": "the key in its stored form",
    "request_method": "method of the request that holds or held the claim, for people",
    "request_path": "its path, cut to 500 characters, for people",
    "request_fingerprint": "the fingerprint, in hexadecimal digits",
    "fingerprint_version": "the version of the rules that made it",
    "status": "`in_progress` or `completed`; `held` and `released` are kept for later releases",
    "fencing_token": "names the claim; only its holder may record or release",
    "attempts": "claims taken so far, takeovers included",
    "steps": "not used by this release",
    "response_status": "the record's status",
    "response_headers": "the record's headers: a list of pairs, in order",
    "response_body": "the record's body; `NULL` in a completed row whose answer could not be kept",
    "locked_at": "the holder's last sign of life",
    "lock_timeout": "the lease in seconds, as the holder had it",
    "stale_policy": "what holds when the lease ran out; `reexecute` in this release",
    "secret_id": "not used by this release",
    "expires_at": "end of the retention; in progress it counts from the claim, once recorded from the recording",
    "completed_at": "time of the recording",
    "created_at": "time of the first claim",
    "updated_at": "time of the last change other than a renewal",
}

#: Exceptions that exist for later releases: this one never answers with them.
NOT_GIVEN = ("TooManyKeys", "OutcomeUnknown")


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def is_refused(option: config.Option) -> bool:
    """Whether this release refuses the option, whatever its value."""
    return option.read.__qualname__.startswith(config._later.__name__)


def options() -> str:
    """Every ``IDEMPOTENCY_…`` key that this release has, and the list of those that it refuses."""
    known = [option for option in config.OPTIONS if not is_refused(option)]
    rows = [
        (f"`{one.config_key}`", "" if one.app_only else f"`{one.name}`", _default(one), one.meaning + _values(one))
        for one in known
    ]
    refused = ", ".join(f"`{option.config_key}`" for option in config.OPTIONS if is_refused(option))
    return (
        _table(("config key", "keyword", "default", "meaning"), rows)
        + f"\n\nNot available in this release yet, and refused with an error when they are set: {refused}.\n"
    )


def _default(option: config.Option) -> str:
    value = option.default
    if isinstance(value, float):  # durations are the only floats
        return f"{value / 3600:g} h" if value and not value % 3600 else f"{value:g} s"
    if option.name == "max_body":
        return f"{value // 2**20} MiB"
    if isinstance(value, tuple):
        return ", ".join(f"`{one}`" for one in value) or "none"
    return {None: "none", True: "true", False: "false"}.get(value) or f"`{value}`"


def _values(option: config.Option) -> str:
    """The values that the option takes, where its reader names them."""
    found = inspect.getclosurevars(option.read).nonlocals
    if "allowed" in found:
        values = [f"`{one}`" for one in found["allowed"]]
        return f" ({' or '.join(values)})" if len(values) > 1 else f" (only {values[0]} in this release)"
    return ""


def answers() -> dict[str, type[errors.IdempotencyError]]:
    """The exceptions that are answers to a client, by name, in the order of their definition."""
    found = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, errors.IdempotencyError)]
    return {one.__name__: one for one in found if one is not errors.IdempotencyError}


def problems() -> str:
    """The answers that the extension gives itself."""
    rows = []
    for name, one in answers().items():
        detail = _text(one)
        retry = "yes" if "Retry-After" in detail else ""
        if name in NOT_GIVEN:
            detail += " *(Defined for later releases; this one never gives it.)*"
        rows.append((f"`{name}`", str(one.code), f"`{one.slug}`", retry, detail))
    return _table(("exception", "status", "`type` ends in", "`Retry-After`", "`detail`, unless it says more"), rows)


def mistakes() -> str:
    """The exceptions that are for the app's developer and for stores."""
    found = [
        one
        for one in vars(errors).values()
        if inspect.isclass(one) and one.__module__ == errors.__name__ and not issubclass(one, errors.IdempotencyError)
    ]
    rows = [
        (f"`{one.__name__}`", ", ".join(f"`{base.__name__}`" for base in one.__bases__), _code(_text(one)))
        for one in found
    ]
    return _table(("exception", "is a", "meaning"), rows)


def _text(documented: Any) -> str:
    return " ".join((inspect.getdoc(documented) or "").split())


def events() -> str:
    """Every event: its name in the log, its level, its signal, and what the signal's comment says."""
    comments = dict(re.findall(r"^((?:#:.*\n)+)(\w+): Final = _signals", inspect.getsource(signals), re.MULTILINE))
    said = {name: " ".join(re.sub(r"^#: ?", "", text, flags=re.MULTILINE).split()) for text, name in comments.items()}
    rows = [
        (f"`{one.name}`", logging.getLevelName(one.level).lower(), f"`{one.signal.name}`", _code(said[one.signal.name]))
        for one in vars(signals).values()
        if isinstance(one, signals.Event)
    ]
    return _table(("event", "level", "signal", "meaning and fields"), rows)


def _code(text: str) -> str:
    return text.replace("``", "`")


def commands() -> str:
    """Every command below ``flask idempotency``, with its options."""
    parts = []
    for name, command in sorted(cli.group.commands.items()):
        rows = []
        with click.Context(command, info_name=name) as context:
            for parameter in command.params:
                record = parameter.get_help_record(context)
                if record is not None:
                    rows.append((f"`{record[0]}`", record[1]))
        said = "\n\n".join(_one_line(part) for part in inspect.cleandoc(command.help or "").split("\n\n"))
        parts.append(f"## flask idempotency {name}\n\n{said}\n\n{_table(('option', 'meaning'), rows)}")
    return "\n\n".join(parts) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def columns() -> str:
    """The table of keys, as PostgreSQL and SQLite have it, and its indexes."""
    table = build_table(sa.MetaData())
    rows = [
        (
            f"`{column.name}`",
            column.type.compile(dialect=postgresql.dialect()),
            column.type.compile(dialect=sqlite.dialect()),
            "yes" if column.nullable else "",
            COLUMNS[column.name],
        )
        for column in table.columns
    ]
    indexes = [
        f"- `{index.name}` on ({', '.join(f'`{column.name}`' for column in index.columns)})"
        + (", unique" if index.unique else "")
        for index in sorted(table.indexes, key=lambda index: str(index.name))
    ]
    heads = ("column", "PostgreSQL", "SQLite", "`NULL`", "holds")
    return _table(heads, rows) + "\n\nIndexes:\n\n" + "\n".join(indexes) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "options": options,
    "problems": problems,
    "mistakes": mistakes,
    "events": events,
    "commands": commands,
    "columns": columns,
}
