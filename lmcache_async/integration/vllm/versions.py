"""What differs between the versions of vLLM that we run under: here alone, and asked of vLLM itself, not of its number.

docs/compatibility.md says which were tried.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

__all__ = ["NOT_CALLED_BY_ALL", "CacheHitSource", "shutdown_timeout_s"]

NOT_CALLED_BY_ALL = frozenset({"get_external_cache_hit_sources"})
"""Methods of the connector that older versions do not know."""

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
else:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:  # before 0.32, which asks nobody where hits come from

        class CacheHitSource(Enum):
            """The kinds of vLLM 0.32 that we tell of."""

            HOST = "host"
            DISK = "disk"
            P2P = "p2p"
            EXTERNAL_UNSPECIFIED = "external_unspecified"


def shutdown_timeout_s(vllm_config: Any) -> float | None:
    """How long vLLM waits for its engine processes to end before it kills them; None where it has no such option."""
    return getattr(vllm_config, "shutdown_timeout", None)
