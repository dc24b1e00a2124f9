"""Loads that the forward of their own step waits for, each layer when the model comes to it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from lmcache_async.device.progress import LoadProgress
from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmcache_async.integration.vllm.metadata import Job
    from lmcache_async.integration.vllm.transfers import Transfers

logger = LimitedLogger(logging.getLogger(__name__))

BEGIN_S = 0.5
"""The whole batch waits: what has not begun to be copied by then is computed instead. Chunks in host memory
wait for nothing, so that this is the time of an event loop or of copying threads that are held up."""


class LayerwiseLoads:
    """Used on the model's thread.

    Args:
        layer_ends: For each layer how many leading planes hold all of it. A layer that is not named here
            waits for everything.
        num_planes: Of the layout.
    """

    def __init__(self, transfers: Transfers, layer_ends: Mapping[str, int], num_planes: int) -> None:
        self._transfers = transfers
        self._ends = layer_ends
        self._num_planes = num_planes
        self._jobs: list[tuple[Job, LoadProgress]] = []
        self._unasked: set[str] = set()
        self._deadline = 0.0

    def start(self, jobs: Sequence[Job]) -> Mapping[int, LoadProgress]:
        """Before the forward. What it returns is for `Transfers.load`."""
        if not jobs:
            return {}
        self.settle()
        self._jobs = [(job, LoadProgress(self._num_planes)) for job in jobs]
        self._unasked = set(self._ends)
        self._deadline = time.monotonic() + BEGIN_S
        return {job.job_id: progress for job, progress in self._jobs}

    def wait(self, layer_name: str) -> None:
        """Before a layer's attention: wait until its part of each load is there, or will never be."""
        if not self._jobs:
            return
        planes = self._ends.get(layer_name)
        for _, progress in self._jobs:
            progress.wait(self._num_planes if planes is None else planes, deadline=self._deadline)
        if planes is not None:
            self._unasked.discard(layer_name)
        elif len(self._unasked) == len(self._ends):  # the first of all layers has waited for all of them
            self._unasked.clear()

    def settle(self) -> None:
        """After the forward. Loads that it did not wait for, or not long enough, are reported as failed.

        By then nothing is written any more.
        """
        if not self._jobs:
            return
        jobs, self._jobs = self._jobs, []
        for job, progress in jobs:
            proven = False
            try:
                proven = self._is_proven(progress)
            except Exception as error:  # a border: what is not known to be there is computed
                logger.log(logging.ERROR, repr(error), "a load's end is unknown: %r", error, exc_info=True)
            if not proven:
                self._transfers.give_up(job)

    def _is_proven(self, progress: LoadProgress) -> bool:
        """Whether the forward waited for every layer, and the load's outcome is known."""
        if not progress.wait_ended(deadline=max(self._deadline, time.monotonic() + BEGIN_S)):
            logger.report("late", "a load did not get on in %.1f s; its tokens are computed", BEGIN_S)
            return False
        if self._unasked:
            logger.report(
                "unasked",
                "vLLM did not wait for layer %s (%d in all); set vllm.layerwise_load to never",
                min(self._unasked),
                len(self._unasked),
            )
            return False
        return True
