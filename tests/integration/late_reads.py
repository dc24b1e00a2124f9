"""A layer in which reads of chosen records block until they are cancelled, as on a disk that hangs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from lmcache_async import Layer, LayerConfig
from lmcache_async.tiers.middleware.base import Call, Next, Results, Verb


class LateReadsConfig(LayerConfig):
    """Options.

    Attributes:
        names: File with the names of the records, one a line.
    """

    names: str


class LateReads(Layer):
    options_type = LateReadsConfig

    async def around(self, call: Call, next: Next) -> Results:
        if call.verb is Verb.GET_MANY:
            late = Path(self.options.names).read_text().split()  # noqa: ASYNC240 - a few bytes, in tests
            if any(key.hex() in late for key in call.keys):
                await asyncio.get_running_loop().create_future()  # until the tier's deadline
        return await next(call)


def install(directory: Path) -> dict[str, Any]:
    """Write the metadata of a distribution with the layer into an engine's path. Return the layer's options."""
    metadata = directory / "late_reads-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: late-reads\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[lmcache_async.layers]\nlate_reads = {__name__}:LateReads\n")
    (directory / "late").touch()
    return {"name": "late_reads", "names": str(directory / "late")}
