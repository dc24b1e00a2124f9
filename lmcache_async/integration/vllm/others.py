"""Loads of the other connectors of a MultiConnector."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from lmcache_async.integration.vllm.request import RequestTracker

WAIT_S = 10.0
"""Longest time that a request waits for the end of a step in which another connector loads tokens that both share."""


@dataclass(frozen=True, slots=True)
class _Load:
    """A load in a step whose end is not known yet.

    Attributes:
        start: Number of tokens before the loaded ones.
        blocks: The blocks after `start`, loaded or computed in the step.
        step: Number of the step.
        until: Requests that share the blocks wait until then.
    """

    tracker: RequestTracker
    start: int
    blocks: frozenset[int]
    step: int
    until: float


class OtherLoads:
    """Loads of other connectors in the step that uses the KV. KV that may be wrong is neither stored nor shared.

    The blocks of such a load are in vLLM's prefix cache before its step has run, and a failure is known only after the
    step. With asynchronous scheduling the next steps are planned meanwhile. Therefore no other request uses these
    blocks until the step has ended. If the load failed, its blocks are removed from the prefix cache. Blocks that vLLM
    computes for the request afterwards are removed too, because their positions may be wrong (vLLM #49250).

    Args:
        blocks_after: Returns the ids of a request's blocks after a number of tokens; none if it has no blocks.
        evict: Removes blocks from vLLM's prefix cache.
    """

    def __init__(
        self, blocks_after: Callable[[str, int], set[int]], evict: Callable[[set[int]], None]
    ) -> None:
        self._blocks_after = blocks_after
        self._evict = evict
        # Since the last step: requests looked up, requests admitted, and admitted requests that another connector loads.
        self._matched: set[str] = set()
        self._admitted: list[RequestTracker] = []
        self._starting: list[RequestTracker] = []
        self._loads: list[_Load] = []
        self._failed: dict[str, int] = {}  # tokens before the failed load, by request
        self._reported = False  # the ranks have reported the end of a step

    def matched(self, tracker: RequestTracker, now: float, *, connected: bool) -> bool:
        """Record that vLLM has looked up the request in its prefix cache. Return whether the request has to wait.

        The wait ends with the step that fills the blocks. After `WAIT_S` the request continues and is not stored. If
        this connector's engines are off, the end of a step is not known, and the request continues at once.

        Args:
            connected: Whether this connector's engines are connected.
        """
        self._matched.add(tracker.request_id)
        self._find_starting()
        starting = any(tracker.shares(each, each.local_tokens) for each in self._starting)
        shared = [load for load in self._loads if tracker.shares(load.tracker, load.start)]
        waits = starting or any(now < load.until for load in shared)
        if waits and (connected or self._reported):
            return True
        if starting or shared:
            tracker.stop_storing()
        return False

    def admitted(self, tracker: RequestTracker) -> None:
        """Record that vLLM is admitting the request. Its number of computed tokens is known at the next call."""
        if tracker.request_id in self._matched:  # otherwise its load has ended
            self._admitted.append(tracker)

    def planned(self, scheduled: Collection[str], step: int, now: float, *, may_load: bool) -> None:
        """Record that a step was planned. Requests with tokens that another connector loads in the step are not stored.

        Args:
            scheduled: Ids of the requests in the step.
            may_load: Whether any connector loads in this step.
        """
        self._find_starting()
        # Without reports of the ranks, because this connector's engine could not be opened, the end of a load is not known.
        while self._loads and now > self._loads[0].until + WAIT_S:
            del self._loads[0]
        for tracker in self._starting if may_load else ():
            if tracker.request_id in scheduled:
                tracker.stop_storing()
                start = tracker.local_tokens
                blocks = frozenset(self._blocks_after(tracker.request_id, start))
                self._loads.append(_Load(tracker, start, blocks, step, now + WAIT_S))
        self._matched.clear()
        self._starting.clear()
        self._evict_failed()

    def step_ended(self, step: int, bad_blocks: set[int]) -> None:
        """Record the end of a step. `step` is its number, or 0 if the ranks have not reported it.

        `bad_blocks` are the ids of blocks that were not loaded.
        """
        self._reported = self._reported or step > 0
        loads, self._loads = self._loads, []
        for load in loads:
            if load.blocks & bad_blocks:
                self._evict(set(load.blocks))
                if self._blocks_after(load.tracker.request_id, load.start):  # neither finished nor preempted
                    self._failed[load.tracker.request_id] = load.start
            elif load.step > step:
                self._loads.append(load)
        self._evict_failed()

    def finished(self, request_id: str) -> None:
        """Evict the blocks of a failed load and forget the request. vLLM frees its blocks after this call."""
        self._evict_failed()
        self._failed.pop(request_id, None)

    def _find_starting(self) -> None:
        self._starting += [tracker for tracker in self._admitted if tracker.loaded_by_another]
        self._admitted.clear()

    def _evict_failed(self) -> None:
        for request_id, start in self._failed.items():
            self._evict(self._blocks_after(request_id, start))
