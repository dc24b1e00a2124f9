"""Connectors of the demo: their vLLM configuration, and parsing of their log lines."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

OURS = "lmcache-async"
NAMES = (OURS, "example", "none")  # vLLM's ExampleConnector checks the demo itself

_RETRIEVED = re.compile(r"\bretrieved \d+/\d+ tokens \((?P<tiers>[^)\n]*)\)")
_TIER = re.compile(r"([\w.-]+)=(\d+)")


def transfer_config(name: str, directory: Path, *, arena: str, disk: str) -> dict[str, Any] | None:
    """Return the `kv_transfer_config` of vLLM; None without a connector. `directory` is for the disk tier."""
    if name == "none":
        return None
    directory.mkdir(parents=True, exist_ok=True)
    if name == "example":
        return {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(directory)},
        }
    return {
        "kv_connector": "LMCacheAsyncConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "arena.max_bytes": arena,
            "tiers": ["cpu", {"name": "disk", "path": directory.absolute().as_uri(), "max_bytes": disk}],
            "vllm.lookup_timeout_s": 1.0,  # two engines on two cores: a late answer would be a miss, and end the demo
        },
    }


def tokens_by_tier(log: str) -> Counter[str]:
    """Return the tokens loaded from each tier, from lines like `retrieved 4096/4098 tokens (cpu=1024, disk=3072), ...`."""
    found: Counter[str] = Counter()
    for line in _RETRIEVED.finditer(log):
        for tier, tokens in _TIER.findall(line["tiers"]):
            found[tier] += int(tokens)
    return found
