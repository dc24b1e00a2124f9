"""Fake device streams: work is done immediately or queued, and events complete when the test says so."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from unittest import mock

import torch


class FakeEvent:
    """An event that completes when its gate is open; it fails with `error`, if given."""

    def __init__(self, gate: threading.Event, error: Exception | None = None) -> None:
        self._gate = gate
        self._error = error
        self.noticed = False

    def reached(self) -> bool:
        if not self._gate.is_set():
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self._gate.wait()
        self.noticed = True
        if self._error is not None:
            raise type(self._error)(*self._error.args)  # as CUDA, a new one for each wait


class FakeStreams:
    """The CUDA calls of the GPU copier, on the host.

    Attributes:
        gate: Events recorded from now on complete when it is open. It is open at first.
        error: Error of events recorded from now on.
        log: Calls in order: `use`, `wait` or `record`, and the number of the stream.
        events: All events recorded on side streams.
        spins: Whether the thread that waits for each of them spins.
        priorities: Priorities of the side streams, in order of creation.
        prepared: Names of the threads that were prepared.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.log: list[tuple[str, int]] = []
        self.events: list[FakeEvent] = []
        self.spins: list[bool] = []
        self.priorities: list[int] = []
        self.prepared: list[str] = []

    def close_gate(self) -> threading.Event:
        """Set a new, closed gate for later events and return it."""
        self.gate = threading.Event()
        return self.gate

    @contextlib.contextmanager
    def thread(self) -> Iterator[None]:
        self.prepared.append(threading.current_thread().name)
        yield

    def open(self, priority: int) -> int:
        self.priorities.append(priority)
        return len(self.priorities)

    @contextlib.contextmanager
    def use(self, stream: int) -> Iterator[None]:
        self.log.append(("use", stream))
        yield

    def record(self, stream: int, *, spin: bool = False) -> FakeEvent:
        self.log.append(("record", stream))
        self.spins.append(spin)
        self.events.append(FakeEvent(self.gate, self.error))
        return self.events[-1]

    def end_of(self, stream: int) -> FakeEvent:
        self.log.append(("end", stream))
        return FakeEvent(self.gate, self.error)

    def record_current(self) -> FakeEvent:
        return FakeEvent(self.gate, self.error)

    def reached(self, event: object) -> bool:
        return isinstance(event, FakeEvent) and event.reached()

    def wait(self, stream: int, event: object) -> None:
        del event
        self.log.append(("wait", stream))

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.empty(num_words, dtype=torch.int64)


class QueuedStreams(FakeStreams):
    """Streams of which each runs its work in order, one piece at each call of `run_one`.

    Copies of torch within `use` are queued. Stream 0 is that of the model.

    Args:
        choice: Chooses the stream that runs next.
    """

    def __init__(self, choice: random.Random) -> None:
        super().__init__()
        self._choice = choice
        self._queues: defaultdict[int, deque[Callable[[], object]]] = defaultdict(deque)
        self._current = 0

    def submit(self, work: Callable[[], object]) -> None:
        """Queue work on the current stream."""
        self._queues[self._current].append(work)

    def run_one(self) -> None:
        """Run the next piece of work of one stream that has some."""
        if ready := [queue for queue in self._queues.values() if queue]:
            self._choice.choice(ready).popleft()()

    @contextlib.contextmanager
    def use(self, stream: int) -> Iterator[None]:
        def copy_(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
            assert non_blocking
            self.submit(lambda: now(target, source))

        now = torch.Tensor.copy_
        self._current = stream
        try:
            with mock.patch.object(torch.Tensor, "copy_", copy_):
                yield
        finally:
            self._current = 0

    def record(self, stream: int, *, spin: bool = False) -> FakeEvent:
        del spin
        gate = threading.Event()
        self._queues[stream].append(gate.set)
        return FakeEvent(gate)

    def record_current(self) -> FakeEvent:
        return self.record(self._current)
