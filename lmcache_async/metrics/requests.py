"""The last requests, for the status page: where each prompt came from, and what was stored of it."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lmcache_async.metrics.instrument import MAX_NAME, Instrument
from lmcache_async.types import RequestPlan, RetrieveReport, StoreReport

_LOADED = {"tokens": 0, "asked_tokens": 0, "bytes": 0, "seconds": 0.0}
_STORED = {"tokens": 0, "chunks": 0, "present": 0, "bytes": 0, "copy_seconds": 0.0, "seconds": 0.0}


class RecentRequests(Instrument):
    """Keeps the last `most` requests as they are shown: plan, sum of the loads and sum of the stores."""

    def __init__(self, *, most: int = 64, clock: Callable[[], float] = time.time) -> None:
        self._most = most
        self._clock = clock
        self._requests: OrderedDict[str | int, dict[str, Any]] = OrderedDict()
        self._unnamed = 0

    def planned(self, plan: RequestPlan) -> None:
        entry = self._entry(plan.request_id)
        entry["plan"] = asdict(plan)
        del entry["plan"]["request_id"]  # the entry has it, shortened

    def retrieved(self, request_id: str, report: RetrieveReport) -> None:
        entry = self._entry(request_id)
        loaded = entry["loaded"] = entry["loaded"] or {**_LOADED, "by_tier": Counter(), "ended_by": ""}
        loaded["tokens"] += report.hit_tokens
        loaded["asked_tokens"] += report.asked_tokens
        loaded["bytes"] += report.bytes
        loaded["seconds"] = round(loaded["seconds"] + report.seconds, 6)
        loaded["by_tier"].update(report.by_tier)
        loaded["ended_by"] = report.cause or loaded["ended_by"]

    def stored(self, request_id: str, report: StoreReport) -> None:
        entry = self._entry(request_id)
        stored = entry["stored"] = entry["stored"] or {**_STORED, "dropped": Counter()}
        stored["tokens"] += report.tokens
        stored["chunks"] += report.stored
        stored["present"] += report.present
        stored["bytes"] += report.bytes
        stored["copy_seconds"] = round(stored["copy_seconds"] + report.copy_seconds, 6)
        stored["seconds"] = round(stored["seconds"] + report.seconds, 6)
        stored["dropped"].update(report.dropped)

    def as_list(self) -> list[dict[str, Any]]:
        """Return the requests for JSON, the latest one first."""
        shown = []
        for entry in reversed(self._requests.values()):
            loaded = entry["loaded"]
            if loaded is not None:
                loaded = loaded | {"by_tier": [list(item) for item in loaded["by_tier"].items()]}
            shown.append(entry | {"loaded": loaded})
        return shown

    def _entry(self, request_id: str) -> dict[str, Any]:
        """Return the entry of a request. Without an id it is a new one each time."""
        key: str | int = request_id
        if not request_id:
            self._unnamed += 1
            key = self._unnamed
        entry = self._requests.get(key)
        if entry is None:
            entry = {
                "request": request_id[:MAX_NAME],
                "time": round(self._clock(), 3),
                "plan": None,
                "loaded": None,
                "stored": None,
            }
            self._requests[key] = entry
            if len(self._requests) > self._most:
                self._requests.popitem(last=False)
        return entry
