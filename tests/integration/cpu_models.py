"""Replacements for parts of vLLM that some models need and that its CPU build lacks, or has only for other CPUs."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from typing import Any


def replace_operations() -> None:
    """Replace in this process the operations on recurrent states that are Triton or CUDA kernels."""
    from vllm.model_executor.layers.mamba import mamba_mixer, mamba_mixer2
    from vllm.model_executor.layers.mamba.ops import ssd_combined
    from vllm.v1.worker import mamba_utils

    mamba_utils.batch_memcpy = _copy_states
    mamba_mixer.selective_scan_fn = _scan_mamba1
    mamba_mixer.selective_state_update = _step_mamba1
    # The product for CPUs requires contiguous rows, which this layer only makes for LoRA.
    mamba_mixer.MambaMixer.is_lora_enabled = property(lambda _: True, lambda _, value: None)
    mamba_mixer2.store_prefill_checkpoint = _store_checkpoint
    scan = ssd_combined._mamba_chunk_scan_combined_fwd
    ssd_combined._mamba_chunk_scan_combined_fwd = _scan_mamba2_by_chunks(scan)


def replace_operations_of_kimi_linear() -> None:
    """Let a Kimi Linear run on a CPU: replace the kernels of Kimi Delta Attention (KDA), and use vLLM's general MLA layer.

    vLLM has two versions of the model. Without an AMD GPU it selects the one for NVIDIA, whose MLA layer uses Triton
    kernels. The version for AMD uses the general layer if AMD's library is not installed.
    """
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn
    from vllm.model_executor.models import ModelRegistry
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    name = "KimiLinearForCausalLM"
    ModelRegistry.register_model(name, f"vllm.models.kimi_k3.amd.linear:{name}")
    convolve = kimi_gdn_linear_attn.causal_conv1d_update
    # The kernel for CPUs requires contiguous rows.
    kimi_gdn_linear_attn.causal_conv1d_update = lambda rows, *args, **options: convolve(
        rows.contiguous(), *args, **options
    )
    kimi_gdn_linear_attn.gather_initial_states = _initial_states
    kda.chunk_kda_with_fused_gate = _scan_kda
    kda.fused_recurrent_kda_packed_decode = _step_kda
    # A block is as large as a state; vLLM divides it for the kernel, which has blocks of 16 tokens.
    CPUMLABackend.supports_block_size = classmethod(lambda cls, size: size is None or size % 16 == 0)
    CPUModelRunner._zero_block_ids = _zero_blocks


def continue_mla_prefills() -> None:
    """Let models with MLA continue a prefill on a CPU without AMX.

    vLLM turns chunked prefill and prefix caching off there, although its backend for these CPUs has a prefill that uses
    the cache. The compiled rotary embedding also writes to wrong elements if the queries are not contiguous.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_otherwise(vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        prefix_caching, step_tokens = cache.enable_prefix_caching, scheduler.max_num_batched_tokens
        block_size = cache.block_size
        check(vllm_config)
        if vllm_config.model_config.is_hybrid:
            cache.block_size = block_size  # as large as a state, not as a block of the kernel
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = True, step_tokens
        cache.enable_prefix_caching = prefix_caching

    CpuPlatform.check_and_update_config = staticmethod(check_otherwise)
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native


def install(directory: Path) -> None:
    """Write the metadata of a vLLM plug-in that replaces the operations in each process with `directory` on its path."""
    metadata = directory / "cpu_models-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-models\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\ncpu_models = {__name__}:{replace_operations.__name__}\n"
    )


def _copy_states(sources: Any, targets: Any, sizes: Any) -> None:
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def _scan_mamba1(
    u: Any,
    ssm_states: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    z: Any,
    delta_bias: Any,
    *,
    query_start_loc: Any,
    cache_indices: Any,
    has_initial_state: Any,
    **_: Any,
) -> Any:
    """Scan the sequences of a batch, and update their states. `u`, `delta`, `z`: (channels, tokens); `B`, `C`: (state, tokens)."""
    import torch
    from torch.nn import functional

    delta = functional.softplus(delta.float() + delta_bias[:, None])
    decay = torch.exp(delta.T[..., None] * A)  # (tokens, channels, state)
    added = (delta * u.float()).T[..., None] * B.float().T[:, None]
    out = torch.empty_like(u)
    for row, (start, stop) in enumerate(itertools.pairwise(query_start_loc.tolist())):
        block = cache_indices[row]
        state = ssm_states[block].float() if has_initial_state[row] else torch.zeros_like(added[0])
        for token in range(start, stop):
            state = decay[token] * state + added[token]
            out[:, token] = state @ C[:, token].float()
        ssm_states[block] = state
    return (out + D[:, None] * u) * functional.silu(z)


def _step_mamba1(
    ssm_states: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    dt_bias: Any,
    *,
    z: Any,
    state_batch_indices: Any,
    out: Any,
    **_: Any,
) -> None:
    """Update the states by one token each. `x`, `dt`, `z`, `out`: (rows, channels); `B`, `C`: (rows, state)."""
    import torch
    from torch.nn import functional

    blocks = state_batch_indices.flatten()
    dt = functional.softplus(dt.float() + dt_bias)
    state = torch.exp(dt[..., None] * A) * ssm_states[blocks] + (dt * x)[..., None] * B[:, None]
    ssm_states[blocks] = state
    out.copy_(((state @ C[..., None])[..., 0] + D * x) * functional.silu(z))


