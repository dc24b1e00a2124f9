"""Mutations after which prefill and decode apart would wait in vain, not wait, or promise what is not true."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

WAITING = "lmcache_async/integration/vllm/waiting.py"
HANDOVER = "lmcache_async/integration/vllm/handover.py"
TEST_WAITING = ("tests/unit/vllm/test_waiting.py",)
TEST_HANDOVER = ("tests/unit/vllm/test_handover.py",)

APART = (
    Mutation(
        "apart: what is promised is not waited for",
        WAITING,
        "deadline = lookup.asked_at + lookup.wait_s",
        "deadline = lookup.asked_at",
        TEST_WAITING,
    ),
    Mutation(
        "apart: who is gone is waited for",
        WAITING,
        "if lookup.abandoned:",
        "if False:",
        TEST_WAITING,
    ),
    Mutation(
        "apart: all that wait ask as often as one",
        WAITING,
        "LAST_PAUSE_S), waiting * SPACING_S)",
        "LAST_PAUSE_S), 0.0)",
        TEST_WAITING,
    ),
    Mutation(
        "apart: a promise of another prompt is believed",
        HANDOVER,
        'return "" if marks[1] == self.end else',
        'return "" if self.end else',
        TEST_WAITING,
    ),
    Mutation(
        "apart: a hole before the last chunk is not seen",
        WAITING,
        "while answer.hit_tokens(size) < promise.tokens and",
        "while not asks and",
        TEST_WAITING,
    ),
    Mutation(
        "apart: the wait begins again with every preemption",
        "lmcache_async/integration/vllm/asking.py",
        "if state.wait_until is None:",
        "if True:",
        TEST_HANDOVER,
    ),
    Mutation(
        "apart: a tier that refuses everything is promised",
        HANDOVER,
        "self._reaches = not chunks",
        "self._reaches = True",
        TEST_HANDOVER,
    ),
    Mutation(
        "apart: what was lost is promised",
        HANDOVER,
        "if lost is not None and lost <= full:",
        "if False:",
        TEST_HANDOVER,
    ),
    Mutation(
        "apart: what memory alone has is not written to the shared tier",
        "lmcache_async/integration/vllm/scheduler.py",
        "if state.load_failed or state.hands_over:",
        "if state.load_failed:",
        TEST_HANDOVER,
    ),
    Mutation(
        "apart: a producer's loads are given blocks that a step still writes",
        "lmcache_async/integration/vllm/connector.py",
        "if not kv_transfer_config.is_kv_consumer:",
        "if False:",
        ("tests/unit/vllm/test_simulated.py::test_what_each_role_stores_and_loads",),
    ),
    Mutation(
        "apart: a promise is compared with the time to compute",
        "lmcache_async/integration/vllm/decide.py",
        "if not (self._always or promised) and",
        "if not self._always and",
        TEST_HANDOVER,
    ),
)
