"""The records of other hosts' daemons."""

from lmcache_async.plugins.peer.config import PeerConfig
from lmcache_async.plugins.peer.tier import PeerTier

__all__ = ["PeerConfig", "PeerTier"]
