"""LoRA adapters by content: the same adapter on two machines is one, a changed one is another."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_async.hashing import weights_fingerprint
from lmcache_async.observability.logging import LimitedLogger

if TYPE_CHECKING:
    from lmcache_async.integration.vllm.chains import Adapter

logger = LimitedLogger(logging.getLogger(__name__))


class AdapterNames:
    """What stands for an adapter's weights in the keys. Reads files: not for the scheduler's thread."""

    def __init__(self) -> None:
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
            return weights_fingerprint(Path(adapter.path))
        except (OSError, ValueError) as error:
            logger.report(
                adapter.path,
                "adapter %s is known by its path alone (%s): %s",
                adapter.name,
                adapter.path,
                error,
            )
            return adapter.path
