"""All commands by name. One file a command."""

from __future__ import annotations

import typer

from lmcache_async.cli.simulate import simulate_command

app = typer.Typer(
    name="lmcache-async",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback as Python writes it can be searched for
    help="Tools for lmcache-async, the KV cache layer under LLM serving.",
)


@app.callback()
def _commands() -> None:
    """Keeps `simulate` a command of its own while it is the only one."""


app.command("simulate")(simulate_command)
