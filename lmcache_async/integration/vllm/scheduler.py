"""Scheduler side of the connector: finds hits, plans loads and stores. Runs on vLLM's scheduler thread."""

from __future__ import annotations

import itertools
import logging
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from lmcache_async.config import EngineConfig
from lmcache_async.engine.check import tier_capabilities
from lmcache_async.hashing import Extra
from lmcache_async.integration.vllm.config import (
    awaited_tokens,
    head_shards,
    layerwise_tokens,
    roles_of,
    uses_tcp,
)
from lmcache_async.integration.vllm.events import MAX_EVENTS, ChunkEvent, MemoryView
from lmcache_async.integration.vllm.groups import KVGroups
from lmcache_async.integration.vllm.jobs import (
    SKIP,
    Job,
    StepMetadata,
    WorkerReport,
    boundary_parts,
    chunk_parts,
    load_job,
    pack_blocks,
)
from lmcache_async.integration.vllm.keys import Adapter, MediaIdentity, Promise, RequestKeys
from lmcache_async.integration.vllm.load_policy import LoadPolicy, PrefillClock
from lmcache_async.integration.vllm.lookup import LookupClient, PromiseCounts
from lmcache_async.integration.vllm.lookup_server import Address, LookupServer, socket_path
from lmcache_async.integration.vllm.metrics import SchedulerMetrics
from lmcache_async.integration.vllm.others import OtherLoads
from lmcache_async.integration.vllm.request import (
    LoadSpan,
    Release,
    RequestOptions,
    RequestPolicy,
    RequestTracker,
    Roles,
    StoreSpan,
)
from lmcache_async.integration.vllm.versions import loads_in_step, shutdown_timeout_s
from lmcache_async.logging import LimitedLogger
from lmcache_async.registry import Registry
from lmcache_async.tiers.base import Capabilities
from lmcache_async.types import RequestPlan

logger = LimitedLogger(logging.getLogger(__name__))

_COMPLETED = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"}
"""Names of the states of requests that have ended by their own output. Not all versions of vLLM have all of them."""

MAX_REPEATS = 8
"""Maximum number of lookups that one step repeats because of their age. A whole queue reaches that age at once."""

MAX_PEEKED_TOKENS = 16_384
"""Maximum number of tokens that are hashed and looked up on the scheduler's thread in one step: about a millisecond."""

MAX_PEEKED_TOKENS_ALONE = 131_072
"""The same limit for a request if the engine has no other request that would have to wait."""

MAX_PEEKS = 8
"""Maximum number of requests that are looked up on the scheduler's thread in one step. Each takes at least 0.1 ms."""

MAX_PLANS = 256
"""Maximum number of load decisions of one step that are sent to the status page."""

_CLOSE_S = 3.0
"""Longest wait for the lookup thread at shutdown. The thread has nothing to write."""

HASH_WAIT_S = 2.0
"""Time that the last chunks of a finished request wait for their keys, with their blocks pinned."""


@dataclass(frozen=True, slots=True)
class _Pinned:
    """The blocks that one store reads.

    Attributes:
        held: Returns whether the request of the store still holds all of the blocks.
    """

    blocks: Sequence[Any]
    held: Callable[[], bool]


class BlockPins:
    """Pins blocks of vLLM's pool that a store reads, so that they are not reused until every rank has copied them.

    `ref_cnt` of the blocks is changed here, as the pool's `touch` and `free_blocks` would change it, because calls of the
    pool for the thousands of blocks of a prompt take too long. The pool is called when a block becomes free.
    """

    def __init__(self, max_fraction: float) -> None:
        self._max_fraction = max_fraction
        self._pool: Any = None
        self._max_blocks = 0
        self._pinned_blocks = 0
        self._jobs: dict[int, _Pinned] = {}

    def __bool__(self) -> bool:
        return bool(self._jobs)

    @property
    def pinned_blocks(self) -> int:
        """References held; a block of two jobs counts twice."""
        return self._pinned_blocks

    @property
    def room(self) -> int:
        """Blocks that may still be pinned."""
        return self._max_blocks - self._pinned_blocks

    def bind(self, block_pool: Any) -> None:
        self._pool = block_pool
        self._max_blocks = max(1, int(block_pool.num_gpu_blocks * self._max_fraction))

    def pin(self, job_id: int, blocks: Sequence[Any], held: Callable[[], bool] = lambda: False) -> None:
        """Pin blocks that a request holds, so that none of them is in the pool's free queue.

        Args:
            held: Returns whether the request still holds all of the blocks. It may return False although it does.
        """
        for block in blocks:
            block.ref_cnt += 1
        self._jobs[job_id] = _Pinned(blocks, held)
        self._pinned_blocks += len(blocks)

    def unpin(self, job_id: int) -> None:
        blocks = self._jobs.pop(job_id).blocks
        self._pinned_blocks -= len(blocks)
        last: list[Any] = []
        for block in blocks:
            if block.ref_cnt > 1:
                block.ref_cnt -= 1
            else:
                last.append(block)
        if last:
            self._pool.free_blocks(reversed(last))  # vLLM evicts in this order: suffixes before prefixes

    def would_free(self) -> bool:
        """Return whether only stores hold some block, so that it becomes free when they end.

        Only the blocks of requests that have ended or were preempted are examined, because the others are held. The last
        blocks of a request are examined first, because other requests may share those before them.
        """
        pinned: Counter[int] = Counter()
        for job in self._jobs.values():
            if job.held():
                continue
            for block in reversed(job.blocks):
                pinned[block.block_id] += 1
                if block.ref_cnt == pinned[block.block_id]:
                    return True
        return False


