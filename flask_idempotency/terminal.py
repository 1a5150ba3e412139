"""What the commands have in common: an option, the app's state, errors as messages, and long output."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Final, TextIO

import click
from flask import current_app

from .errors import ConfigurationError, SettleError, StoreError
from .state import AppState, get_state

#: For a command with one result.
json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")


def app_state() -> AppState:
    """The current app's.

    :raises click.ClickException: the extension was not initialised on the app.
    """
    with refusing():
        return get_state(current_app)


@contextmanager
def refusing() -> Iterator[None]:
    """What can't be done ends the command with its reason, and exit status 1."""
    try:
        yield
    except (ConfigurationError, SettleError, StoreError) as error:
        raise click.ClickException(str(error)) from error


def on_terminal() -> bool:
    """Whether a person sees what is printed. A program that was started with its output closed has none."""
    output: TextIO | None = sys.stdout
    return output is not None and output.isatty()


def echo(lines: Iterable[str]) -> None:
    """Print lines; through the user's pager where a terminal shows fewer of them."""
    if not on_terminal():
        for line in lines:
            click.echo(line)
        return
    lines = iter(lines)
    first = list(islice(lines, shutil.get_terminal_size().lines))
    rest = list(islice(lines, 1))
    if rest:
        click.echo_via_pager(chain(first[:1], (f"\n{line}" for line in chain(first[1:], rest, lines))))
    else:
        click.echo("\n".join(first))
