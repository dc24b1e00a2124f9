"""A layer in which reads of chosen records block until their deadline, as on a disk that hangs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from lmcache_async import Layer, LayerConfig
from lmcache_async.tiers.middleware.base import Call, LayerContext, Next, Results, Verb
from lmcache_async.tiers.middleware.deadline import DeadlineConfig, DeadlineLayer

DEADLINE_S = 0.2


class LateReadsConfig(LayerConfig):
    """Options.

    Attributes:
        names: File with the names of the records, one a line.
    """

    names: str


class LateReads(Layer):
    """Has a short deadline for these records only: on a busy machine, other reads may take long and must be hits."""

    options_type = LateReadsConfig

    def __init__(self, options: LateReadsConfig, context: LayerContext) -> None:
        super().__init__(options, context)
        self._deadline = DeadlineLayer(DeadlineConfig(read_s=DEADLINE_S), context)

    async def around(self, call: Call, next: Next) -> Results:
        if call.verb is Verb.GET_MANY:
            late = Path(self.options.names).read_text().split()  # noqa: ASYNC240 - a few bytes, in tests
            if any(key.hex() in late for key in call.keys):
                return await self._deadline.around(call, _hang)
        return await next(call)


async def _hang(_: Call) -> Results:
    return await asyncio.get_running_loop().create_future()


def install(directory: Path) -> dict[str, Any]:
    """Write the metadata of a distribution with the layer into an engine's path. Return the layer's options."""
    metadata = directory / "late_reads-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: late-reads\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[lmcache_async.layers]\nlate_reads = {__name__}:LateReads\n")
    (directory / "late").touch()
    return {"name": "late_reads", "names": str(directory / "late")}
