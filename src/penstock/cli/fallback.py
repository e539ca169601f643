"""A group of commands whose first word may be left out: `penstock train FILE.toml` is `penstock train run FILE.toml`."""

from typing import Any

from typer.core import TyperGroup

HELP = "--help"


class RunsByDefault(TyperGroup):
    """Takes whatever is no command of its own for the arguments of `run`; a file named like a command is written `./list`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the word in where it was left out."""
        if not args or (args[0] != HELP and args[0] not in self.commands):
            args = ["run", *args]
        return super().parse_args(ctx, args)