@dataclass(frozen=True, slots=True)
class _PlannedStore:
    """A store whose blocks are pinned, with their ids by group. It is sent to the workers when its chunks have keys.

    Attributes:
        span: Chunks to store in the groups of full attention; None to store the other groups at `boundary`.
        num_tokens: Number of leading tokens whose keys are needed.
    """

    job_id: int
    keys: RequestKeys
    span: StoreSpan | None
    boundary: int
    num_tokens: int
    epoch: int
    block_ids: tuple[bytes, ...]
    deadline: float
    hand_over: bool


class StoreQueue:
    """Stores of all requests: pinned, sent to the workers, and unpinned when every rank has copied the blocks.

    `world_size` counts the ranks, or shards of KV heads, that report each job.
    """

    def __init__(
        self,
        pins: BlockPins,
        metrics: SchedulerMetrics,
        groups: KVGroups,
        *,
        world_size: int,
        chunk_size: int,
    ) -> None:
        self._pins = pins
        self._metrics = metrics
        self._world_size = world_size
        self._chunk_size = chunk_size
        self._groups = groups
        self._planned: list[_PlannedStore] = []
        self._job_keys: dict[int, tuple[bytes, ...]] = {}
        self._copied: dict[int, int] = {}
        self._answered: dict[int, int] = {}
        self._unshared: dict[int, int] = {}
        self.keys_in_flight: dict[bytes, int] = {}  # see `RequestTracker.plan_stores`

    def add(
        self,
        job_id: int,
        tracker: RequestTracker,
        span: StoreSpan,
        blocks: Sequence[Sequence[Any]],
        *,
        epoch: int,
        now: float,
    ) -> None:
        """Plan a store of `span` and pin its blocks. `blocks` are all blocks of the request, by group.

        Raises:
            RuntimeError: The request does not have these blocks.
        """
        pinned = []
        for group in self._groups.full:
            table = blocks[group.index]
            start = span.first * self._chunk_size // group.block_size
            stop = start + span.num_tokens // group.block_size
            pinned.append(table[start:stop])
            if len(pinned[-1]) != stop - start:
                raise RuntimeError(
                    f"request {tracker.request_id} does not have blocks {start} to {stop} of group {group.index}"
                )
        self._plan(job_id, tracker, span, 0, pinned, epoch=epoch, now=now)
        if not span.is_tail and tracker.keys.num_hashed >= span.stop * self._chunk_size:
            keys = tuple(tracker.keys.key(0, chunk) for chunk in range(span.first, span.stop))
            self._job_keys[job_id] = keys
            self.keys_in_flight.update(dict.fromkeys(keys, job_id if tracker.hands_over else 0))

    def add_boundary(
        self,
        job_id: int,
        tracker: RequestTracker,
        boundary: int,
        blocks: Sequence[Sequence[Any]],
        *,
        states: Mapping[int, int],
        epoch: int,
        now: float,
    ) -> None:
        """Plan a store of the blocks that groups other than full attention need at a boundary, and pin them.

        No effect if the blocks do not exist any more or may not be pinned.

        Args:
            states: By group, the id of the block with the recurrent state at the boundary. The request's block table does
                not show which of its blocks that is.
        """
        needed: list[Sequence[Any]] = []
        for group in self._groups.boundary_groups:
            start = group.first_needed(boundary) // group.block_size
            stop = boundary // group.block_size
            if group.state:
                # vLLM may have freed the block after the offer, and given it to another request or to this one again.
                offered = states.get(group.index)
                table = blocks[group.index]
                needed.append(
                    [
                        block
                        for block in table
                        if block.block_id == offered and block.block_hash_num_tokens == boundary
                    ]
                )
            else:
                needed.append(blocks[group.index][start:stop])
            held = all(block.ref_cnt and not block.is_null for block in needed[-1])
            if not held or len(needed[-1]) != stop - start:
                return  # outside of the window by now, or not offered
        if sum(map(len, needed)) > self._pins.room:
            self._metrics.skipped("blocks", sum(1 for some in needed if some))
            logger.report(
                "boundary blocks",
                "%d tokens of request %s are stored without their attention windows or states, so they cannot be a hit:"
                " stores already pin %d blocks, which vllm.max_pinned_fraction limits",
                boundary,
                tracker.request_id,
                self._pins.pinned_blocks,
            )
            return
        self._plan(job_id, tracker, None, boundary, needed, epoch=epoch, now=now)

    def _plan(
        self,
        job_id: int,
        tracker: RequestTracker,
        span: StoreSpan | None,
        boundary: int,
        blocks: Sequence[Sequence[Any]],
        *,
        epoch: int,
        now: float,
    ) -> None:
        pinned = [block for some in blocks for block in some]
        if span is None:  # vLLM frees blocks outside of the window, and former states, while the request runs
            needed = boundary
            self._pins.pin(job_id, pinned)
            tracker.boundary_started(job_id, boundary)
        else:
            needed = tracker.keys.num_prompt_tokens if span.is_tail else span.stop * self._chunk_size
            self._pins.pin(job_id, pinned, tracker.block_table_held())
            tracker.store_started(job_id, span)
        self._planned.append(
            _PlannedStore(
                job_id,
                tracker.keys,
                span,
                boundary,
                needed,
                epoch,
                tuple(pack_blocks([block.block_id for block in some]) for some in blocks),
                now + HASH_WAIT_S,
                hand_over=tracker.hands_over,
            )
        )

    def take(self, now: float) -> tuple[Job, ...]:
        """Return the stores whose chunks have keys. Drop stores whose keys were not computed in time."""
        jobs: list[Job] = []
        waiting: list[_PlannedStore] = []
        for store in self._planned:
            if store.keys.num_hashed >= store.num_tokens:
                jobs.append(self._job(store))
            elif store.keys.failed or now > store.deadline:
                self._pins.unpin(store.job_id)
                span = store.span
                self._metrics.skipped("keys", 1 if span is None else span.stop - span.first)
                logger.report(
                    "keys",
                    "the end of request %s is not stored: its chunk keys were not computed within %g s",
                    store.keys.request_id,
                    HASH_WAIT_S,
                )
            else:
                waiting.append(store)
        self._planned = waiting
        return tuple(jobs)

    def copied(self, ranks: Mapping[int, int]) -> None:
        """Record that further ranks have copied the blocks of these jobs."""
        for job_id in self._of_all_ranks(self._copied, ranks):
            self._pins.unpin(job_id)
            self._forget_keys(job_id)

    def answered(self, ranks: Mapping[int, int], unshared: Mapping[int, int]) -> bool:
        """Record that the tiers of further ranks have answered these jobs; see `WorkerReport`.

        Return whether every rank has now answered some job, and all chunks of that job have reached shared tiers.
        """
        for job_id, chunks in unshared.items():
            self._unshared[job_id] = self._unshared.get(job_id, 0) + chunks
            if chunks:
                self._forget_keys(job_id)  # other requests then store these chunks themselves
        return 0 in [self._unshared.pop(job_id, None) for job_id in self._of_all_ranks(self._answered, ranks)]

    def _forget_keys(self, job_id: int) -> None:
        for key in self._job_keys.pop(job_id, ()):
            self.keys_in_flight.pop(key, None)

    def _of_all_ranks(self, counts: dict[int, int], ranks: Mapping[int, int]) -> list[int]:
        """Add reports of ranks, by job, to `counts`. Return the jobs that every rank has reported now."""
        complete = []
        for job_id, count in ranks.items():
            counts[job_id] = counts.get(job_id, 0) + count
            if counts[job_id] >= self._world_size:
                del counts[job_id]
                complete.append(job_id)
        return complete

    def _job(self, store: _PlannedStore) -> Job:
        keys, span, size = store.keys, store.span, self._chunk_size
        if span is None:
            parts = boundary_parts(keys, self._groups, store.boundary, store.block_ids)
        else:
            stop, partial = (span.first, keys.tail) if span.is_tail else (span.stop, None)
            parts = chunk_parts(
                keys, self._groups, span.first, stop, partial, store.block_ids, chunk_size=size
            )
        return Job(
            job_id=store.job_id,
            request_id=keys.request_id,
            request_namespace=keys.request_namespace,
            epoch=store.epoch,
            parts=parts,
            hand_over=store.hand_over,
            event_lora_name=None if span is None or span.is_tail else keys.event_lora_name,
        )


