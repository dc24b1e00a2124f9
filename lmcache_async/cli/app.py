"""All commands by name. One file a command."""

from __future__ import annotations

import typer

from lmcache_async.cli.bench import OWN_OPTIONS, bench_command
from lmcache_async.cli.simulate import simulate_command

app = typer.Typer(
    name="lmcache-async",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback as Python writes it can be searched for
    help="Tools for lmcache-async, the KV cache layer under LLM serving.",
)


app.command("bench", context_settings=OWN_OPTIONS)(bench_command)
app.command("simulate")(simulate_command)
