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
        check(vllm_config)
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
