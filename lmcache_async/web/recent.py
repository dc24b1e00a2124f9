"""The last requests: where each one's prompt came from, and what was stored of it."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lmcache_async.observability.instrument import Instrument
from lmcache_async.types import RequestPlan, RetrieveReport, StoreReport

MAX_NAME = 200
"""Characters of a request's name that are kept: others choose it."""

MAX_PLANNED = 4096
"""Requests whose plan is remembered, so that their loads do not count their prompts again: many steps' plans."""


@dataclass(slots=True)
class _Loaded:
    tokens: int = 0
    asked_tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    by_tier: Counter[str] = field(default_factory=Counter)
    cause: str = ""

    def add(self, report: RetrieveReport) -> None:
        self.tokens += report.hit_tokens
        self.asked_tokens += report.asked_tokens
        self.bytes += report.bytes
        self.seconds += report.seconds
        self.by_tier.update(report.by_tier)
        self.cause = report.cause or self.cause


@dataclass(slots=True)
class _Stored:
    tokens: int = 0
    chunks: int = 0
    present: int = 0
    bytes: int = 0
    copy_seconds: float = 0.0
    seconds: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, report: StoreReport) -> None:
        self.tokens += report.tokens
        self.chunks += report.stored
        self.present += report.present
        self.bytes += report.bytes
        self.copy_seconds += report.copy_seconds
        self.seconds += report.seconds
        self.dropped.update(report.dropped)


@dataclass(slots=True)
class _Request:
    name: str
    time: float
    plan: RequestPlan | None = None
    loaded: _Loaded | None = None
    stored: _Stored | None = None

    def as_dict(self) -> dict[str, Any]:
        plan, loaded, stored = self.plan, self.loaded, self.stored
        return {
            "request": self.name,
            "time": round(self.time, 3),
            "plan": plan
            and {
                "prompt_tokens": plan.prompt_tokens,
                "local_tokens": plan.local_tokens,
                "hit_tokens": plan.hit_tokens,
                "load_tokens": plan.load_tokens,
                "decided": plan.decided,
                "why": plan.why,
            },
            "loaded": loaded
            and {
                "tokens": loaded.tokens,
                "asked_tokens": loaded.asked_tokens,
                "bytes": loaded.bytes,
                "seconds": round(loaded.seconds, 6),
                "by_tier": [[tier, tokens] for tier, tokens in loaded.by_tier.items()],
                "ended_by": loaded.cause,
            },
            "stored": stored
            and {
                "tokens": stored.tokens,
                "chunks": stored.chunks,
                "present": stored.present,
                "bytes": stored.bytes,
                "copy_seconds": round(stored.copy_seconds, 6),
                "seconds": round(stored.seconds, 6),
                "dropped": dict(stored.dropped),
            },
        }


class RecentRequests(Instrument):
    """Keeps the last `most` requests, and adds up prompts.

    Attributes:
        prompt_tokens: Of all prompts; of a request that nobody planned, those that were asked for.
        local_tokens: Of these, those that the model's server had itself.
        decided: Requests by what was decided.
    """

    def __init__(self, *, most: int = 64, clock: Callable[[], float] = time.time) -> None:
        self.prompt_tokens = 0
        self.local_tokens = 0
        self.decided: Counter[str] = Counter()
        self._most = most
        self._clock = clock
        self._requests: OrderedDict[str | int, _Request] = OrderedDict()
        self._planned: OrderedDict[int, None] = OrderedDict()  # hashes of names: others choose their length
        self._unnamed = 0

    def planned(self, plan: RequestPlan) -> None:
        self.prompt_tokens += plan.prompt_tokens
        self.local_tokens += plan.local_tokens
        self.decided[plan.decided] += 1
        self._of(plan.request_id).plan = plan
        if plan.request_id:
            self._planned[hash(plan.request_id)] = None
            self._planned.move_to_end(hash(plan.request_id))
            if len(self._planned) > MAX_PLANNED:
                self._planned.popitem(last=False)

    def retrieved(self, request_id: str, report: RetrieveReport) -> None:
        request = self._of(request_id)
        # A plan that newer requests have pushed out of the table has counted its prompt all the same.
        if request.plan is None and hash(request_id) not in self._planned:
            self.prompt_tokens += report.asked_tokens
        if request.loaded is None:
            request.loaded = _Loaded()
        request.loaded.add(report)

    def stored(self, request_id: str, report: StoreReport) -> None:
        request = self._of(request_id)
        if request.stored is None:
            request.stored = _Stored()
        request.stored.add(report)

    def as_list(self) -> list[dict[str, Any]]:
        """The latest one first."""
        return [request.as_dict() for request in reversed(self._requests.values())]

    def _of(self, request_id: str) -> _Request:
        """The request of that name; one without a name is a new one each time."""
        key: str | int = request_id
        if not request_id:
            self._unnamed += 1
            key = self._unnamed
        request = self._requests.get(key)
        if request is None:
            request = self._requests[key] = _Request(request_id[:MAX_NAME], self._clock())
            if len(self._requests) > self._most:
                self._requests.popitem(last=False)
        return request
