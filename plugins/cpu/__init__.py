"""Host memory: chunks stay in the arena they were copied to."""

from lmcache_async.plugins.cpu.config import CPUConfig
from lmcache_async.plugins.cpu.tier import CPUTier

__all__ = ["CPUConfig", "CPUTier"]
