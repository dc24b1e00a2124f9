"""LoRA adapters by content: the same adapter on two machines is one, a changed one is another."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

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
        """The fingerprint of its files; its path where they cannot be read here."""
        known = self._known.get(adapter)
        if known is None:
            known = self._read(adapter)
            if not adapter.reloaded_in_place:  # else the next request may see other weights under this name
                self._known[adapter] = known
        return known

    def _read(self, adapter: Adapter) -> str:
        try:
            return weights_fingerprint(Path(adapter.path), mode=self._mode, algorithm=self._algorithm)
        except (OSError, ValueError) as error:
            logger.report(
                adapter.path,
                "adapter %s is known by its path alone (%s): %s",
                adapter.name,
                adapter.path,
                error,
            )
            return adapter.path
