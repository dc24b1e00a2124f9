"""The header of each of many records, several at a time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.records.flight import Meter, each, in_order
from lmcache_async.records.look import Looked
from lmcache_async.records.target import Target
from lmcache_async.tiers.rest import Kept

_BATCH = 64  # one after the other, by one of those that work side by side


async def heads(
    target: Target, kept: Sequence[Kept], meter: Meter
) -> AsyncGenerator[Looked | TierError | None, None]:
    """What each record says of itself, in order; why it could not be read; None where it is gone.

    Raises:
        TierUnavailableError: The target does not answer, so the others will not be read either.
    """

    async def work(batch: Sequence[Kept]) -> list[Looked | TierError | None]:
        return [await _head(target, one) for one in batch]

    batches = (kept[start : start + _BATCH] for start in range(0, len(kept), _BATCH))
    async with contextlib.aclosing(in_order(each(batches), work, in_flight=target.in_flight)) as results:
        async for batch in results:
            meter.advance(len(batch), 0)
            for looked in batch:
                yield looked


async def _head(target: Target, kept: Kept) -> Looked | TierError | None:
    try:
        return await target.head(kept)
    except TierUnavailableError:
        raise
    except TierError as error:
        return error
