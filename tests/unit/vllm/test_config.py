from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.config import MultiModalConfig, ParallelConfig, PoolerConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheGroupSpec,
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
    namespace_of,
    unsupported_reason,
)
from lmcache_async.integration.vllm.groups import groups_of
from lmcache_async.integration.vllm.versions import data_parallel_index
from lmcache_async.integration.vllm.worker import WorkerConnector
from lmcache_async.testing.rig import Rig
from tests.support.vllm_simulator import Setup, kv_cache_config, vllm_config

WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64)


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


PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tekken.json",
)


def image_model(config: Any, folder: Path, **settings: Any) -> Any:
    """The config of a model that takes images."""
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
def test_what_changes_the_embeddings_of_media_is_in_the_root(
    config: Any, setup: Setup, tmp_path: Path, settings: dict[str, Any]
):
    plain = root(image_model(config, tmp_path / "model"), setup)

    assert root(image_model(config, tmp_path / "model", **settings), setup) != plain


def test_where_the_processor_lies_its_caches_and_the_chat_template_are_not(
    config: Any, setup: Setup, tmp_path: Path
):
    one = image_model(config, tmp_path / "a" / "model", mm_processor_cache_gb=0)
    other = image_model(config, tmp_path / "b" / "model", limit_per_prompt={"image": 3})
    for place in "ab":
        (tmp_path / place / "model" / "preprocessor_config.json").write_text("{}")
    (tmp_path / "a" / "model" / "chat_template.json").write_text("{}")

    assert root(one, setup) == root(other, setup)


def test_the_root_of_a_text_model_is_that_of_version_0_1(config: Any, setup: Setup):
    known = changed(config, "model_config.hf_config", SimpleNamespace(to_dict=dict))
    engine = load_config(env={}, extra={"weights_fingerprint": "text:w"})
    extra = namespace_of(known, kv_cache_config(setup), engine, "layout").extra

    assert [name for name, _ in extra] == [
        "attention",
        "block_size",
        "kv_cache_dtype",
        "kv_cache_layout",
        "model_config",
        "speculative",
        "vllm",
    ]


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


@pytest.mark.parametrize("chunked_prefill", [True, False])
def test_a_user_may_disable_vllms_own_prefix_caching(tmp_path: Path, chunked_prefill: bool):
    setup = Setup(folder=tmp_path / "model", options={}, prefix_caching=False)
    made = changed(vllm_config(setup), "scheduler_config.enable_chunked_prefill", chunked_prefill)

    assert unsupported_reason(made, kv_cache_config(setup)) is None


@pytest.mark.parametrize("pooling", ["MEAN", "CLS"])
def test_pooling_over_the_whole_prompt_is_not_supported(config: Any, setup: Setup, pooling: str):
    pooled = changed(config, "model_config.pooler_config", PoolerConfig(seq_pooling_type=pooling))

    assert "pooling" in str(unsupported_reason(pooled, kv_cache_config(setup)))


def test_pooling_of_the_last_token_is_supported(config: Any, setup: Setup):
    pooled = changed(config, "model_config.pooler_config", PoolerConfig(seq_pooling_type="LAST"))

    assert unsupported_reason(pooled, kv_cache_config(setup)) is None


def test_attention_to_later_tokens_is_not_supported(config: Any, setup: Setup):
    full = kv_cache_config(setup).kv_cache_groups[0].kv_cache_spec
    seeing = dataclasses.replace(full, non_causal=True)

    assert "causal" in str(unsupported_reason(config, with_groups(setup, group(seeing))))


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
    """With few layers and several stages vLLM gives a stage groups that are empty there."""
    full = kv_cache_config(setup).kv_cache_groups[0]
    stage = with_groups(setup, full, KVCacheGroupSpec([], full.kv_cache_spec))

    assert "no layer of KV cache group 1" in str(backend_reason(config, stage))


@pytest.mark.parametrize("kind", [SlidingWindowSpec, ChunkedLocalAttentionSpec])
def test_attention_windows_are_supported_beside_full_attention_and_alone(
    config: Any, setup: Setup, kind: Any
):
    full = kv_cache_config(setup).kv_cache_groups[0].kv_cache_spec
    common = {"block_size": 16, "num_kv_heads": 2, "head_size": 4, "dtype": torch.float32}
    size = {"sliding_window": 64} if kind is SlidingWindowSpec else {"attention_chunk_size": 64}
    layers = {"layer.0": full, "layer.1": kind(**common, **size)}

    def groups(disabled: bool) -> Any:
        made = changed(config, "scheduler_config.disable_hybrid_kv_cache_manager", disabled)
        made = changed(made, "cache_config.kv_cache_layout", "LBNHC")
        return with_groups(setup, *get_kv_cache_groups(made, dict(layers)))

    hybrid = groups(disabled=False)
    assert unsupported_reason(config, hybrid) is None
    assert unsupported_reason(config, groups(disabled=True)) is None
    assert unsupported_reason(config, with_groups(setup, group(layers["layer.1"]))) is None
    found = {each.kind for each in groups_of(hybrid)}
    assert found == {"full", "window=64" if kind is SlidingWindowSpec else "local=64"}


