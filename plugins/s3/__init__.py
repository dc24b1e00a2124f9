"""Object stores: S3 and what speaks it, Google Cloud Storage, Azure Blob Storage; one object a chunk."""

from lmcache_async.plugins.s3.config import S3Config
from lmcache_async.plugins.s3.tier import S3Tier

__all__ = ["S3Config", "S3Tier"]
