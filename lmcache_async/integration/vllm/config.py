"""Conversion of vLLM's configuration: supported models, the engine's configuration, the namespace of the KV."""

from __future__ import annotations

import hashlib
import logging
import platform
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import vllm
from vllm import envs

from lmcache_async.config import EngineConfig, load_config
from lmcache_async.engine.check import load_engine_config
from lmcache_async.errors import ConfigError
from lmcache_async.hashing import (
    FingerprintMode,
    Namespace,
    canonical_text,
    processor_fingerprint,
    weights_fingerprint,
)
from lmcache_async.integration.vllm.groups import (
    HeadShard,
    KVGroup,
    KVGroups,
    kind_of,
    specs_of,
)
from lmcache_async.integration.vllm.keys import local_path
from lmcache_async.integration.vllm.request import Roles
from lmcache_async.integration.vllm.versions import serves_several_groups

logger = logging.getLogger(__name__)

_TEXT = "text:"
_MEDIA_SETTINGS = (  # of vLLM's MultiModalConfig: fields that change the embeddings of media
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
_WITHOUT_SAFETENSORS = frozenset({"npcache", "pt"})  # load formats that ignore safetensors files
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")  # they depend on the machine

_SUPPORTED = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_WINDOWED = frozenset({"SlidingWindowSpec", "ChunkedLocalAttentionSpec"})
_STATE = frozenset({"MambaSpec"})
_PLAIN = frozenset({"NONE", "FP8_PER_TENSOR"})  # elements without scales next to them
# Methods of speculation. Draft tokens are always verified, so the KV of a draft model cannot change an answer. Method
# draft_model is left out: with several groups the answers of vLLM 0.32 differ from those without speculation.
_DRAFTS = frozenset({"eagle", "eagle3"})
_DRAFTS_WITHOUT_KV = frozenset({"medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix"})
_NOT_INVARIANT = frozenset({"FLASHINFER", "TRITON_MLA"})  # a prefix changes the order of their sums


def engine_config(vllm_config: Any, block_size: int) -> EngineConfig:
    """The engine's configuration, with the chunk size rounded up to whole blocks.

    Raises:
        ConfigError: A key or value is wrong.
    """
    config = load_engine_config(extra=vllm_config.kv_transfer_config.kv_connector_extra_config)
    rounded = -(-config.chunk_size // block_size) * block_size
    if rounded != config.chunk_size:
        logger.info(
            "chunk_size %d is not a multiple of vLLM's block size %d; using %d",
            config.chunk_size,
            block_size,
            rounded,
        )
        config = config.model_copy(update={"chunk_size": rounded})
    return config


def layerwise_always(extra_config: Mapping[str, Any]) -> bool:
    """Whether loads are awaited layer by layer on every device.

    Raises:
        ConfigError: A key or value is wrong.
    """
    return load_config(extra=extra_config).vllm.layerwise_load == "always"


def awaited_tokens(config: EngineConfig, vllm_config: Any) -> int:
    """Return the longest hit, in tokens, whose load from host memory an idle engine awaits; 0 for none.

    With data parallelism of a mixture of experts, other engines compute in lockstep with one that is idle.
    """
    if config.vllm.layerwise_load == "never" or vllm_config.parallel_config.data_parallel_size > 1:
        return 0
    return config.vllm.layerwise_max_tokens


def layerwise_tokens(config: EngineConfig, vllm_config: Any, groups: KVGroups) -> int:
    """Return the longest hit, in tokens, that is loaded by the step that uses it; 0 for none.

    After a failed load, vLLM computes from the first failed block on. It supports this only for models with one group,
    and its model runner V2 computes from a wrong position (vLLM issue #49250). vLLM asks for failed blocks before the
    forward pass of a draft model, so the layers of the draft model have not waited for their part of the load yet. If
    steps overlap, the blocks of such a load are in vLLM's prefix cache before they are filled.
    """
    wanted = config.vllm.layerwise_load
    on_cpu = vllm_config.device_config.device_type == "cpu"
    if not groups.is_one_full or not (wanted == "always" or (wanted == "auto" and on_cpu)):
        return 0
    obstacle = ""
    if (
        vllm_config.scheduler_config.async_scheduling
        or vllm_config.parallel_config.pipeline_parallel_size > 1
    ):
        obstacle = "asynchronous scheduling or pipeline parallelism; start vLLM with --no-async-scheduling"
    elif getattr(vllm_config, "use_v2_model_runner", False):  # not in all versions
        obstacle = (
            "vLLM's model runner V2, which cannot repeat a step; start vLLM with VLLM_USE_V2_MODEL_RUNNER=0"
        )
    elif _drafts_with_kv(vllm_config):
        obstacle = "a draft model, whose layers run after vLLM has asked for failed blocks"
    if not obstacle:
        return config.vllm.layerwise_max_tokens
    if wanted == "always":
        logger.warning("vllm.layerwise_load: no hit is loaded layer by layer with %s", obstacle)
    return 0


def _drafts_with_kv(vllm_config: Any) -> bool:
    """Whether a draft model with layers in the KV cache proposes tokens."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method not in _DRAFTS_WITHOUT_KV


def uses_tcp(config: EngineConfig, vllm_config: Any) -> bool:
    """Whether the scheduler reaches the lookup servers of the ranks over TCP, because they may be on other hosts."""
    parallel = vllm_config.parallel_config
    several_hosts = getattr(parallel, "nnodes", 1) > 1 or parallel.use_ray
    return config.vllm.lookup_transport == "tcp" or (config.vllm.lookup_transport == "auto" and several_hosts)


def roles_of(transfer: Any, config: EngineConfig) -> Roles:
    """Roles of this vLLM instance, from its `kv_transfer_config`."""
    consumes, produces = transfer.is_kv_consumer, transfer.is_kv_producer
    return Roles(
        loads=consumes or config.vllm.producer_loads,
        stores=produces or config.vllm.consumer_stores,
        hands_over=not consumes,
    )


def head_shards(config: EngineConfig, vllm_config: Any, kv_cache_config: Any) -> tuple[HeadShard, ...]:
    """The shards of this rank's KV heads, each with records of its own; empty if they are not divided.

    Their number is the same in the scheduler's process and in every worker process.

    Raises:
        ConfigError: The KV heads of this model cannot be divided like this.
    """
    shards = config.vllm.kv_head_shards
    if shards is None:
        return ()
    if reason := _shards_reason(shards, vllm_config, kv_cache_config):
        raise ConfigError(f"vllm.kv_head_shards is {shards}, but {reason}")
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    count = shards // tp_size
    first = vllm_config.parallel_config.rank % tp_size * count
    return tuple(HeadShard(first + position, shards, position, count) for position in range(count))


def _shards_reason(shards: int, vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return the reason why the KV heads cannot be divided into so many shards; None if they can.

    Every shard has whole heads. Therefore each head belongs to one rank, and no rank replicates heads of another rank.
    """
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    if shards % tp_size:
        return f"the tensor-parallel size is {tp_size}; use a multiple of this size, or remove the key"
    kinds = {kind_of(spec) for spec in specs_of(kv_cache_config)}
    if whole := sorted(kinds - _WINDOWED - {"FullAttentionSpec"}):
        return f"the model has a KV cache without heads ({', '.join(whole)}); remove the key"
    heads = vllm_config.model_config.get_total_num_kv_heads()
    if heads % shards:
        return f"the model has {heads} KV heads; use a divisor of this number, or remove the key"
    for spec in specs_of(kv_cache_config):
        if spec.num_kv_heads % (shards // tp_size):
            return (
                f"a layer has {spec.num_kv_heads} KV heads in each rank; use fewer shards, or remove the key"
            )
        mode = getattr(spec, "kv_quant_mode", None)
        packed = any(
            getattr(spec, name, None) is not None for name in ("num_head_slots", "state_content_bytes")
        )
        if packed or (mode is not None and mode.name not in _PLAIN):
            return "vLLM packs the KV of a head with its scales or with other heads; remove the key"
    return None


def shard_config(config: EngineConfig, shards: int) -> EngineConfig:
    """Return the configuration of one of the `shards` engines of a rank, which divide its memory and threads."""
    store, retrieve = config.store, config.retrieve
    pending = store.max_pending_write_bytes
    return config.model_copy(
        update={
            "copy_threads": max(1, config.copy_threads // shards),
            "arena": config.arena.model_copy(update={"max_bytes": max(1, config.arena.max_bytes // shards)}),
            "gpu": config.gpu.model_copy(
                update={"staging_bytes": max(1, config.gpu.staging_bytes // shards)}
            ),
            "store": store.model_copy(
                update={
                    "max_in_flight_bytes": max(1, store.max_in_flight_bytes // shards),
                    "max_pending_write_bytes": None if pending is None else max(1, pending // shards),
                }
            ),
            "retrieve": retrieve.model_copy(
                update={"max_in_flight_bytes": max(1, retrieve.max_in_flight_bytes // shards)}
            ),
        }
    )


def shard_namespace(namespace: Namespace, shard: HeadShard) -> Namespace:
    """Return the namespace of a shard, given that of its rank, as if the model had one rank per shard."""
    return replace(
        namespace,
        world_size=shard.shards * namespace.pp_size,
        tp_rank=shard.index,
        tp_size=shard.shards,
        tp_replicas=1,
    )


def namespace_of(vllm_config: Any, kv_cache_config: Any, config: EngineConfig, layout_text: str) -> Namespace:
    """Everything that this rank's KV depends on besides tokens, request and KV group. Reads the model's files.

    Ranks with equal KV have equal namespaces, and therefore equal keys in a shared tier.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    tp_size, rank, draft = parallel.tensor_parallel_size, parallel.rank, vllm_config.speculative_config
    return Namespace(
        model=_model_name(model.model),
        weights=_weights(config, model, vllm_config.load_config),
        dtype=str(model.dtype).removeprefix("torch."),
        layout=layout_text,
        quantization=model.quantization or "",
        world_size=parallel.world_size,
        tp_rank=rank % tp_size,
        tp_size=tp_size,
        # With MLA the latents are not split by head.
        replicated=all(kind_of(spec) == "MLAAttentionSpec" for spec in specs_of(kv_cache_config)),
        tp_replicas=getattr(kv_cache_config, "kv_tp_replicas", 1),  # since vLLM 0.32
        pp_rank=rank // tp_size,
        pp_size=parallel.pipeline_parallel_size,
        chunk_size=config.chunk_size,
        algorithm=config.hash_algorithm,
        hash_key=config.read_hash_key(),
        extra=(
            ("attention", _attention(vllm_config, kv_cache_config)),
            ("block_size", str(KVGroups.of(kv_cache_config).block_size)),
            ("kv_cache_dtype", str(cache.cache_dtype)),
            ("kv_cache_layout", str(kv_cache_config.kv_cache_layout)),
            ("model_config", _digest(model.hf_config.to_dict())),
            # The layers of a draft model may be in the same pages.
            ("speculative", f"{draft.method}:{_model_name(draft.model)}" if draft is not None else ""),
            ("vllm", str(vllm.__version__)),
            *_media(config, model),
            *_rare_inputs(vllm_config),
        ),
    )


def group_namespace(namespace: Namespace, group: KVGroup, groups: KVGroups, layout_text: str) -> Namespace:
    """Return the namespace of one KV group, given the namespace of the model.

    A single group of full attention has the namespace of the model, with its layout.
    """
    own = replace(namespace, layout=layout_text)
    if groups.is_one_full:
        return own
    return replace(own, extra=(*own.extra, ("kv_group", f"{group.index} of {len(groups)}, {group.kind}")))


def _model_name(name: object) -> str:
    """Return a name passed to vLLM; for a local directory its last component, because paths differ between machines."""
    path = Path(str(name))
    return path.name if path.is_dir() else str(name)


def _weights(config: EngineConfig, model: Any, load: Any) -> str:
    mode = config.weights_fingerprint
    if mode.startswith(_TEXT):
        return mode
    if load.load_format == "dummy":
        return "dummy"  # generated by vLLM from a seed
    try:
        return weights_fingerprint(
            _weights_path(model, load),
            mode=cast("FingerprintMode", mode),
            algorithm=config.hash_algorithm,
            ignore_safetensors=load.load_format in _WITHOUT_SAFETENSORS,
        )
    except (OSError, ValueError) as error:
        logger.warning(
            "the weights of %s cannot be read (%s): cached KV is used by this process only. "
            "Set weights_fingerprint to text:<name of these weights> to keep it",
            model.model,
            error,
        )
        return f"unknown:{uuid.uuid4().hex}"


def _weights_path(model: Any, load: Any) -> Path:
    """Return the directory from which vLLM loads the weights."""
    if load.load_format == "tensorizer":
        raise ValueError("the load format tensorizer reads them from another place")
    return local_path(model.model, model.revision, load.download_dir)


def _media(config: EngineConfig, model: Any) -> tuple[tuple[str, str], ...]:
    """Return the inputs of media embeddings other than the media; empty for a text model.

    A changed image processor therefore changes the namespace, even if `weights_fingerprint` is a text.
    """
    media = model.multimodal_config
    if media is None:
        return ()
    settings = {name: getattr(media, name) for name in _MEDIA_SETTINGS}
    settings["video_loader"] = envs.VLLM_VIDEO_LOADER_BACKEND
    try:
        files = processor_fingerprint(
            local_path(model.model, model.revision), algorithm=config.hash_algorithm
        )
    except (OSError, ValueError):  # then the weights are unknown too, or named by the user
        files = ""
    return (("media_processor", files), ("media_settings", _digest(settings)))


def _rare_inputs(vllm_config: Any) -> Iterator[tuple[str, str]]:
    """Yield inputs of the KV that few models have. The namespaces of other models are the same as in version 0.1."""
    model, lora = vllm_config.model_config, vllm_config.lora_config
    if _has_long_rope(model.hf_config.to_dict()):
        # vLLM chooses the short or the long factors by the longest request that it accepts.
        yield "max_model_len", str(model.max_model_len)
    if (quantization := getattr(model, "quantization_config", None)) is not None:
        yield "quantization_config", _digest(quantization)
    if lora is not None and lora.target_modules is not None:
        yield "lora_target_modules", _digest(sorted(lora.target_modules))
    if lora is not None and lora.lora_dtype not in ("auto", model.dtype):
        yield "lora_dtype", str(lora.lora_dtype).removeprefix("torch.")


def _has_long_rope(value: Any) -> bool:
    """Whether a model's config has rotary embeddings with short and long factors (LongRoPE, as in Phi-3)."""
    if isinstance(value, dict):
        return "long_factor" in value or any(map(_has_long_rope, value.values()))
    return False


def _attention(vllm_config: Any, kv_cache_config: Any) -> str:
    """The attention backend, and on a CPU the page format, which depends on the instruction set."""
    backend = "+".join(sorted(backends_of(vllm_config, kv_cache_config)))
    if "CPU" not in backend:
        return backend
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    formats = {
        _get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype)
        for spec in specs_of(kv_cache_config)
        if kind_of(spec) not in _STATE
    }
    return f"{backend}/{'+'.join(sorted(formats))}"


def _digest(value: object) -> str:
    return hashlib.sha256(canonical_text(_plain(value)).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if key not in _NOT_OF_THE_MODEL}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else repr(value)


def unsupported_reason(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return the reason why this model or setup is not supported, with a remedy if there is one; None if it is.

    The result is the same in the scheduler's process and in every worker process.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if not model.is_prefix_caching_supported:
        pooling = " with this pooling type" if model.pooler_config is not None else ""
        return f"vLLM does not support prefix caching for this model{pooling}"
    if reason := _groups_reason(vllm_config, kv_cache_config):
        return reason
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism is on; it is not supported"
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        # The schedulers must plan the same steps, but loads and stores end at other times in each process.
        return "each rank has a scheduler of its own (external_launcher). Use --distributed-executor-backend mp or ray"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales is on: the KV would depend on the first prompt that was served"
    return _prefix_reason(vllm_config, kv_cache_config)


def _groups_reason(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return the reason why KV cache groups of these kinds are not supported; None if they are."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "the model has no KV cache"
    kinds = {kind_of(spec) for spec in specs_of(kv_cache_config)}
    described = f"the model has {len(groups)} KV cache groups ({', '.join(sorted(kinds))})"
    if not all(group.enable_kv_transfer for group in groups):
        return "vLLM does not allow the model's KV cache to be transferred"
    # vLLM 0.31 and older look for a prefix in groups of all kinds.
    specs = [spec for spec in specs_of(kv_cache_config) if not getattr(spec, "prefix_cacheable", True)]
    if scratch := sorted(set(map(kind_of, specs))):
        return f"{described}, and vLLM does not cache prefixes of {', '.join(scratch)}"
    if unknown := sorted(kinds - _SUPPORTED - _WINDOWED - _STATE):
        return (
            f"the KV cache is a {', '.join(unknown)};"
            " full attention, MLA, attention windows and recurrent states are supported"
        )
    if kinds <= _SUPPORTED and len(groups) == 1:
        return None
    advice = ""
    if not kinds & _STATE:  # vLLM cannot treat a recurrent state as full attention
        advice = ". Start vLLM with --disable-hybrid-kv-cache-manager; its KV cache then holds fewer tokens"
    if not serves_several_groups(kv_cache_config):
        return f"{described}, which needs vLLM 0.32 or newer{advice}"
    speculative = vllm_config.speculative_config
    if speculative is not None and (method := speculative.method) not in _DRAFTS_WITHOUT_KV:
        if method not in _DRAFTS:
            return (
                f"{described} and speculation with {method!r}; with several groups"
                f" {', '.join(sorted(_DRAFTS | _DRAFTS_WITHOUT_KV))} are supported{advice}"
            )
        if untested := sorted(kinds - _SUPPORTED - {"SlidingWindowSpec"}):
            return f"{described} and a draft model ({method}), which is not supported together with {untested[0]}{advice}"
    modes = {spec.mamba_cache_mode for spec in specs_of(kv_cache_config) if kind_of(spec) in _STATE}
    if modes - {"align"}:
        return (
            f"{described}, and vLLM keeps recurrent states in mode {min(modes)!r}. Start vLLM with"
            " --enable-prefix-caching --mamba-cache-mode align"
        )
    if kv_cache_config.cache_hit_alignment_tokens not in (None, KVGroups.of(kv_cache_config).block_size):
        return f"{described}, and in vLLM their hits can end inside a block, which is not supported"
    return None


def _prefix_reason(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return the reason why a prefill cannot continue after a cached prefix; None if it can.

    In these cases vLLM disables its own prefix caching. `enable_prefix_caching` alone does not show them, because users may
    disable prefix caching and use this connector instead.
    """
    model, cache, scheduler = vllm_config.model_config, vllm_config.cache_config, vllm_config.scheduler_config
    if any(getattr(spec, "non_causal", False) for spec in specs_of(kv_cache_config)):
        return "the model's attention is not causal; vLLM does not support prefix caching for it"
    if vllm_config.device_config.device_type != "cuda" and not (
        cache.enable_prefix_caching or scheduler.enable_chunked_prefill
    ):
        # A platform that cannot continue a prefill disables both. The option --no-enable-prefix-caching disables only one.
        if model.use_mla:
            return "vLLM does not support prefix caching for MLA on this platform; a CPU needs AMX for it"
        if platform.machine().startswith("riscv"):
            return "vLLM does not support prefix caching on RISC-V"
    return None


def backend_reason(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return the reason why the layers or attention backends of this worker are not supported; None if they are."""
    without = [index for index, group in enumerate(kv_cache_config.kv_cache_groups) if not group.layer_names]
    if without:
        return (
            f"this pipeline stage has no layer of KV cache group {', '.join(map(str, without))}; every stage needs one of "
            "each group. Use fewer stages, or VLLM_PP_LAYER_PARTITION"
        )
    if envs.VLLM_BATCH_INVARIANT and (variant := backends_of(vllm_config, kv_cache_config) & _NOT_INVARIANT):
        return f"vLLM does not support prefix caching for {min(variant)} with VLLM_BATCH_INVARIANT"
    return None


def backends_of(vllm_config: Any, kv_cache_config: Any) -> set[str]:
    """Names of the attention backends; empty in a process without the model."""
    layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    return {layers[name].get_attn_backend().get_name() for name in names if name in layers}
