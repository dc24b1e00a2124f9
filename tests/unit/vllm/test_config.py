from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from vllm.config import MultiModalConfig, ParallelConfig, PoolerConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from lmcache_async.config import load_config
from lmcache_async.device.layout import KVLayout
from lmcache_async.engine.builder import EngineGroup
from lmcache_async.errors import ConfigError
from lmcache_async.integration.vllm.config import (
    backend_reason,
    engine_config,
    group_namespace,
    head_shards,
    namespace_of,
    shard_config,
    shard_namespace,
    unsupported_reason,
)
from lmcache_async.integration.vllm.groups import HeadShard, KVGroup, KVGroups
from lmcache_async.integration.vllm.versions import data_parallel_index
from lmcache_async.integration.vllm.worker import RankEngine, shard_views
from lmcache_async.testing.rig import Rig
from tests.support.vllm_simulator import HEADS, Setup, kv_cache_config, spec_of, vllm_config

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64)
STATE = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
FULL = spec_of(KVGroup(0, 16), HEADS)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
LOCAL = ChunkedLocalAttentionSpec(
    block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=64
)
SCRATCH = CircularBufferSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)


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
    """A copy with one value changed, at the given path."""
    first, _, rest = path.partition(".")
    result = copy.copy(config)
    object.__setattr__(result, first, changed(getattr(config, first), rest, value) if rest else value)
    return result


CHANGES = [
    ("model_config.model", "another/model"),
    ("model_config.dtype", torch.bfloat16),
    ("model_config.quantization", "fp8"),
    ("model_config.quantization_config", {"linear": "fp8_per_block"}),
    ("model_config.hf_config.rope_theta", 5.0),
    ("model_config.hf_config.rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
    ("model_config.hf_config.sliding_window", 64),
    ("cache_config.cache_dtype", "fp8"),
    ("parallel_config.rank", 1),
    ("parallel_config.tensor_parallel_size", 2),
    ("parallel_config.pipeline_parallel_size", 2),
    ("speculative_config", SimpleNamespace(method="eagle", model="draft")),
    ("lora_config", SimpleNamespace(target_modules=["q_proj"], lora_dtype=torch.float32)),
    ("lora_config", SimpleNamespace(target_modules=None, lora_dtype=torch.bfloat16)),
]


@pytest.mark.parametrize(("path", "value"), CHANGES)
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


def test_the_longest_request_is_in_the_root_if_the_rotary_embedding_depends_on_it(config: Any, setup: Setup):
    long_rope = {"rope_type": "longrope", "long_factor": [4.0], "short_factor": [1.0]}
    phi = changed(config, "model_config.hf_config.rope_parameters", long_rope)

    assert root(changed(phi, "model_config.max_model_len", 99), setup) != root(phi, setup)
    assert root(changed(config, "model_config.max_model_len", 99), setup) == root(config, setup)


def test_every_size_of_blocks_and_layout_of_vllm_has_its_own_root(config: Any, setup: Setup):
    caches = [kv_cache_config(dataclasses.replace(setup, block_size=size)) for size in (16, 32)]
    caches.append(dataclasses.replace(caches[0], kv_cache_layout="BLNHC"))
    engine = load_config(env={}, extra={"weights_fingerprint": "text:w"})

    assert len({namespace_of(config, cache, engine, "layout").root() for cache in caches}) == 3


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("lora_config", SimpleNamespace(target_modules=None, lora_dtype="auto")),
        ("kv_transfer_config.engine_id", "another launch"),
        ("model_config.hf_config._name_or_path", "/elsewhere"),
        ("model_config.hf_config.transformers_version", "99"),
        ("cache_config.num_gpu_blocks", 5),
    ],
)
def test_launch_and_machine_settings_are_not_in_the_root(config: Any, setup: Setup, path: str, value: Any):
    assert root(changed(config, path, value), setup) == root(config, setup)


