"""The scheduler half, on the scheduler's thread: finds hits, plans loads and stores. It waits for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from lmcache_async.integration.vllm.decide import LoadDecider, PrefillClock
from lmcache_async.integration.vllm.loads import Loads, LoadSpan, load_job, lost_job
from lmcache_async.integration.vllm.metadata import StepMetadata, WorkerReport
from lmcache_async.integration.vllm.pins import Pins
from lmcache_async.integration.vllm.requests import RequestState, new_state
from lmcache_async.integration.vllm.stores import StorePlanner, StorePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmcache_async.config import EngineConfig
    from lmcache_async.integration.vllm.lookup_client import LookupClient
    from lmcache_async.integration.vllm.lookups import Lookup
    from lmcache_async.integration.vllm.metadata import Job

_MISS_AGE_S = 2.0
"""After so long a request that was not a full hit asks again: another one may have stored its prefix."""

_MAX_REPEATS = 8


@dataclass(frozen=True, slots=True)
class Roles:
    """vLLM's `kv_role`: a producer never loads, a consumer never stores."""

    loads: bool = True
    stores: bool = True


class SchedulerHalf:
    """Forwarded to by the connector in vLLM's EngineCore.

    Args:
        layerwise_tokens: The longest hit that is loaded by the step that uses it.
        overlapped: vLLM plans a step before the one before it has ended.

    Attributes:
        lookup_timeouts: Requests whose lookup was late, since the start.
        decider: Counts what was decided: `load`, `recompute` or `partial`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        block_size: int,
        world_size: int,
        roles: Roles,
        client: LookupClient,
        layerwise_tokens: int = 0,
        overlapped: bool = False,
    ) -> None:
        self._config = config
        self._block_size = block_size
        self._roles = roles
        self._client = client
        self._policy = StorePolicy(
            chunk_size=config.chunk_size,
            block_size=block_size,
            world_size=world_size,
            partial_chunks=config.store.partial_chunks,
            generated_tokens=config.store.generated_tokens,
        )
        self.decider = LoadDecider(
            PrefillClock(client.now, config.vllm.prefill_tokens_per_s, overlapped=overlapped),
            config.chunk_size,
            always=config.vllm.load_policy == "always",
        )
        self._pins = Pins(config.vllm.max_pinned_fraction)
        self._stores = StorePlanner(self._policy, self._pins, client)
        self._requests: dict[str, RequestState] = {}
        self._layerwise_tokens = layerwise_tokens
        self._repeats_left = _MAX_REPEATS
        self._manager: Any = None
        self.lookup_timeouts = 0
        self.loads = Loads(
            client,
            chunk_size=config.chunk_size,
            block_size=block_size,
            blocks_of=lambda name: [block.block_id for block in self._blocks_of(name)],
            evict=lambda blocks: self._manager.evict_blocks(blocks),
        )

    def bind_cache_manager(self, manager: Any) -> None:
        """Of vLLM's KVCacheManager we use the block pool and the requests' block tables."""
        self._pins.bind(manager.block_pool)
        self._manager = manager

    def on_new_request(self, request: Any) -> None:
        """First sight of a request: its lookup begins before it is queued."""
        state = self._state(request)
        if state.may_load and not request.skip_reading_prefix_cache:
            state.lookup = self._client.ask(state.chain, request.num_tokens, request.num_preemptions)
        elif state.may_store:
            self._client.hash(state.chain, request.num_tokens)

    def match(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """For get_num_new_matched_tokens; vLLM may ask any number of times."""
        state = self._state(request)
        state.local_tokens = local_tokens
        if self.loads.may_be_empty(local_tokens):
            return None, False  # until their step has ended
        if not state.may_load or request.skip_reading_prefix_cache:
            return 0, False
        if local_tokens >= (request.num_tokens - 1) // self._block_size * self._block_size:
            return 0, False  # vLLM has all that it can use; there is nothing to wait for
        lookup = self._current_lookup(state)
        if state.load_failed or not self._client.ready:
            return 0, False
        if lookup.answer is None:
            if self._client.now() - lookup.asked_at < self._config.vllm.lookup_timeout_s:
                return None, False
            self.lookup_timeouts += not lookup.timed_out
            lookup.timed_out = True
            return 0, False
        hit = self.decider.worth(request, lookup, lookup.answer, local_tokens)
        external = max(0, hit - local_tokens)
        fits = hit < request.num_tokens and external <= self._layerwise_tokens  # a token is left to compute
        state.layerwise = lookup.answer.resident and fits
        return external, external > 0 and not state.layerwise

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> bool:
        """For update_state_after_alloc: the request is admitted, and so many tokens are to be loaded."""
        state = self._state(request)
        lookup = state.lookup
        if external_tokens == 0:
            if lookup is not None and not state.loading:
                self._client.release(lookup)
            return True
        if lookup is None or lookup.answer is None:
            raise RuntimeError(f"{external_tokens} tokens of {request.request_id} were never offered")
        span = LoadSpan(
            state.local_tokens,
            state.local_tokens + external_tokens,
            self._policy.chunk_size,
            self._block_size,
        )
        job = load_job(
            self._stores.new_job_id(),
            self._client.epoch,
            state.chain,
            lookup.answer,
            span,
            blocks.blocks[0],
            layerwise=state.layerwise,
        )
        self._start_load(state, job)
        return True

    def lose_load(self, request: Any, blocks: Any) -> None:
        """A load was promised to vLLM and cannot be planned: have all of its blocks reported as failed."""
        state = self._state(request)
        if state.loading:
            return
        ids = [block.block_id for block in blocks.blocks[0][state.local_tokens // self._block_size :]]
        job_id, epoch = self._stores.new_job_id(), self._client.epoch
        job = lost_job(job_id, epoch, request.request_id, ids, layerwise=state.layerwise)
        self._start_load(state, job)

    def plan_step(self, output: Any) -> StepMetadata:
        """For build_connector_meta, at the end of every scheduling step."""
        self._repeats_left = _MAX_REPEATS
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is not None and state.may_store:
                self._plan_stores(state, num_tokens)
        self.decider.prefill.begin(sum(output.num_scheduled_tokens.values()))
        return StepMetadata(loads=self.take_loads(), stores=self._stores.take(self._client.now()))

    def take_loads(self) -> tuple[Job, ...]:
        """Loads planned since the last step. They must reach the workers whatever else fails."""
        return self.loads.take()

    def update(self, output: Any) -> None:
        """For update_connector_output: what the ranks have ended."""
        if output.invalid_block_ids:
            self.loads.failed(output.invalid_block_ids)
        for request_id in output.finished_recving or ():
            self.loads.ended(request_id)
        self.loads.step_ended()
        if isinstance(output.kv_connector_worker_meta, WorkerReport):
            self._stores.copied(output.kv_connector_worker_meta.copied)
        self.decider.prefill.end()

    def finished(self, request: Any) -> None:
        """For request_finished: its blocks are freed right after this, but for those held by us."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return
        if state.layerwise and request.status != RequestStatus.FINISHED_ABORTED:
            self.loads.ended(request.request_id)  # it has an answer, so its step found nothing missing
        if state.lookup is not None and not state.loading:
            self._client.release(state.lookup)
        self._adopt(state)
        computed = min(request.num_computed_tokens, request.num_tokens)
        self._stores.finish(state, computed, lambda: self._blocks_of(request.request_id))

    def reset(self) -> None:
        """For reset_cache. KV computed before it is not stored any more."""
        self._client.reset(memory_only=self._config.vllm.reset_cache == "memory")
        for state in self._requests.values():
            if state.loading or state.request.num_computed_tokens:
                state.may_store = False
            else:
                state.next_chunk, state.adopted, state.tail_pending = 0, False, state.tail_tokens > 0

    @property
    def has_work(self) -> bool:
        """Whether the engine must keep stepping for us to hear of the end of copies."""
        return self._stores.busy

    @property
    def would_free_blocks(self) -> bool:
        return self._pins.would_free()

    def hit_tiers(self, request: Any) -> Mapping[str, int]:
        """Chunks of the request's hit by the id of the tier that has them."""
        state = self._requests.get(request.request_id)
        lookup = state.lookup if state is not None else None
        return lookup.answer.tiers if lookup is not None and lookup.answer is not None else {}

    def close(self) -> None:
        self._client.close(self._config.shutdown_timeout_s)

    def _state(self, request: Any) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            tail = self._policy.tail_tokens(request.num_prompt_tokens)
            state = new_state(request, tail, loads=self._roles.loads, stores=self._roles.stores)
            self._requests[request.request_id] = state
        return state

    def _current_lookup(self, state: RequestState) -> Lookup:
        """The last lookup, or a new one where that is spent, outdated or of another incarnation."""
        lookup, request = state.lookup, state.request
        if lookup is not None:
            same = lookup.preemptions == request.num_preemptions
            if same and (state.load_failed or not (lookup.released or self._to_repeat(lookup))):
                return lookup
            self._client.release(lookup)
        state.load_failed = state.adopted = False
        state.lookup = self._client.ask(state.chain, request.num_tokens, request.num_preemptions)
        return state.lookup

    def _to_repeat(self, lookup: Lookup) -> bool:
        """Whether its answer is too old. A step repeats a few only: a long queue ages all at once."""
        if lookup.epoch != self._client.epoch:
            return True
        if lookup.answer is None or not self._repeats_left:
            return False
        age = self._client.now() - lookup.asked_at
        hit = lookup.answer.hit_tokens(self._policy.chunk_size)
        complete = hit > lookup.num_tokens - self._block_size
        if age <= (self._config.vllm.lookup_pin_ttl_s / 2 if complete else _MISS_AGE_S):
            return False
        self._repeats_left -= 1
        return True

    def _start_load(self, state: RequestState, job: Job) -> None:
        self._adopt(state)
        self.loads.start(state, job)

    def _plan_stores(self, state: RequestState, num_tokens: int) -> None:
        request = state.request
        # Tokens beyond the known ones are guesses of a draft model or not sampled yet.
        computed = min(request.num_computed_tokens + num_tokens, request.num_tokens)
        self._adopt(state)
        self._stores.plan(state, computed, lambda: self._blocks_of(request.request_id))

    def _adopt(self, state: RequestState) -> None:
        """What the lookup found need not be stored; but what was computed all the same may reach a faster tier."""
        lookup = state.lookup
        if state.adopted or lookup is None or lookup.answer is None or lookup.epoch != self._client.epoch:
            return
        state.adopted = True
        if state.load_failed:
            return
        answer, size = lookup.answer, self._policy.chunk_size
        chunks = answer.chunks if lookup.worth is None else min(answer.chunks, lookup.worth[1] // size)
        state.next_chunk = max(state.next_chunk, chunks)
        ends_there = chunks == state.chain.num_prompt_tokens // size
        if ends_there and answer.partial_tokens >= state.tail_tokens:
            state.tail_pending = False

    def _blocks_of(self, request_id: str) -> Sequence[Any]:
        if self._manager is None:
            raise RuntimeError(f"the cache manager with the blocks of {request_id} was never bound")
        blocks: Sequence[Any] = self._manager.get_blocks(request_id).blocks[0]
        return blocks
