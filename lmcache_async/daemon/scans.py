"""Lists of keys that are given out in steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_async.types import ChunkKey

SCAN_COUNT = 100
MAX_SCAN_COUNT = 1000
MAX_SCANS = 8
"""Lists that are kept; who begins one more ends the oldest."""
_POSITION_BITS = 32


@dataclass(frozen=True, slots=True)
class Step:
    """A piece of a list.

    Attributes:
        cursor: To ask for the next piece with; 0 after the last.
        keys: In no order.
    """

    cursor: int
    keys: Sequence[ChunkKey]


class Scans:
    """Every key that is there from a scan's first step to its last is given once."""

    def __init__(self) -> None:
        self._lists: OrderedDict[int, tuple[str, list[ChunkKey]]] = OrderedDict()
        self._last = 0

    def step(self, tenant: str, cursor: int, count: int, keys: Callable[[], list[ChunkKey]]) -> Step | None:
        """The next piece; None where the cursor is none of the tenant's, or too old.

        Args:
            tenant: Whose keys.
            cursor: 0, or that of the step before.
            count: Keys wanted.
            keys: Gives all of them, for the first step.
        """
        number, position = cursor >> _POSITION_BITS, cursor & ((1 << _POSITION_BITS) - 1)
        if not cursor:
            self._last = number = self._last % (1 << 30) + 1
            self._lists[number] = (tenant, keys())
            while len(self._lists) > MAX_SCANS:
                self._lists.popitem(last=False)
        owner, all_keys = self._lists.get(number, ("", []))
        if owner != tenant:
            return None
        end = position + min(max(count, 1), MAX_SCAN_COUNT)
        if end < len(all_keys):
            return Step((number << _POSITION_BITS) | end, all_keys[position:end])
        del self._lists[number]
        return Step(0, all_keys[position:])
