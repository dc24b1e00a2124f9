"""`python -m tools.scale.messages`: messages of an engine to its host's daemon for one prompt, by kind."""

from __future__ import annotations

import sys
import time
from collections import Counter
from unittest import mock

import torch

from lmcache_async import LMCacheEngineBuilder, load_config
from lmcache_async.daemon import messages
from lmcache_async.engine.sync import LMCacheEngine
from tools.benchmarks import servers

CHUNKS = 64  # of 256 tokens, 2 MiB each
TIMEOUT_S = 30.0
WAITS = dict.fromkeys(("connect_timeout_s", "lookup_timeout_s", "transfer_timeout_s"), TIMEOUT_S)
BLOCKS = CHUNKS * 256 // 16


def count(batch: str) -> dict[str, Counter[str]]:
    """Count the frames of the client for a store and a retrieve of CHUNKS chunks in batches of `batch` bytes."""
    caches = [torch.zeros(2, 2 * BLOCKS, 16, 2, 64) for _ in range(8)]
    tokens = list(range(CHUNKS * 256))
    found: dict[str, Counter[str]] = {}
    with servers.host_daemon(256 << 20) as socket:
        extra = {
            "arena.max_bytes": "192MiB",
            "store.batch_bytes": batch,
            "retrieve.batch_bytes": batch,
            "tiers": [{"name": "host", "socket": str(socket), **WAITS}],
        }
        sent: Counter[str] = Counter()
        pack = messages.frame

        def counted(op: messages.Op, *parts: bytes) -> bytes:
            sent[op.name] += 1
            return pack(op, *parts)

        with mock.patch("lmcache_async.plugins.host.connection.frame", counted):
            engine = LMCacheEngineBuilder.get_or_create(
                "messages", load_config(extra=extra), kv_caches=caches
            )
            try:
                for name, call in (
                    ("store", lambda: engine.store(tokens, slot_mapping=torch.arange(len(tokens)))),
                    ("lookup", lambda: engine.lookup(tokens)),
                    ("retrieve", lambda: engine.retrieve(tokens, slot_mapping=torch.arange(len(tokens)))),
                ):
                    sent.clear()
                    call()
                    if name == "store":
                        _wait(engine, tokens, sent)
                    found[name] = Counter(sent)
            finally:
                LMCacheEngineBuilder.destroy("messages")
    return found


def _wait(engine: LMCacheEngine, tokens: list[int], sent: Counter[str]) -> None:
    """Wait until all chunks are stored, without counting the lookups.

    Raises:
        TimeoutError: A chunk was dropped.
    """
    end = time.monotonic() + TIMEOUT_S
    while engine.lookup(tokens) < len(tokens):
        sent["CONTAINS"] -= 1
        if time.monotonic() > end:
            raise TimeoutError(f"{len(tokens)} tokens are not stored after {TIMEOUT_S} s")
    sent["CONTAINS"] -= 1


if __name__ == "__main__":
    for size in ("32MiB", "3MiB"):
        for what, kinds in count(size).items():
            sys.stdout.write(f"batches of {size}, {what} of {CHUNKS} chunks: {dict(kinds)}\n")
