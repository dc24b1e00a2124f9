"""Differences between the supported versions of vLLM, detected by features and not by version numbers.

docs/compatibility.md lists the tested versions.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

__all__ = [
    "CacheHitSource",
    "data_parallel_index",
    "loads_in_step",
    "serves_several_groups",
    "shutdown_timeout_s",
]

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
else:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:  # vLLM before 0.32, which does not request the source of a hit

        class CacheHitSource(Enum):
            """The kinds of vLLM 0.32 that the connector reports."""

            HOST = "host"
            DISK = "disk"
            EXTERNAL_UNSPECIFIED = "external_unspecified"


def serves_several_groups(kv_cache_config: Any) -> bool:
    """Return whether this vLLM accepts failed loads by request and announces the alignment of hits of several KV groups.

    vLLM 0.32 and newer do. Older versions accept failures by block, which is ambiguous with several groups, or do not
    announce the alignment.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults") and hasattr(
        kv_cache_config, "cache_hit_alignment_tokens"
    )


def loads_in_step(scheduler_output: Any) -> bool:
    """Whether a connector may load KV in the step that uses it; True if this version does not report it."""
    return bool(getattr(scheduler_output, "has_sync_kv_loads", True))


def shutdown_timeout_s(vllm_config: Any) -> float | None:
    """Time that vLLM gives its engine processes to end before it kills them; None if it has no such option."""
    return getattr(vllm_config, "shutdown_timeout", None)


def data_parallel_index(vllm_config: Any) -> int:
    """Number of the data-parallel replica of this engine; 0 without data parallelism.

    Each replica of a dense model is an engine with `data_parallel_size` 1 and `data_parallel_rank` 0; only the
    index differs.
    """
    return int(getattr(vllm_config.parallel_config, "data_parallel_index", 0))
