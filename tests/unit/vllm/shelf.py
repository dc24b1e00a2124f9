"""A tier shared by several simulated vLLMs, with visibility controlled by the test."""

from __future__ import annotations

from typing import Any

from lmcache_async.errors import TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.fakes import DictConfig, DictTier
from lmcache_async.tiers.base import Capabilities
from lmcache_async.types import ChunkKey


class Shelf:
    """Content of the shared tier.

    Attributes:
        visible: Records that lookups find.
        under_way: Records put while the shelf was slow, invisible until `arrive`.
        slow: Puts stay in `under_way` until `arrive`.
        broken: Puts fail.
    """

    def __init__(self) -> None:
        self.visible: dict[ChunkKey, bytes] = {}
        self.under_way: dict[ChunkKey, bytes] = {}
        self.slow = self.broken = False

    def arrive(self) -> None:
        self.visible.update(self.under_way)
        self.under_way.clear()

    def tier_class(self) -> type[DictTier]:
        shelf = self

        class ShelfTier(DictTier):
            config_type = DictConfig

            def __init__(self, config: Any = None) -> None:
                super().__init__(config, records=shelf.visible)

            @property
            def capabilities(self) -> Capabilities:
                return Capabilities(persistent=True, removes=True, lists=True, shared=True)

            async def put(self, key: ChunkKey, buffer: Buffer) -> None:
                if shelf.broken:
                    raise TierUnavailableError("the shelf is broken")
                (shelf.under_way if shelf.slow else shelf.visible)[key] = bytes(buffer.view)

        return ShelfTier
