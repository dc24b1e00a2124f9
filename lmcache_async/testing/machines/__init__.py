"""Hypothesis state machines to subclass: a tier compared with a dict, an engine with a list of prefixes."""

from lmcache_async.testing.machines.cache import CacheMachine
from lmcache_async.testing.machines.tier import TierMachine

__all__ = ["CacheMachine", "TierMachine"]
