"""``flask idempotency``, as an app has it: the commands are imported when one is asked for. No request needs them."""

from __future__ import annotations

import click


class Commands(click.Group):
    """The group of :mod:`flask_idempotency.cli`, which is not imported with the app."""

    def __init__(self) -> None:
        super().__init__("idempotency", help="Look after the idempotency keys.")

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in order."""
        return _group().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        return _group().get_command(ctx, cmd_name)


def _group() -> click.Group:
    from .cli import group

    return group
