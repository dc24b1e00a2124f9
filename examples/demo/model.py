"""A small Llama made on the spot: seeded weights and a tokenizer of its own, so nothing is downloaded.

The weights are random but of real scale, and queries and keys have a gain above 1: attention is peaked, so
one wrong block of KV changes the words that come out. Near-zero "dummy" weights would hide it.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SPECIAL = ("<unk>", "<s>", "</s>")  # token ids 0, 1 and 2
VOCABULARY = 1536  # as many pieces as the demo's own documents give
LAYERS, HIDDEN, INTERMEDIATE = 8, 512, 512
HEADS, KV_HEADS, HEAD_SIZE = 4, 4, 128  # 32 KiB of float32 KV a token
MAX_TOKENS = 8192


def make_model(directory: Path, texts: Iterable[str], *, seed: int = 1234) -> None:
    """Write config, weights and tokenizer; a directory that is complete is left as it is."""
    done = directory / "complete"
    if done.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_config(), indent=1), encoding="utf-8")
    save_file(_weights(seed), directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory, texts)
    done.touch()


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

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
            f"{name}.self_attn.k_proj.weight": linear(KV_HEADS * HEAD_SIZE, HIDDEN, gain=2.2),
            f"{name}.self_attn.v_proj.weight": linear(KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{name}.self_attn.o_proj.weight": linear(HIDDEN, HEADS * HEAD_SIZE),
            f"{name}.mlp.gate_proj.weight": linear(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.up_proj.weight": linear(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.down_proj.weight": linear(HIDDEN, INTERMEDIATE, gain=0.5),
        }
    return tensors


def _write_tokenizer(directory: Path, texts: Iterable[str]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
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
        "model_max_length": MAX_TOKENS,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
