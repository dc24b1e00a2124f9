"""Which chunks are stored, and when: as soon as their KV is computed, while the request still runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_async.integration.vllm.metadata import Job, pack_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lmcache_async.integration.vllm.chains import RequestChain
    from lmcache_async.integration.vllm.lookup_client import LookupClient
    from lmcache_async.integration.vllm.pins import Pins
    from lmcache_async.integration.vllm.requests import RequestState

MAX_JOB_CHUNKS = 32
"""A job's blocks are given back together, so a long prefill is several jobs."""

_HASH_WAIT_S = 2.0  # a finished request's last chunks wait so long for their keys, their blocks held


@dataclass(frozen=True, slots=True)
class StorePolicy:
    """What is stored, and in which units.

    Attributes:
        world_size: Ranks that report each job.
    """

    chunk_size: int
    block_size: int
    world_size: int
    partial_chunks: bool
    generated_tokens: bool

    def tail_tokens(self, num_prompt_tokens: int) -> int:
        """Length of the prompt's partial chunk: the whole blocks after its last full chunk."""
        rest = num_prompt_tokens % self.chunk_size
        return rest - rest % self.block_size if self.partial_chunks else 0


@dataclass(frozen=True, slots=True)
class Planned:
    """Chunks whose blocks are held; they become a job as soon as they have keys."""

    job_id: int
    chain: RequestChain
    epoch: int
    first: int
    stop: int
    is_tail: bool
    block_ids: bytes
    deadline: float
    hand_over: bool

    def needs(self, policy: StorePolicy) -> int:
        """Tokens that must be hashed."""
        return self.chain.num_prompt_tokens if self.is_tail else self.stop * policy.chunk_size


@dataclass(slots=True)
class StoreCounts:
    """Attributes: chunks planned, and chunks given up, since the start."""

    planned_chunks: int = 0
    dropped_chunks: int = 0


