"""Hooks that an engine calls with its reports."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from lmcache_async.logging import one_line
from lmcache_async.types import RequestPlan, RetrieveReport, StoreReport

MAX_NAME = 200
"""Maximum length of a request id in logs and on the status page. Longer ones are truncated, because clients choose them."""


class Instrument:
    """Receives the reports of an engine. Override the methods that you need.

    Methods are called on the thread of the event loop. They must be fast and must not raise.
    """

    def stored(self, request_id: str, report: StoreReport) -> None:
        """Called when a store has ended."""

    def retrieved(self, request_id: str, report: RetrieveReport) -> None:
        """Called when a retrieve has ended."""

    def planned(self, plan: RequestPlan) -> None:
        """Called when a request is admitted and the sources of its prompt are decided."""


class LogInstrument(Instrument):
    """Logs one INFO line per store and retrieve."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def stored(self, request_id: str, report: StoreReport) -> None:
        self._logger.info(
            "stored %d tokens in %d chunks (%d present, dropped: %s), %.1f MB: copied in %.1f ms, "
            "%.2f GB/s; with the tiers in %.1f ms [%s]",
            report.tokens,
            report.stored,
            report.present,
            _pairs(report.dropped),
            report.bytes / 1e6,
            report.copy_seconds * 1e3,
            _rate(report.bytes, report.copy_seconds),
            report.seconds * 1e3,
            one_line(request_id[:MAX_NAME]),
        )

    def retrieved(self, request_id: str, report: RetrieveReport) -> None:
        self._logger.info(
            "retrieved %d/%d tokens (%s), %.1f MB in %.1f ms, %.2f GB/s%s [%s]",
            report.hit_tokens,
            report.asked_tokens,
            _pairs(report.by_tier),
            report.bytes / 1e6,
            report.seconds * 1e3,
            _rate(report.bytes, report.seconds),
            f"; ended by: {report.cause}" if report.cause else "",
            one_line(request_id[:MAX_NAME]),
        )


def _pairs(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={count}" for name, count in sorted(counts.items())) or "none"


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0
