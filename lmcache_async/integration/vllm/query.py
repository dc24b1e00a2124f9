"""One lookup over all ranks: what every one of them has is the hit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from lmcache_async.integration.vllm.decide import slowest
from lmcache_async.integration.vllm.lookups import Answer
from lmcache_async.integration.vllm.wire import unpack_costs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_async.integration.vllm.chains import RequestChain
    from lmcache_async.integration.vllm.link import Link
    from lmcache_async.integration.vllm.lookups import Lookup
    from lmcache_async.integration.vllm.wire import Message
    from lmcache_async.types import Chunk


async def query(
    links: Sequence[Link], chain: RequestChain, lookup: Lookup, ends: Sequence[Sequence[Chunk]]
) -> Answer:
    """Ask each rank for the longest prefix, then for a partial chunk where it ends.

    Where everything is there one message does; the partial chunk at the end goes with it.

    Args:
        ends: By rank, the partial chunks that may follow the last full chunk.

    Raises:
        ValueError: A rank's answer makes no sense, or there are more keys than a message holds.
    """
    chunks = lookup.num_tokens // chain.identity.chunk_size
    keys = chain.packed_keys(0, chunks)
    replies = await _ask_all(
        links,
        [
            {"op": "lookup", "lookup_id": lookup.lookup_id, "keys": keys[rank], "tail": _pack(ends[rank])}
            for rank in range(len(links))
        ],
    )
    if replies is None:
        return Answer(pinned=True)  # a miss, but the ranks that did answer hold leases
    counts = [_number(reply, "count", 0, chunks) for reply in replies]
    held = [_number(reply, "pinned", 0, chunks) for reply in replies]
    hit = min(counts)
    candidates, of_ends = ends, replies
    failed = False
    if hit < chunks:
        candidates = chain.hole_candidates(hit)
        asked = await _first_of_all(links, lookup.lookup_id, candidates)
        of_ends, failed = asked or [], asked is None
    partial = _agreed(candidates, _firsts(of_ends, candidates))
    costs = [unpack_costs(reply.get("costs"), count) for reply, count in zip(replies, counts, strict=True)]
    partial_held = [_flag(reply, "first_pinned") for reply in of_ends]
    return Answer(
        chunks=hit,
        partial_tokens=len(partial[0].tokens) if partial else 0,
        partial_keys=tuple(chunk.key for chunk in partial),
        partial_text=partial[0].extra if partial else "",
        tiers=_tiers(replies[0]),
        pinned=any(held) or any(partial_held) or failed,
        resident=all(count == number for count, number in zip(counts, held, strict=True))
        and (not partial or all(partial_held)),
        costs=slowest(costs, hit),
    )


async def ends_there(links: Sequence[Link], lookup_id: str, keys: Sequence[bytes]) -> bool:
    """Whether every rank has its one of these keys; what is in host memory is pinned.

    Raises:
        ValueError: A rank's answer makes no sense.
    """
    messages = [{"op": "first", "lookup_id": lookup_id, "keys": key} for key in keys]
    replies = await _ask_all(links, messages)
    return replies is not None and all(_number(reply, "first", -1, 0) == 0 for reply in replies)


async def _first_of_all(
    links: Sequence[Link], lookup_id: str, candidates: Sequence[Sequence[Chunk]]
) -> list[Message] | None:
    """Which partial chunk each rank has; nothing where there is none to ask for."""
    if not candidates[0]:
        return []
    return await _ask_all(
        links,
        [{"op": "first", "lookup_id": lookup_id, "keys": _pack(chunks)} for chunks in candidates],
    )


def _agreed(candidates: Sequence[Sequence[Chunk]], firsts: Sequence[int]) -> list[Chunk]:
    """The partial chunk, by rank, that all ranks have; none if they have different ones."""
    if not firsts or min(firsts) < 0 or len(set(firsts)) > 1:
        return []
    return [chunks[first] for chunks, first in zip(candidates, firsts, strict=True)]


async def _ask_all(links: Sequence[Link], messages: Sequence[Message]) -> list[Message] | None:
    """Every rank's answer; None if one of them has none."""
    replies = await asyncio.gather(
        *(link.call(message) for link, message in zip(links, messages, strict=True))
    )
    answered = [reply for reply in replies if reply is not None]
    return answered if len(answered) == len(replies) else None


def _firsts(replies: Sequence[Message], candidates: Sequence[Sequence[Chunk]]) -> list[int]:
    if not replies:
        return []
    return [
        _number(reply, "first", -1, len(chunks) - 1)
        for reply, chunks in zip(replies, candidates, strict=True)
    ]


def _number(reply: Message, name: str, least: int, most: int) -> int:
    value = reply.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"a rank answered {value!r:.40} as {name}; it is {least} to {most}")
    return value


def _flag(reply: Message, name: str) -> bool:
    value = reply.get(name)
    if not isinstance(value, bool):
        raise ValueError(f"a rank answered {value!r:.40} as {name}; it is true or false")  # noqa: TRY004
    return value


def _tiers(reply: Message) -> dict[str, int]:
    tiers = reply.get("tiers")
    if not isinstance(tiers, dict) or not all(
        isinstance(name, str) and type(count) is int for name, count in tiers.items()
    ):
        raise ValueError(f"a rank answered {tiers!r:.40} as tiers; it is chunks by a tier's name")
    return tiers


def _pack(chunks: Sequence[Chunk]) -> bytes:
    return b"".join(chunk.key for chunk in chunks)
