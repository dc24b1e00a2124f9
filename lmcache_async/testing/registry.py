"""A registry that also offers what a test hands it."""

from __future__ import annotations

from collections.abc import Mapping

from lmcache_async.registry import LAYERS, STAGES, TIERS, Registry


class FakeRegistry(Registry):
    """The installed plug-ins, and before them the given ones.

    Args:
        tiers: Tier classes by name.
        stages: Stage classes or async functions by name.
        layers: Layer classes by name.
    """

    def __init__(
        self,
        *,
        tiers: Mapping[str, object] | None = None,
        stages: Mapping[str, object] | None = None,
        layers: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        self._given = {TIERS: dict(tiers or {}), STAGES: dict(stages or {}), LAYERS: dict(layers or {})}

    def load(self, group: str, name: str, *, third_party: bool = True) -> object:
        if name in self._given[group]:
            return self._given[group][name]
        return super().load(group, name, third_party=third_party)
