"""`lmcache-async serve`: the daemon that keeps one pool of records for all engines of a host."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from lmcache_async.cli.output import say
from lmcache_async.config import format_size
from lmcache_async.daemon.config import DaemonConfig, load_daemon_config
from lmcache_async.daemon.server import Daemon
from lmcache_async.errors import LMCacheAsyncError


def serve_command(
    socket: Annotated[
        Path | None, typer.Option(help="Where engines connect; a place of this user's by default.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(help="Shared memory of the pool, such as 20GiB; needed here or in the file.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of these and further options.", dir_okay=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the line that says that it is ready as JSON.")
    ] = False,
) -> None:
    """Keep one pool of records for all engines of this host, whose tier is `host`, until SIGTERM or SIGINT.

    docs/tiers/host.md names the options of the file.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        options = load_daemon_config(config, {"socket": socket, "max_bytes": max_bytes})
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(options, as_json=as_json))
    except LMCacheAsyncError as error:
        say(error, to_stderr=True)
        raise typer.Exit(2) from None


async def _serve(config: DaemonConfig, *, as_json: bool) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    async with Daemon(config) as daemon:
        if as_json:
            ready = {
                "socket": str(daemon.path),
                "max_bytes": config.max_bytes,
                "status": daemon.status_url,
            }
            typer.echo(json.dumps(ready))
        else:
            size = format_size(config.max_bytes)
            typer.echo(f"lmcache-async: a pool of {size} is ready at {daemon.path}")
            if daemon.status_url is not None:
                typer.echo(f"lmcache-async: status page and metrics at {daemon.status_url}")
        await ended.wait()
