import asyncio
from pathlib import Path

from lmcache_async import Allocate, Buffer, ChunkKey, Tier, TierConfig, TierUnavailableError


class FolderConfig(TierConfig):
    path: Path


class FolderTier(Tier):
    config_type = FolderConfig

    async def contains(self, key: ChunkKey) -> bool:
        return (self.config.path / key.hex()).exists()

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        try:
            record = await asyncio.to_thread((self.config.path / key.hex()).read_bytes)
        except FileNotFoundError:
            return None
        buffer = await allocate(len(record))
        buffer.view[:] = record
        return buffer

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        path = self.config.path / key.hex()
        try:  # under another name first: nobody finds half a record
            path.with_suffix(".new").write_bytes(buffer.view)
            path.with_suffix(".new").rename(path)
        except OSError as error:
            raise TierUnavailableError(f"cannot write to {self.config.path}: {error}") from error
