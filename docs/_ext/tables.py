"""The reference's tables, as Markdown, from the package's own tables.

They stand in the pages between ``<!-- table: NAME … -->`` and ``<!-- end of table -->``. Rewrite them after a change of
the package, with the interpreter of the virtual environment that ``make`` has set up::

    .venv/bin/python docs/_ext/tables.py

What the package can't know (what a column is for, say) stands here. The tests see to it that nothing is left out, and
that the pages are current.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

# The tables are made from the package beside the docs, whether it is installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parent))

import states

from flask_idempotency import Idempotency, cli, config, errors, signals, testing
from flask_idempotency.attempt import Attempt
from flask_idempotency.claim import Asking, Claim, Stored
from flask_idempotency.contrib import apiflask, console, observing, restx, smorest
from flask_idempotency.contrib.opentelemetry import IdempotencyTelemetry
from flask_idempotency.contrib.prometheus import IdempotencyMetrics, StoreCollector
from flask_idempotency.counting import write_counts
from flask_idempotency.lifecycle import Watcher
from flask_idempotency.prune import Pruned
from flask_idempotency.recorded import Recorded
from flask_idempotency.store import SQLAlchemyStore
from flask_idempotency.store.base import Store
from flask_idempotency.store.survey import Survey
from flask_idempotency.store.table import build_table

#: What each column of the table of keys holds.
COLUMNS = {
    "id": "primary key",
    "scope": "the scope in its stored form",
    "key": "the key in its stored form",
    "request_method": "method of the request that holds or held the claim, for people",
    "request_path": "its path, cut to 500 characters, for people",
    "request_fingerprint": "the fingerprint, in hexadecimal digits; keyed, it begins with its key's id",
    "fingerprint_version": "the version of the rules that made it; with encryption keys higher by 1000",
    "status": "`in_progress`; `completed`; `held`: waits for a person; `released`: claimable, and kept for its steps",
    "fencing_token": "names the claim; only its holder may record or release",
    "attempts": "claims taken so far, takeovers and runs after a release with steps included",
    "steps": "the results of the steps so far, each a JSON text or sealed, under its name; `NULL`: there are none",
    "response_status": "the record's status",
    "response_headers": "the record's headers: a list of pairs, in order; of a sealed record its key's id",
    "response_body": "the record's body; `NULL` in a completed row whose answer is not kept, or is in the body store",
    "locked_at": "the holder's last sign of life",
    "lock_timeout": "the lease in seconds, as the holder had it",
    "stale_policy": "what a retry gets when the lease ran out, as the holder had it: `reexecute` or `reject`",
    "secret_id": "names the secret that derived keys are made with; `NULL` where there are none",
    "expires_at": "end of the retention; in progress it counts from the claim, once recorded from the recording; "
    "a held key has none, whatever stands here",
    "completed_at": "time of the recording",
    "created_at": "time of the first claim",
    "updated_at": "time of the last change other than a renewal",
    "replays": "with `IDEMPOTENCY_COUNT_REPLAYS`: how often the record was replayed; `NULL` is none",
    "conflicts": "likewise: how many duplicates got 409",
    "mismatches": "likewise: how many other requests came with the key",
    "early_replays": "of the replays, those of a record younger than 5 s",
    "late_replays": "of the replays, those of a record older than 30 s",
}

#: The methods of ``Idempotency`` that are decorators, and whether they take options.
DECORATORS = {"required": True, "optional": True, "exempt": False, "scope_loader": False}

#: What there is beside ``Idempotency`` and its attempt.
OTHERS = (
    Attempt,
    Pruned,
    write_counts,
    errors,
    errors.IdempotencyError,
    signals,
    SQLAlchemyStore,
    Store,
    Asking,
    Claim,
    Stored,
    Recorded,
    testing.StoreConformance,
    Survey,
    testing.SurveyConformance,
    smorest.document,
    apiflask.document,
    restx.document,
    IdempotencyMetrics,
    StoreCollector,
    IdempotencyTelemetry,
    console.console_blueprint,
)

#: Those classes of them that an app makes an object of.
MADE_BY_APPS = (IdempotencyMetrics, IdempotencyTelemetry)

#: Names to import them by, where these are not those of their modules.
PUBLIC = {
    SQLAlchemyStore: "flask_idempotency.store.SQLAlchemyStore",
    console.console_blueprint: "flask_idempotency.contrib.console.console_blueprint",
}

DOCS = Path(__file__).resolve().parents[1]

#: A table in a page.
PLACE = re.compile(r"^<!-- table: (?P<name>\w+)[^\n]*-->\n.*?^<!-- end of table -->$", re.MULTILINE | re.DOTALL)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def options() -> str:
    """Every ``IDEMPOTENCY_…`` key."""
    rows = [
        (f"`{one.config_key}`", "" if one.app_only else f"`{one.name}`", _default(one), one.meaning + _values(one))
        for one in config.OPTIONS
    ]
    return _table(("config key", "keyword", "default", "meaning"), rows)


def _default(option: config.Option) -> str:
    value = option.default
    if isinstance(value, float):  # durations are the only floats
        return f"{value / 3600:g} h" if value and not value % 3600 else f"{value:g} s"
    if option.name == "max_body":
        return f"{value // 2**20} MiB"
    if isinstance(value, tuple):
        return ", ".join(f"`{one}`" for one in value) or "none"
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"`{value}`"


def _values(option: config.Option) -> str:
    """The values that the option takes, where its reader names them."""
    found = inspect.getclosurevars(option.read).nonlocals
    if "allowed" in found:
        *others, last = (f"`{one}`" for one in found["allowed"])
        return f" ({', '.join(others)} or {last})" if others else f" (only {last} in this release)"
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
        rows.append((f"`{name}`", str(one.code), f"[`{one.slug}`](errors/{one.slug}.md)", retry, detail))
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


#: What each outcome counts.
MEANINGS = {
    "executed": "the view ran, and the key is completed",
    "replayed": "answered from the record",
    "conflict": "409: the first request is in flight, or its outcome is unknown",
    "mismatch": "422: a used key came with another request",
    "rejected": "turned away for another reason, which `idempotency_rejections_total` has",
    "released": "the view ran, and the key was given up with nothing recorded",
    "held": "the view failed after it had committed something: the key waits for a person",
    "lost": "the view ran, and its claim was taken over meanwhile",
    "unguarded": "the view ran without a claim, for a reason that `idempotency_unguarded_total` has",
    "takeover": "beside another outcome: the request took over a claim whose lease had run out",
    "record_failed": "beside another outcome: the answer is not kept, or not yet, or the view ran without the store",
}


def outcomes() -> str:
    """What became of a request, with the signal that tells of it."""
    rows = [(f"`{one}`", f"`{signal.name}`", MEANINGS[one]) for signal, one in observing.OUTCOMES.items()]
    return _table(("outcome", "signal", "the request"), rows)


def figures() -> str:
    """Every metric, by both names."""
    rows = [
        (
            f"`{one.prometheus}`",
            f"`{one.opentelemetry}`",
            one.kind,
            f"`{one.unit}`",
            ", ".join(f"`{label}`" for label in one.labels),
            one.meaning,
        )
        for one in observing.FIGURES
    ]
    return _table(("Prometheus", "OpenTelemetry", "kind", "unit", "labels", "what it says"), rows)


def _code(text: str) -> str:
    """The text of a docstring, its literals and references as Markdown has them."""
    return re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text).replace("``", "`")


def commands() -> str:
    """Every command below ``flask idempotency``, with its options."""
    parts = []
    for name, command in sorted(cli.group.commands.items()):
        rows, arguments = [], []
        with click.Context(command, info_name=name) as context:
            for parameter in command.params:
                record = parameter.get_help_record(context)
                if isinstance(parameter, click.Argument):
                    arguments.append(parameter.make_metavar(context))
                elif record is not None:
                    rows.append((f"`{record[0]}`", record[1]))
        said = "\n\n".join(_one_line(part) for part in inspect.cleandoc(command.help or "").split("\n\n"))
        spelled = " ".join(["flask idempotency", name, *arguments])
        parts.append(f"## {spelled}\n\n{said}\n\n{_table(('option', 'meaning'), rows)}")
    return "\n\n".join(parts) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def columns() -> str:
    """The table of keys, as each database has it, and its indexes."""
    table = build_table(sa.MetaData())
    rows = [
        (
            f"`{column.name}`",
            column.type.compile(dialect=postgresql.dialect()),
            column.type.compile(dialect=sqlite.dialect()),
            column.type.compile(dialect=mysql.dialect()),
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
    heads = ("column", "PostgreSQL", "SQLite", "MariaDB, MySQL", "`NULL`", "holds")
    return _table(heads, rows) + "\n\nIndexes:\n\n" + "\n".join(indexes) + "\n"


def steps() -> str:
    """What leads from one state of a key to the next."""
    rows = [(f"`{one.before}`", f"`{one.after}`", f"`{one.method}`", one.when) for one in states.STEPS]
    return _table(("from", "to", "call of the store", "when"), rows)


def methods() -> str:
    """What ``Idempotency`` has."""
    rows = []
    for name, member in _public(Idempotency).items():
        spelled = name
        if name in DECORATORS:
            forms = ["", "(option=…)"] if DECORATORS[name] else [""]
            spelled = "`, `".join(f"@idempotency.{name}{form}" for form in forms)
        elif callable(member):
            spelled = f"idempotency.{name}{_signature(member)}"
        elif isinstance(member, property):
            spelled = f"idempotency.{name}"
        rows.append((f"`{spelled}`", _said(member)))
    own = (f"`{Idempotency.__name__}{_signature(Idempotency)}`", _said(Idempotency))
    return _table(("name", "what it does"), [own, *rows])


def attempt() -> str:
    """What ``idempotency.current`` has."""
    fields = re.findall(r":ivar (\w+): ((?:.|\n)*?)(?=\n:ivar|\Z)", inspect.getdoc(Attempt) or "")
    rows = [(f"`{name}`", _code(" ".join(text.split()))) for name, text in fields]
    for name, member in _public(Attempt).items():
        rows.append((f"`{name}{_signature(member) if callable(member) else ''}`", _said(member)))
    return _table(("name", "what it is, or does"), rows)


def others() -> str:
    """The other names that apps and stores of their own use."""
    rows = []
    for one in OTHERS:
        name = one.__name__ if inspect.ismodule(one) else PUBLIC.get(one, f"{one.__module__}.{one.__qualname__}")
        called = dataclasses.is_dataclass(one) or inspect.isfunction(one) or one in MADE_BY_APPS
        rows.append((f"`{name}{_signature(one) if called else ''}`", _said(one)))
    return _table(("name", "what it is"), rows)


def store() -> str:
    """What a store has."""
    rows = [
        (f"`{name}{_signature(member) if callable(member) else ''}`", _said(member))
        for name, member in _public(Store).items()
    ]
    return _table(("name", "what it does"), rows)


def _public(documented: type) -> dict[str, Any]:
    """The methods and properties of a class, other than those that the extension itself calls."""
    found = {name: one for name, one in vars(documented).items() if callable(one) or isinstance(one, property)}
    return {name: one for name, one in found.items() if not name.startswith("_") and not hasattr(Watcher, name)}


def _signature(function: Callable[..., Any]) -> str:
    """How it is called, without the types."""
    signature = inspect.signature(function)
    bare = [one.replace(annotation=one.empty) for name, one in signature.parameters.items() if name != "self"]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _said(documented: Any) -> str:
    """What a docstring says, on one line, without its lists of parameters."""
    text = inspect.getdoc(documented) or ""
    return _code(" ".join(re.split(r"^:\w+", text, maxsplit=1, flags=re.MULTILINE)[0].split()))


TABLES: dict[str, Callable[[], str]] = {
    "options": options,
    "problems": problems,
    "mistakes": mistakes,
    "events": events,
    "outcomes": outcomes,
    "figures": figures,
    "commands": commands,
    "columns": columns,
    "steps": steps,
    "methods": methods,
    "attempt": attempt,
    "others": others,
    "store": store,
}


def rewritten(text: str) -> str:
    """A page's text with its tables as they should be now."""

    def made(found: re.Match[str]) -> str:
        begin = f"<!-- table: {found['name']}, written by docs/_ext/tables.py -->"
        return f"{begin}\n\n{TABLES[found['name']]().strip()}\n\n<!-- end of table -->"

    return PLACE.sub(made, text)


def pages() -> list[Path]:
    """The pages that have tables."""
    found = [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts]
    return [page for page in found if PLACE.search(page.read_text())]


if __name__ == "__main__":
    for page in pages():
        before = page.read_text()
        after = rewritten(before)
        if after != before:
            page.write_text(after)
            print(f"rewrote {page.relative_to(DOCS.parent)}")
    states.PICTURE.write_text(states.drawn())
