"""vLLM's blocks that a store still reads: kept from reuse until every rank has copied them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class Pins:
    """Holds blocks of vLLM's pool by one reference of our own each. The scheduler's thread only.

    A prompt has thousands of blocks and the scheduler's thread is precious, so the references are
    counted here, as the pool's own `touch` and `free_blocks` count them. The pool comes in where a block
    becomes free.

    Args:
        max_fraction: Largest part of the pool that may be held at one time.
    """

    def __init__(self, max_fraction: float) -> None:
        self._max_fraction = max_fraction
        self._pool: Any = None
        self._max_blocks = 0
        self._held_blocks = 0
        self._jobs: dict[int, Sequence[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._jobs)

    @property
    def held_blocks(self) -> int:
        """References held; a block of two jobs counts twice."""
        return self._held_blocks

    @property
    def room(self) -> int:
        """Blocks that may still be held."""
        return self._max_blocks - self._held_blocks

    def bind(self, block_pool: Any) -> None:
        self._pool = block_pool
        self._max_blocks = max(1, int(block_pool.num_gpu_blocks * self._max_fraction))

    def hold(self, job_id: int, blocks: Sequence[Any]) -> None:
        """Hold blocks of a request. It holds them itself now, so none of them is in the free queue."""
        for block in blocks:
            block.ref_cnt += 1
        self._jobs[job_id] = blocks
        self._held_blocks += len(blocks)

    def let_go(self, job_id: int) -> None:
        blocks = self._jobs.pop(job_id)
        self._held_blocks -= len(blocks)
        last: list[Any] = []
        for block in blocks:
            if block.ref_cnt > 1:
                block.ref_cnt -= 1
            else:
                last.append(block)
        if last:
            self._pool.free_blocks(reversed(last))  # the first is evicted first: the last of a prefix

    def would_free(self) -> bool:
        """Whether some block is held by us alone, so that the end of a store makes it free."""
        held: Counter[int] = Counter()
        for blocks in self._jobs.values():
            for block in blocks:
                held[block.block_id] += 1
                if block.ref_cnt == held[block.block_id]:
                    return True
        return False
