"""Other connectors that vLLM can be started with, each configured to keep KV where ours does: in host memory."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcache_async.bench.serve_settings import choose
from lmcache_async.bench.serve_setup import CHUNK, Contestant

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ALL = "all"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Peer:
    """A connector by the name that vLLM knows it by.

    Attributes:
        extra: Its `kv_connector_extra_config`, of the bytes it may use and a directory.
        environment: Its environment, of the bytes.
        needs: A package beside vLLM.
    """

    name: str
    extra: Callable[[int, Path], dict[str, Any]]
    environment: Callable[[int], dict[str, str]] = lambda _: {}
    needs: str = ""

    @property
    def missing(self) -> str:
        """The package it needs and that is not installed."""
        there = not self.needs or importlib.util.find_spec(self.needs) is not None
        return "" if there else self.needs

    def contestant(self, arena_bytes: int, directory: Path) -> Contestant:
        transfer = {
            "kv_connector": self.name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": self.extra(arena_bytes, directory),
        }
        return Contestant(self.name, transfer, self.environment(arena_bytes))


def _memory(arena_bytes: int, _: Path) -> dict[str, Any]:
    return {"cpu_bytes_to_use": arena_bytes}


def _files(_: int, directory: Path) -> dict[str, Any]:
    return {"shared_storage_path": str(directory / "example")}


def _lmcache(arena_bytes: int) -> dict[str, str]:
    return {
        "LMCACHE_CHUNK_SIZE": str(CHUNK),
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(arena_bytes / GIB),
        "LMCACHE_TRACK_USAGE": "false",
        "PYTHONHASHSEED": "0",  # its keys are Python's hashes
    }


PEERS = (
    Peer("OffloadingConnector", _memory),
    Peer("SimpleCPUOffloadConnector", _memory),
    Peer("ExampleConnector", _files),
    Peer("LMCacheConnectorV1", lambda _, __: {}, _lmcache, needs="lmcache"),
)


def chosen_peers(names: str) -> list[Peer]:
    """Peers by their names between commas; `all` for every one.

    Raises:
        ConfigError: There is no such peer.
    """
    if names.strip() == ALL:
        return list(PEERS)
    wanted = choose("connector", names, [peer.name for peer in PEERS])
    return [peer for peer in PEERS if peer.name in wanted]
