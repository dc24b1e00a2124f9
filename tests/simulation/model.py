"""Prompts and their KV, the expected hits, and checks of device memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from random import Random

import numpy as np
import numpy.typing as npt
import xxhash

from lmcache_async.hashing import RequestNamespace
from lmcache_async.testing.rig import Rig
from lmcache_async.types import BlockIds, Tokens
from tests.simulation.loop import Violation

NAMESPACES = (RequestNamespace(), RequestNamespace(cache_salt="tenant"))

Content = npt.NDArray[np.uint8]
"""KV of a prompt: one row of bytes for each token."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt in one namespace.

    Attributes:
        namespace: Index of the namespace.
        tokens: Token ids.
        content: The KV. Row i depends on the namespace and on tokens 0 to i.
        chunks: (number, end position) of each chunk. Equal chunks of different prompts have the same number.
    """

    namespace: int
    tokens: Tokens
    content: Content
    chunks: tuple[tuple[int, int], ...]

    @property
    def request_namespace(self) -> RequestNamespace:
        return NAMESPACES[self.namespace]


def make_prompts(
    rng: Random, *, count: int, max_tokens: int, chunk_size: int, row_bytes: int
) -> list[tuple[Prompt, ...]]:
    """Draw `count` texts, and return a prompt for each text and namespace. Many texts share a prefix."""
    texts: list[list[int]] = []
    for _ in range(count):
        text: list[int] = []
        if texts and rng.random() < 0.8:
            other = rng.choice(texts)
            text = other[: rng.randrange(len(other) + 1)]
        wanted = max(1, rng.randrange(max_tokens + 1))
        texts.append((text + [rng.randrange(100) for _ in range(max_tokens)])[: max(wanted, len(text))])
    numbers: dict[tuple[int, bytes], int] = {}
    return [
        tuple(
            _prompt(numbers, namespace, np.asarray(text, np.int32), chunk_size, row_bytes)
            for namespace in range(len(NAMESPACES))
        )
        for text in texts
    ]


def _prompt(
    numbers: dict[tuple[int, bytes], int], namespace: int, tokens: Tokens, chunk_size: int, row_bytes: int
) -> Prompt:
    stops = [*range(chunk_size, len(tokens), chunk_size), len(tokens)]
    chunks = tuple(
        (numbers.setdefault((namespace, tokens[:stop].tobytes()), len(numbers)), stop) for stop in stops
    )
    rows = [_row(namespace, tokens[: stop + 1], row_bytes) for stop in range(len(tokens))]
    return Prompt(namespace, tokens, np.frombuffer(b"".join(rows), np.uint8).reshape(-1, row_bytes), chunks)


def _row(namespace: int, prefix: Tokens, row_bytes: int) -> bytes:
    text = bytes([namespace]) + prefix.tobytes()
    parts = [xxhash.xxh3_128_digest(text, seed=part) for part in range(-(-row_bytes // 16))]
    return b"".join(parts)[:row_bytes]


@dataclass(frozen=True, slots=True)
class Promise:
    """Expected hits of a prompt at the start of a call.

    Attributes:
        possible: Chunks that may be hits.
        least: Number of leading chunks that must be hits, unless `clear` is called meanwhile.
        epoch: Epoch at the start.
    """

    possible: frozenset[int] = frozenset()
    least: int = 0
    epoch: int = -1


class Model:
    """Two sets of chunks: those that may be hits, and those that must be.

    A chunk may be a hit after a store of it started in its namespace, until all is cleared. It must be a hit
    after a store reported it as kept. This is checked only if everything fits and nothing fails, so that no
    chunk is lost by an eviction, an error or a crash.

    Args:
        all_fits: Whether every prompt fits into every tier, and no fault is injected.
        persistent: Whether a tier outlives the process.
    """

    def __init__(self, *, all_fits: bool, persistent: bool) -> None:
        self.all_fits = all_fits
        self._persistent = persistent
        self._possible: set[int] = set()
        self._certain: set[int] = set()
        self._flushed: set[int] = set()  # the certain chunks that are in a persistent tier
        self._clears = 0
        self._epoch = 0
        self._since_clear: set[int] = set()  # chunks written since the oldest running clear started

    @property
    def epoch(self) -> int:
        """Counts starts and ends of clears. Nothing is expected of a call during which it changes."""
        return self._epoch

    def begin(self, prompt: Prompt, *, store: bool) -> None:
        """Record the start of a store, or of another call that may write (promote) the prompt's chunks."""
        numbers = {number for number, _ in prompt.chunks}
        if store:
            self._possible |= numbers
        if self._clears:
            self._since_clear |= numbers & self._possible

    def stored(self, prompt: Prompt, *, since: int) -> None:
        """Record the end of a store that started in epoch `since` and dropped nothing."""
        if self.all_fits and not self._clears and since == self._epoch:
            self._certain.update(number for number, _ in prompt.chunks)

    def promise(self, prompt: Prompt, first: int = 0) -> Promise:
        """Return the expectation for a call that starts now, for the prompt's chunks from `first` on.

        Loads that start during a clear are misses.
        """
        numbers = [number for number, _ in prompt.chunks[first:]]
        least = 0 if self._clears else len(list(takewhile(self._certain.__contains__, numbers)))
        return Promise(frozenset(self._possible.intersection(numbers)), least, self._epoch)

    def bounds(self, promise: Promise, prompt: Prompt, first: int = 0) -> tuple[int, int]:
        """Return the minimum and maximum hit of a call that ends now, in chunks from `first` on."""
        numbers = [number for number, _ in prompt.chunks[first:]]
        possible = takewhile(lambda number: number in promise.possible or number in self._possible, numbers)
        return promise.least if promise.epoch == self._epoch else 0, len(list(possible))

    def begin_flush(self) -> frozenset[int]:
        return frozenset(self._certain)

    def flushed(self, since: frozenset[int]) -> None:
        """Record the success of a flush that started when `since` was stored."""
        if self._persistent:
            self._flushed |= since & self._certain

    def begin_clear(self, *, memory_only: bool) -> None:
        if not self._clears:
            self._since_clear.clear()
        self._clears += 1
        self._epoch += 1
        self._forget(memory_only)

    def end_clear(self, *, memory_only: bool, done: bool) -> None:
        """Record the end of a clear. `done`: it reported that everything is deleted."""
        self._clears -= 1
        self._epoch += 1
        self._forget(memory_only)
        if done and not memory_only:
            self._possible &= self._since_clear

    def crash(self) -> None:
        """Record the loss of memory and of all running calls."""
        self._clears = 0
        self._certain = set(self._flushed)

    def closed(self) -> None:
        """Record an orderly close of the engine, which flushes persistent tiers."""
        self.flushed(self.begin_flush())
        self.crash()

    def _forget(self, memory_only: bool) -> None:
        if not memory_only:
            self._flushed.clear()
        self._certain &= self._flushed


