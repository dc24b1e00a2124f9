"""Keys of a request as the lookup client makes them."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_async.integration.vllm.groups import KVGroup, block_size_of
from lmcache_async.integration.vllm.keys import RequestKeys
from lmcache_async.integration.vllm.lookup_server import PROTOCOL, Identity

CHUNK, BLOCK = 8, 2
ROOTS = (b"0" * 16, b"1" * 16)


def opened_keys(
    tokens: Sequence[int],
    *,
    roots: Sequence[bytes] = ROOTS,
    groups: Sequence[KVGroup] = (),
    num_prompt: int | None = None,
    hashed: bool = True,
    **options: object,
) -> RequestKeys:
    """Return the keys of a request in chunks of `CHUNK` tokens.

    Args:
        tokens: Its tokens.
        roots: Root of each rank. Those of the groups are the same for all ranks.
        groups: KV groups; none for a single one.
        num_prompt: Number of prompt tokens; all by default.
        hashed: Whether all tokens are hashed.
        options: Arguments of `RequestKeys`.
    """
    keys = RequestKeys("r", tokens, len(tokens) if num_prompt is None else num_prompt, **options)  # type: ignore[arg-type]
    unit = block_size_of(groups) if groups else BLOCK
    group_roots = [[bytes([group.index]) * 16 for group in groups]] * len(roots)
    keys.open(roots, Identity(PROTOCOL, roots[0], "xxh3_128", CHUNK, unit), "", group_roots=group_roots)
    if hashed:
        keys.extend(len(tokens), lambda: None)
    return keys
