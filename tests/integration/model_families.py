"""Very small models of other families than Llama, with random weights of real scale.

Each output depends on every part of the prompt, as with the Llama of the demo.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from examples.demo.model import ModelSize, make_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LLAMA = ModelSize(vocabulary=512, layers=4, hidden=256, heads=4, head_size=64, max_tokens=4096)
VOCABULARY = LLAMA.vocabulary
HIDDEN, HEADS, HEAD_SIZE, LAYERS = LLAMA.hidden, LLAMA.heads, LLAMA.head_size, 3  # of the other families
WINDOW = 96  # tokens that a sliding-window layer sees

IMAGE_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(VOCABULARY, VOCABULARY + 4)
IMAGE_VOCABULARY = VOCABULARY + len(IMAGE_SPECIAL)  # tokens of a text mean no image
PATCH, MERGE = 14, 2
IMAGE_SIDE = 12 * PATCH * MERGE  # pixels; an image becomes 12 * 12 tokens
IMAGE_TOKENS = (IMAGE_SIDE // (PATCH * MERGE)) ** 2
VISION_HIDDEN, VISION_LAYERS = 64, 2


class Weights:
    """Collects named tensors from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def linear(self, name: str, rows: int, columns: int, *, gain: float = 1.0, bias: bool = False) -> None:
        self.tensors[f"{name}.weight"] = self._normal(rows, columns) * (gain / math.sqrt(columns))
        if bias:
            self.tensors[f"{name}.bias"] = self._normal(rows) * 0.1

    def embedding(self, name: str, rows: int, columns: int, *, scale: float = 1.0) -> None:
        self.tensors[f"{name}.weight"] = self._normal(rows, columns) * scale

    def constant(self, name: str, size: int, value: float) -> None:
        self.tensors[f"{name}.weight"] = torch.full((size,), value)

    def mlp(self, name: str, hidden: int, *, size: int = 0, bias: bool = False) -> None:
        size = size or hidden
        self.linear(f"{name}.gate_proj", size, hidden, bias=bias)
        self.linear(f"{name}.up_proj", size, hidden, bias=bias)
        self.linear(f"{name}.down_proj", hidden, size, gain=0.5, bias=bias)

    def attention(self, name: str, *, bias: bool = False) -> None:
        for part, gain in (("q_proj", 2.2), ("k_proj", 2.2), ("v_proj", 1.0)):
            self.linear(f"{name}.{part}", HEADS * HEAD_SIZE, HIDDEN, gain=gain, bias=bias)
        self.linear(f"{name}.o_proj", HIDDEN, HEADS * HEAD_SIZE)

    def recurrent(self, name: str, keys: int, values: int) -> None:
        """A Gated DeltaNet layer with this number of key heads and value heads."""
        channels = (2 * keys + values) * HEAD_SIZE
        self.tensors[f"{name}.conv1d.weight"] = self._normal(channels, 1, 4) / 2
        self.tensors[f"{name}.A_log"] = torch.linspace(-5.0, -2.0, values)
        self.tensors[f"{name}.dt_bias"] = torch.ones(values)
        self.linear(f"{name}.in_proj_qkvz", channels + values * HEAD_SIZE, HIDDEN)
        self.linear(f"{name}.in_proj_ba", 2 * values, HIDDEN)
        self.linear(f"{name}.out_proj", HIDDEN, values * HEAD_SIZE)
        self.constant(f"{name}.norm", HEAD_SIZE, 1.0)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)


