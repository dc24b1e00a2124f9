"""A small generated Llama with random weights and its own tokenizer, so that nothing is downloaded.

The weights have a realistic scale, and queries and keys have a gain above 1. Attention is therefore peaked, and one
wrong block of KV changes the output. Near-zero "dummy" weights would hide it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SPECIAL = ("<unk>", "<s>", "</s>")  # token ids 0, 1 and 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Dimensions of a model, without grouped-query attention."""

    vocabulary: int
    layers: int
    hidden: int
    heads: int
    head_size: int
    max_tokens: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of float32 KV per token."""
        return 2 * self.layers * self.heads * self.head_size * 4


# The documents of the demo give a vocabulary of 1536 pieces; 32 KiB of KV per token.
DEMO = ModelSize(vocabulary=1536, layers=8, hidden=512, heads=4, head_size=128, max_tokens=8192)


def make_model(
    directory: Path, texts: Iterable[str] | None, *, size: ModelSize = DEMO, seed: int = 1234
) -> Path:
    """Write config, weights and tokenizer, unless the directory is complete.

    Args:
        directory: Output directory; created if needed.
        texts: Training texts of the tokenizer; None writes no tokenizer.
        size: Dimensions of the model.
        seed: Seed of the weights.

    Returns:
        `directory`.
    """
    done = directory / "complete"
    if done.exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_config(size), indent=1), encoding="utf-8")
    save_file(_weights(size, seed), directory / "model.safetensors", metadata={"format": "pt"})
    if texts is not None:
        _write_tokenizer(directory, texts, size)
    done.touch()
    return directory


def _config(size: ModelSize) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "head_dim": size.head_size,
        "max_position_embeddings": size.max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }


def _weights(size: ModelSize, seed: int) -> dict[str, torch.Tensor]:
    hidden, attention = size.hidden, size.heads * size.head_size
    generator = torch.Generator().manual_seed(seed)

    def linear(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    tensors = {
        "model.embed_tokens.weight": torch.randn(size.vocabulary, hidden, generator=generator),
        "lm_head.weight": linear(size.vocabulary, hidden, gain=2.0),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(size.layers):
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


def _write_tokenizer(directory: Path, texts: Iterable[str], size: ModelSize) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size.vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "model_max_length": size.max_tokens,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
