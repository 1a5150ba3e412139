"""The commands that look at keys, and that erase a scope's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import count
from typing import Any, Final

import click
from flask.cli import with_appcontext

from . import drawing, forms, overview
from .claim import Status
from .errors import RowUnreadable
from .signals import shown
from .state import AppState
from .store.survey import Filters, Summary
from .terminal import app_state, echo, json_option, on_terminal, refusing


@click.command("stats")
@click.option("--by", type=click.Choice(["endpoint", "scope"]), help="Who retries most, in place of the overview.")
@json_option
@with_appcontext
def stats_command(by: str | None, as_json: bool) -> None:
    """Show how many keys there are: by status, age and endpoint, their size, and what waits for somebody.

    With --by, show for each endpoint or scope how often used keys came again, the most frequent first. All keys are
    read for it, some thousands at a time. An endpoint is found by the path: "(none)" are paths that no route has now.
    """
    state = app_state()
    with refusing():
        ranks = overview.ranked(state, by or "endpoint")
        found = overview.survey_of(state).stats() if by is None else None
    if as_json:
        click.echo(json.dumps(forms.ranks(ranks, str(by)) if found is None else forms.stats(found, ranks)))
        return
    echo(_with_hints(state, drawing.ranks(ranks, str(by)) if found is None else drawing.stats(found, ranks)))


@click.command("list")
@click.option("--scope", help="Only keys of this scope, in its stored form.")
@click.option("--status", type=click.Choice([one.value for one in Status]), help="Only keys with this status.")
@click.option("--path", metavar="PREFIX", help="Only keys of requests whose path begins so.")
@click.option("--key", metavar="PREFIX", help="Only keys that begin so.")
@click.option("--stale", is_flag=True, help="Only claims past their lease.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Show so many at most.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each key.")
@with_appcontext
def list_command(limit: int, as_json: bool, status: str | None, **filters: Any) -> None:
    """List keys, those stored last first.

    A key is stored anew only where it was deleted or is claimed for the first time: what is claimed again after its
    retention keeps its place.
    """
    state = app_state()
    meant = Filters(status=None if status is None else Status(status), **filters)
    with refusing():
        found = overview.walked(state, meant, limit)
        if as_json:
            echo(json.dumps(forms.summary(one)) for one in found)
            return
        first = next(found, None)
        if first is None:
            click.echo("There is no such key.")
            return
        echo(_pages(first, found))


@click.command("show")
@click.argument("scope")
@click.argument("key")
@click.option("--body", is_flag=True, help="Also the recorded body: as a text if it is one, else its bytes.")
@json_option
@with_appcontext
def show_command(scope: str, key: str, body: bool, as_json: bool) -> None:
    """Show one key: its times, attempts, lease, steps and recorded answer.

    SCOPE and KEY are given as they are stored, which is how the log and the list show them. The record is what the
    client got, and may be confidential.
    """
    state, sealed = app_state(), None
    with refusing():
        found = overview.found(state, scope, key)
    try:
        found = replace(found, recorded=overview.recorded_of(state, found), steps=overview.steps_of(state, found))
    except RowUnreadable as error:
        # What is not encrypted is shown all the same: it tells what became of the key.
        sealed = str(error)
        found = replace(found, recorded=None, steps={})
    echo([json.dumps(forms.detail(found, body))] if as_json else drawing.detail(found, body))
    if sealed is not None:
        raise click.ClickException(f"Its answer and its steps are not shown: {sealed}")


@click.command("delete")
@click.option("--scope", required=True, help="Whose keys, in the scope's stored form.")
@click.option("--key", help="This key alone, in its stored form.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@with_appcontext
def delete_command(scope: str, key: str | None, yes: bool, as_json: bool) -> None:
    """Delete all keys of a scope, or one, whatever their status, with their recorded answers.

    For off-boarding and erasure. A retry that comes afterwards runs the view again, and a view that is running now
    records nothing. Bodies in the body store are deleted, too. Batches, each in transactions of its own: a run that
    was stopped can be repeated.
    """
    state = app_state()
    with refusing():
        overview.survey_of(state, "erase")
        if not yes:
            click.confirm(_question(scope, key), abort=True, err=as_json)
        if key is None and on_terminal() and not as_json:
            done = _with_progress(state, scope)
        else:
            done = overview.erase(state, scope, key)
    click.echo(json.dumps(asdict(done)) if as_json else _sentence(done))
    if done.left:
        raise click.ClickException(
            f"{drawing.counted(done.left, 'body', 'bodies')} in the body store could not be deleted: see the log. What "
            "belongs to no key, flask idempotency prune --body-store deletes an hour after it was written, or later."
        )


COMMANDS: Final[tuple[click.Command, ...]] = (stats_command, list_command, show_command, delete_command)


def _with_hints(state: AppState, lines: Iterable[str]) -> Iterator[str]:
    yield from lines
    if overview.older(state):
        yield drawing.MIGRATE
    elif not state.settings.count_replays:
        yield drawing.NOT_COUNTED


def _pages(first: Summary, others: Iterator[Summary]) -> Iterator[str]:
    """Tables, one for each page that is read, so that the first is there while the last is not yet asked for."""
    page = [first]
    for one in others:
        if len(page) == overview.PAGE:
            yield from drawing.listed(page)
            page = []
        page.append(one)
    yield from drawing.listed(page)


def _question(scope: str, key: str | None) -> str:
    if key is None:
        return f"All keys of {shown(scope)} will be deleted, and their retries run again. Delete them?"
    return f"The key {shown(key)} of {shown(scope)} will be deleted, and its retry runs again. Delete it?"


def _with_progress(state: AppState, scope: str) -> overview.Erased:
    deleted = 0

    def told(_: object) -> str:
        return f"{deleted} keys"

    # How many there are is not known: to count them would take as long as a part of the deletion.
    with click.progressbar(count(), label="Deleting", item_show_func=told) as bar:

        def progress(more: int) -> None:
            nonlocal deleted
            deleted += more
            bar.update(1, deleted)

        return overview.erase(state, scope, progress=progress)


def _sentence(done: overview.Erased) -> str:
    bodies = f", and {drawing.counted(done.bodies, 'body', 'bodies')} in the body store" if done.bodies else ""
    return f"Deleted {drawing.counted(done.deleted, 'key')}{bodies} in {done.duration:.1f} s."
