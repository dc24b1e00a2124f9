"""What may be there and what must be there, by the rules alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from lmcache_async.testing.simulation.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Promise:
    """What is known of a prompt's chunks when a call begins.

    Attributes:
        possible: Those that may be hits.
        least: How many leading ones have to be, unless a clearing comes.
        epoch: Of clearings.
    """

    possible: frozenset[int] = frozenset()
    least: int = 0
    epoch: int = -1


class Model:
    """Two sets of chunks: those that may be hits, and those that have to be.

    A chunk may be there once a store of it has begun in its namespace, until all is cleared; nothing
    else may. It has to be there once a store reported it kept, as long as nothing is evicted, fails or
    crashes: that is only asked for where everything fits and nothing fails.

    Args:
        all_fits: Whether every prompt fits into every tier, and no fault is ever injected.
        persistent: Whether a tier outlives the process.
    """

    def __init__(self, *, all_fits: bool, persistent: bool) -> None:
        self.all_fits = all_fits
        self._persistent = persistent
        self._possible: set[int] = set()
        self._certain: set[int] = set()
        self._flushed: set[int] = set()  # of these, in a tier that outlives the process
        self._clears = 0
        self._epoch = 0
        self._since_clear: set[int] = set()  # may have been brought since the oldest clearing under way

    @property
    def epoch(self) -> int:
        """Another one for every clearing that begins or ends: what spans two has no promise."""
        return self._epoch

    def begin(self, prompt: Prompt, *, store: bool) -> None:
        """A call begins that may bring chunks of the prompt into a tier: a store, or by promotion."""
        numbers = {number for number, _ in prompt.chunks}
        if store:
            self._possible |= numbers
        if self._clears:
            self._since_clear |= numbers & self._possible

    def stored(self, prompt: Prompt, *, since: int) -> None:
        """A store that began in epoch `since` has ended, and dropped nothing."""
        if self.all_fits and not self._clears and since == self._epoch:
            self._certain.update(number for number, _ in prompt.chunks)

    def promise(self, prompt: Prompt, first: int = 0) -> Promise:
        """What to expect of a call that begins now, for the prompt's chunks from `first` on."""
        numbers = [number for number, _ in prompt.chunks[first:]]
        least = len(list(takewhile(self._certain.__contains__, numbers)))
        return Promise(frozenset(self._possible.intersection(numbers)), least, self._epoch)

    def bounds(self, promise: Promise, prompt: Prompt, first: int = 0) -> tuple[int, int]:
        """How many chunks from `first` on have to be, and may be, the hit of a call that ends now."""
        numbers = [number for number, _ in prompt.chunks[first:]]
        possible = takewhile(lambda number: number in promise.possible or number in self._possible, numbers)
        return promise.least if promise.epoch == self._epoch else 0, len(list(possible))

    def begin_flush(self) -> frozenset[int]:
        return frozenset(self._certain)

    def flushed(self, since: frozenset[int]) -> None:
        """A flush has ended well that began when `since` was there."""
        if self._persistent:
            self._flushed |= since & self._certain

    def begin_clear(self, *, memory_only: bool) -> None:
        if not self._clears:
            self._since_clear.clear()
        self._clears += 1
        self._epoch += 1
        self._forget(memory_only)

    def end_clear(self, *, memory_only: bool, done: bool) -> None:
        """A clearing has ended; `done` when it said that everything is gone."""
        self._clears -= 1
        self._epoch += 1
        self._forget(memory_only)
        if done and not memory_only:
            self._possible &= self._since_clear

    def crash(self) -> None:
        """Memory is gone, and whatever was under way."""
        self._clears = 0
        self._certain = set(self._flushed)

    def closed(self) -> None:
        """The engine was closed in order: what persists was flushed."""
        self.flushed(self.begin_flush())
        self.crash()

    def _forget(self, memory_only: bool) -> None:
        if not memory_only:
            self._flushed.clear()
        self._certain &= self._flushed
