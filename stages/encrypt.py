"""Encryption of sealed records for tiers outside the process's memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

from lmcache_async.config import EngineConfig
from lmcache_async.errors import ConfigError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.encryption import RecordCipher
from lmcache_async.memory.threads import in_thread
from lmcache_async.pipeline.batch import EncryptedBatch, SealedBatch
from lmcache_async.tiers.stack import TierStack


class EncryptStage:
    """Encrypts a copy of each record for tiers outside of the arena. Tiers in the arena store the record itself.

    A hit in host memory therefore needs no decryption, and a store needs a second slab per chunk until it is
    written. If not all chunks get a slab within `store.allocate_timeout_s`, the last ones of the batch are
    stored only in tiers in the arena. One worker thread call per batch.

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
            raise ConfigError("store.stages: encrypt has no key; set encryption.key_file")
        self._cipher = cipher
        self._stack = stack
        self._arena = arena
        self._workers = workers
        self._timeout_s = config.store.allocate_timeout_s

    async def __call__(self, batch: SealedBatch) -> EncryptedBatch:
        sizes = [buffer.nbytes for buffer in batch.buffers] if self._stack.leaves_memory else []
        copies = await self._arena.lease_many(sizes, timeout_s=self._timeout_s)
        batch.scope.add(copies)
        if copies:
            await in_thread(self._workers, lambda: self._encrypt(batch, copies))
        return batch.as_type(EncryptedBatch, at_rest=tuple(copies))

    def _encrypt(self, batch: SealedBatch, copies: Sequence[Buffer]) -> None:
        for chunk, buffer, copy in zip(batch.chunks, batch.buffers, copies, strict=False):
            self._cipher.encrypt(buffer.view, copy.view, chunk.key)
