"""Imports vLLM once, with its own warnings let through."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's imports warn of others' deprecations
    import vllm.v1.core.block_pool
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.engine.core  # noqa: F401
