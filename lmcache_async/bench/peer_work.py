"""What our engine and its peers are both made to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from lmcache_async.bench.cache import CacheForm

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from contextlib import AbstractContextManager

    import numpy.typing as npt

HASH_LIST, HASH_ARRAY = "hash, list", "hash, int64 array"
STORE, RETRIEVE = "store", "retrieve"
STORE_NOTHING, RETRIEVE_NOTHING = "store, no copies", "retrieve, no copies"
LOOKUP, LOOKUP_PINNED = "lookup", "lookup, pinned"


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do.

    Attributes:
        unit: Of its figure.
        amount: The figure is `amount` a second for a rate, and `amount` times the seconds for a time.
    """

    name: str
    unit: str
    amount: float

    def figure(self, seconds: float) -> float:
        return self.amount / seconds if self.unit.endswith("/s") else self.amount * seconds


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes, equal for all.

    Attributes:
        form: Of the cache whose KV is stored and retrieved.
        hash_tokens: Tokens of the prompt that is hashed.
        chunks: Chunks of the prompt that is stored and retrieved without copies, and looked up.
    """

    form: CacheForm
    hash_tokens: int
    chunks: int

    @property
    def small(self) -> CacheForm:
        """A cache of `chunks` chunks whose records are as small as they can be."""
        return CacheForm(self.chunks * self.form.chunk_size, chunk_size=self.form.chunk_size)

    @property
    def nbytes(self) -> int:
        """Bytes of KV in the large cache, in bfloat16."""
        form = self.form
        return form.tokens * form.layers * form.heads * 2 * form.head_dim * 2

    @property
    def prompt(self) -> npt.NDArray[np.int64]:
        """The prompt that is hashed."""
        return np.random.default_rng(0).integers(1000, 128000, self.hash_tokens)

    def tasks(self) -> dict[str, Task]:
        chunk_us = 1e6 / self.chunks
        tasks = [
            *(Task(name, "M tokens/s", self.hash_tokens / 1e6) for name in (HASH_LIST, HASH_ARRAY)),
            *(Task(name, "GB/s", self.nbytes / 1e9) for name in (STORE, RETRIEVE)),
            *(Task(name, "us/chunk", chunk_us) for name in (STORE_NOTHING, RETRIEVE_NOTHING)),
            *(Task(name, "us/chunk", chunk_us) for name in (LOOKUP, LOOKUP_PINNED)),
        ]
        return {task.name: task for task in tasks}


Ready: TypeAlias = "Callable[[], AbstractContextManager[Callable[[], float]]]"
"""Gives what does a task once, and the seconds it took."""


class PeerError(Exception):
    """A peer does not run, or not this task; the message says why."""


class Peer(Protocol):
    """Another system, ready to be measured."""

    @property
    def name(self) -> str:
        """With its version."""

    @property
    def tasks(self) -> Collection[str]:
        """Names of those that it can do."""

    async def seconds(self, task: str) -> float:
        """Do it once, and say what it took.

        Raises:
            PeerError: It failed.
        """


class PeerModule(Protocol):
    """What the file of a peer has. It is imported only in the peer's own process."""

    @staticmethod
    def tasks(work: Workload) -> dict[str, Ready]:
        """For each task that it can do what makes ready for it, and cleans up; one is ready at any time."""
