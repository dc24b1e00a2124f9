"""Copy from the paged KV cache into the payloads of records."""

from __future__ import annotations

from itertools import pairwise

from lmcache_async.config import EngineConfig
from lmcache_async.device.copier import Copier, CopyJob
from lmcache_async.memory.record import RecordFormat
from lmcache_async.pipeline.batch import FilledBatch, LeasedBatch


class DeviceToHostStage:
    """Gathers the rows of all layers of a batch of chunks in one call, after the fence of the request.

    If `seal` is the next stage, the copy also computes the payloads' checksums, because nothing changes the
    payloads in between. If the call is cancelled, it first waits for the end of the copy.
    """

    reads_device = True

    def __init__(self, copier: Copier, record_format: RecordFormat, config: EngineConfig) -> None:
        self._copier = copier
        self._header_bytes = record_format.header_bytes
        self._digest = ("device_to_host", "seal") in pairwise(config.store.stages)

    async def __call__(self, batch: LeasedBatch) -> FilledBatch:
        start = self._header_bytes
        jobs = [
            CopyJob(rows, buffer.array_from(start))
            for rows, buffer in zip(batch.rows, batch.buffers, strict=True)
        ]
        digests = None
        if jobs:
            digests = await self._copier.gather(jobs, batch.request.fence, digest=self._digest)
        return batch.as_type(FilledBatch, checksums=tuple(digests or ()))
