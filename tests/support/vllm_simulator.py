"""vLLM without a model: its real scheduler and the real connector with a KV cache of known values.

The value at a position is a hash of the tokens up to it, as KV is, and the next token is a function of the
value. So each step can check all values that attention would read, and two runs with the same tokens have
used the same KV. Each step runs the parts in vLLM's order, without waiting.
"""

from __future__ import annotations

import copy
import json
import pickle
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_async.integration.vllm.connector import LMCacheAsyncConnector
from lmcache_async.integration.vllm.groups import KVGroup
from lmcache_async.integration.vllm.jobs import Job, JobPart, StepMetadata
from lmcache_async.integration.vllm.versions import serves_several_groups

Positions: TypeAlias = npt.NDArray[np.intp]

VOCABULARY = 4096
LAYERS, HEADS, CONTENT = 2, 2, 8
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
    "head_dim": 32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Configuration of the simulated vLLM.

    Attributes:
        folder: Directory for the model's config file.
        options: The connector's kv_connector_extra_config; None for no connector.
        overlapped: A step is scheduled while the previous one still runs, as on GPUs.
        stages: Pipeline stages. As many steps are in flight, as with asynchronous scheduling or without it.
        by_priority: vLLM schedules requests by their priority, and preempts those of the lowest one.
        multi: The connector is a child of vLLM's MultiConnector.
        others: `kv_transfer_config` of the other children.
        first: The connector is the first child, and not the last one.
        split_heads: The ranks divide the KV heads, and the values of a head are those of no other. Otherwise each rank
            has as many heads, with values of its own.
        kv_events: vLLM collects KV events. The scheduler publishes them.
        groups: KV groups of the model, each of one layer; by default one group of full attention with two layers.
        drafts: Speculated tokens per step. A seeded random number of them is accepted. With drafts, vLLM keeps the
            recurrent states at the ends of all blocks.
    """

    folder: Path
    options: Mapping[str, Any] | None
    num_blocks: int = 256
    block_size: int = 16
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 8
    ranks: int = 1
    kv_role: str = "kv_both"
    prefix_caching: bool = True
    overlapped: bool = False
    stages: int = 1
    by_priority: bool = False
    kv_events: bool = False
    multi: bool = False
    others: tuple[Mapping[str, Any], ...] = ()
    first: bool = False
    split_heads: bool = False
    groups: tuple[KVGroup, ...] = ()
    drafts: int = 0

    @property
    def layers(self) -> dict[str, KVGroup]:
        """Group of each layer."""
        groups = self.groups or (KVGroup(0, self.block_size),) * LAYERS
        return {f"layer.{layer}": group for layer, group in enumerate(groups)}


def vllm_config(setup: Setup) -> VllmConfig:
    load_general_plugins()  # registers the connector
    setup.folder.mkdir(parents=True, exist_ok=True)
    (setup.folder / "config.json").write_text(json.dumps(_MODEL))
    model = ModelConfig(model=str(setup.folder), skip_tokenizer_init=True, dtype="float32", seed=0)
    transfer = None
    if setup.options is not None:
        given: dict[str, Any] = {
            "kv_connector": "LMCacheAsyncConnector",
            "kv_role": setup.kv_role,
            "kv_connector_extra_config": {"weights_fingerprint": "text:simulated", **setup.options},
        }
        if setup.multi:
            children = {"connectors": [given, *setup.others] if setup.first else [*setup.others, given]}
            given = {
                "kv_connector": "MultiConnector",
                "kv_role": setup.kv_role,
                "kv_connector_extra_config": children,
            }
        transfer = KVTransferConfig(**given)
    cache = CacheConfig(
        block_size=setup.block_size, enable_prefix_caching=setup.prefix_caching, gpu_memory_utilization=0.9
    )
    cache.num_gpu_blocks = setup.num_blocks
    if any(group.state for group in setup.groups):
        cache.mamba_cache_mode = "align"
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        parallel_config=ParallelConfig(
            tensor_parallel_size=setup.ranks,
            distributed_executor_backend="mp" if setup.ranks > 1 else None,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=model.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=setup.overlapped,
            policy="priority" if setup.by_priority else "fcfs",
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if setup.kv_events
        else None,
    )
    config.scheduler_config.async_scheduling = setup.overlapped  # vLLM's CPU platform turns it off
    config.parallel_config.pipeline_parallel_size = setup.stages  # a rank runs all stages of a step at once
    if setup.drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=setup.drafts,
            prompt_lookup_max=1,
            target_model_config=model,
            target_parallel_config=config.parallel_config,
        )
    return config


def kv_cache_config(setup: Setup) -> KVCacheConfig:
    heads = HEADS // setup.ranks if setup.split_heads else HEADS
    names: dict[KVGroup, list[str]] = {}
    for name, group in setup.layers.items():
        names.setdefault(group, []).append(name)
    return KVCacheConfig(
        num_blocks=setup.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(layers, spec_of(group, heads, setup.drafts)) for group, layers in names.items()
        ],
        prefix_cache_retention_interval=0 if setup.groups and not setup.drafts else None,
    )


def spec_of(group: KVGroup, heads: int = 1, drafts: int = 0) -> KVCacheSpec:
    if group.state:
        return MambaSpec(
            block_size=group.block_size,
            shapes=((CONTENT,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
            num_speculative_blocks=drafts,
        )
    shape: dict[str, Any] = {
        "block_size": group.block_size,
        "num_kv_heads": heads,
        "head_size": CONTENT // 2,
        "dtype": torch.float32,
    }
    if group.window:
        return SlidingWindowSpec(**shape, sliding_window=group.window)
    if group.local:
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=group.local)
    return FullAttentionSpec(**shape)


SIMULATOR_OPTIONS = {
    "chunk_size": 64,
    "arena.max_bytes": "8MiB",
    "arena.prefault": False,
    "vllm.load_policy": "always",  # these steps compute nothing, so they are faster than any load
    "vllm.lookup_timeout_s": 60.0,  # the machine may be slow; a test of the deadline sets its own
}


MODELS = {
    "full": (KVGroup(0, 16),),
    "window": (KVGroup(0, 16), KVGroup(1, 16, window=100)),
    "window in all layers": (KVGroup(0, 16, window=100),),
    "chunked local": (KVGroup(0, 16), KVGroup(1, 16, local=96)),
    "two full, two windows": (
        KVGroup(0, 16, window=20),
        KVGroup(1, 16),
        KVGroup(2, 16, window=150),
        KVGroup(3, 16),
    ),
    "blocks of two sizes": (KVGroup(0, 32), KVGroup(1, 16, window=100), KVGroup(2, 16)),
    "two states": (KVGroup(0, 16), KVGroup(1, 16, state="GDN"), KVGroup(2, 16, state="GDN")),
}
"""KV groups of models."""


def several_groups_served() -> bool:
    """Return whether this vLLM serves models with several KV groups; 0.31 and older, used by `python -m tools.compat`, do not."""
    return serves_several_groups(KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]))


@dataclass(slots=True)
class Work:
    """Tokens of one request in one step.

    Attributes:
        start, stop: Positions of the tokens. The last ones are the drafts, if there are any.
        blocks: Block table of each group in vLLM's model runner. It still has the blocks that the request has freed.
        held: Blocks of the request in the scheduler.
        starts: The request is new or was preempted.
        previous: The request's step before, unless it starts.
    """

    start: int
    stop: int
    blocks: Mapping[int, Sequence[int]] | Sequence[Sequence[int]]
    held: frozenset[int]
    starts: bool
    previous: Work | None = None
    drafts: int = 0
    accepted: int = 0

    @property
    def end(self) -> int:
        """Position after the accepted tokens."""
        return self.stop - self.drafts + self.accepted

    def states(self, block_size: int) -> dict[int, int]:
        """Return the last position of each recurrent state that vLLM writes, by its column of the block table.

        There is one before the drafts, one after each of them, and a copy at the boundary of a block that was reached.
        """
        column, last = (self.stop - 1) // block_size, self.stop - self.drafts - 1
        states = {column + draft: last + draft for draft in range(self.drafts + 1)}
        boundary = self.end - self.end % block_size
        if boundary > last:
            states[boundary // block_size - 1] = boundary - 1
        return states

    def state_column(self, block_size: int) -> int:
        """Return the column of the block table with the recurrent state before the step."""
        states = self.previous.states(block_size) if self.previous else {}
        found = (column for column, position in states.items() if position == self.start - 1)
        return next(found, (self.start - 1) // block_size)


class Rank:
    """One worker: its KV cache and its WorkerConnector."""

    def __init__(self, setup: Setup, config: Any, cache_config: KVCacheConfig, rank: int) -> None:
        self.rank = rank
        self._groups = list(setup.layers.values())
        heads = HEADS // setup.ranks if setup.split_heads else HEADS
        self._heads = np.full((1, 1, 1), rank % 2, np.float32)
        if setup.split_heads:
            self._heads = np.arange(rank * heads, (rank + 1) * heads, dtype=np.float32).reshape(1, -1, 1)
        self.caches = {}
        for name, group in setup.layers.items():
            shape = (1, 1) if group.state else (heads, group.block_size)
            self.caches[name] = torch.full((cache_config.num_blocks, *shape, CONTENT), -1.0)
        # Their memory as numpy arrays: each step reads and writes a few values, for which torch is slow.
        self._arrays = [cache.numpy() for cache in self.caches.values()]
        self.connector: Any = None
        if config.kv_transfer_config is not None:
            mine = copy.copy(config)
            mine.parallel_config = copy.copy(config.parallel_config)
            mine.parallel_config.rank = rank
            self.connector = KVConnectorFactory.create_connector(mine, KVConnectorRole.WORKER, cache_config)
            self.connector.register_kv_caches(self.caches)

    def write(self, layer: int, work: Work, values: Sequence[int]) -> None:
        """Write the values of the positions that `work` computes; of a recurrent state those that vLLM keeps."""
        group, columns = self._groups[layer], None
        if group.state:
            states = work.states(group.block_size)
            columns, values = list(states), [values[position - work.start] for position in states.values()]
        rows, slots, stored = self._places(work, work.start, values, layer, columns)
        self._arrays[layer][rows, :, slots] = stored

    def wrong_positions(self, layer: int, work: Work, values: Sequence[int]) -> list[int]:
        """Return the positions before `work` that this layer reads and at which its cache has a wrong value."""
        group = self._groups[layer]
        first = _first_read(group, work.start)
        if first == work.start:
            return []
        columns = [work.state_column(group.block_size)] if group.state else None
        rows, slots, stored = self._places(work, first, values[first:], layer, columns)
        differs = (self._arrays[layer][rows, :, slots] != stored).any((1, 2))
        positions: list[int] = (differs.nonzero()[0] + first).tolist()
        return positions

    def stores_wrong_values(self, part: JobPart, values: Sequence[int]) -> bool:
        """Whether the blocks of a store do not have the values of its positions. `values` are those of the request."""
        stop = part.start + len(part.tokens) // 4
        for layer, group in enumerate(self._groups):
            if group.index == part.group:
                start = stop - 1 if group.state else part.start
                table = [0] * (part.start // group.block_size) + part.rows().tolist()
                work = Work(stop, stop, {group.index: table}, frozenset(), starts=False)
                columns = [len(table) - 1] if group.state else None
                rows, slots, stored = self._places(work, start, values[start:stop], layer, columns)
                if (self._arrays[layer][rows, :, slots] != stored).any():
                    return True
        return False

    def _places(
        self, work: Work, start: int, values: Sequence[int], layer: int, columns: list[int] | None
    ) -> tuple[Positions, Positions, npt.NDArray[np.float32]]:
        group = self._groups[layer]
        positions = np.arange(start, start + len(values), dtype=np.intp)
        table = np.asarray(work.blocks[group.index], np.intp)
        rows = table[positions // group.block_size if columns is None else columns]
        stored = np.asarray(values, np.float32).reshape(-1, 1, 1) * np.float32(4) + np.float32(layer * 2)
        if group.state:
            return rows, np.zeros_like(positions), stored + np.float32(self.rank % 2)
        return rows, positions % group.block_size, stored + self._heads


def _first_read(group: KVGroup, position: int) -> int:
    """First position that a layer of the group reads to compute the KV at `position`."""
    if group.state:
        return max(0, position - 1)
    if group.window:
        return max(0, position - group.window + 1)
    return position - position % group.local if group.local else 0


def value_after(value: int, token: int) -> int:
    """Return the KV at the next position; it fits a float32 exactly."""
    return zlib.crc32(token.to_bytes(8, "little", signed=True), value) & 0x3FFFFF


class EncodedRequest(Request):  # type: ignore[misc]
    """A request whose images are encoded already."""

    @property
    def num_encoder_inputs(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Image:
    """Placeholder tokens of an image in a prompt. `identifier` names the content."""

    start: int
    length: int
    identifier: str


def inputs_of(request: Request) -> list[int]:
    """Return what the model reads at each position of a request: the token, or a number for a part of an image."""
    inputs = list(request.all_token_ids)
    for feature in request.mm_features:
        place, part = feature.mm_position, zlib.crc32(feature.identifier.encode())
        inputs[place.offset : place.offset + place.length] = range(part, part + place.length)
    return inputs


def first_value(request: Request, weights: int = 0) -> int:
    """Return the value before the first position of a request, which depends on its adapter and the model's weights.

    `weights` is the number of changes of the weights.
    """
    adapter = request.lora_request.lora_name if request.lora_request else ""
    return zlib.crc32(adapter.encode(), weights) & 0x3FFFFF if adapter or weights else 0


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(VOCABULARY) for _ in range(num_tokens)]


def next_token(value: int) -> int:
    return value % VOCABULARY


@dataclass(slots=True)
class Step:
    output: Any
    work: dict[str, Work]
    preempted: set[str] = field(default_factory=set)


class SimulatedVLLM:
    """A simulated vLLM: add requests, run steps, and read the outputs.

    Attributes:
        outputs: Generated tokens by request.
        finish_reasons: Finish reason of each finished request.
        kv_transfer_params: Parameters returned by finished requests, for the vLLM that continues them.
        cached_tokens: Prompt tokens that vLLM did not compute, by request: (prefix cache, connector).
        computed_tokens: Tokens computed in all steps; hits reduce it.
        connector_stats: The connector's statistics for vLLM's metrics, one entry for each step that had any.
        before_report: Called once, between the next step and the report of its results to the scheduler.
        weights: Number of changes of the model's weights.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.config = vllm_config(setup)
        cache_config = kv_cache_config(setup)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(cache_config, self.config)
        cache_config.hash_block_size = hash_block_size
        resolve_alignment = getattr(kv_cache_utils, "resolve_cache_hit_alignment_tokens", None)
        if resolve_alignment is not None:  # since vLLM 0.32
            cache_config.cache_hit_alignment_tokens = resolve_alignment(
                cache_config, self.config, block_size, hash_block_size
            )
        init_none_hash(sha256)
        self.ranks = [Rank(setup, self.config, cache_config, rank) for rank in range(setup.ranks)]
        scheduler_class = AsyncScheduler if setup.overlapped else Scheduler
        self.scheduler = scheduler_class(
            vllm_config=self.config,
            kv_cache_config=cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.connector: Any = self.scheduler.connector
        self._shake_hands()
        self._aggregator = KVOutputAggregator(setup.ranks)
        self._block_hasher = get_request_block_hasher(hash_block_size, sha256)
        self._values: dict[str, list[int]] = {}
        self._first_values: dict[str, int] = {}
        self._tokens: dict[str, list[int]] = {}
        self._block_tables: dict[str, list[list[int]]] = {}
        self._last_work: dict[str, Work] = {}
        self._chosen = random.Random(0)
        self._queue: deque[Step] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.kv_transfer_params: dict[str, dict[str, Any] | None] = {}
        self.cached_tokens: dict[str, tuple[int, int]] = {}
        self.computed_tokens = 0
        self.connector_stats: list[dict[str, Any]] = []
        self.preemptions = 0
        self.before_report: Callable[[], object] | None = None
        self.weights = 0
        self._stored_values: dict[int, list[int]] = {}  # of the request, by job
        self._audited: set[Any] = set()
        self._wrong_stores: list[str] = []

    def _shake_hands(self) -> None:
        """Pass on what the workers tell the scheduler. Only a single worker runs in the scheduler's process."""
        told = {
            (0, rank.rank): metadata
            for rank in self.ranks
            if rank.connector is not None
            and (metadata := rank.connector.get_handshake_metadata()) is not None
        }
        if told and self.connector is not None:
            self.connector.set_xfer_handshake_metadata_pp_aware(
                told if len(self.ranks) == 1 else pickle.loads(pickle.dumps(told))
            )

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        max_tokens: int = 4,
        params: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
        stop_token: int | None = None,
        adapter: LoRARequest | None = None,
        images: Sequence[Image] = (),
        priority: int = 0,
        resumable: bool = False,
        skip_reading_prefix_cache: bool | None = None,
    ) -> Request:
        """Add a request and return it. An earlier request with this id must have ended.

        A resumable request is a session: it waits for `extend` after its answer.
        """
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=[] if stop_token is None else [stop_token],
            skip_reading_prefix_cache=skip_reading_prefix_cache,
            extra_args={"kv_transfer_params": dict(params)} if params else None,
        )
        request = EncodedRequest(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=cache_salt,
            lora_request=adapter,
            priority=priority,
            resumable=resumable,
            mm_features=[
                MultiModalFeatureSpec(
                    None, "image", image.identifier, PlaceholderRange(image.start, image.length)
                )
                for image in images
            ],
            block_hasher=self._block_hasher,
        )
        self._tokens[request_id] = inputs_of(request)
        self._values[request_id] = []
        self._first_values[request_id] = first_value(request, self.weights)
        self.outputs[request_id] = []
        self.finish_reasons.pop(request_id, None)
        self.scheduler.add_request(request)
        return request

    def extend(self, request_id: str, tokens: Sequence[int], *, max_tokens: int = 4) -> None:
        """Give a session that has answered further tokens, or end it if there are none.

        VLLM discards the last token of the answer, which was not computed.
        """
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        update = EncodedRequest(request_id, list(tokens), sampling, None, resumable=bool(tokens))
        self.scheduler.add_request(update)
        if tokens:
            session = self.scheduler.requests[request_id]
            self._tokens[request_id] = inputs_of(session)
            del self._values[request_id][session.num_computed_tokens :]

    def update_weights(self) -> bool:
        """Change the weights of an idle vLLM, and thus all values. Return False if vLLM could not reset its caches.

        It cannot while blocks are held. Requests that have begun are computed again.
        """
        assert not self._queue
        try:
            reset = self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        except RuntimeError:
            return False
        if reset:
            self.weights += 1
            for request_id, request in self.scheduler.requests.items():
                self._first_values[request_id] = first_value(request, self.weights)
                self._values[request_id].clear()
        return reset

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.finish_reasons.setdefault(request_id, "abort")

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self._queue)

    def step(self) -> None:
        """Schedule one step and run the oldest one."""
        self._audit_stores()
        output = self.scheduler.schedule()
        for job in getattr(own_metadata(output.kv_connector_metadata), "stores", ()):
            self._stored_values[job.job_id] = self._values[job.request_id]
        self._queue.append(Step(output, self._work_of(output)))
        in_flight = max(self.setup.stages, 1 + self.setup.overlapped)
        depth = in_flight if output.total_num_scheduled_tokens else 1
        while len(self._queue) >= depth and self._queue:
            self._run(self._queue.popleft())
        if self._wrong_stores:
            raise AssertionError(f"wrong KV is stored: {self._wrong_stores}")

    def _audit_stores(self) -> None:
        """Check the blocks of every store when they are copied. They are final then."""
        for rank in self.ranks if self.connector is not None else ():
            for engine in own_connector(rank.connector).worker.engines:
                if engine._transfers is not None and engine._transfers not in self._audited:
                    self._audited.add(engine._transfers)
                    engine._transfers._part_copied = partial(
                        self._copied, rank, engine._transfers._part_copied
                    )

    def _copied(self, rank: Rank, report: Callable[[Job], None], job: Job) -> None:
        values = self._stored_values[job.job_id]
        if any(rank.stores_wrong_values(part, values) for part in job.parts):
            self._wrong_stores.append(f"rank {rank.rank}, {job.request_id}, job {job.job_id}")
        report(job)

    def run(self, *, max_seconds: float = 150.0) -> None:
        """Run steps until no request is left, as vLLM's engine loop does."""
        deadline = time.monotonic() + max_seconds
        while self.busy:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not idle after {max_seconds} s; finished are {self.finish_reasons}")
            before = self.computed_tokens
            self.step()
            if self.computed_tokens == before:
                time.sleep(0.001)  # as vLLM's engine does, so that transfers make progress

    def close(self) -> None:
        for connector in [*(rank.connector for rank in self.ranks), self.connector]:
            if connector is not None:
                connector.shutdown()

    def _work_of(self, output: Any) -> dict[str, Work]:
        cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
        starting = {*cached.resumed_req_ids, *(request.req_id for request in new)}
        new_blocks = [*zip(cached.req_ids, cached.new_block_ids, strict=True)]
        new_blocks += [(request.req_id, request.block_ids) for request in new]
        work = {}
        for request_id, ids in new_blocks:
            if request_id in starting:
                self._block_tables[request_id] = [[] for _ in ids]
            tables = self._block_tables[request_id]
            for table, more in zip(tables, ids or (), strict=False):  # None if there is no new block
                table.extend(more)
            stop = self.scheduler.requests[request_id].num_computed_tokens  # this step is already included
            held = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            work[request_id] = Work(
                stop - output.num_scheduled_tokens[request_id],
                stop,
                [list(table) for table in tables],
                frozenset().union(*held),
                starts=request_id in starting,
            )
        return work

    def _run(self, step: Step) -> None:
        outputs = self._run_ranks(step)
        merged = self._aggregator.aggregate(outputs) if self.connector is not None else outputs[0]
        if (call := self.before_report) is not None:
            self.before_report = None
            call()
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
        for (
            request_id
        ) in step.work:  # the scheduler drops the token of a step before which it preempted the request
            if (request := self.scheduler.requests.get(request_id)) is not None:
                del self._tokens[request_id][request.num_tokens :]
        if self.setup.drafts and not self.setup.overlapped:  # otherwise the scheduler adds them itself
            drafts = [[0] * self.setup.drafts for _ in step.work]
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(step.work), drafts))
        self.preemptions += len(step.output.preempted_req_ids or ())

    def _run_ranks(self, step: Step) -> list[ModelRunnerOutput]:
        """Run the ranks in the order of vLLM's model runner V1, all at the same layer at the same time."""
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
        failed = {name for name, work in step.work.items() if invalid & work.held}
        for request_id, (number, wrong) in spoiled.items():
            if request_id not in failed:
                raise AssertionError(f"rank {number}: {request_id} has read wrong KV at {wrong}")
        sampled = [self._sample(name, work, failed=name in failed) for name, work in step.work.items()]
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
        """Write and read every layer. Wrong KV that a request reads makes its later layers wrong too.

        Returns:
            For each request that read wrong KV, the rank and the positions of the first wrong values.
        """
        spoiled: dict[str, tuple[int, list[int]]] = {}
        for request_id, work in step.work.items():
            tokens, values = self._tokens[request_id], self._values[request_id]
            if self.setup.drafts:
                self._speculate(work, len(tokens))
                work.previous = None if work.starts else self._last_work.get(request_id)
                self._last_work[request_id] = replace(work, previous=None)
            while len(values) < work.end:
                token = tokens[len(values)] if len(values) < len(tokens) else next_token(values[-1])
                values.append(value_after(values[-1] if values else self._first_values[request_id], token))
            self.computed_tokens += work.stop - work.start
        for layer, group in enumerate(self.setup.layers.values() if step.work else ()):
            for rank in self.ranks:
                if rank.connector is not None:
                    rank.connector.wait_for_layer_load(f"layer.{layer}")
            if group.state:  # a step replaces the state that it reads
                self._read(layer, step, spoiled)
            for rank in self.ranks:
                for request_id, work in step.work.items():
                    values = self._values[request_id][work.start : work.end]
                    values = values + [-7] * (work.stop - work.end)
                    rank.write(layer, work, [-9] * len(values) if request_id in spoiled else values)
            if not group.state:  # requests read blocks that others compute in the same step
                self._read(layer, step, spoiled)
        return spoiled

    def _read(self, layer: int, step: Step, spoiled: dict[str, tuple[int, list[int]]]) -> None:
        for rank in self.ranks:
            for request_id, work in step.work.items():
                wrong = rank.wrong_positions(layer, work, self._values[request_id][: work.start])
                if wrong:
                    spoiled.setdefault(request_id, (rank.rank, wrong))

    def _speculate(self, work: Work, known: int) -> None:
        """Begin after the accepted drafts of the last step, which vLLM did not know yet, and accept some of this one."""
        rejected = max(0, work.start - (known - 1))
        work.start, work.stop = work.start - rejected, work.stop - rejected
        work.drafts = max(0, work.stop - known)
        work.accepted = self._chosen.randrange(work.drafts + 1)

    def _sample(self, request_id: str, work: Work, *, failed: bool) -> list[int]:
        """The tokens after the step, if it computes all known ones. VLLM drops it if a load of the step has failed."""
        tokens, values = self._tokens[request_id], self._values[request_id]
        if work.stop < len(tokens):
            return []
        if failed:
            return [VOCABULARY]  # never the right token
        new = [next_token(value) for value in values[len(tokens) - 1 : work.end]]
        tokens.extend(new)
        return new


