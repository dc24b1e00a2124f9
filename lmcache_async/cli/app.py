"""All commands by name. One file a command."""

from __future__ import annotations

import typer

from lmcache_async.cli.bench import OWN_OPTIONS, bench_command
from lmcache_async.cli.config import config_app
from lmcache_async.cli.doctor import doctor_command
from lmcache_async.cli.export import export_command
from lmcache_async.cli.gc import gc_command
from lmcache_async.cli.import_ import import_command
from lmcache_async.cli.inspect_ import inspect_command
from lmcache_async.cli.serve import serve_command
from lmcache_async.cli.simulate import simulate_command
from lmcache_async.cli.tiers import tiers_command
from lmcache_async.cli.top import top_command
from lmcache_async.cli.verify import verify_command
from lmcache_async.cli.warm import warm_command

app = typer.Typer(
    name="lmcache-async",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback as Python writes it can be searched for
    help="Tools for lmcache-async, the KV cache layer under LLM serving.",
)


app.command("bench", context_settings=OWN_OPTIONS)(bench_command)
app.command("simulate")(simulate_command)
app.command("serve")(serve_command)
app.command("doctor")(doctor_command)
app.command("tiers")(tiers_command)
app.add_typer(config_app, name="config")
app.command("top")(top_command)
app.command("inspect")(inspect_command)
app.command("verify")(verify_command)
app.command("gc")(gc_command)
app.command("export")(export_command)
app.command("import")(import_command)
app.command("warm")(warm_command)
