"""Third-party distributions, written into a directory on sys.path."""

from __future__ import annotations

from pathlib import Path

from lmcache_async.registry import TIERS

GOOD = '''
from typing import Any
from pydantic import Field
from lmcache_async import Tier
from lmcache_async.tiers.base import Capabilities, TierConfig

class ShelfConfig(TierConfig):
    """Options of the shelf.

    Attributes:
        colour: Of its boards.
    """

    colour: str
    boards: int = Field(default=3, ge=1, description="How many there are.")
    anything: Any = None

class Shelf(Tier):
    """Boards on a wall."""

    config_type = ShelfConfig

    @property
    def capabilities(self):
        return Capabilities(removes=True, max_concurrency=self.config.boards)

    async def contains(self, key): return False
    async def get(self, key, allocate): return None
    async def put(self, key, buffer): pass
    async def remove(self, key): return True
'''


def install(folder: Path, name: str, points: dict[str, str], module: str, *, group: str = TIERS) -> None:
    """Write the distribution `name` 1.0 with entry points of a group, and its module `<name>_module`."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{point} = {name}_module:{value}" for point, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
    (folder / f"{name}_module.py").write_text(module)
