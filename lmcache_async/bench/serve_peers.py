"""The serve benchmark with peers beside ours, for whoever compares connectors."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lmcache_async.bench.serve_connectors import ALL
from lmcache_async.bench.serve_run import measure
from lmcache_async.bench.serve_settings import QUICK, Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lmcache_async.bench.frame import Frame, Row

PARTS = "alone,load"


async def rows(
    frame: Frame, settings: Settings | None = None, *, connectors: str = ALL
) -> AsyncIterator[Row]:
    """New prompts, known prompts and loads: ours, and every peer that is installed and starts.

    A row of a peer ends in its name, which its parameter `connector` has too. A peer that is left out is named
    in the log with the reason.

    Args:
        settings: The usual or the quick ones by default; of them `connectors` and `parts` do not count.
        connectors: Names between commas.

    Raises:
        ConfigError: There is no such connector.
        ServeError: vLLM by itself, or with our connector, did not start or answered wrongly.
    """
    given = settings or (QUICK if frame.quick else Settings())
    for row in measure(dataclasses.replace(given, connectors=connectors, parts=PARTS), frame):
        yield row
