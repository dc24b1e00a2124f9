"""Differences between the supported versions of vLLM, found by its features and not by its version number.

docs/compatibility.md lists the tested versions.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

__all__ = [
    "NOT_CALLED_BY_ALL",
    "CacheHitSource",
    "data_parallel_index",
    "shutdown_timeout_s",
    "transfer_results",
]

NOT_CALLED_BY_ALL = frozenset({"get_external_cache_hit_sources"})
"""Methods of the connector that older versions do not call."""

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
else:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:  # before 0.32, which does not request the source of a hit

        class CacheHitSource(Enum):
            """The kinds of vLLM 0.32 that the connector reports."""

            HOST = "host"
            DISK = "disk"
            P2P = "p2p"
            EXTERNAL_UNSPECIFIED = "external_unspecified"


def transfer_results() -> Any:
    """The class of vLLM for the ends of transfers, with failures by request; None before 0.32.

    Older versions take failures by block, which is not possible with several KV groups.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return getattr(base, "KVConnectorTransferResults", None)


def shutdown_timeout_s(vllm_config: Any) -> float | None:
    """Time that vLLM gives its engine processes to end before it kills them; None if it has no such option."""
    return getattr(vllm_config, "shutdown_timeout", None)


def data_parallel_index(vllm_config: Any) -> int:
    """Number of the data-parallel replica of this engine; 0 without data parallelism.

    Each replica of a dense model is an engine with `data_parallel_size` 1 and `data_parallel_rank` 0; only the
    index differs.
    """
    return int(getattr(vllm_config.parallel_config, "data_parallel_index", 0))
