"""Which models and setups the connector supports."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from vllm import envs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_SUPPORTED = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
# --disable-hybrid-kv-cache-manager makes full attention of these, if there is full attention besides.
_LOCAL = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec"})
_NOT_INVARIANT = frozenset({"FLASHINFER", "TRITON_MLA"})  # a prefix changes the order of their sums


def unsupported_reason(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why this model or setup cannot be served from, with the remedy where there is one; None when it can.

    The answer is the same in the scheduler's process and in every worker's.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if not model.is_prefix_caching_supported:
        pooling = " with this pooling type" if model.pooler_config is not None else ""
        return f"vLLM does not support prefix caching for this model{pooling}"
    if reason := _groups_reason(kv_cache_config.kv_cache_groups):
        return reason
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism is on; it is not supported"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales is on: the KV would depend on the first prompt that was served"
    return _prefix_reason(vllm_config, kv_cache_config)


def _groups_reason(groups: Sequence[Any]) -> str | None:
    """Why KV cache groups of these kinds are not supported."""
    kinds = {type(spec).__name__ for group in groups for spec in specs_of(group.kv_cache_spec)}
    if len(groups) != 1:
        reason = f"the model has {len(groups)} KV cache groups ({', '.join(sorted(kinds))}); one is supported"
        if kinds & _SUPPORTED and kinds <= _SUPPORTED | _LOCAL:
            # vLLM then keeps the KV of every layer for the whole prompt, as full attention does.
            reason += (
                ". Start vLLM with --disable-hybrid-kv-cache-manager; its KV cache then holds fewer tokens"
            )
        return reason
    if not groups[0].enable_kv_transfer:
        return "the model's KV cache is not to be transferred"
    if unknown := sorted(kinds - _SUPPORTED):
        reason = f"the KV cache is a {', '.join(unknown)}; full attention and MLA are supported"
        if kinds == {"SlidingWindowSpec"}:  # vLLM takes the window for the longest prompt then
            reason += ". Start vLLM with --disable-sliding-window if no request is longer than the window"
        return reason
    return None


def _prefix_reason(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why a prefill cannot continue after a cached prefix: the cases in which vLLM disables its own prefix caching.

    `enable_prefix_caching` alone does not tell them, since a user may disable prefix caching too and have this
    connector instead.
    """
    model, cache, scheduler = vllm_config.model_config, vllm_config.cache_config, vllm_config.scheduler_config
    if any(
        getattr(spec, "non_causal", False)
        for spec in specs_of(kv_cache_config.kv_cache_groups[0].kv_cache_spec)
    ):
        return "the model's attention is not causal; vLLM does not support prefix caching for it"
    if vllm_config.device_config.device_type != "cuda" and not (
        cache.enable_prefix_caching or scheduler.enable_chunked_prefill
    ):
        # A platform that cannot continue a prefill forces both off, which no user's --no-enable-prefix-caching does.
        if model.use_mla:
            return "vLLM does not support prefix caching for MLA on this platform; a CPU needs AMX for it"
        if platform.machine().startswith("riscv"):
            return "vLLM does not support prefix caching on RISC-V"
    return None


def backend_reason(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """`unsupported_reason` of the loaded model's attention backends, which only a worker knows."""
    if envs.VLLM_BATCH_INVARIANT and (variant := backends_of(vllm_config, kv_cache_config) & _NOT_INVARIANT):
        return f"vLLM does not support prefix caching for {min(variant)} with VLLM_BATCH_INVARIANT"
    return None


def specs_of(spec: Any) -> Iterable[Any]:
    """The spec, or those of each layer where layers differ in their sizes."""
    inner = getattr(spec, "kv_cache_specs", None)
    return inner.values() if isinstance(inner, dict) else (spec,)


def backends_of(vllm_config: Any, kv_cache_config: Any) -> set[str]:
    """Names of the attention backends; none in a process without the model."""
    layers: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    group = kv_cache_config.kv_cache_groups[0]
    return {layers[name].get_attn_backend().get_name() for name in group.layer_names if name in layers}
