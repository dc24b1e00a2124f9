"""A vLLM configuration for a KV cache without a model; see `vllm_simulator`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.plugins import load_general_plugins
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VOCABULARY = 4096
LAYERS, HEADS, CONTENT = 2, 2, 8
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
    "head_dim": 32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How the simulated vLLM is configured.

    Attributes:
        folder: For the model's config file.
        options: The connector's kv_connector_extra_config; None runs without a connector.
        overlapped: A step is scheduled while the one before it still runs, as vLLM does on GPUs.
        multi: The connector is a child of vLLM's MultiConnector.
        kv_events: VLLM gathers KV events; who wants them looks at what its scheduler publishes.
    """

    folder: Path
    options: Mapping[str, Any] | None
    num_blocks: int = 256
    block_size: int = 16
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 8
    ranks: int = 1
    kv_role: str = "kv_both"
    prefix_caching: bool = True
    overlapped: bool = False
    kv_events: bool = False
    multi: bool = False


def vllm_config(setup: Setup) -> VllmConfig:
    load_general_plugins()  # makes the connector known by name
    setup.folder.mkdir(parents=True, exist_ok=True)
    (setup.folder / "config.json").write_text(json.dumps(_MODEL))
    model = ModelConfig(model=str(setup.folder), skip_tokenizer_init=True, dtype="float32", seed=0)
    transfer = None
    if setup.options is not None:
        given: dict[str, Any] = {
            "kv_connector": "LMCacheAsyncConnector",
            "kv_role": setup.kv_role,
            "kv_connector_extra_config": {"weights_fingerprint": "text:simulated", **setup.options},
        }
        if setup.multi:
            children = {"connectors": [given]}
            given = {
                "kv_connector": "MultiConnector",
                "kv_role": setup.kv_role,
                "kv_connector_extra_config": children,
            }
        transfer = KVTransferConfig(**given)
    cache = CacheConfig(
        block_size=setup.block_size, enable_prefix_caching=setup.prefix_caching, gpu_memory_utilization=0.9
    )
    cache.num_gpu_blocks = setup.num_blocks
    return VllmConfig(
        model_config=model,
        cache_config=cache,
        parallel_config=ParallelConfig(
            tensor_parallel_size=setup.ranks,
            distributed_executor_backend="mp" if setup.ranks > 1 else None,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=model.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=setup.overlapped,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if setup.kv_events
        else None,
    )


def kv_cache_config(setup: Setup) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=setup.block_size, num_kv_heads=HEADS, head_size=CONTENT // 2, dtype=torch.float32
    )
    layers = [f"layer.{layer}" for layer in range(LAYERS)]
    return KVCacheConfig(
        num_blocks=setup.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
    )