@dataclass(slots=True)
class _Load:
    """A load that not every rank has finished. The tokens from `stop` on are not loaded."""

    tracker: RequestTracker
    job: Job
    span: LoadSpan
    stop: int


class SchedulerConnector:
    """The connector in vLLM's EngineCore process.

    `world_size` counts the ranks, or shards of KV heads; each has an engine. `tiers` are the capabilities of each tier, by
    its id. With `beside_others`, other connectors of a MultiConnector may load tokens too.

    Attributes:
        config: Configuration of the engines.
        load_policy: Decides how much of a hit is loaded.
        metrics: Counts of lookups and loads.
        tier_media: Where each tier stores records, by its id.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        groups: KVGroups,
        world_size: int,
        roles: Roles,
        client: LookupClient,
        awaited_tokens: int = 0,
        layerwise_tokens: int = 0,
        media: MediaIdentity | None = None,
        tiers: Mapping[str, Capabilities] | None = None,
        beside_others: bool = False,
    ) -> None:
        self.config = config
        self._groups = groups
        self.roles = roles
        self._media = media or MediaIdentity()
        self._client = client
        # A MultiConnector has no short path for loads from host memory; see decision 6.
        self._views = [MemoryView() for _ in range(0 if beside_others else world_size)]
        client.set_memories([view.lookups for view in self._views])
        self.load_policy = LoadPolicy(
            PrefillClock(client.now, config.vllm.prefill_tokens_per_s),
            config.chunk_size,
            always=config.vllm.load_policy == "always",
        )
        self._policy = RequestPolicy(
            chunk_size=config.chunk_size,
            groups=self._groups,
            partial_chunks=groups.stores_partial_chunks(configured=config.store.partial_chunks),
            generated_tokens=config.store.generated_tokens,
            lookup_timeout_s=config.vllm.lookup_timeout_s,
            lookup_pin_ttl_s=config.vllm.lookup_pin_ttl_s,
            wait_for_producer_s=config.vllm.wait_for_producer_s,
            layerwise_tokens=layerwise_tokens,
            decide=self.load_policy.decide,
        )
        tiers = tiers or {}
        self.tier_media = {name: each.medium for name, each in tiers.items()}
        self._not_cleared = [name for name, each in tiers.items() if not (each.lists and each.removes)]
        self._outlived = any(each.persistent for each in tiers.values())
        self.metrics = SchedulerMetrics(self.load_policy, lambda: client.promises)
        self._trackers: dict[str, RequestTracker] = {}
        self._loads: dict[str, _Load] = {}  # by request id
        self._new_loads: list[Job] = []
        self._awaited_tokens = awaited_tokens
        self._others = (
            OtherLoads(self._blocks_after, lambda blocks: self._manager.evict_blocks(blocks))
            if beside_others
            else None
        )
        self._pins = BlockPins(config.vllm.max_pinned_fraction)
        self._stores = StoreQueue(
            self._pins,
            self.metrics,
            self._groups,
            world_size=world_size,
            chunk_size=config.chunk_size,
        )
        self._job_ids = itertools.count(1)
        self._nothing_runs = False  # the last step had no tokens
        self._repeats_left = MAX_REPEATS
        self._peeks_left, self._peek_tokens_left = MAX_PEEKS, MAX_PEEKED_TOKENS
        # Looked up by this thread in this step, and not admitted yet. Nothing is pinned for these.
        self._peeked: dict[str, RequestTracker] = {}
        self._viewed: set[str] = set()  # requests that were looked up in `_views` only
        # Assumed until a store reports otherwise. At worst, the first consumers wait without effect.
        self._reaches_shared_tier = True
        self._wants_plans = config.http.listen is not None
        self._plans: deque[RequestPlan] = deque(maxlen=MAX_PLANS)
        self._events: deque[ChunkEvent] = deque(maxlen=MAX_EVENTS)
        self._manager: Any = None
        self._reset = ""  # see `RequestKeys.reset`

    # Called through the connector's methods, whose names are in the comments.

    @classmethod
    def of_vllm(
        cls,
        vllm_config: Any,
        kv_cache_config: Any,
        config: EngineConfig,
        groups: KVGroups,
        *,
        beside_others: bool = False,
    ) -> Self:
        """Start the connector. Its lookup thread connects to the workers when they are ready.

        Raises:
            ConfigError: A key or value is wrong.
        """
        transfer = vllm_config.kv_transfer_config
        shards = head_shards(config, vllm_config, kv_cache_config)
        world_size = vllm_config.parallel_config.world_size * max(1, len(shards))
        capabilities = tier_capabilities(config, Registry())
        _warn_of_lost_writes(vllm_config, config, capabilities)
        client = LookupClient(
            [
                None
                if uses_tcp(config, vllm_config)
                else socket_path(config.vllm.socket_dir, transfer.engine_id, rank)
                for rank in range(world_size)
            ],
            chunk_size=config.chunk_size,
            lookup_timeout_s=config.vllm.lookup_timeout_s,
            groups=groups,
            partial_chunks=config.store.partial_chunks,
            hash_key=config.read_hash_key(),
            adapter_algorithm=config.hash_algorithm,
        )
        return cls(
            config,
            groups=groups,
            world_size=world_size,
            roles=roles_of(transfer, config),
            client=client,
            awaited_tokens=awaited_tokens(config, vllm_config),
            layerwise_tokens=layerwise_tokens(config, vllm_config, groups),
            media=MediaIdentity.of(vllm_config),
            tiers=capabilities,
            beside_others=beside_others,
        )

    def bind_cache_manager(self, manager: Any) -> None:
        """Use the block pool and the requests' block tables of vLLM's KVCacheManager."""
        self._pins.bind(manager.block_pool)
        self._manager = manager

    def connect(self, addresses: Mapping[int, Address], local: LookupServer | None = None) -> None:
        """set_xfer_handshake_metadata: the lookup servers of the ranks, if they are reached over TCP.

        `local` is the server of the only rank, if that rank is in this process.
        """
        self._client.set_addresses(addresses)
        if local is not None:
            self._views.clear()
            self._client.set_memories([local.memory])

    def on_new_request(self, request: Any) -> None:
        """Start the lookup of a request before it is queued."""
        tracker = self._tracker(request)
        if tracker.looks_up:
            if not self._peek(tracker):
                self._ask(tracker)
        elif tracker.stores:
            self._client.hash(tracker.keys, tracker.num_tokens)

    def match(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """get_num_new_matched_tokens: return the number of external tokens, and whether they are loaded asynchronously.

        The number is None if vLLM has to ask again. vLLM may call this any number of times for one request.
        """
        tracker = self._tracker(request)
        tracker.local_found(local_tokens)
        self._deliver_answers()
        now = self._client.now()
        if self._may_be_unfilled(tracker, now):
            return None, False  # until the step that fills the blocks has ended
        if self._nothing_runs and tracker.gives_way():
            return None, False
        if tracker.waits_for_keys(now, connected=self._client.connected):
            # After a reset or a reconnection the keys are not requested yet.
            self._client.hash(tracker.keys, tracker.num_tokens)
            return None, False
        if not tracker.looks_up or tracker.local_suffices:
            return 0, False
        refresh = tracker.refresh_lookup(now, self._client.epoch, may_repeat=self._repeats_left > 0)
        if refresh.ask:
            self._repeats_left -= refresh.repeated
            self._release(refresh.release)
            self._ask(tracker)
        offer = tracker.offer(now, ready=self._client.ready)
        if offer.late:
            self.metrics.lookup_late()
        if self._groups.has_states and (shared := tracker.shared_tokens) > request.shared_prefix_boundary:
            request.shared_prefix_boundary = shared  # vLLM ends a step there and offers the states
        return offer.tokens, offer.is_async

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> bool:
        """update_state_after_alloc: plan a load of `external_tokens` tokens for an admitted request. Return True."""
        tracker = self._tracker(request)
        self._peeked.pop(tracker.request_id, None)
        if self._others is not None:
            self._others.admitted(tracker)
        admission = tracker.admitted(external_tokens)
        if self._groups.boundary_groups:  # vLLM 0.31 and older, which lack the attribute, have one group
            tracker.add_shared_boundary(request.shared_prefix_boundary)
        self.metrics.admitted(admission)
        if self._wants_plans and admission.first:
            self._plans.append(admission.plan)
        if external_tokens == 0:
            self._release(tracker.lookup_unused())
        else:
            span = tracker.load_started(external_tokens)
            try:
                self._start_load(tracker, span, blocks)
            except Exception:  # no load is running, so `fail_load` can report it as failed
                self._release(tracker.load_ended())
                raise
        return True

    def fail_load(self, request: Any, blocks: Any) -> None:
        """Report all blocks of a load as failed, because it cannot be planned and vLLM waits for it."""
        tracker = self._tracker(request)
        span = tracker.load_impossible()
        if span is not None:
            self._start_load(tracker, span, blocks)

    def plan_step(self, output: Any) -> StepMetadata:
        """build_connector_meta: return the loads and stores of a step that vLLM has scheduled."""
        self._nothing_runs = not output.total_num_scheduled_tokens
        self._repeats_left = MAX_REPEATS
        self._deliver_answers()
        self._ask_for_peeked()
        # The model waits for layer-wise loads, so such a step measures no prefill.
        layerwise = any(load.job.layerwise for load in self._loads.values())
        prompt_tokens = 0 if layerwise else _prompt_tokens(output)
        step = self.load_policy.prefill.begin(prompt_tokens, output.total_num_scheduled_tokens)
        if self._others is not None:
            scheduled, may_load = output.num_scheduled_tokens, loads_in_step(output)
            self._others.planned(scheduled, step, self._client.now(), may_load=may_load)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            tracker = self._trackers.get(request_id)
            if tracker is not None and tracker.stores:
                states: dict[int, dict[int, int]] = {}
                if self._groups.has_states:
                    states = _offered_states(request_id, output.kv_connector_block_state)
                    tracker.states_offered(states)
                # Tokens beyond the known ones are drafts or not sampled yet.
                self._plan_stores(tracker, tracker.step_planned(num_tokens), states)
        stores = self._stores.take(self._client.now())
        plans = tuple(self._plans)
        self._plans.clear()
        return StepMetadata(self.take_loads(idle=self.load_policy.prefill.idle), stores, plans, step)

    def take_loads(self, *, idle: bool = False) -> tuple[Job, ...]:
        """Return the loads planned since the last step. They must reach the workers even if `plan_step` fails.

        Args:
            idle: Whether no step with tokens is running, so that the workers may await short loads from host memory.
        """
        loads = tuple(replace(job, awaited=job.awaited and idle) for job in self._new_loads)
        self._new_loads.clear()
        return loads

    def update(self, output: Any) -> None:
        """update_connector_output: process the results of the ranks."""
        if output.invalid_block_ids:
            self._loads_failed(output.invalid_block_ids)
        for request_id in getattr(output, "failed_recving", None) or ():  # since vLLM 0.32
            self._request_failed(request_id)
        for request_id in output.finished_recving or ():
            self._load_ended(request_id)
        for request_id in [name for name, load in self._loads.items() if load.job.layerwise]:
            self._load_ended(request_id)  # its step has ended, and its failures are recorded above
        report = output.kv_connector_worker_meta
        if self._others is not None:
            step = report.step if isinstance(report, WorkerReport) else 0
            self._others.step_ended(step, output.invalid_block_ids)
        if isinstance(report, WorkerReport):
            self._stores.copied(report.copied)
            self._stores_answered(report)
            self._events.extend(report.events)
            for rank, change in report.memory.items():
                if rank < len(self._views):
                    self._views[rank].apply(change)
            self.load_policy.prefill.end(report.step)

    def finished(self, request: Any) -> Promise | None:
        """request_finished: plan the last stores. After this call vLLM frees the request's blocks that are not pinned.

        Return the promise for the vLLM instance that continues the request; None if nothing is promised.
        """
        self._deliver_answers()
        if self._others is not None:
            self._others.finished(request.request_id)
        tracker = self._trackers.pop(request.request_id, None)
        if tracker is None:
            return None
        tracker.end()
        if self._peeked.pop(tracker.request_id, None) is not None:  # not admitted
            self._viewed.discard(tracker.request_id)
        load = self._loads.get(request.request_id)
        if load is not None and load.job.layerwise:
            if request.status.name in _COMPLETED:  # so its step has loaded everything
                self._load_ended(request.request_id)
            else:
                # Whether the load has failed is not known yet. Blocks that its step computed after the hit are in vLLM's
                # prefix cache, and they cannot be found by the request any more when it is known.
                self._manager.evict_blocks(self._blocks_after(request.request_id, load.span.local))
        self._release(tracker.lookup_unused())
        if tracker.request_id in self._viewed:  # let the ranks' eviction policies learn of the lookup
            self._viewed.discard(tracker.request_id)
            self._client.release(self._client.ask(tracker.keys, tracker.keys.num_hashed), None)
        tracker.skip_stored(self._client.epoch)
        computed = tracker.computed_tokens
        if tracker.tokens_to_hash(computed):
            self._client.hash(tracker.keys, computed)
        computed = self._with_keys(tracker, computed)
        spans, dropped = tracker.finished(computed, self._pins.room)
        if dropped:
            self.metrics.skipped("blocks", dropped)
            logger.report(
                "blocks",
                "%d chunks at the end of request %s are not stored: stores already pin %d blocks, which"
                " vllm.max_pinned_fraction limits",
                dropped,
                tracker.request_id,
                self._pins.pinned_blocks,
            )
        self._add_stores(tracker, spans, tracker.plan_boundaries(computed), {})
        return tracker.promise(self.config.store.timeout_s) if self._reaches_shared_tier else None

    def reset(self) -> None:
        """reset_cache: clear the tiers. KV that was computed before is not stored any more.

        Requests get another namespace if a tier cannot be cleared, or outlives this process: the weights may have changed
        in place, and those of a later process are the files' again.
        """
        mode = self.config.vllm.reset_cache
        for view in self._views:
            view.clear()
        self._viewed.clear()
        self._client.reset(memory_only=mode != "all")
        self._stores.keys_in_flight.clear()  # workers drop these stores
        if mode == "all" and self._not_cleared:
            logger.report(
                "reset",
                "the tiers %s cannot list their records, so a reset cannot clear them: this vLLM uses another"
                " namespace from now on and does not find these records",
                ", ".join(self._not_cleared),
            )
        if mode == "new_namespace" or (mode == "all" and (self._not_cleared or self._outlived)):
            self._reset = uuid.uuid4().hex
        for tracker in self._trackers.values():
            keys = tracker.keys.after_reset(self._reset) if self._reset else None
            tracker.cache_reset(keys)

    @property
    def has_work(self) -> bool:
        """Whether vLLM must continue to run steps, so that the end of copies is reported to this connector.

        This includes loads of aborted requests: vLLM holds their blocks until the end, and cannot sleep before.
        """
        return bool(self._pins or self._loads)

    @property
    def would_free_blocks(self) -> bool:
        return self._pins.would_free()

    def tracker(self, request_id: str) -> RequestTracker | None:
        """The state of a request that is not finished."""
        self._deliver_answers()
        return self._trackers.get(request_id)

    @property
    def num_requests(self) -> int:
        return len(self._trackers)

    @property
    def ready(self) -> bool:
        return self._client.ready

    @property
    def promises(self) -> PromiseCounts:
        return self._client.promises

    def tokens_by_tier(self, request: Any, num_tokens: int) -> Mapping[str, int]:
        """Return the number of the request's `num_tokens` loaded tokens in each tier, by tier id."""
        tracker = self._trackers.get(request.request_id)
        return tracker.tokens_by_tier(num_tokens) if tracker is not None else {}

    def take_chunk_events(self) -> list[ChunkEvent]:
        """take_events: chunks that tiers stored or removed since the last call."""
        events = list(self._events)
        self._events.clear()
        return events

    def close(self) -> None:
        self._client.close(min(self.config.shutdown_timeout_s, _CLOSE_S))

    # Requests and lookups

    def _tracker(self, request: Any) -> RequestTracker:
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            options = RequestOptions.of(request.kv_transfer_params)
            # Prompts given as embeddings have no token ids, and the tokens of a streaming session may be revoked.
            usable = (
                request.prompt_embeds is None
                and not request.resumable
                and request.prompt_token_ids is not None
                and self._media.all_by_content(request.mm_features)
            )
            keys = _keys_of(request, options.tags, self._reset)
            tracker = RequestTracker(
                request,
                keys,
                self._policy,
                may_load=usable and self.roles.loads and options.load,
                may_store=usable and self.roles.stores and options.store,
                hands_over=self.roles.hands_over or options.hand_over,
                promise=options.promise,
            )
            self._trackers[request.request_id] = tracker
        return tracker

    def _ask(self, tracker: RequestTracker) -> None:
        self._peeked.pop(tracker.request_id, None)
        self._viewed.discard(tracker.request_id)
        promise, wait_s = tracker.promise_to_wait_for(self._client.now())
        tracker.lookup_sent(self._client.ask(tracker.keys, tracker.num_tokens, promise, wait_s))

    def _peek(self, tracker: RequestTracker) -> bool:
        """Look up a new request in host memory, so that the next step can use the answer. Return False without one."""
        alone = len(self._trackers) == 1
        most = MAX_PEEKED_TOKENS_ALONE if alone else self._peek_tokens_left
        if not self._peeks_left or tracker.num_tokens > most or tracker.has_promise:
            return False
        self._peeks_left -= 1
        found = self._client.peek(tracker.keys, tracker.num_tokens)
        self._peek_tokens_left -= tracker.keys.num_hashed  # few if the first chunk is not in memory
        if found is None:
            return False
        lookup, answered = found
        tracker.lookup_sent(lookup)
        tracker.lookup_answered(answered)
        self._peeked[tracker.request_id] = tracker
        if self._views:
            self._viewed.add(tracker.request_id)
        return True

    def _ask_for_peeked(self) -> None:
        """Send lookups of the peeked requests that this step did not admit: their chunks may be evicted before the next step."""
        self._peeks_left, self._peek_tokens_left = MAX_PEEKS, MAX_PEEKED_TOKENS
        for tracker in list(self._peeked.values()):
            self._ask(tracker)

    def _deliver_answers(self) -> None:
        for answered in self._client.take_answers():
            tracker = self._trackers.get(answered.request_id)
            if tracker is not None:
                tracker.lookup_answered(answered)

    def _release(self, release: Release | None) -> None:
        if release is not None:
            self._client.release(release.lookup, release.answer)

    # Loads

    def _start_load(self, tracker: RequestTracker, span: LoadSpan, blocks: Any) -> None:
        tracker.skip_stored(self._client.epoch)
        resident = span.answer is not None and span.answer.resident
        job = load_job(
            next(self._job_ids),
            self._client.epoch,
            tracker.keys,
            span,
            [_loadable(blocks.blocks[group.index]) for group in self._groups],
            self._groups,
            chunk_size=self._policy.chunk_size,
            awaited=resident and not span.layerwise and span.hit - span.local <= self._awaited_tokens,
        )
        self._new_loads.append(job)
        self._loads[tracker.request_id] = _Load(tracker, job, span, span.hit)
        self.metrics.load_planned()

    def _load_ended(self, request_id: str) -> None:
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        self._release(load.tracker.load_ended())
        start, stop, answer = load.span.local, load.stop, load.span.answer
        by_tier = answer.tokens_by_tier(start, stop, self._policy.chunk_size) if answer is not None else {}
        self.metrics.load_ended(stop - start, by_tier)

    def _loads_failed(self, bad_blocks: set[int]) -> None:
        for request_id, load in self._loads.items():
            first_token = load.job.first_token_in(bad_blocks, self._groups)
            if first_token is None:
                continue
            load.stop = min(load.stop, first_token)
            if load.tracker.load_tokens_failed(first_token):
                self.metrics.load_failed()
            if load.job.layerwise:
                # The blocks are in vLLM's prefix cache, where others could find them before they are computed.
                bad = bad_blocks & set(load.job.touched_blocks())
                self._manager.evict_blocks(bad | self._blocks_after(request_id, first_token))
            logger.report(
                "load",
                "a load of request %s failed; its tokens from %d on are computed",
                request_id,
                first_token,
            )

    def _request_failed(self, request_id: str) -> None:
        """Record that a load failed in some KV group. vLLM computes all tokens of the request."""
        load = self._loads.get(request_id)
        if load is None:
            return
        load.stop = load.span.local
        if load.tracker.load_tokens_failed(0):
            self.metrics.load_failed()
        logger.report("load", "a load of request %s failed; all of its tokens are computed", request_id)

    def _may_be_unfilled(self, tracker: RequestTracker, now: float) -> bool:
        """Return whether the prefix that vLLM has for the request may include blocks that a load of a step still fills."""
        others = self._others
        if others is not None and others.matched(tracker, now, connected=self._client.connected):
            return True
        local = tracker.local_tokens
        return any(load.job.layerwise and load.span.local < local for load in self._loads.values())

    # Stores

    def _stores_answered(self, report: WorkerReport) -> None:
        """Process the answers of the tiers to stores that are handed over."""
        if self._stores.answered(report.answered, report.unshared):
            self._reaches_shared_tier = True
        for job_id, chunks in report.unshared.items():
            if not chunks:
                continue
            self._reaches_shared_tier = False
            logger.report(
                "unshared",
                "%d chunks of a store did not reach a tier that other processes read;"
                " consumers do not wait for this producer until a later store does",
                chunks,
            )
            for tracker in self._trackers.values():
                tracker.store_not_shared(job_id)

    def _plan_stores(
        self, tracker: RequestTracker, computed_tokens: int, states: Mapping[int, Mapping[int, int]]
    ) -> None:
        tracker.skip_stored(self._client.epoch)
        computed_tokens = self._with_keys(tracker, computed_tokens)
        needed = tracker.tokens_to_hash(computed_tokens)
        if not needed:
            return
        if tracker.keys.requested < needed:
            self._client.hash(tracker.keys, tracker.num_tokens)
        spans = tracker.plan_stores(computed_tokens, self._stores.keys_in_flight, self._pins.room)
        self._add_stores(tracker, spans, tracker.plan_boundaries(computed_tokens), states)

    def _with_keys(self, tracker: RequestTracker, computed_tokens: int) -> int:
        """Return the number of computed tokens that have keys or will have them soon. Hashing needs connected workers."""
        return computed_tokens if self._client.connected else min(computed_tokens, tracker.keys.num_hashed)

    def _add_stores(
        self,
        tracker: RequestTracker,
        spans: Sequence[StoreSpan],
        boundaries: Sequence[int],
        states: Mapping[int, Mapping[int, int]],
    ) -> None:
        if not spans and not boundaries:
            return
        blocks, epoch, now = self._blocks(tracker.request_id), self._client.epoch, self._client.now()
        for span in spans:
            self._stores.add(next(self._job_ids), tracker, span, blocks, epoch=epoch, now=now)
        for boundary in boundaries:
            offered = states.get(boundary, {})
            self._stores.add_boundary(
                next(self._job_ids), tracker, boundary, blocks, states=offered, epoch=epoch, now=now
            )

    def _blocks_after(self, request_id: str, tokens: int) -> set[int]:
        """Ids of the blocks of the request after a number of tokens, in all groups."""
        return {
            block.block_id
            for group, blocks in zip(self._groups, self._blocks(request_id), strict=True)
            for block in blocks[tokens // group.block_size :]
            if not block.is_null
        }

    def _blocks(self, request_id: str) -> list[Sequence[Any]]:
        """All blocks of the request for each group of vLLM."""
        if self._manager is None:
            raise RuntimeError(f"the cache manager with the blocks of request {request_id} was never bound")
        return list(self._manager.get_blocks(request_id).blocks)


def _warn_of_lost_writes(
    vllm_config: Any, config: EngineConfig, capabilities: Mapping[str, Capabilities]
) -> None:
    """Warn if vLLM kills its workers before the engine can write its queues, and name the option that prevents it."""
    tiers = ", ".join(name for name, each in capabilities.items() if each.persistent)
    timeout_s = shutdown_timeout_s(vllm_config)
    log = logging.getLogger(__name__)
    if tiers and vllm_config.parallel_config.use_ray:
        log.warning(
            "stopping vLLM loses writes queued for %s: vLLM kills workers that are Ray actors at once, whatever the value"
            " of --shutdown-timeout. --distributed-executor-backend mp avoids this",
            tiers,
        )
    elif tiers and timeout_s is not None and timeout_s < config.shutdown_timeout_s:
        log.warning(
            "stopping vllm serve loses writes queued for %s: vLLM kills its workers after %g s, and closing takes up to"
            " %g s (shutdown_timeout_s). Start vLLM with --shutdown-timeout 30",
            tiers,
            timeout_s,
            config.shutdown_timeout_s,
        )


def _prompt_tokens(output: Any) -> int:
    """Return the number of prompt tokens in a step. A decode has one token, or several with draft tokens."""
    counts, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    if output.total_num_scheduled_tokens == len(counts):
        return 0
    return sum(count for request_id, count in counts.items() if count > 1 and request_id not in drafts)


def _offered_states(request_id: str, block_state: Any) -> dict[int, dict[int, int]]:
    """The blocks with recurrent states that vLLM offers in a step: ids by number of tokens and group."""
    states: dict[int, dict[int, int]] = {}
    if block_state is not None:
        for group, block_id, boundary in block_state.boundary_state_offloads.get(request_id, ()):
            states.setdefault(boundary, {})[group] = block_id
    return states


def _loadable(blocks: Sequence[Any]) -> list[int]:
    """Block ids, SKIP for a null block: its tokens are outside of the attention window."""
    return [SKIP if block.is_null else block.block_id for block in blocks]


def _keys_of(request: Any, tags: tuple[tuple[str, str], ...], reset: str) -> RequestKeys:
    lora = request.lora_request
    adapter = None
    if lora is not None:
        adapter = Adapter(lora.lora_name, lora.lora_path, bool(lora.load_inplace), lora.lora_int_id)
    return RequestKeys(
        request_id=request.request_id,
        source=request.all_token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        adapter=adapter,
        cache_salt=request.cache_salt or "",
        tags=tags,
        extras=tuple(map(_extra, request.mm_features)),
        reset=reset,
    )


def _extra(feature: Any) -> Extra:
    start = feature.mm_position.offset
    return Extra(start, start + feature.mm_position.length, feature.identifier)
