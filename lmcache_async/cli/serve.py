"""`lmcache-async serve`: run the daemon of the host tier."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from pathlib import Path
from typing import Annotated

import uvloop
from typer import Option

from lmcache_async.cli.output import say
from lmcache_async.config import format_size
from lmcache_async.daemon.config import DaemonConfig, load_daemon_config
from lmcache_async.daemon.server import Daemon


def serve_command(
    socket: Annotated[
        Path | None, Option(help="Path of the socket; by default in the runtime directory of this user.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        Option(help="Size of the pool in shared memory, such as 20GiB; required here or in the file."),
    ] = None,
    config: Annotated[
        Path | None, Option(help="YAML file with these and further options.", dir_okay=False)
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print the ready line as JSON.")] = False,
) -> None:
    """Run the daemon that keeps one pool of records for all engines of this host, until SIGTERM or SIGINT.

    Engines use the pool with the tier `host`. docs/tiers/host.md lists the options of the file.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    options = load_daemon_config(config, {"socket": socket, "max_bytes": max_bytes})
    uvloop.run(_serve(options, as_json=as_json))


async def _serve(config: DaemonConfig, *, as_json: bool) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    async with Daemon(config) as daemon:
        if as_json:
            ready = {"socket": str(daemon.path), "max_bytes": config.max_bytes, "status": daemon.status_url}
            say(json.dumps(ready))
        else:
            size = format_size(config.max_bytes)
            say(f"lmcache-async: a pool of {size} is ready at {daemon.path}")
            if daemon.status_url is not None:
                say(f"lmcache-async: status page and metrics at {daemon.status_url}")
        await ended.wait()
