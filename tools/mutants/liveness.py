"""Mutations that leak memory or let a call wait forever."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

BUFFER = "lmcache_async/memory/buffer.py"
ARENA = "lmcache_async/memory/arena.py"
DEADLINE = "lmcache_async/tiers/middleware/deadline.py"
HANDLE = "lmcache_async/tiers/handle.py"
WRITER = "lmcache_async/tiers/writer.py"
STACK = "lmcache_async/tiers/stack.py"
RUNNER = "lmcache_async/pipeline/runner.py"
TEST_CANCEL = ("tests/cancellation/test_engine_cancellation.py",)
TEST_HANDLE = ("tests/tiers/test_handle.py",)
TEST_STACK = ("tests/tiers/test_stack.py",)
TEST_WRITER = ("tests/tiers/test_writer.py",)

LEASES = (
    Mutation(
        "the writer does not release its lease",
        WRITER,
        "            item.buffer.release()\n",
        "",
        TEST_WRITER,
    ),
    Mutation(
        "the handle does not release its leases of a put",
        HANDLE,
        "release_results(self._leases)",
        "pass",
        TEST_HANDLE,
    ),
    Mutation(
        "buffers of a late call are not released",
        DEADLINE,
        "            release_results(task.result())",
        "            pass",
        ("tests/tiers/test_layer_conformance.py::TestDeadline",),
    ),
    Mutation(
        "a batch does not release its leases",
        RUNNER,
        "        for scope in run.scopes[index]:\n            scope.close()",
        "        pass",
        TEST_CANCEL,
    ),
    Mutation(
        "a cancelled fetch does not release its results",
        STACK,
        "            release_results(got)\n            raise",
        "            raise",
        TEST_STACK,
    ),
    Mutation(
        "chunks after a missing one are not released",
        STACK,
        "release_results(got[count:])",
        "pass",
        TEST_STACK,
    ),
    Mutation(
        "a slab is used again while a view of it lives",
        BUFFER,
        "sys.getrefcount(self._bytes) == _NO_VIEWS",
        "True",
        ("tests/unit/test_buffer.py",),
    ),
    Mutation(
        "a cancelled wait for memory keeps its slabs",
        ARENA,
        "self._free.extend(waiter.slabs)",
        "pass",
        ("tests/unit/test_arena_machine.py",),
    ),
    Mutation(
        "the cpu tier evicts chunks in use",
        "plugins/cpu/tier.py",
        "return buffer is not None and not buffer.shared",
        "return buffer is not None",
        ("tests/tiers/test_cpu.py",),
    ),
    Mutation(
        "the capacity of the cpu tier is not checked",
        "plugins/cpu/tier.py",
        "if len(self._chunks) >= self._max_slabs:",
        "if False:",
        ("tests/tiers/test_cpu.py",),
    ),
)

LAYERS = (
    Mutation(
        "a breaker that is open lets calls through",
        "lmcache_async/tiers/middleware/breaker.py",
        "return now >= self._until",
        "return True",
        ("tests/tiers/test_layer_breaker.py",),
    ),
    Mutation(
        "a limit lets everything through",
        "lmcache_async/tiers/middleware/limit.py",
        "taken = min(amounts[option], budget.max_bytes)",
        "taken = 0",
        ("tests/tiers/test_layer_limit.py",),
    ),
    Mutation(
        "a retry has no last attempt",
        "lmcache_async/tiers/middleware/retry.py",
        "if taken + 1 < self.options.attempts:",
        "if True:",
        ("tests/tiers/test_layer_retry.py",),
    ),
    Mutation(
        "a retry goes beyond the deadline",
        "lmcache_async/tiers/middleware/retry.py",
        "if asyncio.get_running_loop().time() + pause_s < deadline:",
        "if True:",
        ("tests/tiers/test_layer_retry.py",),
    ),
)

WAITS = (
    Mutation(
        "a tier's call has no deadline",
        DEADLINE,
        "await asyncio.wait({task}, timeout=limit_s)",
        "await asyncio.wait({task})",
        TEST_HANDLE,
    ),
    Mutation(
        "a run has no deadline",
        RUNNER,
        "timer = loop.call_at(deadline, run.end_at_deadline)",
        "timer = loop.call_at(deadline + 1e6, run.end_at_deadline)",
        ("tests/unit/test_runner.py",),
    ),
    Mutation(
        "a wait for memory has no deadline",
        ARENA,
        "async with asyncio.timeout(timeout_s):",
        "async with asyncio.timeout(None):",
        ("tests/unit/test_arena.py::test_a_deadline_ends_only_its_own_wait",),
    ),
    Mutation(
        "a cancelled copy is not awaited",
        "lmcache_async/memory/threads.py",
        "            await wait_done(ended)\n",
        "            pass\n",
        TEST_CANCEL,
    ),
    Mutation(
        "a cancelled copy of a GPU is not awaited",
        "lmcache_async/device/cuda.py",
        "await run_shielded(asyncio.gather(*running, return_exceptions=True))",
        "await asyncio.gather(*running, return_exceptions=True)",
        ("tests/unit/test_copier_cuda.py",),
    ),
    Mutation(
        "a load that no thread waits for is not copied",
        "lmcache_async/device/cpu.py",
        "call_later(UNAWAITED_S,",
        "call_later(UNAWAITED_S + 1e6,",
        ("tests/unit/test_copier_cpu.py",),
    ),
    Mutation(
        "a cancelled call in a thread is abandoned",
        "lmcache_async/memory/threads.py",
        "    while pending := [one for one in work if not one.done()]:\n",
        "    while pending := []:\n",
        ("tests/unit/test_thread_waits.py",),
    ),
    Mutation(
        "the prefix is not cut where a chunk vanished",
        STACK,
        "count = next((i for i, buffer in enumerate(got) if buffer is None), len(got))",
        "count = len(got)",
        TEST_STACK,
    ),
    Mutation(
        "a retrieve continues after a missing chunk",
        "lmcache_async/engine/builder.py",
        "ends=lambda batch, report: bool(report.cause) or report.hit_chunks < len(batch.chunks),",
        "ends=lambda batch, report: False,",
        ("tests/unit/test_engine_integrity.py",),
    ),
    Mutation(
        "a plan continues after a missing chunk",
        STACK,
        "return tuple(tiers[:prefix]), cause",
        "return tuple(tiers), cause",
        ("tests/tiers/test_plan.py",),
    ),
    Mutation(
        "a lookup in memory is sure although a tier may have the chunk",
        "lmcache_async/engine/lookup.py",
        "found is not None and self._others_lack(keys[count])",
        "found is not None",
        ("tests/unit/test_lookups.py",),
    ),
    Mutation(
        "the scheduler keeps keys of host memory that a rank has evicted",
        "lmcache_async/integration/vllm/events.py",
        "self._keys.difference_update(unpack_keys(change.removed))",
        "pass",
        ("tests/unit/vllm/test_memory_view.py",),
    ),
    Mutation(
        "the scheduler keeps keys of host memory after a reset",
        "lmcache_async/integration/vllm/scheduler.py",
        "            view.clear()",
        "            pass",
        ("tests/unit/vllm/test_scheduler.py",),
    ),
    Mutation(
        "the scheduler keeps keys of chunks that were removed from host memory",
        "lmcache_async/integration/vllm/events.py",
        "self._keys.difference_update(unpack_keys(change.removed))",
        "pass",
        ("tests/unit/vllm/test_memory_view.py",),
    ),
    Mutation(
        "a store reserves memory before its fence is reached",
        "lmcache_async/engine/builder.py",
        "        await _wait_fence(copier, batch, timeout_s)\n        if num_chunks",
        "        if num_chunks",
        ("tests/unit/test_engine.py",),
    ),
    Mutation(
        "a load reserves memory before its fence is reached",
        "lmcache_async/engine/builder.py",
        "and self._retrieve_budget.statistics().used_bytes:",
        "and False:",
        ("tests/unit/test_engine.py",),
    ),
    Mutation(
        "a copy takes a part before its fence is reached",
        "lmcache_async/device/cuda.py",
        "            await self.wait_fence(fence)\n",
        "            pass\n",
        ("tests/unit/test_copier_cuda.py",),
    ),
    Mutation(
        "copies to host memory are not on the stream of their part",
        "lmcache_async/device/cuda.py",
        "            if to_host:\n                self._copy_payloads(",
        "        if to_host:\n                self._copy_payloads(",
        ("tests/unit/test_copier_cuda.py",),
    ),
    Mutation(
        "a GPU copier does not check later jobs",
        "lmcache_async/device/cuda.py",
        "        if start < stop:\n",
        "        if start < stop and not start:\n",
        ("tests/unit/test_copier_cuda.py",),
    ),
)