class StorePlanner:
    """Plans stores for all requests. The scheduler's thread only."""

    def __init__(self, policy: StorePolicy, pins: Pins, client: LookupClient) -> None:
        self._policy = policy
        self._pins = pins
        self._client = client
        self._planned: list[Planned] = []
        self._in_flight: dict[int, tuple[bytes, ...]] = {}
        self._keys: set[bytes] = set()  # of chunks in flight; two requests with one prefix store it once
        self._copied: dict[int, int] = {}
        self._next_job = 0
        self.counts = StoreCounts()

    def new_job_id(self) -> int:
        self._next_job += 1
        return self._next_job

    @property
    def busy(self) -> bool:
        return bool(self._pins)

    def plan(self, state: RequestState, computed_tokens: int, blocks: Callable[[], Sequence[Any]]) -> None:
        """Plan what this step completes and what earlier steps could not.

        Args:
            computed_tokens: Known tokens of the request whose KV is there once this step has run.
            blocks: Gives all blocks of the request, as vLLM has them; called only if there is something to plan.
        """
        full, tail = self._due(state, computed_tokens)
        if full <= state.next_chunk and not tail:
            return
        chain = state.chain
        needed = max(full * self._policy.chunk_size, chain.num_prompt_tokens if tail else 0)
        if chain.requested < needed:
            self._client.hash(chain, state.request.num_tokens)
        full = min(full, chain.num_hashed // self._policy.chunk_size)
        tail = tail and chain.tail is not None
        if full > state.next_chunk or tail:
            self._plan(state, full, tail, blocks(), skip_in_flight=True)

    def finish(self, state: RequestState, computed_tokens: int, blocks: Callable[[], Sequence[Any]]) -> None:
        """The request ends: hold what is left, for as long as its keys are not known."""
        full, tail = self._due(state, computed_tokens)
        if full > state.next_chunk or tail:
            self._client.hash(state.chain, computed_tokens)
            self._plan(state, full, tail, blocks(), skip_in_flight=False)
            self.counts.dropped_chunks += max(0, full - state.next_chunk) + state.tail_pending

    def take(self, now: float) -> tuple[Job, ...]:
        """The jobs of this step."""
        jobs: list[Job] = []
        waiting: list[Planned] = []
        for planned in self._planned:
            if planned.chain.num_hashed >= planned.needs(self._policy):
                jobs.append(self._job(planned))
            elif planned.chain.failed or now > planned.deadline:
                self._pins.let_go(planned.job_id)
                self.counts.dropped_chunks += planned.stop - planned.first
            else:
                waiting.append(planned)
        self._planned = waiting
        return tuple(jobs)

    def copied(self, ranks: Mapping[int, int]) -> None:
        """So many more ranks have copied these jobs' blocks."""
        for job_id, count in ranks.items():
            total = self._copied.pop(job_id, 0) + count
            if total < self._policy.world_size:
                self._copied[job_id] = total
                continue
            self._pins.let_go(job_id)
            self._keys.difference_update(self._in_flight.pop(job_id, ()))

    def _due(self, state: RequestState, computed_tokens: int) -> tuple[int, bool]:
        """Full chunks that are computed, and whether the prompt's partial end is to be stored now."""
        if not state.may_store or state.loading or state.chain.failed:
            return 0, False
        prompt = state.chain.num_prompt_tokens
        limit = computed_tokens if self._policy.generated_tokens else min(computed_tokens, prompt)
        return limit // self._policy.chunk_size, state.tail_pending and computed_tokens >= prompt

    def _plan(
        self, state: RequestState, full: int, tail: bool, blocks: Sequence[Any], *, skip_in_flight: bool
    ) -> None:
        while state.next_chunk < full:
            first = state.next_chunk
            if skip_in_flight and state.chain.key(0, first) in self._keys:
                state.next_chunk += 1
                continue
            stop = self._run_end(state.chain, first, full, skip_in_flight=skip_in_flight)
            if stop == first:
                return  # no room; a later step tries again
            self._hold(state, first, stop, blocks, is_tail=False)
            state.next_chunk = stop
        if tail and state.next_chunk >= state.chain.num_prompt_tokens // self._policy.chunk_size:
            first = state.chain.num_prompt_tokens // self._policy.chunk_size
            if self._pins.room >= state.tail_tokens // self._policy.block_size:
                self._hold(state, first, first + 1, blocks, is_tail=True)
                state.tail_pending = False

    def _run_end(self, chain: RequestChain, first: int, full: int, *, skip_in_flight: bool) -> int:
        """Where the run of chunks from `first` ends: at one in flight, at a job's size, or for want of room."""
        room = self._pins.room * self._policy.block_size // self._policy.chunk_size
        stop = min(full, first + min(MAX_JOB_CHUNKS, max(0, room)))
        if skip_in_flight and self._keys:
            for chunk in range(first, stop):
                if chain.key(0, chunk) in self._keys:
                    return chunk
        return stop

    def _hold(
        self, state: RequestState, first: int, stop: int, blocks: Sequence[Any], *, is_tail: bool
    ) -> None:
        blocks_per_chunk = self._policy.chunk_size // self._policy.block_size
        start = first * blocks_per_chunk
        count = state.tail_tokens // self._policy.block_size if is_tail else (stop - first) * blocks_per_chunk
        held = blocks[start : start + count]
        if len(held) != count:
            raise RuntimeError(f"request {state.chain.request_id} has no blocks {start}..{start + count}")
        job_id = self.new_job_id()
        self._pins.hold(job_id, held)
        deadline = self._client.now() + _HASH_WAIT_S
        ids = pack_blocks([block.block_id for block in held])
        epoch, hand_over = self._client.epoch, state.hands_over
        self._planned.append(
            Planned(job_id, state.chain, epoch, first, stop, is_tail, ids, deadline, hand_over)
        )
        if hand_over:
            state.first_chunks[job_id] = first
        self.counts.planned_chunks += stop - first
        if not is_tail and state.chain.num_hashed >= stop * self._policy.chunk_size:
            self._remember(job_id, tuple(state.chain.key(0, chunk) for chunk in range(first, stop)))

    def _job(self, planned: Planned) -> Job:
        chain, size = planned.chain, self._policy.chunk_size
        if planned.is_tail and chain.tail is not None:
            tail = chain.tail
            start, stop, keys = tail.start, tail.start + tail.num_tokens, tail.keys
            texts = {0: tail.text} if tail.text else {}
        else:
            start, stop = planned.first * size, planned.stop * size
            keys = chain.packed_keys(planned.first, planned.stop)
            texts = chain.texts_of(planned.first, planned.stop)
        return Job(
            job_id=planned.job_id,
            request_id=chain.request_id,
            request_namespace=chain.request_namespace,
            epoch=planned.epoch,
            start=start,
            tokens=chain.packed_tokens(start, stop),
            keys=keys,
            texts=tuple(texts.items()),
            block_ids=planned.block_ids,
            hand_over=planned.hand_over,
            parents=chain.packed_keys(planned.first - 1, planned.first)
            if start and not planned.is_tail
            else (),
            told_as=None if planned.is_tail else chain.told_as,
        )

    def _remember(self, job_id: int, keys: tuple[bytes, ...]) -> None:
        self._in_flight[job_id] = keys
        self._keys.update(keys)
