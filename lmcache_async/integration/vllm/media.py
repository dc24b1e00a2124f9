"""Identity of the images, audio and video of a request."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

from lmcache_async.observability.logging import LimitedLogger

logger = LimitedLogger(logging.getLogger(__name__))

# An adapter's name and a colon may precede either: vLLM's `InputProcessor._get_mm_identifier`.
_COUNTER = re.compile(r"(?:.*:)?renderer\d+-mm-\d+-.*-\d+", re.DOTALL)  # `BaseRenderer._process_mm_uuids`
_DIGEST = re.compile(r"(?:.*:)?(?:[0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)  # `MultiModalHasher.hash_kwargs`


@dataclass(frozen=True, slots=True)
class MediaIdentity:
    """Tells identifiers of content from numbers that vLLM counts up.

    vLLM identifies a media item by a hash of its content, or by the `uuid` that the client sent with it. With
    prefix caching off and `mm_processor_cache_gb=0` it counts instead of hashing. The count begins again in
    each process, so the same identifier stands for different images.

    Attributes:
        hashed: Whether vLLM hashes the content of items without a `uuid`.
    """

    hashed: bool = True

    @classmethod
    def of(cls, vllm_config: Any) -> MediaIdentity:
        media = vllm_config.model_config.multimodal_config
        caches = vllm_config.cache_config.enable_prefix_caching
        return cls(hashed=media is None or caches or media.mm_processor_cache_gb > 0)

    def all_by_content(self, features: list[Any]) -> bool:
        """Whether every item is identified by its content; logs the cause where one is not.

        Args:
            features: The request's `mm_features`.
        """
        if all(self.is_content(feature.identifier) for feature in features):
            return True
        logger.report(
            "counted media",
            "requests with images, audio or video are not cached: with prefix caching off and "
            "mm_processor_cache_gb=0 vLLM counts them instead of hashing them. Start vLLM with "
            "--enable-prefix-caching or with --mm-processor-cache-gb above 0, or send a uuid with each item "
            "(other than a bare hexadecimal hash)",
        )
        return False

    def is_content(self, identifier: str) -> bool:
        """Whether the same identifier always stands for the same content.

        Where vLLM does not hash, it still hashes its own count together with a request's
        `mm_processor_kwargs`. Such a hash looks like a client's, so neither is accepted there.
        """
        if not identifier or _COUNTER.fullmatch(identifier):
            return False
        return self.hashed or not _DIGEST.fullmatch(identifier)
