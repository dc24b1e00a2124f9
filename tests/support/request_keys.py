"""Keys of a request as the lookup client makes them, and a rank that answers lookups from a set of keys."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_async.integration.vllm.groups import KVGroup, KVGroups
from lmcache_async.integration.vllm.keys import RequestKeys
from lmcache_async.integration.vllm.load_policy import Costs, pack_costs
from lmcache_async.integration.vllm.lookup_server import PROTOCOL, Identity, unpack_keys, unpack_runs

CHUNK, BLOCK = 8, 2
ONE_GROUP = KVGroups((KVGroup(0, BLOCK),))
ROOTS = (b"0" * 16, b"1" * 16)


def opened_keys(
    tokens: Sequence[int],
    *,
    roots: Sequence[bytes] = ROOTS,
    groups: Sequence[KVGroup] = ONE_GROUP,
    num_prompt: int | None = None,
    hashed: bool = True,
    **options: object,
) -> RequestKeys:
    """Return the keys of a request in chunks of `CHUNK` tokens.

    Args:
        tokens: Its tokens.
        roots: Root of each rank. Those of the groups are the same for all ranks.
        groups: KV groups.
        num_prompt: Number of prompt tokens; all by default.
        hashed: Whether all tokens are hashed.
        options: Arguments of `RequestKeys`.
    """
    keys = RequestKeys("r", tokens, len(tokens) if num_prompt is None else num_prompt, **options)  # type: ignore[arg-type]
    unit = KVGroups(groups).block_size
    group_roots = [[bytes([group.index]) * 16 for group in groups]] * len(roots)
    keys.open(roots, Identity(PROTOCOL, roots[0], "xxh3_128", CHUNK, unit), "", group_roots=group_roots)
    if hashed:
        keys.extend(len(tokens), lambda: None)
    return keys


class Rank:
    """Answers lookups from a set of keys.

    Attributes:
        messages: Number of messages so far.
    """

    def __init__(self, costs: Costs = ()) -> None:
        self.stored: set[bytes] = set()
        self.costs = pack_costs(costs)
        self.messages = 0

    async def call(self, message: dict[str, object]) -> dict[str, object]:
        self.messages += 1
        keys = unpack_keys(message.get("keys", b""))  # type: ignore[arg-type]
        count = next((at for at, key in enumerate(keys) if key not in self.stored), len(keys))
        runs = message["runs"] if count == len(keys) else [[b"", b""]] * len(message["runs"])  # type: ignore[arg-type]
        found = [[self._first(packed), 0, "cpu"] for packed in runs]  # type: ignore[attr-defined]
        if message["op"] == "first":
            return {"found": found}
        return {"count": count, "pinned": count, "tiers": {}, "costs": self.costs, "found": found}

    def _first(self, packed: object) -> int:
        runs = unpack_runs(packed)
        return next((at for at, run in enumerate(runs) if self.stored.issuperset(run)), -1)
