"""Mutations of disaggregated prefill: endless waits, missing waits, wrong answers."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

LOOKUP = "lmcache_async/integration/vllm/lookup.py"
PROMISE = "lmcache_async/integration/vllm/keys.py"
REQUEST = "lmcache_async/integration/vllm/request.py"
SCHEDULER = "lmcache_async/integration/vllm/scheduler.py"
TEST_WAITER = ("tests/unit/vllm/test_promise_waiter.py",)
TEST_PROMISE = ("tests/unit/vllm/test_promise.py",)

DISAGGREGATED = (
    Mutation(
        "disaggregated: a promise is not awaited",
        LOOKUP,
        "deadline = lookup.asked_at + lookup.wait_s",
        "deadline = lookup.asked_at",
        TEST_WAITER,
    ),
    Mutation(
        "disaggregated: an aborted request keeps waiting",
        LOOKUP,
        "queries += 1\n            if pending.abandoned:",
        "queries += 1\n            if False:",
        TEST_WAITER,
    ),
    Mutation(
        "disaggregated: the rate of queries is not shared by waiting requests",
        LOOKUP,
        "LAST_PAUSE_S), waiting * SPACING_S)",
        "LAST_PAUSE_S), 0.0)",
        TEST_WAITER,
    ),
    Mutation(
        "disaggregated: a promise of another prompt is accepted",
        PROMISE,
        'return "" if digests[1] == self.end else',
        'return "" if self.end else',
        TEST_WAITER,
    ),
    Mutation(
        "disaggregated: a missing chunk before the last one is not detected",
        LOOKUP,
        "while not self._query.keeps(promise, lookup, answer, size) and",
        "while not queries and",
        TEST_WAITER,
    ),
    Mutation(
        "disaggregated: the wait begins again with every preemption",
        REQUEST,
        "if self._promise_until is None:",
        "if True:",
        TEST_PROMISE,
    ),
    Mutation(
        "disaggregated: a tier that refuses everything is promised",
        SCHEDULER,
        "self._reaches_shared_tier = False",
        "self._reaches_shared_tier = True",
        TEST_PROMISE,
    ),
    Mutation(
        "disaggregated: lost chunks are promised",
        REQUEST,
        "if cursor.lost_chunk is not None and cursor.lost_chunk <= full:",
        "if False:",
        TEST_PROMISE,
    ),
    Mutation(
        "disaggregated: chunks that only memory has are not written to the shared tier",
        REQUEST,
        "if self.load_failed or self.hands_over:",
        "if self.load_failed:",
        TEST_PROMISE,
    ),
    Mutation(
        "disaggregated: a producer's loads are given blocks that a step still writes",
        "lmcache_async/integration/vllm/connector.py",
        "changed = [each for each in kv_transfer_configs if not each.is_kv_consumer]",
        "changed: list[Any] = []",
        ("tests/unit/vllm/test_simulated.py::test_stores_and_loads_by_role",),
    ),
    Mutation(
        "disaggregated: a promise is compared with the time to compute",
        "lmcache_async/integration/vllm/load_policy.py",
        "if promised:",
        "if False:",
        TEST_PROMISE,
    ),
)
