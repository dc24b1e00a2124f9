"""Identifiers of images, audio and video that are content hashes."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.multimodal.hasher import MultiModalHasher
from vllm.renderers.base import BaseRenderer

from lmcache_async.integration.vllm import keys
from lmcache_async.integration.vllm.keys import MediaIdentity
from lmcache_async.logging import LimitedLogger

HASHED, COUNTED = MediaIdentity(hashed=True), MediaIdentity(hashed=False)
DIGEST = MultiModalHasher.hash_kwargs("blake3", model_id="m", image=b"pixels")


def vllm_config(*, prefix_caching: bool, cache_gb: float | None) -> Any:
    settings = None if cache_gb is None else SimpleNamespace(mm_processor_cache_gb=cache_gb)
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=settings),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )


def vllms_own_names(config: Any, uuids: list[str | None]) -> list[str | None]:
    """Identifiers that vLLM's renderer derives from the client's uuids; None is hashed later."""
    renderer = SimpleNamespace(
        config=config, model_config=config.model_config, _validate_mm_uuids=lambda *_: None
    )
    items = SimpleNamespace(get_all_counts=lambda: {"image": len(uuids)})
    names = BaseRenderer._process_mm_uuids(renderer, {}, items, {"image": uuids}, "renderer0-mm-7")
    return list(names["image"])


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("cache_gb", [4, 0])
def test_content_hashing_by_vllm_is_detected(prefix_caching: bool, cache_gb: float) -> None:
    config = vllm_config(prefix_caching=prefix_caching, cache_gb=cache_gb)
    unnamed, named = vllms_own_names(config, [None, "cat.png"])

    assert MediaIdentity.of(config).hashed == (unnamed is None)
    assert unnamed is None or not MediaIdentity.of(config).is_content(unnamed)
    assert named == "cat.png"
    assert MediaIdentity.of(config).is_content(named)


def test_a_text_model_has_nothing_to_hash() -> None:
    assert MediaIdentity.of(vllm_config(prefix_caching=False, cache_gb=None)).hashed


@pytest.mark.parametrize("identity", [HASHED, COUNTED], ids=["hashed", "counted"])
@pytest.mark.parametrize(
    ("identifier", "content"),
    [
        ("renderer0-mm-1-image-0", False),
        ("renderer12-mm-3456-vision_chunk-7", False),
        ("adapter:renderer0-mm-1-video-0", False),
        ("team:adapter:renderer0-mm-1-audio-0", False),
        ("", False),
        ("cat.png", True),
        ("adapter:cat.png", True),
        ("123e4567-e89b-12d3-a456-426614174000", True),
        (f"sha256-{DIGEST}", True),
        ("my renderer0-mm", True),
    ],
)
def test_a_uuid_of_a_client_identifies_content_and_a_count_does_not(
    identity: MediaIdentity, identifier: str, content: bool
) -> None:
    assert identity.is_content(identifier) == content


@pytest.mark.parametrize("algorithm", ["blake3", "sha256", "sha512"])
@pytest.mark.parametrize("prefix", ["", "adapter:"])
def test_a_hash_is_content_only_where_vllm_hashes_content(algorithm: Any, prefix: str) -> None:
    """Otherwise it may be a hash of a count and the request's `mm_processor_kwargs`."""
    digest = MultiModalHasher.hash_kwargs(
        algorithm, model_id="m", image="renderer0-mm-1-image-0", mm_processor_kwargs={"max_pixels": 9}
    )

    assert HASHED.is_content(prefix + digest)
    assert not COUNTED.is_content(prefix + digest)


def test_the_log_names_the_cause_once_and_the_remedies(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "logger", LimitedLogger(logging.getLogger("test.media")))
    features = [SimpleNamespace(identifier=name) for name in ("cat.png", "renderer0-mm-1-image-0")]
    with caplog.at_level(logging.WARNING, logger="test.media"):
        for _ in range(3):
            assert not COUNTED.all_by_content(features)
    assert COUNTED.all_by_content(features[:1])
    assert COUNTED.all_by_content([])

    [record] = [record for record in caplog.records if record.name == "test.media"]
    for remedy in ("--enable-prefix-caching", "--mm-processor-cache-gb", "uuid"):
        assert remedy in record.getMessage()
