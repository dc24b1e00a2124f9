"""vLLM's block hashing for its prefix cache, in its own process. Blocks have the length of our chunks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

from tools.benchmarks import peers
from tools.benchmarks.peers import Ready, Workload

ALGORITHM = "sha256"  # its default


def tasks(work: Workload) -> dict[str, Ready]:
    return {peers.HASH_LIST: lambda: hashing(work)}


@contextlib.contextmanager
def hashing(work: Workload) -> Iterator[Callable[[], float]]:
    function = get_hash_fn_by_name(ALGORITHM)
    init_none_hash(function)
    tokens, size = work.prompt.tolist(), work.form.chunk_size

    def run() -> float:
        parent: Any = None
        start = time.perf_counter()
        for at in range(0, len(tokens), size):
            parent = hash_block_tokens(function, parent, tokens[at : at + size], None)
        return time.perf_counter() - start

    yield run
