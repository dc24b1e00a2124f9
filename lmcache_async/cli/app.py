"""The commands by name. The module of a command is imported when the command is parsed."""

from __future__ import annotations

import pkgutil
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from lmcache_async.errors import LMCacheAsyncError

COMMANDS = {
    "bench": "Measure memory, disk and tiers, and compare each with its physical limit.",
    "serve": "Run the daemon that keeps one pool of records for all engines of this host, until SIGTERM or SIGINT.",
    "doctor": "Check the environment, the machine, the configuration and each of its tiers, and advise what to do.",
    "tiers": "List the installed tiers, layers and stages, with the reason if one cannot be used.",
    "config": "Show, check and describe configurations.",
    "top": "Show hits by tier, transfer rates, queues, leases, breakers and recent requests, until Ctrl-C.",
    "inspect": "Show the records by namespace, or the header of one record. Read-only.",
    "verify": "Read every record and verify its checksums, lengths and key.",
    "gc": "Delete records by namespace, age or size, and unreadable ones.",
    "copy": "Copy records from one directory or tier to another, each verified on the way.",
    "warm": "Copy the prefixes of prompts from a slower tier of a config to the faster ones.",
}
"""First paragraph of the help of each command. `serve` is `serve_command` in `cli/serve.py`, and so on."""


class LazyCommand(TyperCommand):
    """A command whose module is imported when it is parsed. Its name and summary need no import."""

    def __init__(self, name: str) -> None:
        super().__init__(name, help=COMMANDS[name])

    def load(self) -> Any:
        """Import and return the click command."""
        target = pkgutil.resolve_name(f"lmcache_async.cli.{self.name}:{self.name}_command")
        if not isinstance(target, typer.Typer):
            function, target = target, typer.Typer(add_completion=False)
            target.command(self.name)(function)
        command = typer.main.get_command(target)
        command.help = command.help or self.help  # a group has none of its own
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the loaded command, which click then runs and completes."""
        return self.load().make_context(info_name, args, parent, **extra)


def load_commands() -> dict[str, Any]:
    """Return all click commands by their full names, such as `config show`. Imports all modules."""
    loaded: dict[str, Any] = {}
    for name in COMMANDS:
        command = LazyCommand(name).load()
        inner = command.commands if isinstance(command, TyperGroup) else None
        loaded |= {name: command} if inner is None else {f"{name} {key}": one for key, one in inner.items()}
    return loaded


class LazyGroup(TyperGroup):
    """The group of `COMMANDS`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name in COMMANDS:
            self.add_command(LazyCommand(name))

    def invoke(self, ctx: Any) -> Any:
        """Run the command. An expected error ends it with a message."""
        from lmcache_async.cli.output import USAGE, refuse

        try:
            return super().invoke(ctx)
        except (LMCacheAsyncError, OSError) as error:
            refuse(error, USAGE)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lmcache-async {version('lmcache-async')}")
        raise typer.Exit


app = typer.Typer(
    name="lmcache-async",
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # plain tracebacks are easier to search for
    help="Tools for lmcache-async, a KV cache for LLM serving with vLLM.",
)


@app.callback()
def root_command(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options before the command."""
    del version  # printed by its callback
