from __future__ import annotations

import copy
import dataclasses
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from lmcache_async.config import load_config
from lmcache_async.integration.vllm.config import engine_config, namespace_of, unsupported_reason
from lmcache_async.testing.vllm_setup import Setup, kv_cache_config, vllm_config


@pytest.fixture
def setup(tmp_path) -> Setup:
    return Setup(folder=tmp_path / "model", options={})


@pytest.fixture
def config(setup: Setup) -> Any:
    made = vllm_config(setup)
    made.parallel_config.rank = 0
    return made


def root(config: Any, setup: Setup, *, layout: str = "layout", **options: Any) -> bytes:
    engine = load_config(env={}, extra={"weights_fingerprint": "text:w", **options})
    return namespace_of(config, kv_cache_config(setup), engine, layout).root()


def changed(config: Any, path: str, value: Any) -> Any:
    """A copy with one value changed, as deep as the path goes."""
    first, _, rest = path.partition(".")
    result = copy.copy(config)
    object.__setattr__(result, first, changed(getattr(config, first), rest, value) if rest else value)
    return result


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.model", "another/model"),
        ("model_config.dtype", torch.bfloat16),
        ("model_config.quantization", "fp8"),
        ("model_config.hf_config.rope_theta", 5.0),
        ("cache_config.cache_dtype", "fp8"),
        ("parallel_config.rank", 1),
        ("parallel_config.tensor_parallel_size", 2),
        ("parallel_config.pipeline_parallel_size", 2),
        ("speculative_config", SimpleNamespace(method="eagle", model="draft")),
    ],
)
def test_everything_that_the_kv_depends_on_is_in_the_root(config: Any, setup: Setup, path: str, value: Any):
    assert root(changed(config, path, value), setup) != root(config, setup)


def test_layout_weights_chunk_size_and_algorithm_are_in_the_root(config: Any, setup: Setup):
    roots = {
        root(config, setup),
        root(config, setup, layout="other"),
        root(config, setup, weights_fingerprint="text:v"),
        root(config, setup, chunk_size=512),
        root(config, setup, hash_algorithm="sha256"),
    }
    assert len(roots) == 5


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("kv_transfer_config.engine_id", "another launch"),
        ("model_config.hf_config._name_or_path", "/elsewhere"),
        ("model_config.hf_config.transformers_version", "99"),
        ("cache_config.num_gpu_blocks", 5),
    ],
)
def test_what_only_differs_between_launches_and_machines_is_not(
    config: Any, setup: Setup, path: str, value: Any
):
    assert root(changed(config, path, value), setup) == root(config, setup)


def test_a_local_model_is_known_by_its_weights_wherever_it_lies(config: Any, setup: Setup, tmp_path):
    roots = []
    for place, weight in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        folder = tmp_path / place / "model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({}))
        save_file({"w": torch.tensor([weight])}, folder / "model.safetensors")
        moved = changed(config, "model_config.model", str(folder))
        roots.append(root(moved, setup, weights_fingerprint="sampled"))

    assert roots[0] == roots[1] != roots[2]


def test_weights_that_cannot_be_read_serve_this_process_alone(config: Any, setup: Setup, caplog):
    with caplog.at_level(logging.WARNING):
        logging.getLogger("lmcache_async").propagate = True
        first, second = (root(config, setup, weights_fingerprint="sampled") for _ in range(2))

    assert first != second
    assert "weights_fingerprint" in caplog.text


def test_chunks_are_whole_blocks(config: Any, caplog):
    config.kv_transfer_config.kv_connector_extra_config["chunk_size"] = 100
    with caplog.at_level(logging.INFO):
        logging.getLogger("lmcache_async").propagate = True
        logging.getLogger("lmcache_async").setLevel(logging.INFO)
        assert engine_config(config, 16).chunk_size == 112
        assert engine_config(config, 128).chunk_size == 128

    assert len(caplog.records) == 2


def test_a_chunk_size_that_fits_is_left_alone(config: Any, caplog):
    assert engine_config(config, 16).chunk_size == 256
    assert not caplog.records


def group(spec: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(["layer.0"], spec)


def with_groups(setup: Setup, *groups: KVCacheGroupSpec) -> Any:
    cache = kv_cache_config(setup)
    cache.kv_cache_groups = list(groups)
    return cache


def test_full_attention_and_mla_are_supported_also_with_layers_of_several_sizes(config: Any, setup: Setup):
    full = kv_cache_config(setup).kv_cache_groups[0].kv_cache_spec
    mla = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    several = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full, "b": full})

    for spec in (full, mla, several):
        assert unsupported_reason(config, with_groups(setup, group(spec))) is None


def test_ranks_of_mla_have_the_same_keys_and_places_of_their_own(config: Any, setup: Setup):
    full = kv_cache_config(setup).kv_cache_groups[0].kv_cache_spec
    mla = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    engine = load_config(env={}, extra={"weights_fingerprint": "text:w"})
    two = changed(config, "parallel_config.tensor_parallel_size", 2)

    def ranks(config: Any, spec: Any) -> list[Any]:
        cache = with_groups(setup, group(spec))
        configs = [changed(config, "parallel_config.rank", rank) for rank in (0, 1)]
        return [namespace_of(each, cache, engine, "layout") for each in configs]

    first, second = ranks(two, mla)
    assert first.root() == second.root()
    assert (first.tp_rank, second.tp_rank) == (0, 1)  # directories and ports go by it
    assert "replicated" not in first.text
    first, second = ranks(two, full)
    assert first.root() != second.root()
    stages = changed(config, "parallel_config.pipeline_parallel_size", 2)
    first, second = ranks(stages, mla)  # other layers
    assert first.root() != second.root()


def test_what_is_not_supported_is_named(config: Any, setup: Setup):
    full = kv_cache_config(setup).kv_cache_groups[0]
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64
    )
    reasons = [
        unsupported_reason(config, with_groups(setup, full, full)),
        unsupported_reason(config, with_groups(setup)),
        unsupported_reason(config, with_groups(setup, group(window))),
        unsupported_reason(config, with_groups(setup, dataclasses.replace(full, enable_kv_transfer=False))),
        unsupported_reason(
            changed(config, "parallel_config.decode_context_parallel_size", 2), kv_cache_config(setup)
        ),
        unsupported_reason(
            changed(config, "cache_config", SimpleNamespace(calculate_kv_scales=True)), kv_cache_config(setup)
        ),
    ]
    for reason, word in zip(
        reasons, ("2 KV", "0 KV", "SlidingWindow", "transferred", "context", "calculate"), strict=True
    ):
        assert reason is not None
        assert word in reason
