"""Decryption of records from tiers outside the process's memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

from lmcache_async.config import EngineConfig
from lmcache_async.errors import ChunkCorruptError, ConfigError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.memory.threads import in_thread
from lmcache_async.pipeline.batch import FetchedBatch
from lmcache_async.tiers.stack import TierStack


class DecryptStage:
    """Decrypts records from tiers outside of the arena, each in place in its slab.

    A slab with other readers is not modified; its record is decrypted into a new slab. A record that is not
    encrypted, is encrypted with an unknown key, was modified or belongs to another chunk ends the prefix, is
    counted by cause and is rejected by its tier. One worker thread call per batch.

    Raises:
        ConfigError: No key is configured.
    """

    def __init__(
        self,
        stack: TierStack,
        arena: Arena,
        workers: Executor,
        config: EngineConfig,
        cipher: RecordCipher | None,
    ) -> None:
        if cipher is None:
            raise ConfigError("retrieve.stages: decrypt has no key; set encryption.key_file")
        self._cipher = cipher
        self._stack = stack
        self._arena = arena
        self._workers = workers
        self._timeout_s = config.retrieve.allocate_timeout_s

    async def __call__(self, batch: FetchedBatch) -> FetchedBatch:
        encrypted = [i for i, tier in enumerate(batch.tiers) if self._stack.tiers[tier].leaves_memory]
        if not encrypted:
            return batch
        targets = await self._targets(batch, encrypted)
        error = await in_thread(
            self._workers, lambda: self._decrypt(batch, encrypted[: len(targets)], targets)
        )
        if error is None and len(targets) == len(encrypted):
            count, cause = len(batch.chunks), batch.cause
        elif error is None:
            count, cause = encrypted[len(targets)], "no_room"
        else:
            count, cause = encrypted[error[0]], "corrupt"
            key = batch.chunks[count].key
            await self._stack.reject(batch.tiers[count], key, error[1], "cannot be decrypted")
        buffers = list(batch.buffers)
        for index, target in zip(encrypted, targets, strict=False):
            buffers[index] = target
        return replace(batch, buffers=tuple(buffers), cause=cause).first(count)

    async def _targets(self, batch: FetchedBatch, encrypted: Sequence[int]) -> list[Buffer]:
        """Return the buffer for the decrypted record of each chunk, for as many as there is memory."""
        # Determined once, because other leases may end while this call waits for memory.
        shared = [batch.buffers[i].shared for i in encrypted]
        sizes = [batch.buffers[i].nbytes for i, is_shared in zip(encrypted, shared, strict=True) if is_shared]
        fresh = await self._arena.lease_many(sizes, timeout_s=self._timeout_s) if sizes else []
        batch.scope.add(fresh)
        left = iter(fresh)
        targets: list[Buffer] = []
        for index, is_shared in zip(encrypted, shared, strict=True):
            target = next(left, None) if is_shared else batch.buffers[index]
            if target is None:
                break
            targets.append(target)
        return targets

    def _decrypt(
        self, batch: FetchedBatch, encrypted: Sequence[int], targets: Sequence[Buffer]
    ) -> tuple[int, ChunkCorruptError] | None:
        """Return the position and error of the first invalid record; None if all are valid."""
        for position, (index, target) in enumerate(zip(encrypted, targets, strict=True)):
            try:
                self._cipher.decrypt(batch.buffers[index].view, target.view, batch.chunks[index].key)
            except ChunkCorruptError as error:
                return position, error.with_traceback(None)  # its frames would keep the slabs in use
        return None
