"""Object stores: S3 and compatible ones, Google Cloud Storage, Azure Blob Storage. One object per chunk."""

from lmcache_async.plugins.s3.config import S3Config
from lmcache_async.plugins.s3.tier import S3Tier

__all__ = ["S3Config", "S3Tier"]
