"""Use the engine without vLLM, on plain tensors: store the KV of a prompt, and load it for one with the same prefix."""

from __future__ import annotations

import asyncio
import time

import torch

from lmcache_async import CacheEngine, KVLayout, Namespace, load_config

BLOCKS, BLOCK_SIZE, TOKENS = 512, 16, 2048


async def main() -> None:
    # 8 layers of a paged KV cache: K and V, blocks, tokens per block, heads, head size
    caches = [torch.randn(2, BLOCKS, BLOCK_SIZE, 4, 64) for _ in range(8)]
    layout = KVLayout.from_token_slots(caches)
    config = load_config(extra={"arena.max_bytes": "256MiB"})
    namespace = Namespace(
        model="example", weights="none", dtype=layout.dtype, layout=layout.text, chunk_size=config.chunk_size
    )
    prompt = list(range(TOKENS))
    async with CacheEngine.open(config, layout=layout, namespace=namespace) as engine:
        start = time.perf_counter()
        report = await engine.store(prompt, torch.arange(TOKENS))
        print(f"stored {report.stored} chunks in {time.perf_counter() - start:.3f} s")

        longer = [*prompt, 7, 8, 9]
        print(f"found {await engine.lookup(longer)} of {len(longer)} tokens")

        start = time.perf_counter()
        mask = await engine.retrieve(longer, torch.arange(4096, 4096 + len(longer)))  # to other slots
        print(f"loaded {int(mask.sum())} of {len(longer)} tokens in {time.perf_counter() - start:.3f} s")

    slots = caches[0].flatten(1, 2)
    assert torch.equal(slots[:, 4096 : 4096 + TOKENS], slots[:, :TOKENS])


if __name__ == "__main__":
    asyncio.run(main())
