"""Mutations of models with several KV groups: KV of another group, position or window."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

VLLM = "lmcache_async/integration/vllm"
TEST_KEYS = ("tests/unit/vllm/test_keys.py",)
TEST_LOOKUP = ("tests/unit/vllm/test_lookup.py",)
TEST_PINS = ("tests/unit/vllm/test_block_pins.py",)
TEST_WORKER = ("tests/unit/vllm/test_worker.py",)

GROUPS = (
    Mutation(
        "groups: a window is one block too short",
        f"{VLLM}/groups.py",
        "first = max(0, num_tokens - self.window + 1)",
        "first = max(0, num_tokens - self.window + 1 + self.block_size)",
        TEST_KEYS,
    ),
    Mutation(
        "groups: the keys of a boundary do not depend on the group",
        f"{VLLM}/keys.py",
        "boundary_root(own, key,",
        "boundary_root(bytes(KEY_BYTES), key,",
        TEST_KEYS,
    ),
    Mutation(
        "groups: the keys of a boundary do not depend on the tokens before the window",
        f"{VLLM}/keys.py",
        "boundary_root(own, key,",
        "boundary_root(own, bytes(KEY_BYTES),",
        TEST_KEYS,
    ),
    Mutation(
        "groups: a part of a boundary counts as all of it",
        f"{VLLM}/lookup_server.py",
        "            if result.count == count:",
        "            if result.count:",
        TEST_LOOKUP,
    ),
    Mutation(
        "groups: blocks outside of the window are stored",
        f"{VLLM}/scheduler.py",
        "or any(block.is_null for block in needed[-1])",
        "or False",
        TEST_PINS,
    ),
    Mutation(
        "groups: a failed load is not reported",
        f"{VLLM}/worker.py",
        "                self._failed_requests.add(job.request_id)",
        "                pass",
        TEST_WORKER,
    ),
)
