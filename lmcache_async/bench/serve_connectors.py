"""Other connectors that vLLM can be started with, each configured to keep KV where ours does: in host memory."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmcache_async.bench.serve_settings import choose
from lmcache_async.bench.serve_setup import CHUNK, Contestant

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ALL = "all"
NO_CONNECTOR = "NoConnector"
ON_DISK = "/disk"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Peer:
    """A connector by the name that vLLM knows it by; one that keeps KV on disk has a name with `/disk` behind it.

    Attributes:
        extra: Its `kv_connector_extra_config`, of the bytes it may use and a directory.
        environment: Its environment, of the same.
        needs: A package beside vLLM.
        module: Of the connector, where vLLM must be told; such as stand-ins for what it lacks on a CPU.
    """

    name: str
    extra: Callable[[int, Path], dict[str, Any]]
    environment: Callable[[int, Path], dict[str, str]] = lambda _, __: {}
    needs: str = ""
    module: str = ""

    @property
    def missing(self) -> str:
        """The package it needs and that is not installed."""
        there = not self.needs or importlib.util.find_spec(self.needs) is not None
        return "" if there else self.needs

    def contestant(self, arena_bytes: int, directory: Path) -> Contestant:
        if self.name == NO_CONNECTOR:
            return Contestant(self.name)
        own = directory / self.name.replace("/", "-")
        transfer = {
            "kv_connector": self.name.removesuffix(ON_DISK),
            "kv_role": "kv_both",
            "kv_connector_extra_config": self.extra(arena_bytes, own),
        }
        if self.module:
            transfer["kv_connector_module_path"] = self.module
        environment = self.environment(arena_bytes, own)
        return Contestant(self.name, transfer, environment, own if self.name.endswith(ON_DISK) else None)


def _memory(arena_bytes: int, _: Path) -> dict[str, Any]:
    return {"cpu_bytes_to_use": arena_bytes}


def _files(_: int, directory: Path) -> dict[str, Any]:
    return {"shared_storage_path": str(directory)}


def _nothing(_: int, __: Path) -> dict[str, Any]:
    return {}


_LMCACHE = {
    "LMCACHE_CHUNK_SIZE": str(CHUNK),
    "LMCACHE_SAVE_UNFULL_CHUNK": "False",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONHASHSEED": "0",  # its keys are Python's hashes
}


def _lmcache(arena_bytes: int, _: Path) -> dict[str, str]:
    return _LMCACHE | {
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(arena_bytes / GIB),
    }


def _lmcache_disk(arena_bytes: int, directory: Path) -> dict[str, str]:
    """Around the page cache, as ours."""
    directory.mkdir(exist_ok=True)
    return _LMCACHE | {
        "LMCACHE_LOCAL_CPU": "False",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(arena_bytes / 2 / GIB),
        "LMCACHE_LOCAL_DISK": f"file://{directory}/",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "64",
        "LMCACHE_EXTRA_CONFIG": '{"use_odirect": true}',
    }


PEERS = (
    Peer("OffloadingConnector", _memory),
    Peer("SimpleCPUOffloadConnector", _memory),
    Peer("ExampleConnector", _files),
    Peer("LMCacheConnectorV1", _nothing, _lmcache, needs="lmcache"),
    Peer(f"LMCacheConnectorV1{ON_DISK}", _nothing, _lmcache_disk, needs="lmcache"),
)

ITSELF = Peer(NO_CONNECTOR, _nothing)
"""One more vLLM without a connector: as far as it is from the other one, figures say nothing."""


def chosen_peers(names: str) -> list[Peer]:
    """Peers by their names between commas, each with `@MODULE` behind it where it is to be; `all` for every one.

    `NoConnector` is one too, which `all` leaves out.

    Raises:
        ConfigError: There is no such peer.
    """
    if names.strip() == ALL:
        return list(PEERS)
    modules = dict(_parts(text) for text in names.split(","))
    known = (*PEERS, ITSELF)
    wanted = choose("connector", ",".join(modules), [peer.name for peer in known])
    return [replace(peer, module=modules[peer.name]) for peer in known if peer.name in wanted]


def _parts(text: str) -> tuple[str, str]:
    name, _, module = text.partition("@")
    return name.strip(), module.strip()
