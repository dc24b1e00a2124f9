"""Names that tiers written for version 0.1 import; `Tier.offline` replaces them.

`at_rest(config)` of a tier is not called any more: the maintenance commands open such a tier and use its `keys`, `get`, `put` and
`remove`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lmcache_async.tiers.offline import LeftoverFile
from lmcache_async.types import ChunkKey

Litter = LeftoverFile


class Kept(NamedTuple):
    """An entry of a listing; now `StoredRecord`."""

    key: ChunkKey
    nbytes: int = 0
    stamp: int = 0


class AtRest:
    """Base class of offline access; now `OfflineStore`."""

    place: Path