def test_windows_need_failures_by_request(config: Any, setup: Setup, monkeypatch: pytest.MonkeyPatch):
    """VLLM 0.31 and older take them by block, which several groups share."""
    full = kv_cache_config(setup).kv_cache_groups[0]
    monkeypatch.delattr("vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults")

    reason = str(unsupported_reason(config, with_groups(setup, full, group(WINDOW))))

    assert "vLLM 0.32" in reason
    assert "--disable-hybrid-kv-cache-manager" in reason
    assert unsupported_reason(config, with_groups(setup, full)) is None


def test_the_namespaces_of_the_groups_differ(config: Any, setup: Setup):
    full = kv_cache_config(setup).kv_cache_groups[0]
    engine = load_config(env={}, extra={"weights_fingerprint": "text:w"})
    wider = dataclasses.replace(WINDOW, sliding_window=65)
    other_shape = dataclasses.replace(STATE, shapes=((2, 8),))
    other_dtype = dataclasses.replace(STATE, dtypes=(torch.int32,))
    roots = []
    for spec in (WINDOW, wider, STATE, other_shape, other_dtype):
        cache = with_groups(setup, full, group(spec))
        whole, groups = namespace_of(config, cache, engine, "layout"), groups_of(cache)
        roots += [group_namespace(whole, each, groups, "layout").root() for each in groups]
    alone = with_groups(setup, full)
    whole = namespace_of(config, alone, engine, "layout")

    assert len({*roots}) == 6  # full attention has the same one in all models
    assert group_namespace(whole, groups_of(alone)[0], groups_of(alone), "layout") == whole


STATE = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")


def test_recurrent_states_are_supported_in_the_mode_that_keeps_them_at_block_boundaries(
    config: Any, setup: Setup
):
    full = kv_cache_config(setup).kv_cache_groups[0]
    dense = dataclasses.replace(STATE, mamba_cache_mode="all")

    assert unsupported_reason(config, with_groups(setup, full, group(STATE))) is None
    assert unsupported_reason(config, with_groups(setup, group(STATE))) is None
    reason = str(unsupported_reason(config, with_groups(setup, full, group(dense))))
    assert "--mamba-cache-mode align" in reason
    assert "--disable" not in reason


def test_no_remedy_is_named_where_there_is_none(config: Any, setup: Setup, monkeypatch: pytest.MonkeyPatch):
    full = kv_cache_config(setup).kv_cache_groups[0]
    monkeypatch.delattr("vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults")

    reason = str(unsupported_reason(config, with_groups(setup, full, group(STATE))))

    assert "vLLM 0.32" in reason
    assert "--disable" not in reason


def test_what_is_not_supported_is_named(config: Any, setup: Setup):
    full = kv_cache_config(setup).kv_cache_groups[0]
    eagle = SimpleNamespace(method="eagle", model="draft")
    several = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": WINDOW, "b": WINDOW})
    reasons = [
        unsupported_reason(config, with_groups(setup, full, full)),
        unsupported_reason(config, with_groups(setup)),
        unsupported_reason(
            changed(config, "speculative_config", eagle), with_groups(setup, full, group(WINDOW))
        ),
        unsupported_reason(config, with_groups(setup, group(several))),
        unsupported_reason(config, with_groups(setup, dataclasses.replace(full, enable_kv_transfer=False))),
        unsupported_reason(
            changed(config, "parallel_config.decode_context_parallel_size", 2), kv_cache_config(setup)
        ),
        unsupported_reason(
            changed(config, "cache_config", SimpleNamespace(calculate_kv_scales=True)), kv_cache_config(setup)
        ),
    ]
    for reason, word in zip(
        reasons,
        ("2 KV", "no KV", "draft", "several sizes", "transferred", "context", "calculate"),
        strict=True,
    ):
        assert reason is not None
        assert word in reason


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_of_a_dense_model_is_known_by_its_index(rank: int):
    parallel = ParallelConfig(data_parallel_size=2, data_parallel_rank=rank)
    parallel.reconfigure_for_independent_dp_rank()  # as vLLM does in the replica's process

    assert parallel.data_parallel_rank == 0
    assert data_parallel_index(SimpleNamespace(parallel_config=parallel)) == rank


def test_a_vllm_without_data_parallelism_is_the_first_replica(config: Any):
    assert data_parallel_index(config) == 0


def test_the_worker_opens_its_engine_as_that_replica(config: Any, setup: Setup, tmp_path, monkeypatch):
    opened: list[int] = []

    @contextlib.asynccontextmanager
    async def open_engine(*_: Any, replica: int, **__: Any) -> AsyncIterator[None]:
        opened.append(replica)
        raise ConfigError("far enough")
        yield

    monkeypatch.setattr(config.parallel_config, "data_parallel_index", 3)
    side = WorkerConnector.of_vllm(config, kv_cache_config(setup), open_engine=open_engine)
    layout = KVLayout.from_token_slots([torch.zeros(4, 2, 16, 1, 8)], order="B2NHD")
    with pytest.raises(ConfigError, match="far enough"):
        side.open(EngineGroup(layout, Rig().namespace))

    assert opened == [3]
