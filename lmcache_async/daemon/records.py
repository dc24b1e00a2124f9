"""What the daemon looks at in what it is given, before others find it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_async.errors import ChunkCorruptError
from lmcache_async.memory.header import peek_sizes

if TYPE_CHECKING:
    from lmcache_async.daemon.pool import Slot


def is_record(slot: Slot) -> bool:
    """Whether it begins as a record of that length. Readers prove the rest."""
    try:
        _, record_bytes = peek_sizes(slot.view)
    except ChunkCorruptError:
        return False
    return record_bytes == slot.nbytes