def test_a_local_model_is_identified_by_its_weights_at_any_path(config: Any, setup: Setup, tmp_path):
    roots = []
    for place, weight in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        folder = tmp_path / place / "model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({}))
        save_file({"w": torch.tensor([weight])}, folder / "model.safetensors")
        moved = changed(config, "model_config.model", str(folder))
        moved = changed(moved, "speculative_config", SimpleNamespace(method="mtp", model=str(folder)))
        roots.append(root(moved, setup, weights_fingerprint="sampled"))

    assert roots[0] == roots[1] != roots[2]


PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tekken.json",
)


def image_model(config: Any, folder: Path, **settings: Any) -> Any:
    """The config of a model with image input."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({}))
    save_file({"w": torch.tensor([1.0])}, folder / "model.safetensors")
    placed = changed(config, "model_config.model", str(folder))
    return changed(placed, "model_config.multimodal_config", MultiModalConfig(**settings))


@pytest.mark.parametrize("weights", ["sampled", "text:w"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_changed_image_processor_is_another_namespace(
    config: Any, setup: Setup, tmp_path: Path, name: str, weights: str
):
    one, other = (image_model(config, tmp_path / place / "model") for place in "ab")
    (tmp_path / "a" / "model" / name).write_text(json.dumps({"image_mean": [0.5]}))
    (tmp_path / "b" / "model" / name).write_text(json.dumps({"image_mean": [0.4]}))

    assert root(one, setup, weights_fingerprint=weights) != root(other, setup, weights_fingerprint=weights)


@pytest.mark.parametrize(
    "settings",
    [
        {"mm_processor_kwargs": {"max_pixels": 1000}},
        {"mm_processor_kwargs": {"images_kwargs": {"size": {"longest_edge": 9}}}},
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
        {"video_pruning_rate": 0.5},
        {"mm_encoder_attn_dtype": "fp8"},
    ],
    ids=str,
)
def test_settings_that_affect_media_embeddings_are_in_the_root(
    config: Any, setup: Setup, tmp_path: Path, settings: dict[str, Any]
):
    plain = root(image_model(config, tmp_path / "model"), setup)

    assert root(image_model(config, tmp_path / "model", **settings), setup) != plain


def test_the_location_of_the_processor_its_caches_and_the_chat_template_are_not_in_the_root(
    config: Any, setup: Setup, tmp_path: Path
):
    one = image_model(config, tmp_path / "a" / "model", mm_processor_cache_gb=0)
    other = image_model(config, tmp_path / "b" / "model", limit_per_prompt={"image": 3})
    for place in "ab":
        (tmp_path / place / "model" / "preprocessor_config.json").write_text("{}")
    (tmp_path / "a" / "model" / "chat_template.json").write_text("{}")

    assert root(one, setup) == root(other, setup)


@pytest.mark.parametrize(
    ("load_format", "loaded"),
    [("auto", "model.safetensors"), ("npcache", "pytorch_model.bin"), ("pt", "consolidated.00.pt")],
)
def test_the_fingerprint_is_that_of_the_files_that_are_loaded(
    config: Any, setup: Setup, tmp_path: Path, load_format: str, loaded: str
):
    save_file({"w": torch.tensor([1.0])}, tmp_path / "model.safetensors")
    for name in ("pytorch_model.bin", "consolidated.00.pt"):
        (tmp_path / name).write_bytes(b"1")
    placed = changed(config, "model_config.model", str(tmp_path))
    placed = changed(placed, "load_config.load_format", load_format)
    before = root(placed, setup, weights_fingerprint="sampled")
    again = root(placed, setup, weights_fingerprint="sampled")
    if load_format == "auto":
        save_file({"w": torch.tensor([2.0])}, tmp_path / loaded)
    else:
        (tmp_path / loaded).write_bytes(b"2")

    assert before == again != root(placed, setup, weights_fingerprint="sampled")


def test_kv_of_weights_from_elsewhere_is_used_by_this_process_only(config: Any, setup: Setup, tmp_path: Path):
    save_file({"w": torch.tensor([1.0])}, tmp_path / "model.safetensors")
    placed = changed(config, "model_config.model", str(tmp_path))
    placed = changed(placed, "load_config.load_format", "tensorizer")

    first, second = (root(placed, setup, weights_fingerprint="sampled") for _ in range(2))

    assert first != second


def test_downloaded_weights_are_read_from_vllms_download_directory(config: Any, setup: Setup, tmp_path: Path):
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    placed = changed(config, "model_config.model", "org/name")
    placed = changed(placed, "load_config.download_dir", str(tmp_path))
    roots = []
    for commit, weight in (("a" * 40, 1.0), ("b" * 40, 1.0), ("c" * 40, 2.0)):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        save_file({"w": torch.tensor([weight])}, snapshot / "model.safetensors")
        (repository / "refs" / "main").write_text(commit)
        roots.append(root(placed, setup, weights_fingerprint="sampled"))

    assert roots[0] == roots[1] != roots[2]


def test_kv_of_weights_that_cannot_be_read_is_used_by_this_process_only(config: Any, setup: Setup, caplog):
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
        config.kv_transfer_config.kv_connector_extra_config["chunk_size"] = 256
        assert engine_config(config, 16).chunk_size == 256

    assert len(caplog.records) == 2


def group(spec: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(["layer.0"], spec)


def with_groups(setup: Setup, *groups: KVCacheGroupSpec) -> Any:
    cache = kv_cache_config(setup)
    cache.kv_cache_groups = list(groups)
    return cache


def test_ranks_of_mla_have_the_same_keys_and_separate_directories(config: Any, setup: Setup):
    engine = load_config(env={}, extra={"weights_fingerprint": "text:w"})
    two = changed(config, "parallel_config.tensor_parallel_size", 2)

    def ranks(config: Any, spec: Any) -> list[Any]:
        cache = with_groups(setup, group(spec))
        configs = [changed(config, "parallel_config.rank", rank) for rank in (0, 1)]
        return [namespace_of(each, cache, engine, "layout") for each in configs]

    first, second = ranks(two, MLA)
    assert first.root() == second.root()
    assert (first.tp_rank, second.tp_rank) == (0, 1)  # directories and ports depend on it
    assert "replicated" not in first.text
    first, second = ranks(two, FULL)
    assert first.root() != second.root()
    stages = changed(config, "parallel_config.pipeline_parallel_size", 2)
    first, second = ranks(stages, MLA)  # other layers
    assert first.root() != second.root()


def test_ranks_that_share_a_kv_head_have_the_same_keys(config: Any, setup: Setup):
    cache = kv_cache_config(setup)
    cache.kv_tp_replicas = 2
    engine = load_config(env={}, extra={"weights_fingerprint": "text:w"})
    four = changed(config, "parallel_config.tensor_parallel_size", 4)

    roots = [
        namespace_of(changed(four, "parallel_config.rank", rank), cache, engine, "layout").root()
        for rank in range(4)
    ]

    assert roots[0] == roots[1]
    assert roots[2] == roots[3]
    assert roots[0] != roots[2]


def sharded(number: int) -> Any:
    return load_config(env={}, extra={"weights_fingerprint": "text:w", "vllm.kv_head_shards": number})


def ranked(config: Any, tp_size: int, rank: int, pp_size: int = 1) -> Any:
    made = changed(config, "parallel_config.tensor_parallel_size", tp_size)
    made = changed(made, "parallel_config.pipeline_parallel_size", pp_size)
    made = changed(made, "parallel_config.world_size", tp_size * pp_size)
    return changed(made, "parallel_config.rank", rank)


def with_heads(config: Any, setup: Setup, heads: int, tp_size: int) -> tuple[Any, Any]:
    """The config of a model with this number of KV heads, and the KV cache of one of its ranks."""
    cache = kv_cache_config(setup)
    spec = dataclasses.replace(cache.kv_cache_groups[0].kv_cache_spec, num_kv_heads=heads // tp_size)
    cache.kv_cache_groups[0].kv_cache_spec = spec
    return changed(config, "model_config.model_arch_config.total_num_kv_heads", heads), cache


def shard_namespaces(config: Any, setup: Setup, tp_size: int, pp_size: int = 1, number: int = 4) -> list[Any]:
    """The namespaces of all shards of all ranks of a model with eight KV heads."""
    config, cache = with_heads(config, setup, 8, tp_size)
    made = []
    for rank in range(tp_size * pp_size):
        mine = ranked(config, tp_size, rank, pp_size)
        own = namespace_of(mine, cache, sharded(number), "layout")
        made += [shard_namespace(own, shard) for shard in head_shards(sharded(number), mine, cache)]
    return made


@pytest.mark.parametrize("pp_size", [1, 2])
def test_head_shards_have_the_same_namespaces_with_every_number_of_ranks(
    config: Any, setup: Setup, pp_size: int
):
    one, two, four = (shard_namespaces(config, setup, tp_size, pp_size) for tp_size in (1, 2, 4))

    assert one == two == four
    assert len({each.root() for each in one}) == len({each.rank for each in one}) == 4 * pp_size
    assert shard_namespaces(config, setup, 2, pp_size, number=8)[0].root() != one[0].root()


def test_head_shards_are_named_like_the_ranks_of_a_vllm_with_as_many(config: Any, setup: Setup):
    model, cache = with_heads(config, setup, 8, 4)
    ranks = [namespace_of(ranked(model, 4, rank), cache, sharded(4), "layout") for rank in range(4)]

    assert shard_namespaces(config, setup, 1) == ranks


@pytest.mark.parametrize(("path", "value"), [each for each in CHANGES if "tensor_parallel" not in each[0]])
def test_everything_that_the_kv_depends_on_but_the_number_of_ranks_is_in_the_root_of_a_head_shard(
    config: Any, setup: Setup, path: str, value: Any
):
    def roots(config: Any) -> set[bytes]:
        config, cache = with_heads(config, setup, 8, config.parallel_config.tensor_parallel_size)
        own = namespace_of(config, cache, sharded(4), "layout")
        shards = head_shards(sharded(4), config, cache)
        return {shard_namespace(own, shard).root() for shard in shards}

    two = ranked(config, 2, 0)
    assert not roots(changed(two, path, value)) & roots(two)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))
def test_head_shards_have_every_head_of_every_rank_once_and_in_order(tp_size: int, count: int, size: int):
    heads = []
    for rank in range(tp_size):
        for position in range(count):
            shard = HeadShard(rank * count + position, tp_size * count, position, count)
            first, number = shard.of_heads(count * size)
            heads += [(shard.index, rank * count * size + head) for head in range(first, first + number)]

    assert heads == [(head // size, head) for head in range(tp_size * count * size)]


@pytest.mark.parametrize(
    ("shards", "tp_size", "changes", "reason"),
    [
        (2, 4, {}, "the tensor-parallel size is 4; use a multiple of this size, or remove the key"),
        (3, 1, {}, "the model has 8 KV heads; use a divisor of this number, or remove the key"),
        (16, 16, {}, "the model has 8 KV heads; use a divisor of this number, or remove the key"),
        (
            4,
            1,
            {"num_kv_heads": 2},
            "a layer has 2 KV heads in each rank; use fewer shards, or remove the key",
        ),
        (4, 1, {"num_head_slots": 16}, "vLLM packs the KV of a head with its scales or with other heads"),
        (
            4,
            1,
            {"state_content_bytes": 72},
            "vLLM packs the KV of a head with its scales or with other heads",
        ),
        (4, 1, {"kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD}, "vLLM packs the KV of a head with its"),
    ],
)
def test_unsuitable_numbers_of_head_shards_are_refused(
    config: Any, setup: Setup, shards: int, tp_size: int, changes: dict[str, Any], reason: str
):
    made, cache = with_heads(ranked(config, tp_size, 0), setup, 8, tp_size)
    group = cache.kv_cache_groups[0]
    group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, **changes)

    with pytest.raises(ConfigError, match=re.escape(f"vllm.kv_head_shards is {shards}, but {reason}")):
        head_shards(sharded(shards), made, cache)


@pytest.mark.parametrize("spec", [MLA, STATE], ids=lambda spec: type(spec).__name__)
def test_kv_caches_without_heads_have_no_head_shards(config: Any, setup: Setup, spec: Any):
    reason = rf"a KV cache without heads \({type(spec).__name__}\); remove the key"
    with pytest.raises(ConfigError, match=reason):
        head_shards(sharded(2), config, with_groups(setup, group(FULL), group(spec)))


@pytest.mark.parametrize("shape", [(8, 2, 16, 9), (8, 4, 16, 8), (8, 16, 16), ()])
def test_kv_caches_of_another_form_than_their_heads_are_refused(setup: Setup, shape: tuple[int, ...]):
    cache = kv_cache_config(setup)
    caches = {f"layer.{index}": torch.zeros(8, 2, 16, 8) for index in range(2)}

    assert shard_views(cache, caches, HeadShard(0, 2, 0, 2))["layer.1"].shape == (8, 1, 16, 8)
    caches["layer.1"] = torch.zeros(shape)
    with pytest.raises(ConfigError, match=r"layer\.1 has the shape .* which is not that of 2 heads"):
        shard_views(cache, caches, HeadShard(0, 2, 0, 2))


def test_layers_that_share_the_kv_of_others_are_left_out_of_head_shards(setup: Setup):
    caches = {f"layer.{index}": torch.zeros(8, 2, 16, 8) for index in range(2)}
    caches["layer.2"] = caches["layer.1"]

    assert list(shard_views(kv_cache_config(setup), caches, HeadShard(0, 2, 0, 2))) == ["layer.0", "layer.1"]


def test_head_shards_divide_the_memory_and_the_threads_of_their_process():
    whole = load_config(
        env={},
        extra={"arena.max_bytes": "8GiB", "copy_threads": 3, "store.max_pending_write_bytes": "2GiB"},
    )
    part = shard_config(whole, 4)

    assert part.arena.max_bytes == 2 << 30
    assert part.copy_threads == 1
    assert part.gpu.staging_bytes * 4 == whole.gpu.staging_bytes
    assert part.store.max_in_flight_bytes * 4 == whole.store.max_in_flight_bytes
    assert part.retrieve.max_in_flight_bytes * 4 == whole.retrieve.max_in_flight_bytes
    assert part.max_pending_write_bytes == 512 << 20
    assert shard_config(load_config(env={}), 2).max_pending_write_bytes == 1 << 30


@pytest.mark.parametrize(("backend", "supported"), [("FLASHINFER", False), ("FLASH_ATTN", True)])
def test_batch_invariance_is_supported_where_vllm_caches_prefixes_with_it(
    config: Any, setup: Setup, monkeypatch: pytest.MonkeyPatch, backend: str, supported: bool
):
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    layers = dict.fromkeys(kv_cache_config(setup).kv_cache_groups[0].layer_names, layer)
    loaded = changed(config, "compilation_config.static_forward_context", layers)
    assert backend_reason(loaded, kv_cache_config(setup)) is None

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")

    assert (backend_reason(loaded, kv_cache_config(setup)) is None) == supported


def test_a_pipeline_stage_without_layers_of_a_group_is_not_supported(config: Any, setup: Setup) -> None:
    """With few layers and several stages, vLLM gives a stage groups that are empty there."""
    stage = with_groups(setup, group(FULL), KVCacheGroupSpec([], FULL))

    assert "no layer of KV cache group 1" in str(backend_reason(config, stage))


def layers_of(*specs: Any) -> dict[str, Any]:
    return {f"layer.{index}": spec for index, spec in enumerate(specs)}


@pytest.mark.kv_groups
@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_groups_of_layers_of_several_sizes_are_supported(config: Any, setup: Setup, layout: str):
    """As in Gemma 4: heads of full attention are larger, and fewer, than those with a window."""
    made = changed(config, "scheduler_config.disable_hybrid_kv_cache_manager", False)
    made = changed(made, "cache_config.kv_cache_layout", layout)
    specs = (WINDOW, dataclasses.replace(FULL, head_size=64), WINDOW, dataclasses.replace(FULL, head_size=32))
    cache = with_groups(setup, *get_kv_cache_groups(made, layers_of(*specs)))

    assert unsupported_reason(config, cache) is None
    assert {each.kind for each in KVGroups.of(cache)} == {"full", "window=64"}
    assert sorted(name for each in KVGroups.of(cache) for name in each.layers) == list(layers_of(*specs))


@pytest.mark.parametrize(("other", "remedy"), [(WINDOW, True), (STATE, False)], ids=["window", "state"])
def test_several_groups_need_failures_by_request(
    config: Any, setup: Setup, monkeypatch: pytest.MonkeyPatch, other: Any, remedy: bool
):
    """VLLM 0.30 and older report them by block, and several groups share block ids."""
    results = "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults"
    monkeypatch.delattr(results, raising=False)

    reason = str(unsupported_reason(config, with_groups(setup, group(FULL), group(other))))

    assert "vLLM 0.32" in reason
    assert ("--disable-hybrid-kv-cache-manager" in reason) == remedy
    assert unsupported_reason(config, with_groups(setup, group(FULL))) is None


def test_several_groups_are_not_supported_without_an_alignment_of_hits(
    config: Any, setup: Setup, monkeypatch: pytest.MonkeyPatch
):
    """As in vLLM 0.31, which reports failures by request."""
    cache = with_groups(setup, group(FULL), group(WINDOW))
    vars(cache).pop("cache_hit_alignment_tokens", None)
    monkeypatch.delattr(KVCacheConfig, "cache_hit_alignment_tokens", raising=False)

    assert "vLLM 0.32" in str(unsupported_reason(config, cache))


def test_the_namespaces_of_the_groups_differ(config: Any, setup: Setup):
    engine = load_config(env={}, extra={"weights_fingerprint": "text:w"})
    wider = dataclasses.replace(WINDOW, sliding_window=65)
    other_shape = dataclasses.replace(STATE, shapes=((2, 8),))
    other_dtype = dataclasses.replace(STATE, dtypes=(torch.int32,))
    roots = []
    for spec in (WINDOW, wider, STATE, other_shape, other_dtype):
        cache = with_groups(setup, group(FULL), group(spec))
        whole, groups = namespace_of(config, cache, engine, "layout"), KVGroups.of(cache)
        roots += [group_namespace(whole, each, groups, "layout").root() for each in groups]
    alone = with_groups(setup, group(FULL))
    whole = namespace_of(config, alone, engine, "layout")

    assert len({*roots}) == 6  # full attention has the same one in all models
    assert group_namespace(whole, KVGroups.of(alone)[0], KVGroups.of(alone), "layout") == whole


def speculation(method: str) -> dict[str, Any]:
    return {"speculative_config": SimpleNamespace(method=method, model="draft")}


def pooling(kind: str) -> dict[str, Any]:
    return {"model_config.pooler_config": PoolerConfig(seq_pooling_type=kind)}


NO_PREFIX_CACHING = {"cache_config.enable_prefix_caching": False}
UNCHUNKED = {"scheduler_config.enable_chunked_prefill": False}
LAUNCHED = {"parallel_config.distributed_executor_backend": "external_launcher"}
SEVERAL_KINDS: list[tuple[list[Any], dict[str, Any], str]] = [
    ([FULL, STATE], {}, ""),
    ([STATE], {}, ""),
    ([FULL, dataclasses.replace(STATE, mamba_cache_mode="all")], {}, "--mamba-cache-mode align"),
    ([FULL, FULL, STATE], speculation("ngram"), ""),
    ([FULL, FULL, WINDOW], speculation("suffix"), ""),
    ([FULL, FULL, WINDOW], speculation("eagle"), ""),
    ([FULL, FULL, WINDOW], speculation("eagle3"), ""),
    ([FULL, FULL, STATE], speculation("eagle"), "together with MambaSpec"),
    ([FULL, FULL, LOCAL], speculation("eagle3"), "together with ChunkedLocalAttentionSpec"),
    ([FULL, FULL, WINDOW], speculation("draft_model"), "'draft_model'; with several groups eagle, eagle3"),
    ([FULL, FULL, WINDOW], speculation("mtp"), "'mtp'"),
]


@pytest.mark.parametrize(
    ("specs", "changes", "reason"),
    [
        ([FULL], {}, ""),
        ([MLA], {}, ""),
        ([UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": FULL})], {}, ""),
        ([FULL], NO_PREFIX_CACHING, ""),
        ([FULL], NO_PREFIX_CACHING | UNCHUNKED, ""),
        ([FULL], pooling("LAST"), ""),
        ([FULL], pooling("MEAN"), "pooling"),
        ([FULL], pooling("CLS"), "pooling"),
        ([FULL], speculation("draft_model"), ""),
        ([FULL], speculation("mtp"), ""),
        ([], {}, "no KV"),
        ([FULL, SCRATCH], {}, "does not cache prefixes of CircularBufferSpec"),
        ([dataclasses.replace(FULL, non_causal=True)], {}, "causal"),
        ([FULL], {"parallel_config.decode_context_parallel_size": 2}, "context"),
        ([FULL], {"cache_config": SimpleNamespace(calculate_kv_scales=True)}, "calculate"),
        ([FULL], LAUNCHED, ""),
        ([FULL], LAUNCHED | {"parallel_config.world_size": 2}, "a scheduler of its own"),
        *(pytest.param(*each, marks=pytest.mark.kv_groups) for each in SEVERAL_KINDS),
    ],
)
def test_supported_setups_and_the_reasons_against_others(
    config: Any, setup: Setup, specs: list[Any], changes: dict[str, Any], reason: str
):
    for path, value in changes.items():
        config = changed(config, path, value)

    found = unsupported_reason(config, with_groups(setup, *map(group, specs)))

    assert reason in str(found) if reason else found is None
    if any(isinstance(spec, MambaSpec) for spec in specs):  # the flag is no remedy for recurrent states
        assert "--disable-hybrid-kv-cache-manager" not in str(found)


def test_a_group_that_vllm_does_not_transfer_is_not_supported(config: Any, setup: Setup):
    kept = dataclasses.replace(group(FULL), enable_kv_transfer=False)

    assert "transferred" in str(unsupported_reason(config, with_groups(setup, kept)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_of_a_dense_model_is_known_by_its_index(rank: int):
    parallel = ParallelConfig(data_parallel_size=2, data_parallel_rank=rank)
    parallel.reconfigure_for_independent_dp_rank()  # as vLLM does in the replica's process

    assert parallel.data_parallel_rank == 0
    assert data_parallel_index(SimpleNamespace(parallel_config=parallel)) == rank
    assert data_parallel_index(SimpleNamespace(parallel_config=ParallelConfig())) == 0


def test_the_worker_opens_its_engine_as_that_replica(config: Any, setup: Setup, monkeypatch):
    opened: list[int] = []

    @contextlib.asynccontextmanager
    async def open_engine(*_: Any, replica: int, **__: Any) -> AsyncIterator[None]:
        opened.append(replica)
        raise ConfigError("far enough")
        yield

    monkeypatch.setattr(config.parallel_config, "data_parallel_index", 3)
    groups = KVGroups.of(kv_cache_config(setup))
    side = RankEngine.of_vllm(config, engine_config(config, 16), groups, open_engine=open_engine)
    layout = KVLayout.from_token_slots([torch.zeros(4, 2, 16, 1, 8)], order="B2NHD")
    with pytest.raises(ConfigError, match="far enough"):
        side.open(EngineGroup(layout, Rig().namespace))

    assert opened == [3]
