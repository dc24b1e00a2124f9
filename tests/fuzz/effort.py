"""Fuzzing effort: one pass over the profile's examples, or new ones for LMCACHE_ASYNC_FUZZ_SECONDS."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from hypothesis import HealthCheck, settings

SECONDS = float(os.environ.get("LMCACHE_ASYNC_FUZZ_SECONDS", "0"))

effort = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    **({"derandomize": False, "database": None} if SECONDS else {}),  # type: ignore[arg-type]
)


def keep_at_it(check: Callable[[], None]) -> None:
    """Run a property repeatedly until the time is over."""
    deadline = time.monotonic() + SECONDS
    check()
    while time.monotonic() < deadline:
        check()
