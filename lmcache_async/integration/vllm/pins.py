"""vLLM's blocks that a store still reads: kept from reuse until every rank has copied them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class Pins:
    """Holds blocks of vLLM's pool by one reference of our own each. The scheduler's thread only.

    Args:
        max_fraction: Largest part of the pool that may be held at one time.
    """

    def __init__(self, max_fraction: float) -> None:
        self._max_fraction = max_fraction
        self._pool: Any = None
        self._max_blocks = 0
        self._jobs: dict[int, list[Any]] = {}
        self._held: Counter[int] = Counter()

    def __bool__(self) -> bool:
        return bool(self._jobs)

    @property
    def held_blocks(self) -> int:
        return len(self._held)

    @property
    def room(self) -> int:
        """Blocks that may still be held."""
        return self._max_blocks - len(self._held)

    def bind(self, block_pool: Any) -> None:
        self._pool = block_pool
        self._max_blocks = max(1, int(block_pool.num_gpu_blocks * self._max_fraction))

    def hold(self, job_id: int, block_ids: Sequence[int]) -> None:
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        self._jobs[job_id] = blocks
        self._held.update(block_ids)

    def let_go(self, job_id: int) -> None:
        blocks = self._jobs.pop(job_id)
        for block in blocks:
            self._held[block.block_id] -= 1
            if not self._held[block.block_id]:
                del self._held[block.block_id]
        self._pool.free_blocks(
            reversed(blocks)
        )  # the first is evicted first, and that is the last of a prefix

    def would_free(self) -> bool:
        """Whether some block is held by us alone, so that the end of a store makes it free."""
        blocks = self._pool.blocks if self._held else ()
        return any(blocks[block_id].ref_cnt == count for block_id, count in self._held.items())
