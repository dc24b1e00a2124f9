"""vLLM without a model: its real scheduler and our real connector over a KV cache whose values are known.

The value at a position is a hash of the tokens up to it, as KV is, and the next token is a function of
it. So each step can check that whatever attention would read is right, and two runs that give the same
tokens have used the same KV. Nothing here waits: each step runs the parts in vLLM's order.
"""

from __future__ import annotations

import copy
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_async.testing.vllm_setup import (
    CONTENT,
    HEADS,
    LAYERS,
    VOCABULARY,
    Setup,
    kv_cache_config,
    vllm_config,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def value_after(value: int, token: int) -> int:
    """The KV at the next position; it fits a float32 exactly."""
    return zlib.crc32(token.to_bytes(8, "little", signed=True), value) & 0x3FFFFF


def next_token(value: int) -> int:
    return value % VOCABULARY


@dataclass(slots=True)
class Work:
    """What one request computes in one step: positions start..stop in these blocks."""

    start: int
    stop: int
    blocks: Sequence[int]


@dataclass(slots=True)
class Step:
    output: Any
    work: dict[str, Work]
    preempted: set[str] = field(default_factory=set)


class Rank:
    """One worker: its KV cache and its half of the connector."""

    def __init__(self, config: Any, cache_config: Any, rank: int) -> None:
        self.rank = rank
        block_size = cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.block_size = block_size
        shape = (cache_config.num_blocks, HEADS, block_size, CONTENT)
        self.caches = {f"layer.{layer}": torch.full(shape, -1.0) for layer in range(LAYERS)}
        self.connector: Any = None
        if config.kv_transfer_config is not None:
            mine = copy.copy(config)
            mine.parallel_config = copy.copy(config.parallel_config)
            mine.parallel_config.rank = rank
            self.connector = KVConnectorFactory.create_connector(mine, KVConnectorRole.WORKER, cache_config)
            self.connector.register_kv_caches(self.caches)

    def write(self, blocks: Sequence[int], start: int, values: Sequence[int]) -> None:
        for layer, cache in enumerate(self.caches.values()):
            rows, slots, stored = self._places(blocks, start, values, layer)
            cache[rows, :, slots] = stored

    def wrong_positions(self, blocks: Sequence[int], start: int, values: Sequence[int]) -> list[int]:
        """Where, from `start` on, the cache holds something else."""
        wrong: set[int] = set()
        for layer, cache in enumerate(self.caches.values()):
            rows, slots, stored = self._places(blocks, start, values, layer)
            differs = (cache[rows, :, slots] != stored).flatten(1).any(1)
            wrong.update((differs.nonzero().flatten() + start).tolist())
        return sorted(wrong)

    def _places(
        self, blocks: Sequence[int], start: int, values: Sequence[int], layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, start + len(values))
        rows = torch.tensor(blocks)[positions // self.block_size]
        stored = torch.tensor(values, dtype=torch.float32) * 4 + layer * 2 + self.rank % 2
        return rows, positions % self.block_size, stored.view(-1, 1, 1)


class SimulatedVLLM:
    """Feed it requests, step it, look at the outputs.

    Attributes:
        outputs: Generated tokens by request.
        finish_reasons: Why each finished request ended.
        cached_tokens: By request, prompt tokens that vLLM did not compute: (its own, the connector's).
        computed_tokens: Tokens computed in all steps, the measure of what hits have saved.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.config = vllm_config(setup)
        cache_config = kv_cache_config(setup)
        init_none_hash(sha256)
        self.ranks = [Rank(self.config, cache_config, rank) for rank in range(setup.ranks)]
        scheduler_class = AsyncScheduler if setup.overlapped else Scheduler
        self.scheduler = scheduler_class(
            vllm_config=self.config,
            kv_cache_config=cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=setup.block_size,
            log_stats=True,
        )
        self.connector: Any = self.scheduler.connector
        self._aggregator = KVOutputAggregator(setup.ranks)
        self._block_hasher = get_request_block_hasher(setup.block_size, sha256)
        self._values: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._queue: deque[Step] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.cached_tokens: dict[str, tuple[int, int]] = {}
        self.computed_tokens = 0
        self.preemptions = 0

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        max_tokens: int = 4,
        params: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": dict(params)} if params else None,
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=cache_salt,
            block_hasher=self._block_hasher,
        )
        self._tokens[request_id] = list(tokens)
        self._values[request_id] = []
        self.outputs[request_id] = []
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.finish_reasons.setdefault(request_id, "abort")

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self._queue)

    def step(self) -> None:
        """Schedule one step and run the oldest one."""
        output = self.scheduler.schedule()
        self._queue.append(Step(output, self._work_of(output)))
        depth = 2 if self.setup.overlapped and output.total_num_scheduled_tokens else 1
        while len(self._queue) >= depth and self._queue:
            self._run(self._queue.popleft())

    def run(self, *, max_seconds: float = 60.0) -> None:
        """Step until nothing is left to do, as vLLM's engine loop does."""
        deadline = time.monotonic() + max_seconds
        while self.busy:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not idle after {max_seconds} s; finished are {self.finish_reasons}")
            before = self.computed_tokens
            self.step()
            if self.computed_tokens == before:
                time.sleep(0.001)  # as vLLM's engine does, so that transfers get on

    def close(self) -> None:
        for connector in [*(rank.connector for rank in self.ranks), self.connector]:
            if connector is not None:
                connector.shutdown()

    def _work_of(self, output: Any) -> dict[str, Work]:
        work = {}
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            stop = request.num_computed_tokens  # the scheduler has counted this step already
            blocks = self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            work[request_id] = Work(stop - count, stop, list(blocks))
        return work

    def _run(self, step: Step) -> None:
        outputs = [self._run_rank(rank, step) for rank in self.ranks]
        merged = self._aggregator.aggregate(outputs) if self.connector is not None else outputs[0]
        results = self.scheduler.update_from_output(step.output, merged)
        for engine_outputs in results.values():
            for item in engine_outputs.outputs:
                self.outputs[item.request_id].extend(item.new_token_ids)
                if item.finish_reason is not None:
                    self.finish_reasons[item.request_id] = str(item.finish_reason)
                if item.prefill_stats is not None:
                    stats = item.prefill_stats
                    self.cached_tokens[item.request_id] = (
                        stats.num_local_cached_tokens,
                        stats.num_external_cached_tokens,
                    )
        self.preemptions += len(step.output.preempted_req_ids or ())

    def _run_rank(self, rank: Rank, step: Step) -> ModelRunnerOutput:
        """The order of vLLM's model runner V1."""
        connector, output = rank.connector, step.output
        if connector is not None:
            connector.handle_preemptions(output.kv_connector_metadata)
            connector.bind_connector_metadata(output.kv_connector_metadata)
        sampled = [self._forward(rank, request_id, work) for request_id, work in step.work.items()]
        result = ModelRunnerOutput(
            req_ids=list(step.work),
            req_id_to_index={request_id: index for index, request_id in enumerate(step.work)},
            sampled_token_ids=sampled,
        )
        if connector is not None:
            result.kv_connector_output = _connector_output(connector, output)
        return result

    def _forward(self, rank: Rank, request_id: str, work: Work) -> list[int]:
        tokens, values = self._tokens[request_id], self._values[request_id]
        while len(values) < min(work.stop, len(tokens)):
            values.append(value_after(values[-1] if values else 0, tokens[len(values)]))
        wrong = rank.wrong_positions(work.blocks, 0, values[: work.start])
        if wrong:
            raise AssertionError(f"rank {rank.rank}: {request_id} would read wrong KV at {wrong}")
        rank.write(work.blocks, work.start, values[work.start : work.stop])
        if rank.rank == 0:
            self.computed_tokens += work.stop - work.start
        if work.stop < len(tokens):
            return []
        token = next_token(values[work.stop - 1])
        if len(tokens) == work.stop:
            tokens.append(token)
        return [tokens[work.stop]]


def _connector_output(connector: Any, output: Any) -> KVConnectorOutput:
    result = KVConnectorOutput()
    connector.start_load_kv(None)
    connector.wait_for_save()
    transfers = connector.get_transfer_results(output.finished_req_ids)
    result.finished_sending = transfers.finished_sending
    result.finished_recving = transfers.finished_recving
    result.invalid_block_ids = connector.get_block_ids_with_load_errors()
    result.kv_connector_worker_meta = connector.build_connector_worker_meta()
    connector.clear_connector_metadata()
    return result
