"""vLLM without a model: its real scheduler and our real connector over a KV cache whose values are known.

The value at a position is a hash of the tokens up to it, as KV is, and the next token is a function of
it. So each step can check that whatever attention would read is right, and two runs that give the same
tokens have used the same KV. Nothing here waits: each step runs the parts in vLLM's order.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_async.testing.vllm_rank import Rank, Work
from lmcache_async.testing.vllm_setup import (
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
class Step:
    output: Any
    work: dict[str, Work]
    preempted: set[str] = field(default_factory=set)


class SimulatedVLLM:
    """Feed it requests, step it, look at the outputs.

    Attributes:
        outputs: Generated tokens by request.
        finish_reasons: Why each finished request ended.
        kv_transfer_params: What finished requests gave back for another vLLM to go on with.
        cached_tokens: By request, prompt tokens that vLLM did not compute: (its own, the connector's).
        computed_tokens: Tokens computed in all steps, the measure of what hits have saved.
        connector_stats: What the connector gave vLLM's metrics, a step that had any.
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
        self.kv_transfer_params: dict[str, dict[str, Any] | None] = {}
        self.cached_tokens: dict[str, tuple[int, int]] = {}
        self.computed_tokens = 0
        self.connector_stats: list[dict[str, Any]] = []
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
        outputs = self._run_ranks(step)
        merged = self._aggregator.aggregate(outputs) if self.connector is not None else outputs[0]
        results = self.scheduler.update_from_output(step.output, merged)
        for engine_outputs in results.values():
            told = engine_outputs.scheduler_stats
            if told is not None and told.kv_connector_stats is not None:
                self.connector_stats.append(told.kv_connector_stats)
            for item in engine_outputs.outputs:
                self.outputs[item.request_id].extend(item.new_token_ids)
                if item.finish_reason is not None:
                    self.finish_reasons[item.request_id] = str(item.finish_reason)
                    self.kv_transfer_params[item.request_id] = item.kv_transfer_params
                if item.prefill_stats is not None:
                    stats = item.prefill_stats
                    self.cached_tokens[item.request_id] = (
                        stats.num_local_cached_tokens,
                        stats.num_external_cached_tokens,
                    )
        self.preemptions += len(step.output.preempted_req_ids or ())

    def _run_ranks(self, step: Step) -> list[ModelRunnerOutput]:
        """The order of vLLM's model runner V1. The ranks are at the same layer at the same time."""
        output = step.output
        connectors = [rank.connector for rank in self.ranks if rank.connector is not None]
        for connector in connectors:
            connector.handle_preemptions(output.kv_connector_metadata)
            connector.bind_connector_metadata(output.kv_connector_metadata)
            if output.has_sync_kv_loads:
                connector.start_load_kv(None)
        spoiled = self._forward(step)
        ends = [_connector_output(connector, output) for connector in connectors]
        invalid = {block for end in ends for block in end.invalid_block_ids}
        for request_id, (number, wrong) in spoiled.items():
            if not invalid.intersection(step.work[request_id].blocks):
                raise AssertionError(f"rank {number}: {request_id} has read wrong KV at {wrong}")
        sampled = [self._sample(name, work, spoilt=name in spoiled) for name, work in step.work.items()]
        results = []
        for rank in self.ranks:
            result = ModelRunnerOutput(
                req_ids=list(step.work),
                req_id_to_index={request_id: index for index, request_id in enumerate(step.work)},
                sampled_token_ids=sampled,
            )
            if ends:
                result.kv_connector_output = ends[rank.rank]
            results.append(result)
        return results

    def _forward(self, step: Step) -> dict[str, tuple[int, list[int]]]:
        """Write and read every layer; requests that read wrong KV, which goes on into the layers after it.

        Returns:
            For each of them the rank and the positions where it was seen first.
        """
        spoiled: dict[str, tuple[int, list[int]]] = {}
        for request_id, work in step.work.items():
            tokens, values = self._tokens[request_id], self._values[request_id]
            while len(values) < min(work.stop, len(tokens)):
                values.append(value_after(values[-1] if values else 0, tokens[len(values)]))
            self.computed_tokens += work.stop - work.start
        for layer in range(LAYERS) if step.work else ():
            for rank in self.ranks:
                if rank.connector is not None:
                    rank.connector.wait_for_layer_load(f"layer.{layer}")
                for request_id, work in step.work.items():
                    values = self._values[request_id][work.start : work.stop]
                    rank.write(layer, work, [-9] * len(values) if request_id in spoiled else values)
            for rank in self.ranks:
                for request_id, work in step.work.items():
                    wrong = rank.wrong_positions(layer, work, self._values[request_id][: work.start])
                    if wrong:
                        spoiled.setdefault(request_id, (rank.rank, wrong))
        return spoiled

    def _sample(self, request_id: str, work: Work, *, spoilt: bool) -> list[int]:
        tokens, values = self._tokens[request_id], self._values[request_id]
        if work.stop < len(tokens):
            return []
        if spoilt:
            return [VOCABULARY]  # no request's right answer
        token = next_token(values[work.stop - 1])
        if len(tokens) == work.stop:
            tokens.append(token)
        return [tokens[work.stop]]


def _connector_output(connector: Any, output: Any) -> KVConnectorOutput:
    result = KVConnectorOutput()
    if not output.has_sync_kv_loads:
        connector.start_load_kv(None)
    connector.wait_for_save()
    transfers = connector.get_transfer_results(output.finished_req_ids)
    result.finished_sending = transfers.finished_sending
    result.finished_recving = transfers.finished_recving
    result.invalid_block_ids = connector.get_block_ids_with_load_errors()
    result.kv_connector_stats = connector.get_kv_connector_stats()
    result.kv_connector_worker_meta = connector.build_connector_worker_meta()
    connector.clear_connector_metadata()
    return result
