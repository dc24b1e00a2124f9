"""LoRA adapters by content: the same adapter on two machines is one, a changed one is another."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_async.config.values import expand_home
from lmcache_async.hashing import CRYPTOGRAPHIC, FingerprintMode, weights_fingerprint
from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from lmcache_async.integration.vllm.chains import Adapter

logger = LimitedLogger(logging.getLogger(__name__))


class AdapterNames:
    """What stands for an adapter's weights in the keys. Reads files: not for the scheduler's thread.

    Args:
        algorithm: Hash of the chunk keys. Where that is cryptographic, tenants are hostile and may bring
            adapters of their own: every byte counts then.
    """

    def __init__(self, algorithm: str = "xxh3_128") -> None:
        self._algorithm = algorithm
        self._mode: FingerprintMode = "full" if algorithm in CRYPTOGRAPHIC else "sampled"
        self._known: dict[Adapter, str] = {}

    def content(self, adapter: Adapter) -> str:
        """The fingerprint of its files; where they cannot be read, what no other load of any adapter has."""
        known = self._known.get(adapter)
        if known is None:
            known = self._read(adapter)
            if not adapter.reloaded_in_place:  # else the next request may see other weights under this name
                self._known[adapter] = known
        return known

    def _read(self, adapter: Adapter) -> str:
        try:
            return weights_fingerprint(local_path(adapter.path), mode=self._mode, algorithm=self._algorithm)
        except (OSError, ValueError) as error:
            logger.report(
                adapter.path,
                "the weights of adapter %s (%s) cannot be told apart (%s): what is cached of it serves this"
                " process alone",
                adapter.name,
                adapter.path,
                error,
            )
            return f"unknown:{uuid.uuid4().hex}"


def local_path(name: str, revision: str | None = None) -> Path:
    """Where the files of a model or an adapter are: a path, or a name on the hub that was downloaded before.

    Raises:
        OSError: They are not here (or ValueError).
    """
    path = expand_home(name)
    if path.exists() or path.is_absolute():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))