def _connector_output(connector: Any, output: Any) -> KVConnectorOutput:
    result = KVConnectorOutput()
    if not output.has_sync_kv_loads:
        connector.start_load_kv(None)
    connector.wait_for_save()
    transfers = connector.get_transfer_results(output.finished_req_ids)
    result.finished_sending = transfers.finished_sending
    result.finished_recving = transfers.finished_recving
    result.failed_recving = transfers.failed_recving
    result.invalid_block_ids = connector.get_block_ids_with_load_errors()
    result.kv_connector_stats = connector.get_kv_connector_stats()
    result.kv_connector_worker_meta = connector.build_connector_worker_meta()
    connector.clear_connector_metadata()
    return result


Until = Callable[[Callable[[], bool]], None]


@dataclass
class Simulators:
    """Makes simulators and closes them."""

    tmp_path: Path
    socket_dir: Path
    until: Until
    made: list[SimulatedVLLM] = field(default_factory=list)

    def __call__(self, options: dict[str, Any] | None = None, **setup: Any) -> SimulatedVLLM:
        given = {**SIMULATOR_OPTIONS, "vllm.socket_dir": str(self.socket_dir), **(options or {})}
        sim = SimulatedVLLM(Setup(folder=self.tmp_path / "model", options=given, **setup))
        self.made.append(sim)
        self.until(lambda: scheduler_of(sim).ready)
        return sim

    def stored(
        self, options: dict[str, Any] | None = None, *, num_tokens: int = 300, **setup: Any
    ) -> tuple[SimulatedVLLM, list[int]]:
        """Return a simulator that has computed and stored a prompt, and the prompt."""
        sim, tokens = self(options, **setup), prompt(num_tokens)
        sim.add("cold", tokens)
        self.settle(sim)
        return sim, tokens

    def settle(self, sim: SimulatedVLLM) -> None:
        """Wait until all computed chunks are stored, and empty vLLM's own cache."""
        sim.run()
        self.end_calls(sim)
        assert sim.scheduler.reset_prefix_cache()

    def end_calls(self, sim: SimulatedVLLM) -> None:
        """Wait until no store or load is running or about to start on the engines' loops."""

        def busy(engine: Any) -> bool:
            transfers = engine._transfers
            return bool(transfers._storing or transfers._loading or engine.engine.statistics().running)

        self.until(lambda: not any(map(busy, rank_engines_of(sim))))