def make_image_model(directory: Path, *, image_mean: float = 0.5) -> Path:
    """Write a Qwen2.5-VL with its image processor and tokenizer."""
    weights = Weights(seed=2)
    weights.embedding("model.embed_tokens", IMAGE_VOCABULARY, HIDDEN)
    weights.linear("lm_head", IMAGE_VOCABULARY, HIDDEN, gain=2.0)
    weights.constant("model.norm", HIDDEN, 1.0)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights.constant(f"{name}.input_layernorm", HIDDEN, 1.0)
        weights.constant(f"{name}.post_attention_layernorm", HIDDEN, 1.0)
        weights.attention(f"{name}.self_attn")
        for part in ("q_proj", "k_proj", "v_proj"):
            weights.tensors[f"{name}.self_attn.{part}.bias"] = torch.zeros(HEADS * HEAD_SIZE)
        weights.mlp(f"{name}.mlp", HIDDEN)
    _vision_tower(weights)
    _write(directory, _image_config(), weights)
    _write_tokenizer(directory, IMAGE_SPECIAL)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "min_pixels": (2 * PATCH) ** 2,
        "max_pixels": IMAGE_SIDE**2,
        "image_mean": [image_mean] * 3,
        "image_std": [0.25] * 3,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def _vision_tower(weights: Weights) -> None:
    size = VISION_HIDDEN
    weights.linear("visual.patch_embed.proj", size, 3 * 2 * PATCH * PATCH)
    patch = weights.tensors["visual.patch_embed.proj.weight"]
    weights.tensors["visual.patch_embed.proj.weight"] = patch.reshape(size, 3, 2, PATCH, PATCH)
    for layer in range(VISION_LAYERS):
        name = f"visual.blocks.{layer}"
        weights.constant(f"{name}.norm1", size, 1.0)
        weights.constant(f"{name}.norm2", size, 1.0)
        weights.linear(f"{name}.attn.qkv", 3 * size, size, gain=1.5, bias=True)
        weights.linear(f"{name}.attn.proj", size, size, bias=True)
        weights.mlp(f"{name}.mlp", size, bias=True)
    merged = size * MERGE**2
    weights.constant("visual.merger.ln_q", size, 1.0)
    weights.linear("visual.merger.mlp.0", merged, merged, bias=True)
    weights.linear("visual.merger.mlp.2", HIDDEN, merged, gain=2.0, bias=True)


def _image_config() -> dict[str, object]:
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": IMAGE_PAD,
        "video_token_id": VIDEO_PAD,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "vocab_size": IMAGE_VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": VISION_LAYERS,
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": VISION_HIDDEN,
            "num_heads": 2,
            "in_channels": 3,
            "in_chans": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 4 * PATCH * MERGE,
            "fullatt_block_indexes": [VISION_LAYERS - 1],
            "out_hidden_size": HIDDEN,
            "hidden_act": "silu",
        },
    }


