"""The scheduler half, on the scheduler's thread: finds hits, plans loads and stores. It waits for nothing."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from lmcache_async.integration.vllm.accounts import Accounts
from lmcache_async.integration.vllm.asking import Asking
from lmcache_async.integration.vllm.decide import LoadDecider, PrefillClock
from lmcache_async.integration.vllm.handover import Handover, Promise
from lmcache_async.integration.vllm.loads import Loads, LoadSpan, load_job, lost_job
from lmcache_async.integration.vllm.media import MediaIdentity
from lmcache_async.integration.vllm.metadata import StepMetadata, WorkerReport
from lmcache_async.integration.vllm.notices import MAX_NOTICES
from lmcache_async.integration.vllm.pins import Pins
from lmcache_async.integration.vllm.plans import Plans
from lmcache_async.integration.vllm.requests import RequestState, Roles, new_state
from lmcache_async.integration.vllm.stores import StorePlanner, StorePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmcache_async.config import EngineConfig
    from lmcache_async.integration.vllm.lookup_client import LookupClient
    from lmcache_async.integration.vllm.metadata import Job
    from lmcache_async.integration.vllm.notices import Notice
    from lmcache_async.observability.families import Family


_CLOSE_S = 3.0
"""Longest wait for the lookup thread at the end; it has nothing to write."""


class SchedulerHalf:
    """Forwarded to by the connector in vLLM's EngineCore.

    Args:
        layerwise_tokens: The longest hit that is loaded by the step that uses it.
        overlapped: vLLM plans a step before the one before it has ended.
        media: Which identifiers of images, audio and video stand for their content.

    Attributes:
        roles: What it does.
        asking: Counts lookups that were late.
        decider: Counts what was decided: `load`, `recompute` or `partial`.
        tier_kinds: The tiers' names by their ids.
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
        media: MediaIdentity | None = None,
    ) -> None:
        self._config = config
        self._block_size = block_size
        self.roles = roles
        self._media = media or MediaIdentity()
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
        self._notices: deque[Notice] = deque(maxlen=MAX_NOTICES)
        self.asking = Asking(client, config, block_size)
        self._accounts = Accounts(config.chunk_size)
        self.tier_kinds = {tier.id: tier.name for tier in config.tiers}
        self._handover = Handover(self._policy, wait_s=config.store.timeout_s)
        self._plans = Plans(block_size, config.chunk_size, wanted=config.http.listen is not None)
        self._manager: Any = None
        self.loads = Loads(
            client,
            chunk_size=config.chunk_size,
            block_size=block_size,
            blocks_of=lambda name: [block.block_id for block in self._blocks_of(name)],
            evict=lambda blocks: self._manager.evict_blocks(blocks),
            on_ended=lambda name, failed: self._accounts.load_ended(name, self.decider, failed=failed),
        )

    def bind_cache_manager(self, manager: Any) -> None:
        """Of vLLM's KVCacheManager we use the block pool and the requests' block tables."""
        self._pins.bind(manager.block_pool)
        self._manager = manager

    def on_new_request(self, request: Any) -> None:
        """First sight of a request: its lookup begins before it is queued."""
        state = self._state(request)
        if state.may_load and not request.skip_reading_prefix_cache:
            self.asking.ask(state)
        elif state.may_store:
            self._client.hash(state.chain, request.num_tokens)

    def match(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """For get_num_new_matched_tokens; vLLM may ask any number of times."""
        state = self._state(request)
        state.local_tokens = local_tokens
        if self.loads.may_be_empty(local_tokens):
            return None, False  # until their step has ended
        if self.asking.waits_for_keys(state):
            return None, False
        if not state.may_load or request.skip_reading_prefix_cache:
            return 0, False
        if local_tokens >= (request.num_tokens - 1) // self._block_size * self._block_size:
            return 0, False  # vLLM has all that it can use; there is nothing to wait for
        lookup = self.asking.current(state)
        if state.load_failed or not self._client.ready:
            return 0, False
        if lookup.answer is None:
            return None if self.asking.may_wait(state, lookup) else 0, False
        hit = self.decider.worth(request, lookup, lookup.answer, local_tokens)
        external = max(0, hit - local_tokens)
        fits = hit < request.num_tokens and external <= self._layerwise_tokens  # a token is left to compute
        state.layerwise = lookup.answer.resident and fits
        return external, external > 0 and not state.layerwise

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> bool:
        """For update_state_after_alloc: the request is admitted, and so many tokens are to be loaded."""
        state = self._state(request)
        lookup = state.lookup
        self._accounts.admitted(state, external_tokens)
        self._plans.note(state, external_tokens)
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
        self.asking.new_step()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is not None and state.may_store:
                self._plan_stores(state, num_tokens)
        self.decider.prefill.begin(sum(output.num_scheduled_tokens.values()))
        stores = self._stores.take(self._client.now())
        return StepMetadata(loads=self.take_loads(), stores=stores, plans=self._plans.take())

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
            report = output.kv_connector_worker_meta
            self._stores.copied(report.copied)
            self._handover.written(report.unshared, self._requests.values)
            self._notices.extend(report.notices)
        self.decider.prefill.end()

    def finished(self, request: Any) -> Promise | None:
        """For request_finished: its blocks are freed right after this, but for those held by us.

        Returns:
            What another vLLM, which is to go on with it, will find.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return None
        if state.layerwise and request.status != RequestStatus.FINISHED_ABORTED:
            self.loads.ended(request.request_id)  # it has an answer, so its step found nothing missing
        if state.lookup is not None and not state.loading:
            self._client.release(state.lookup)
        self._adopt(state)
        computed = min(request.num_computed_tokens, request.num_tokens)
        self._stores.finish(state, computed, lambda: self._blocks_of(request.request_id))
        return self._handover.promise(state)

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

    def take_notices(self) -> list[Notice]:
        """For take_events: what tiers have got and given up since the last call."""
        if not self._notices:
            return []
        notices = list(self._notices)
        self._notices.clear()
        return notices

    def take_stats(self) -> list[Family]:
        """For get_kv_connector_stats: what was counted since the last call."""
        return self._accounts.changed(self.decider, self.asking, self.loads, self._client.waits)

    def close(self) -> None:
        self._client.close(min(self._config.shutdown_timeout_s, _CLOSE_S))

    def _state(self, request: Any) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            tail = self._policy.tail_tokens(request.num_prompt_tokens)
            state = new_state(request, tail, self.roles, self._media)
            self._requests[request.request_id] = state
        return state

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
        if state.load_failed or state.hands_over:
            return  # what is to be handed over is offered to every tier that lacks it
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
