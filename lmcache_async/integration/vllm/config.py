"""From vLLM's configuration to ours: the engine's config, what the KV depends on."""

from __future__ import annotations

import hashlib
import logging
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vllm import envs

from lmcache_async.config import EngineConfig, load_config
from lmcache_async.engine.check import load_engine_config
from lmcache_async.hashing import (
    FingerprintMode,
    Namespace,
    canonical_text,
    processor_fingerprint,
    weights_fingerprint,
)
from lmcache_async.integration.vllm.adapters import local_path
from lmcache_async.integration.vllm.requests import Roles
from lmcache_async.integration.vllm.support import backends_of, specs_of

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

_TEXT = "text:"
_MEDIA_SETTINGS = (  # of vLLM's MultiModalConfig: what changes how media become embeddings
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")  # in the model's config, but of the machine


def engine_config(vllm_config: Any, block_size: int) -> EngineConfig:
    """The engine's config, its chunk size rounded up to whole blocks.

    Raises:
        ConfigError: A key or value is wrong.
    """
    config = load_engine_config(extra=vllm_config.kv_transfer_config.kv_connector_extra_config)
    rounded = -(-config.chunk_size // block_size) * block_size
    if rounded != config.chunk_size:
        logger.info(
            "chunk_size %d is no multiple of vLLM's block size %d; %d is used",
            config.chunk_size,
            block_size,
            rounded,
        )
        config = config.model_copy(update={"chunk_size": rounded})
    return config


def block_size_of(kv_cache_config: Any) -> int:
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def layerwise_always(extra_config: Mapping[str, Any]) -> bool:
    """Whether loads are awaited layer by layer on every device.

    Raises:
        ConfigError: A key or value is wrong.
    """
    return load_config(extra=extra_config).vllm.layerwise_load == "always"


def steps_overlap(vllm_config: Any) -> bool:
    """Whether vLLM plans a step before the one before it has ended."""
    return bool(
        vllm_config.scheduler_config.async_scheduling
        or vllm_config.parallel_config.pipeline_parallel_size > 1
    )


def layerwise_tokens(config: EngineConfig, vllm_config: Any) -> int:
    """The longest hit that the batch itself waits for; 0 for none.

    Blocks of such a load are in vLLM's prefix cache before they are filled. Should it fail, then nobody
    may have used them, which holds where a step's end is known before the next one is planned.
    """
    wanted = config.vllm.layerwise_load
    overlapping = steps_overlap(vllm_config)
    if wanted == "always" and overlapping:
        logger.warning(
            "vllm.layerwise_load: always has no effect with asynchronous scheduling or pipeline parallelism; "
            "start vLLM with --no-async-scheduling"
        )
    on = wanted == "always" or (wanted == "auto" and vllm_config.device_config.device_type == "cpu")
    return config.vllm.layerwise_max_tokens if on and not overlapping else 0


def roles_of(transfer: Any, config: EngineConfig) -> Roles:
    """What this vLLM does, by its `kv_transfer_config`."""
    consumes, produces = transfer.is_kv_consumer, transfer.is_kv_producer
    return Roles(
        loads=consumes or config.vllm.producer_loads,
        stores=produces or config.vllm.consumer_stores,
        hands_over=not consumes,
    )


def namespace_of(vllm_config: Any, kv_cache_config: Any, config: EngineConfig, layout_text: str) -> Namespace:
    """What this rank's KV depends on besides tokens and request. Reads the model's files.

    Ranks whose KV is the same have the same namespace, and so the same keys in a tier that they share.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    tp_size = parallel.tensor_parallel_size
    rank = parallel.rank
    return Namespace(
        model=_model_name(model),
        weights=_weights(config, model, vllm_config.load_config.load_format),
        dtype=str(model.dtype).removeprefix("torch."),
        layout=layout_text,
        quantization=model.quantization or "",
        world_size=parallel.world_size,
        tp_rank=rank % tp_size,
        tp_size=tp_size,
        replicated=_replicated(kv_cache_config),
        pp_rank=rank // tp_size,
        pp_size=parallel.pipeline_parallel_size,
        chunk_size=config.chunk_size,
        algorithm=config.hash_algorithm,
        hash_key=config.read_hash_key(),
        extra=(
            ("attention", _attention(vllm_config, kv_cache_config)),
            ("block_size", str(block_size_of(kv_cache_config))),
            ("kv_cache_dtype", str(cache.cache_dtype)),
            ("kv_cache_layout", str(kv_cache_config.kv_cache_layout)),
            ("model_config", _digest(model.hf_config.to_dict())),
            ("speculative", _speculative(vllm_config.speculative_config)),
            ("vllm", _vllm_version()),
            *_media(config, model),
        ),
    )


def replica_of(vllm_config: Any) -> int:
    """The number of the data-parallel replica that this engine is; 0 without data parallelism.

    Each replica of a dense model is an engine with `data_parallel_size` 1 and `data_parallel_rank` 0; only the
    index differs.
    """
    return int(getattr(vllm_config.parallel_config, "data_parallel_index", 0))  # older versions may lack it


def _replicated(kv_cache_config: Any) -> bool:
    """Whether all tensor-parallel ranks have the same KV: MLA's latents are of no head, and are not split."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in specs_of(group.kv_cache_spec)]
    return all(type(spec).__name__ == "MLAAttentionSpec" for spec in specs)


def _model_name(model: Any) -> str:
    """As it was asked for; of a local folder its name, since the place differs between machines."""
    path = Path(model.model)
    return path.name if path.is_dir() else str(model.model)


def _weights(config: EngineConfig, model: Any, load_format: str) -> str:
    mode = config.weights_fingerprint
    if mode.startswith(_TEXT):
        return mode
    if load_format == "dummy":
        return "dummy"  # vLLM makes them from a seed of its own
    try:
        return weights_fingerprint(
            local_path(model.model, model.revision),
            mode=cast("FingerprintMode", mode),
            algorithm=config.hash_algorithm,
        )
    except (OSError, ValueError) as error:
        logger.warning(
            "the weights of %s cannot be told apart (%s): what is cached now serves this process alone. "
            "Set weights_fingerprint to text:<a name of these weights> to keep it",
            model.model,
            error,
        )
        return f"unknown:{uuid.uuid4().hex}"


def _media(config: EngineConfig, model: Any) -> tuple[tuple[str, str], ...]:
    """What embeddings of images, audio and video depend on besides their content; nothing for a text model.

    With it a changed image processor is another namespace, also where `weights_fingerprint` is the user's text.
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
    except (OSError, ValueError):  # then the weights are unknown too, or are what the user says
        files = ""
    return (("media_processor", files), ("media_settings", _digest(settings)))


def _attention(vllm_config: Any, kv_cache_config: Any) -> str:
    """The attention backend, and on a CPU the page format, which depends on the instruction set."""
    group = kv_cache_config.kv_cache_groups[0]
    backend = "+".join(sorted(backends_of(vllm_config, kv_cache_config)))
    if "CPU" not in backend:
        return backend
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    spec = next(iter(specs_of(group.kv_cache_spec)))
    isa = _get_attn_isa(
        vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
    )
    return f"{backend}/{isa}"


def _speculative(config: Any) -> str:
    """A draft model's layers may lie in the same pages."""
    return "" if config is None else f"{config.method}:{config.model}"


def _digest(value: object) -> str:
    return hashlib.sha256(canonical_text(_plain(value)).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if key not in _NOT_OF_THE_MODEL}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else repr(value)


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)
