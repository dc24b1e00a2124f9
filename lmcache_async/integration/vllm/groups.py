"""KV cache groups of a model: which tokens each of them needs to continue a request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of the model that share a block table in vLLM.

    A group of full attention needs every token to continue a request. Its chunks are stored one by one. Another group
    needs only the last tokens: these are stored together, for single positions ("boundaries") of a request. Several
    groups of full attention are stored in the same chunks.

    Attributes:
        index: Index in vLLM's list of groups, and in the list of block tables of a request.
        window: Tokens that a query attends to, itself included; 0 without a sliding window.
        local: Tokens of an attention chunk, to which the attention of a query is limited; 0 without chunked local attention.
        state: Description of the recurrent state (Mamba, GDN, KDA); a block holds one state. "" for attention.
    """

    index: int
    block_size: int
    window: int = 0
    local: int = 0
    state: str = ""
    layers: tuple[str, ...] = ()

    @property
    def is_full(self) -> bool:
        return not (self.window or self.local or self.state)

    @property
    def kind(self) -> str:
        """The attention or state of the group, part of its namespace."""
        if self.state:
            return f"state={self.state}"
        return f"window={self.window}" if self.window else f"local={self.local}" if self.local else "full"

    def first_needed(self, num_tokens: int) -> int:
        """Return the first position, on a block boundary, that is needed to continue after `num_tokens` tokens.

        For a recurrent state it is the start of the last block, which holds the state after all of these tokens.
        """
        first = 0
        if self.state:
            first = max(0, num_tokens - self.block_size)
        elif self.window:
            first = max(0, num_tokens - self.window + 1)
        elif self.local:
            first = num_tokens - num_tokens % self.local
        return first - first % self.block_size


class KVGroups:
    """The KV groups of a model, and what follows from them.

    Attributes:
        full: The groups that are stored chunk by chunk, the leading one first.
        boundary_groups: The groups that are stored at boundaries.
        leading: The group whose namespace is the root of the chunk keys: one of full attention, if there is any.
        block_size: Least common multiple of the block sizes of all groups, in tokens.
        has_states: Whether a group is a recurrent state, so that vLLM chooses the boundaries.
        is_one_full: Whether the model has a single group, of full attention.
    """

    def __init__(self, groups: Iterable[KVGroup]) -> None:
        self._all = tuple(groups)
        self.full = [group for group in self._all if group.is_full]
        self.boundary_groups = [group for group in self._all if not group.is_full]
        self.leading = next(iter(self.full), self._all[0])
        self.block_size = math.lcm(*(group.block_size for group in self._all))
        self.has_states = any(group.state for group in self._all)
        self.is_one_full = len(self._all) == 1 and not self.boundary_groups

    @classmethod
    def of(cls, kv_cache_config: Any) -> KVGroups:
        """The groups of a model, from vLLM's KV cache configuration."""
        return cls(_group(index, group) for index, group in enumerate(kv_cache_config.kv_cache_groups))

    def __iter__(self) -> Iterator[KVGroup]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> KVGroup:
        return self._all[index]

    def stores_partial_chunks(self, *, configured: bool) -> bool:
        """Return whether prompts are stored up to their last whole block, given `store.partial_chunks`.

        With recurrent states they always are: vLLM's last state may be inside of a chunk, and is useless without the
        KV before it.
        """
        return configured or self.has_states

    def last_boundary(self, num_tokens: int, chunk_size: int, *, partial_chunks: bool) -> int:
        """Return the last position at which a request of `num_tokens` tokens can continue.

        At least one token is left to compute.
        """
        unit = self.block_size if partial_chunks else chunk_size
        return (num_tokens - 1) // unit * unit


@dataclass(frozen=True, slots=True)
class HeadShard:
    """A part of the KV heads of a model. A rank has one or more, each with an engine and records of its own."""

    index: int  # among the `shards` of the model
    shards: int
    position: int  # among the `shards_of_rank` of its rank
    shards_of_rank: int

    def of_heads(self, heads: int) -> tuple[int, int]:
        """First head and number of heads of this shard, among the `heads` of its rank."""
        count = heads // self.shards_of_rank
        return self.position * count, count


def _group(index: int, group: Any) -> KVGroup:
    spec = next(_layer_specs(group))  # layers of one group differ at most in the size of a block
    kind = kind_of(spec)
    return KVGroup(
        index,
        int(spec.block_size),
        window=int(spec.sliding_window) if kind == "SlidingWindowSpec" else 0,
        local=int(spec.attention_chunk_size) if kind == "ChunkedLocalAttentionSpec" else 0,
        state=_state_text(spec) if kind == "MambaSpec" else "",
        layers=tuple(group.layer_names),
    )


def _state_text(spec: Any) -> str:
    parts = (f"{dtype}{list(shape)}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    return f"{spec.mamba_type.name}:{'+'.join(parts)}".replace(" ", "")


def kind_of(spec: Any) -> str:
    return type(spec).__name__


def specs_of(kv_cache_config: Any) -> Iterator[Any]:
    """The spec of each group, or of each of its layers if they differ in size."""
    for group in kv_cache_config.kv_cache_groups:
        yield from _layer_specs(group)


def _layer_specs(group: Any) -> Iterator[Any]:
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    yield from inner.values() if isinstance(inner, dict) else (group.kv_cache_spec,)
