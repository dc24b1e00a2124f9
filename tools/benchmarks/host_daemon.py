"""`python -m tools.benchmarks.host_daemon SOCKET BYTES`: a daemon that runs until the end of stdin."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from lmcache_async.daemon.config import DaemonConfig
from lmcache_async.daemon.server import Daemon

READY = "ready"


async def _serve(path: Path, nbytes: int) -> None:
    config = DaemonConfig.model_validate({"socket": path, "max_bytes": nbytes, "max_client_bytes": nbytes})
    async with Daemon(config):
        sys.stdout.write(f"{READY}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))
