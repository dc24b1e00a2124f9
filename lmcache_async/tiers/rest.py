"""Names that tiers written for version 0.1 import; `Tier.offline` replaces them.

Version 0.1 called `at_rest(config)` of a tier to get an `AtRest`. It is not called any more: the maintenance commands
open such a tier and use its `keys`, `get`, `put` and `remove`.
"""

from __future__ import annotations

from abc import ABC
from pathlib import Path
from typing import NamedTuple

from lmcache_async.types import ChunkKey


class Kept(NamedTuple):
    """An entry of a listing; see `lmcache_async.tiers.offline.StoredRecord`."""

    key: ChunkKey
    nbytes: int = 0
    stamp: int = 0


class Litter(NamedTuple):
    """A file that is not a record; see `lmcache_async.tiers.offline.LeftoverFile`."""

    name: str
    nbytes: int


class AtRest(ABC):  # its methods are no longer called
    """Base class of offline access in version 0.1; see `lmcache_async.tiers.offline.OfflineStore`."""

    place: Path