def own_metadata(metadata: Any) -> Any:
    """The metadata of our connector, which may be in that of a MultiConnector."""
    children = getattr(metadata, "metadata", (metadata,))
    return next((each for each in children if isinstance(each, StepMetadata)), None)


def own_connector(connector: Any) -> Any:
    """Our connector, which may be in a MultiConnector."""
    children = getattr(connector, "sub_connectors", [connector])
    return next(each for each in children if isinstance(each, LMCacheAsyncConnector))


def scheduler_of(sim: SimulatedVLLM) -> Any:
    return own_connector(sim.connector).scheduler


def engine_of(rank: Any) -> Any:
    return own_connector(rank.connector).worker.engines[0].engine


def rank_engines_of(sim: SimulatedVLLM) -> list[Any]:
    """The `RankEngine`s of all ranks, and of all shards of their KV heads."""
    return [each for rank in sim.ranks for each in own_connector(rank.connector).worker.engines]


def engines_of(sim: SimulatedVLLM) -> list[Any]:
    """The engines of all ranks, and of all shards of their KV heads."""
    return [each.engine for each in rank_engines_of(sim)]


def expected(tokens: Sequence[int], max_tokens: int, value: int = 0) -> list[int]:
    """The answer to a prompt. `value` is that before the first position; see `first_value`."""
    for token in tokens:
        value = value_after(value, token)
    result = []
    for _ in range(max_tokens):
        result.append(next_token(value))
        value = value_after(value, result[-1])
    return result


def assert_nothing_is_held(sim: SimulatedVLLM) -> None:
    side = scheduler_of(sim)
    assert (side.has_work, side.num_requests) == (False, 0)
    assert sim.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == sim.setup.num_blocks - 1
