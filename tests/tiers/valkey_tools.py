"""Tools for tests of the valkey tier."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from lmcache_async.memory.arena import Arena
from lmcache_async.plugins.valkey import ValkeyConfig, ValkeyTier
from lmcache_async.plugins.valkey.topology import slot_of
from lmcache_async.testing.records import key_of
from tests.support.daemons import WAITS
from tests.support.valkey_servers import master_of


def config(url: str, **options: object) -> ValkeyConfig:
    """A config with its own keys, and with deadlines for a busy machine."""
    return ValkeyConfig.model_validate({"url": url, "key_prefix": f"{uuid.uuid4().hex}:", **WAITS, **options})


def bound(settings: ValkeyConfig, arena: Arena) -> ValkeyTier:
    tier = ValkeyTier(settings)
    tier.bind(arena)
    return tier


def home_of(settings: ValkeyConfig, number: int) -> int:
    """Index of the master of a `ServerCluster` that has the chunk."""
    return master_of(slot_of(f"{settings.key_prefix}{key_of(number).hex()}".encode()))


def of_each(settings: ValkeyConfig, count: int) -> Sequence[list[int]]:
    """`count` chunks of each of the three masters."""
    found: list[list[int]] = [[], [], []]
    number = 0
    while min(map(len, found)) < count:
        home = found[home_of(settings, number)]
        if len(home) < count:
            home.append(number)
        number += 1
    return found
