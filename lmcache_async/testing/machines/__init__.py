"""Hypothesis state machines to subclass: a tier against a dict, and an engine against a list of prefixes."""

from lmcache_async.testing.machines.cache import CacheMachine
from lmcache_async.testing.machines.tier import TierMachine

__all__ = ["CacheMachine", "TierMachine"]
