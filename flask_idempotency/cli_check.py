"""``flask idempotency check``."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from .checking import check
from .cli import group
from .drawing import counted
from .terminal import app_state, refusing

__all__ = ["check_command", "group"]


@group.command("check")
@click.option(
    "--worker-timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="After how long the server ends a worker; taken from GUNICORN_CMD_ARGS if left out.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def check_command(worker_timeout: float | None, as_json: bool) -> None:
    """Look at table, indexes, clocks, lease and routes: say what is wrong and what to do.

    Exits with 1 if something is wrong. What is only to be known, keys that wait for a person for example, changes
    nothing.
    """
    with refusing():
        found = check(app_state(), worker_timeout)
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