POISON = 0xA5


class Region:
    """Rows that one client stores from and retrieves into.

    All other content is poison, so that a copy at the wrong time or of the wrong size is detected.
    """

    def __init__(self, rig: Rig, first: int, rows: BlockIds) -> None:
        self.rows = rows
        self._planes = [
            part.view(rig.num_slots, -1).numpy().view(np.uint8)[first : first + len(rows)]
            for pair in rig.tensors
            for part in pair
        ]
        self._order = rows - first
        self.poison()

    def poison(self) -> None:
        for plane in self._planes:
            plane.fill(POISON)

    def write(self, content: Content) -> None:
        """Write the KV of the first tokens, as the model does."""
        places = self._order[: len(content)]
        at = 0
        for plane in self._planes:
            width = plane.shape[1]
            plane[places] = content[:, at : at + width]
            at += width

    def check(self, content: Content, start: int, stop: int) -> None:
        """Check that tokens `start` to `stop` have their content, and that no other row was written.

        Raises:
            Violation: A byte is wrong.
        """
        places = self._order[start:stop]
        at = 0
        for index, plane in enumerate(self._planes):
            width = plane.shape[1]
            wrong = plane[places] != content[start:stop, at : at + width]
            if wrong.any():
                token = start + int(np.flatnonzero(wrong.any(axis=1))[0])
                raise Violation(f"wrong bytes: token {token} of a hit of {start} to {stop}, plane {index}")
            at += width
            plane[places] = POISON
            if (plane != POISON).any():
                row = int(np.flatnonzero((plane != POISON).any(axis=1))[0])
                raise Violation(
                    f"row {row} outside the hit of tokens {start} to {stop} was written, plane {index}"
                )


def make_regions(rig: Rig, rng: Random, *, count: int, num_rows: int) -> list[Region]:
    """Return `count` adjacent regions, half of them with shuffled rows."""
    regions: list[Region] = []
    for index in range(count):
        rows = list(range(index * num_rows, (index + 1) * num_rows))
        if rng.random() < 0.5:
            rng.shuffle(rows)
        regions.append(Region(rig, index * num_rows, np.asarray(rows, np.int64)))
    return regions
