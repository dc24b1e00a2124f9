"""Mutations of models with several KV groups: KV of another group, position or window."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

VLLM = "lmcache_async/integration/vllm"
TEST_ENGINE = ("tests/unit/test_lookups.py",)
TEST_KEYS = ("tests/unit/vllm/test_keys.py",)
TEST_PINS = ("tests/unit/vllm/test_block_pins.py",)
TEST_SCHEDULER = ("tests/unit/vllm/test_scheduler.py",)
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
        "lmcache_async/engine/lookup.py",
        "if len(tiers) == len(runs[position]):",
        "if tiers:",
        TEST_ENGINE,
    ),
    Mutation(
        "groups: blocks outside of the window are stored",
        f"{VLLM}/scheduler.py",
        "held = all(block.ref_cnt and not block.is_null for block in needed[-1])",
        "held = True",
        TEST_PINS,
    ),
    Mutation(
        "groups: a recurrent state is read by its position in the block table",
        f"{VLLM}/scheduler.py",
        "            if group.state:\n",
        "            if False:\n",
        TEST_SCHEDULER,
    ),
    Mutation(
        "groups: states are stored that vLLM did not offer for all groups",
        f"{VLLM}/scheduler.py",
        "== boundary\n                    ]",
        "== boundary\n                    ]\n                    or blocks[group.index][start:stop]",
        TEST_SCHEDULER,
    ),
    Mutation(
        "groups: a state is stored from a block that vLLM has reused in the same step",
        f"{VLLM}/scheduler.py",
        "if block.block_id == offered and block.block_hash_num_tokens == boundary",
        "if block.block_id == offered",
        ("tests/unit/vllm/test_simulated.py::test_rejected_drafts_never_lead_to_wrong_kv",),
    ),
    Mutation(
        "groups: vLLM's longer common prefix is replaced",
        f"{VLLM}/scheduler.py",
        "(shared := tracker.shared_tokens) > request.shared_prefix_boundary",
        "(shared := tracker.shared_tokens)",
        TEST_SCHEDULER,
    ),
    Mutation(
        "groups: a failed load is not reported",
        f"{VLLM}/worker.py",
        "                self._failed_requests.add(job.request_id)",
        "                pass",
        TEST_WORKER,
    ),
    Mutation(
        "groups: a request whose load has failed keeps others from being tried",
        f"{VLLM}/request.py",
        "return self.load_failed and self._gave_way",
        "return False",
        (
            "tests/unit/vllm/test_simulated.py::test_a_request_whose_load_has_failed_lets_vllm_try_those_that_hold_blocks",
        ),
    ),
)
