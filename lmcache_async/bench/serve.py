"""A real vLLM with our connector beside one without: first tokens, hits, restarts, mixed loads, a slow tier.

Each vLLM is a process of its own. All are alive together and are asked strictly one after the other, in a random
order drawn for each round, so that a drift of the machine meets all of them. Every answer must be that of the
vLLM without connector and every hit a hit; else there are no figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_async.bench.serve_run import measure
from lmcache_async.bench.serve_settings import QUICK, Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lmcache_async.bench.frame import Frame, Row

__all__ = ["QUICK", "Settings", "run"]


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    for row in measure(settings, frame):
        yield row