def _write_tokenizer(directory: Path, special: tuple[str, ...] = ()) -> None:
    """One token for each word `t<id>`, and the special ones after them."""
    words = {f"t{token}": token for token in range(VOCABULARY)}
    words |= {name: token for token, name in enumerate(special, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "t0",
        "eos_token": "t2",
        "pad_token": "t2",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def make_llama(directory: Path) -> Path:
    """Write the Llama that most tests use: the demo's, smaller and without a tokenizer."""
    return make_model(directory, None, size=LLAMA, seed=1)


def make_embedding_model(directory: Path) -> Path:
    """Write the small Llama with a tokenizer, without which vLLM starts no pooling model."""
    make_llama(directory)
    _write_tokenizer(directory)
    return directory


def make_mla_model(directory: Path) -> Path:
    """Write a DeepSeek-V2 whose layers are all dense. vLLM's kernel for CPUs wants latents of 512 and 64 numbers."""
    latent, rope, nope, value = 512, 64, 64, 64
    weights = Weights(seed=3)
    weights.embedding("model.embed_tokens", VOCABULARY, HIDDEN)
    weights.linear("lm_head", VOCABULARY, HIDDEN, gain=2.0)
    weights.constant("model.norm", HIDDEN, 1.0)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights.constant(f"{name}.input_layernorm", HIDDEN, 1.0)
        weights.constant(f"{name}.post_attention_layernorm", HIDDEN, 1.0)
        weights.linear(f"{name}.self_attn.q_proj", HEADS * (nope + rope), HIDDEN, gain=2.2)
        weights.linear(f"{name}.self_attn.kv_a_proj_with_mqa", latent + rope, HIDDEN, gain=2.2)
        weights.constant(f"{name}.self_attn.kv_a_layernorm", latent, 1.0)
        weights.linear(f"{name}.self_attn.kv_b_proj", HEADS * (nope + value), latent)
        weights.linear(f"{name}.self_attn.o_proj", HIDDEN, HEADS * value)
        weights.mlp(f"{name}.mlp", HIDDEN)
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "moe_intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": LAYERS,
        "moe_layer_freq": 1,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return _write(directory, config, weights)


def make_sliding_window_model(directory: Path) -> Path:
    """Write a Gemma 3: two layers with a sliding window, then one that sees everything."""
    weights = Weights(seed=4)
    weights.embedding("model.embed_tokens", VOCABULARY, HIDDEN, scale=1 / math.sqrt(HIDDEN))
    weights.constant("model.norm", HIDDEN, 1.0)  # Gemma adds one to it
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):
            weights.constant(f"{name}.{norm}", HIDDEN, 0.0)
        weights.attention(f"{name}.self_attn")
        weights.constant(f"{name}.self_attn.q_norm", HEAD_SIZE, 0.5)
        weights.constant(f"{name}.self_attn.k_norm", HEAD_SIZE, 0.5)
        weights.mlp(f"{name}.mlp", HIDDEN)
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "query_pre_attn_scalar": HEAD_SIZE,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    return _write(directory, config, weights)


def make_windows_only_model(directory: Path) -> Path:
    """Write a Mistral with a sliding window in every layer."""
    weights = Weights(seed=5)
    weights.embedding("model.embed_tokens", VOCABULARY, HIDDEN)
    weights.linear("lm_head", VOCABULARY, HIDDEN, gain=2.0)
    weights.constant("model.norm", HIDDEN, 1.0)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights.constant(f"{name}.input_layernorm", HIDDEN, 1.0)
        weights.constant(f"{name}.post_attention_layernorm", HIDDEN, 1.0)
        weights.attention(f"{name}.self_attn")
        weights.mlp(f"{name}.mlp", HIDDEN)
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "sliding_window": WINDOW,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return _write(directory, config, weights)


def make_recurrent_model(directory: Path) -> Path:
    """Write a Qwen3-Next: three layers with a recurrent state (Gated DeltaNet), then one of full attention.

    vLLM's kernel for CPUs wants states of 64 by 64 numbers and bfloat16. The states decay slowly, so that they depend
    on tokens far back.
    """
    layers, keys, values, experts, expert_size = 4, 2, 2, 4, 64
    weights = Weights(seed=6)
    weights.embedding("model.embed_tokens", VOCABULARY, HIDDEN)
    weights.linear("lm_head", VOCABULARY, HIDDEN, gain=2.0)
    weights.constant("model.norm", HIDDEN, 0.0)  # one is added to it
    for layer in range(layers):
        name = f"model.layers.{layer}"
        weights.constant(f"{name}.input_layernorm", HIDDEN, 0.0)
        weights.constant(f"{name}.post_attention_layernorm", HIDDEN, 0.0)
        if layer < layers - 1:
            weights.recurrent(f"{name}.linear_attn", keys, values)
            weights.mlp(f"{name}.mlp", HIDDEN)
        else:
            weights.attention(f"{name}.self_attn")
            weights.linear(f"{name}.self_attn.q_proj", 2 * HEADS * HEAD_SIZE, HIDDEN, gain=2.2)  # with a gate
            weights.constant(f"{name}.self_attn.q_norm", HEAD_SIZE, 0.0)
            weights.constant(f"{name}.self_attn.k_norm", HEAD_SIZE, 0.0)
            weights.linear(f"{name}.mlp.gate", experts, HIDDEN)
            weights.linear(f"{name}.mlp.shared_expert_gate", 1, HIDDEN)
            for expert in (*(f"experts.{index}" for index in range(experts)), "shared_expert"):
                weights.mlp(f"{name}.mlp.{expert}", HIDDEN, size=expert_size)
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "layer_types": ["linear_attention"] * (layers - 1) + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": HEAD_SIZE,
        "linear_value_head_dim": HEAD_SIZE,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": expert_size,
        "shared_expert_intermediate_size": expert_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(layers - 1)),
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    weights.tensors = {name: tensor.bfloat16() for name, tensor in weights.tensors.items()}
    return _write(directory, config, weights)


def _write(directory: Path, config: Mapping[str, object], weights: Weights) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights.tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
