"""``flask idempotency``: thin commands over the library's own functions."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from flask.cli import AppGroup

from . import checking, listing, outcomes
from .cli_keys import COMMANDS
from .drawing import counted
from .prune import Pruned, prune
from .state import AppState
from .terminal import app_state, json_option, on_terminal, refusing

group = AppGroup("idempotency")
for command in COMMANDS:
    group.add_command(command)


@group.command("prune")
@click.option("--batch-size", type=click.IntRange(min=1), default=5_000, show_default=True, help="Keys a batch.")
@click.option("--max-batches", type=click.IntRange(min=1), help="Stop after so many batches.")
@click.option("--pause", type=click.FloatRange(min=0), default=0.0, help="Seconds between two batches.")
@click.option("--dry-run", is_flag=True, help="Only say how many keys would be deleted.")
@click.option("--body-store", is_flag=True, help="Then delete bodies in the body store that belong to no key.")
@json_option
def prune_command(dry_run: bool, as_json: bool, **options: Any) -> None:
    """Delete the keys that are past their retention.

    Each batch is a transaction of its own. A live claim is never touched. Run it from cron; two at once share the
    work.
    """
    state = app_state()
    with refusing():
        state.prepare()
        if on_terminal() and not (dry_run or as_json):
            done = _with_progress(state, options)
        else:
            done = prune(state, dry_run=dry_run, **options)
    click.echo(json.dumps(asdict(done)) if as_json else _sentence(done, options["body_store"]))


@group.command("release")
@click.argument("scope")
@click.argument("key")
@click.option("--force", is_flag=True, help="Also while its view may still run, and though it has an answer.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def release_command(scope: str, key: str, force: bool, yes: bool) -> None:
    """Make a key claimable again: the next retry runs the view.

    SCOPE and KEY are given as they are stored, which is how the log shows them. For keys that are held since their
    outcome is unknown, or whose claim's lease is over.
    """
    state = app_state()
    if not yes:
        click.confirm(f"The next request with the key {key!r} of {scope!r} will run the view. Release it?", abort=True)
    with refusing():
        outcomes.release(state, scope, key, force=force)
    click.echo("Released.")


@group.command("routes")
@click.option("--check", is_flag=True, help="Only say what is wrong, and exit with 1 if something is.")
@click.option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="With --check: endpoints that may be unguarded, as in 'admin.*'; 'PATCH carts.*' for one method of them. Can "
    "be given more than once.",
)
@json_option
def routes_command(check: bool, ignore: tuple[str, ...], as_json: bool) -> None:
    """Show every route, whether it is guarded, and how.

    With --check, fail where a POST or PATCH is neither guarded nor exempt, and where a guard is useless. No request is
    served, and the database is not asked.
    """
    found = listing.list_routes(app_state())
    wrong = listing.findings(found, ignore)
    if as_json:
        click.echo(json.dumps({**asdict(found), "findings": wrong}))
    else:
        for line in listing.described(found, wrong, ignore) if check else listing.drawn(found):
            click.echo(line)
    if check and wrong:
        raise click.exceptions.Exit(1)


@group.command("check")
@click.option(
    "--worker-timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="After how long the server ends a worker; taken from GUNICORN_CMD_ARGS if left out.",
)
@json_option
def check_command(worker_timeout: float | None, as_json: bool) -> None:
    """Look at table, indexes, clocks, lease and routes: say what is wrong and what to do.

    Exits with 1 if something is wrong. What is only to be known, keys that wait for a person for example, changes
    nothing.
    """
    with refusing():
        found = checking.check(app_state(), worker_timeout)
    if as_json:
        click.echo(json.dumps(asdict(found)))
    else:
        for one in found.findings:
            click.echo(f"Wrong: {one.problem} {one.remedy}")
        for one in found.notes:
            click.echo(f"Note: {one.problem} {one.remedy}")
        click.echo(f"{counted(len(found.findings), 'finding')}." if found.findings else "Nothing is wrong.")
    if found.findings:
        raise click.exceptions.Exit(1)


def _with_progress(state: AppState, options: dict[str, Any]) -> Pruned:
    length = state.store.prunable()
    if options["max_batches"] is not None:
        length = min(length, options["max_batches"] * options["batch_size"])
    with click.progressbar(length=length, label="Pruning") as bar:
        return prune(state, progress=bar.update, **options)


def _sentence(done: Pruned, body_store: bool) -> str:
    keys, bodies = counted(done.deleted, "key"), f"{counted(done.orphans, 'body', 'bodies')} of no key"
    if done.dry_run:
        return f"Would prune {keys}." + (f" Would delete {bodies}." if body_store else "")
    batches = counted(done.batches, "batch", "batches")
    deleted = f" Deleted {bodies}." if body_store else ""
    return f"Pruned {keys} in {batches} and {done.duration:.1f} s.{deleted}"
