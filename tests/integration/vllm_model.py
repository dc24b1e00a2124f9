"""A very small Llama whose output depends on every block of its KV."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 512
LAYERS, HIDDEN, HEADS, HEAD_SIZE = 4, 256, 4, 64
KV_BYTES = 2 * LAYERS * HEADS * HEAD_SIZE * 4  # of one token, float32


def make_model(directory: Path) -> Path:
    """Write the model. Weights are of real scale and attention is peaked: with tiny ones wrong KV goes unseen."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(_config()))
    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def linear(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "lm_head.weight": linear(VOCABULARY, HIDDEN, gain=2.0),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.self_attn.q_proj.weight": linear(HEADS * HEAD_SIZE, HIDDEN, gain=2.2),
            f"{name}.self_attn.k_proj.weight": linear(HEADS * HEAD_SIZE, HIDDEN, gain=2.2),
            f"{name}.self_attn.v_proj.weight": linear(HEADS * HEAD_SIZE, HIDDEN),
            f"{name}.self_attn.o_proj.weight": linear(HIDDEN, HEADS * HEAD_SIZE),
            f"{name}.mlp.gate_proj.weight": linear(HIDDEN, HIDDEN),
            f"{name}.mlp.up_proj.weight": linear(HIDDEN, HIDDEN),
            f"{name}.mlp.down_proj.weight": linear(HIDDEN, HIDDEN, gain=0.5),
        }
    return tensors
