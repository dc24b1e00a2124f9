"""A small Llama made on the spot: seeded weights and no tokenizer, since prompts are token ids.

The weights are random but of real scale, and queries and keys have a gain above 1: attention is peaked, so
one wrong block of KV changes the answer. Near-zero "dummy" weights would hide it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's sizes; by default 32 KiB of float32 KV a token."""

    layers: int = 8
    hidden: int = 512
    heads: int = 4
    head_dim: int = 128
    vocabulary: int = 4096


SMALL = Shape(layers=2, hidden=128, heads=2, head_dim=64)


def make_model(directory: Path, shape: Shape, *, dtype: str, max_tokens: int) -> None:
    """Write its config and weights to a new directory."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in _weights(shape).items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _weights(shape: Shape) -> dict[str, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(1234)
    hidden, attention = shape.hidden, shape.heads * shape.head_dim

    def linear(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    tensors = {
        "model.embed_tokens.weight": torch.randn(shape.vocabulary, hidden, generator=generator),
        "lm_head.weight": linear(shape.vocabulary, hidden, gain=2.0),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": torch.ones(hidden),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}.self_attn.q_proj.weight": linear(attention, hidden, gain=2.2),
            f"{name}.self_attn.k_proj.weight": linear(attention, hidden, gain=2.2),
            f"{name}.self_attn.v_proj.weight": linear(attention, hidden),
            f"{name}.self_attn.o_proj.weight": linear(hidden, attention),
            f"{name}.mlp.gate_proj.weight": linear(hidden, hidden),
            f"{name}.mlp.up_proj.weight": linear(hidden, hidden),
            f"{name}.mlp.down_proj.weight": linear(hidden, hidden, gain=0.5),
        }
    return tensors
