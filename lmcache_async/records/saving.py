"""Records out of an archive proven and saved, each key once."""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import Executor
from dataclasses import dataclass
from weakref import WeakValueDictionary

from lmcache_async.errors import ChunkCorruptError, TierError, TierFullError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.threads import in_thread
from lmcache_async.records.archive import Frame
from lmcache_async.records.namespaces import Selection
from lmcache_async.records.proving import Checked, check
from lmcache_async.records.target import Target
from lmcache_async.tiers.rest import Kept
from lmcache_async.types import ChunkKey


@dataclass(frozen=True, slots=True)
class Coming:
    """A record out of the archive, not proven yet, in memory that is to be released."""

    frame: Frame
    buffer: Buffer
    stamp: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a record that was taken out of the archive.

    Attributes:
        there: It was saved before, out of the same archive.
    """

    key: ChunkKey
    nbytes: int
    checked: Checked
    refused: str = ""
    message: str = ""
    there: bool = False


class Saver:
    """Of several records with one key the first that is right is saved; they wait for each other.

    Attributes:
        saved: The keys that were saved.
    """

    def __init__(self, target: Target, selection: Selection, workers: Executor) -> None:
        self.saved: set[ChunkKey] = set()
        self._target = target
        self._selection = selection
        self._workers = workers
        self._turns: WeakValueDictionary[ChunkKey, asyncio.Lock] = WeakValueDictionary()

    async def save(self, coming: Coming) -> Outcome:
        """Prove and save it, and release its memory."""
        key, nbytes = coming.frame.key, coming.frame.nbytes
        with coming.buffer as buffer:
            turn = self._turns.setdefault(key, asyncio.Lock())
            async with turn:
                if key in self.saved:
                    return Outcome(key, nbytes, Checked(None), there=True)
                prove = functools.partial(_prove, Kept(key), buffer.view, self._selection)
                checked = await in_thread(self._workers, prove)
                if not checked.taken or checked.cause:
                    return Outcome(key, nbytes, checked, checked.cause, checked.message)
                try:
                    await self._target.save(key, buffer, coming.stamp)
                except TierUnavailableError:
                    raise
                except TierError as error:
                    return Outcome(key, nbytes, checked, _word(error), str(error))
                self.saved.add(key)
        return Outcome(key, nbytes, checked)


def _word(error: TierError) -> str:
    if isinstance(error, ChunkCorruptError):
        return error.cause
    return "full" if isinstance(error, TierFullError) else "error"


def _prove(kept: Kept, record: memoryview, selection: Selection) -> Checked:
    checked = check(kept, iter([record]), selection=selection)
    if checked.taken and not checked.cause and checked.looked is not None:
        says = checked.looked.record_bytes
        if says != len(record):
            message = f"the header says {says} bytes, the archive has {len(record)}"
            return Checked(checked.looked, cause="length", message=message)
    return checked