def _scan_mamba2_by_chunks(scan: Any) -> Any:
    """Return vLLM's scan for CPUs, extended by the states after each chunk."""
    import torch

    def scan_by_chunks(
        x: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        chunk_size: int,
        out: Any,
        *,
        initial_states: Any,
        return_intermediate_states: bool,
        **options: Any,
    ) -> Any:
        if not return_intermediate_states:
            return scan(x, dt, A, B, C, chunk_size, out, initial_states=initial_states, **options)
        rows = options["seq_idx"].tolist()
        states: list[Any] = []
        for index, (start, stop) in enumerate(itertools.pairwise(options["cu_chunk_seqlens"].tolist())):
            state = None
            if index and rows[index] == rows[index - 1]:
                state = states[-1]
            elif initial_states is not None:
                state = initial_states[rows[index], None]
            part = slice(start, stop)
            options["cu_seqlens"] = torch.tensor([0, stop - start], dtype=torch.int32)
            states.append(
                scan(
                    x[part],
                    dt[part],
                    A,
                    B[part],
                    C[part],
                    chunk_size,
                    out[part],
                    initial_states=state,
                    **options,
                )
            )
        return torch.cat(states)

    return scan_by_chunks


def _store_checkpoint(
    checkpoint: Any,
    chunk_idx: Any,
    x: Any,
    conv_state: Any,
    chunk_states: Any,
    ssm_state: Any,
    query_start_loc: Any,
    *,
    state_len: int,
) -> None:
    """Write the state of each row at its checkpoint to a block. An offset of 0 is no checkpoint."""
    for row, offset in enumerate(checkpoint.checkpoint_offsets.tolist()):
        if offset > 0:
            block, end = checkpoint.state_indices[row], query_start_loc[row] + offset
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[chunk_idx[row]]


def _zero_blocks(runner: Any, block_ids: list[int]) -> None:
    """Zero new blocks of attention. vLLM's version for CPUs takes the numbers of blocks for those of the kernel's blocks."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    for group in runner.kv_cache_config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, AttentionSpec):
            for layer in group.layer_names:
                cache = runner.compilation_config.static_forward_context[layer].kv_cache
                cache.unflatten(0, (runner.kv_cache_config.num_blocks, -1))[block_ids] = 0


def _initial_states(states: Any, indices: Any, has_initial_state: Any) -> Any:
    """The states of the rows of a batch, zeros for a row without one."""
    return states[indices].masked_fill(~has_initial_state[:, None, None, None], 0)


def _scan_kda(
    q: Any,
    k: Any,
    v: Any,
    raw_g: Any,
    raw_beta: Any,
    A_log: Any,
    g_bias: Any,
    *,
    initial_state: Any,
    cu_seqlens: Any,
    **_: Any,
) -> tuple[Any, Any]:
    """Scan the sequences of a batch. Return the outputs and the states at the ends of the sequences.

    `q`, `k`, `v`, `raw_g`: (1, tokens, heads, channels); `raw_beta`: (1, tokens, heads); states: (sequences, heads,
    values, keys). The recurrence is that of Kimi Linear (arXiv:2510.26692).
    """
    import torch

    decay, beta = _gates_of_kda(raw_g[0], raw_beta[0], A_log, g_bias)
    out = torch.empty_like(v)
    states = []
    for row, (start, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        state = initial_state[row].float()
        for token in range(start, stop):
            state = _next_state_of_kda(state, k[0, token], v[0, token], decay[token], beta[token])
            out[0, token] = _output_of_kda(state, q[0, token])
        states.append(state)
    return out, torch.stack(states)


def _step_kda(
    mixed_qkv: Any,
    raw_g: Any,
    raw_beta: Any,
    A_log: Any,
    dt_bias: Any,
    lower_bound: Any,
    initial_state: Any,
    state_indices: Any,
) -> tuple[Any, Any]:
    """Update the states at `state_indices` by one token each. `mixed_qkv`: (rows, 3 * heads * channels)."""
    assert lower_bound is None
    rows, heads, channels = raw_g.shape[1:]
    q, k, v = mixed_qkv.view(rows, 3, heads, channels).unbind(1)
    decay, beta = _gates_of_kda(raw_g[0], raw_beta[0], A_log, dt_bias)
    state = _next_state_of_kda(initial_state[state_indices].float(), k, v, decay, beta)
    initial_state[state_indices] = state
    return _output_of_kda(state, q)[None].to(mixed_qkv.dtype), initial_state


def _gates_of_kda(raw_g: Any, raw_beta: Any, A_log: Any, g_bias: Any) -> tuple[Any, Any]:
    """The decay of each channel of a state, (tokens, heads, channels), and the weight of each token, (tokens, heads)."""
    import torch
    from torch.nn import functional

    steps = functional.softplus(raw_g.float() + g_bias.view(raw_g.shape[1:]))
    return torch.exp(-torch.exp(A_log)[:, None] * steps), torch.sigmoid(raw_beta.float())


def _next_state_of_kda(state: Any, k: Any, v: Any, decay: Any, beta: Any) -> Any:
    k = _normalized(k)[..., None, :]
    state = state * decay[..., None, :]
    change = (v.float() - (state * k).sum(-1)) * beta[..., None]
    return state + change[..., None] * k


def _output_of_kda(state: Any, q: Any) -> Any:
    return (state * _normalized(q)[..., None, :]).sum(-1) * q.shape[-1] ** -0.5


def _normalized(vectors: Any) -> Any:
    vectors = vectors.float()
    return vectors * (vectors.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
