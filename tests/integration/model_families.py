"""Very small models of families other than Llama, with random weights of realistic scale.

Each output depends on every part of the prompt, as with the Llama of the demo.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from examples.demo.model import ModelSize, make_model

LLAMA = ModelSize(vocabulary=512, layers=4, hidden=256, heads=4, head_size=64, max_tokens=4096)
VOCABULARY = LLAMA.vocabulary
HIDDEN, HEADS, HEAD_SIZE, LAYERS = LLAMA.hidden, LLAMA.heads, LLAMA.head_size, 3  # of the other families
WINDOW = 96  # tokens that a sliding-window layer sees
GEMMA2_WINDOW, GPT_OSS_WINDOW = 100, 80  # these end inside a block
LLAMA4_CHUNK = 128  # tokens of an attention chunk
KV_HEADS = 2  # of the families with grouped-query attention
EXPERTS, EXPERT_SIZE = 4, 64  # of the families with a mixture of experts
# vLLM's CPU kernel for MLA requires latents of 512 and 64 numbers.
MLA = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}

_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")

IMAGE_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(VOCABULARY, VOCABULARY + 4)
IMAGE_VOCABULARY = VOCABULARY + len(IMAGE_SPECIAL)  # token ids of a text are below the image tokens
PATCH, MERGE = 14, 2
IMAGE_SIDE = 12 * PATCH * MERGE  # pixels; an image becomes 12 * 12 tokens
IMAGE_TOKENS = (IMAGE_SIDE // (PATCH * MERGE)) ** 2
VISION_HIDDEN, VISION_LAYERS = 64, 2


class Weights:
    """Collects named tensors from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def decoder(
        self,
        *,
        layers: int = LAYERS,
        vocabulary: int = VOCABULARY,
        norms: Sequence[str] = _NORMS,
        norm: float = 1.0,
        final_norm: float = 1.0,
        tied: bool = False,
    ) -> Iterator[str]:
        """Write the embeddings, the output layer and the norms, and yield the name of each layer.

        Args:
            norm: Value of the norms of a layer.
            tied: The embeddings are the output layer too, and the model multiplies them by sqrt(HIDDEN), as Gemma does.
        """
        self.normal("model.embed_tokens.weight", vocabulary, HIDDEN, scale=HIDDEN**-0.5 if tied else 1.0)
        if not tied:
            self.linear("lm_head", vocabulary, HIDDEN, gain=2.0)
        self.constant("model.norm", HIDDEN, final_norm)
        for layer in range(layers):
            name = f"model.layers.{layer}"
            for part in norms:
                self.constant(f"{name}.{part}", HIDDEN, norm)
            yield name

    def normal(self, name: str, *shape: int, scale: float = 1.0) -> None:
        self.tensors[name] = torch.randn(*shape, generator=self._generator) * scale

    def linear(self, name: str, rows: int, columns: int, *, gain: float = 1.0, bias: bool = False) -> None:
        self.normal(f"{name}.weight", rows, columns, scale=gain / math.sqrt(columns))
        if bias:
            self.normal(f"{name}.bias", rows, scale=0.1)

    def constant(self, name: str, size: int, value: float) -> None:
        self.tensors[f"{name}.weight"] = torch.full((size,), value)

    def mlp(
        self,
        name: str,
        *,
        hidden: int = HIDDEN,
        size: int = 0,
        bias: bool = False,
        parts: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        size = size or hidden
        gate, up, down = parts
        self.linear(f"{name}.{gate}", size, hidden, bias=bias)
        self.linear(f"{name}.{up}", size, hidden, bias=bias)
        self.linear(f"{name}.{down}", hidden, size, gain=0.5, bias=bias)

    def experts(
        self,
        name: str,
        *,
        parts: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        more: Sequence[str] = (),
    ) -> None:
        """A mixture of experts with the router `gate`."""
        self.linear(f"{name}.gate", EXPERTS, HIDDEN)
        for part in more:
            self.linear(f"{name}.{part}", 1, HIDDEN)
        for expert in range(EXPERTS):
            self.mlp(f"{name}.experts.{expert}", size=EXPERT_SIZE, parts=parts)

    def fused_experts(self, name: str, *, bias: bool = False) -> None:
        """The experts of a layer in two transposed tensors."""
        self.normal(f"{name}.gate_up_proj", EXPERTS, HIDDEN, 2 * EXPERT_SIZE, scale=1 / math.sqrt(HIDDEN))
        self.normal(f"{name}.down_proj", EXPERTS, EXPERT_SIZE, HIDDEN, scale=0.5 / math.sqrt(EXPERT_SIZE))
        if bias:
            self.normal(f"{name}.gate_up_proj_bias", EXPERTS, 2 * EXPERT_SIZE, scale=0.1)
            self.normal(f"{name}.down_proj_bias", EXPERTS, HIDDEN, scale=0.1)

    def attention(
        self,
        name: str,
        *,
        heads: int = HEADS,
        kv_heads: int = HEADS,
        norm: float | None = None,
        bias: bool = False,
    ) -> None:
        """Attention with distinct scores, and with norms of queries and keys if a value is given for them."""
        gain = 2.2 if norm is None else 1.0
        for part, own, scale in (
            ("q_proj", heads, gain),
            ("k_proj", kv_heads, gain),
            ("v_proj", kv_heads, 1.0),
        ):
            self.linear(f"{name}.{part}", own * HEAD_SIZE, HIDDEN, gain=scale, bias=bias)
        self.linear(f"{name}.o_proj", HIDDEN, heads * HEAD_SIZE, bias=bias)
        if norm is not None:
            for part in ("q_norm", "k_norm"):
                self.constant(f"{name}.{part}", HEAD_SIZE, norm)

    def recurrent(self, name: str, keys: int, values: int) -> None:
        """A Gated DeltaNet layer with this number of key heads and value heads."""
        channels = (2 * keys + values) * HEAD_SIZE
        self.normal(f"{name}.conv1d.weight", channels, 1, 4, scale=0.5)
        self.tensors[f"{name}.A_log"] = torch.linspace(-5.0, -2.0, values)
        self.tensors[f"{name}.dt_bias"] = torch.ones(values)
        self.linear(f"{name}.in_proj_qkvz", channels + values * HEAD_SIZE, HIDDEN)
        self.linear(f"{name}.in_proj_ba", 2 * values, HIDDEN)
        self.linear(f"{name}.out_proj", HIDDEN, values * HEAD_SIZE)
        self.constant(f"{name}.norm", HEAD_SIZE, 1.0)

    def mamba2(self, name: str, heads: int, states: int) -> None:
        """A Mamba 2 layer with one group, and heads whose state is HEAD_SIZE by `states` numbers.

        The states decay slowly, so that they depend on tokens far back.
        """
        inner = heads * HEAD_SIZE
        channels = inner + 2 * states
        self.linear(f"{name}.in_proj", inner + channels + heads, HIDDEN)
        self.normal(f"{name}.conv1d.weight", channels, 1, 4, scale=0.5)
        self.normal(f"{name}.conv1d.bias", channels, scale=0.1)
        self.tensors[f"{name}.A_log"] = torch.linspace(-5.0, -2.0, heads)
        self.tensors[f"{name}.dt_bias"] = torch.full((heads,), -2.0)
        self.tensors[f"{name}.D"] = torch.full((heads,), 0.1)
        self.constant(f"{name}.norm", inner, 1.0)
        self.linear(f"{name}.out_proj", HIDDEN, inner)

    def mamba1(self, name: str, inner: int, states: int, rank: int) -> None:
        """A Mamba 1 layer with `inner` channels, whose state is `states` numbers each."""
        self.linear(f"{name}.in_proj", 2 * inner, HIDDEN)
        self.normal(f"{name}.conv1d.weight", inner, 1, 4, scale=0.5)
        self.normal(f"{name}.conv1d.bias", inner, scale=0.1)
        self.linear(f"{name}.x_proj", rank + 2 * states, inner)
        self.linear(f"{name}.dt_proj", inner, rank, gain=0.3)
        self.tensors[f"{name}.dt_proj.bias"] = torch.full((inner,), -3.0)
        self.tensors[f"{name}.A_log"] = torch.linspace(-4.0, -1.0, states).repeat(inner, 1)
        self.tensors[f"{name}.D"] = torch.full((inner,), 0.1)
        for part, size in (("dt", rank), ("b", states), ("c", states)):
            self.constant(f"{name}.{part}_layernorm", size, 1.0)
        self.linear(f"{name}.out_proj", HIDDEN, inner)

    def kda(self, name: str, heads: int) -> None:
        """A layer of Kimi Delta Attention, whose states decay slowly."""
        inner = heads * HEAD_SIZE
        for part in ("q", "k", "v"):
            self.linear(f"{name}.{part}_proj", inner, HIDDEN)
            self.normal(f"{name}.{part}_conv1d.weight", inner, 1, 4, scale=0.5)
        for part in ("f", "g"):
            self.linear(f"{name}.{part}_a_proj", HEAD_SIZE, HIDDEN)
            self.linear(f"{name}.{part}_b_proj", inner, HEAD_SIZE)
        self.linear(f"{name}.b_proj", heads, HIDDEN)
        self.tensors[f"{name}.A_log"] = torch.linspace(-5.0, -2.0, heads).view(1, 1, heads, 1)
        self.tensors[f"{name}.dt_bias"] = torch.full((inner,), -2.0)
        self.constant(f"{name}.o_norm", HEAD_SIZE, 1.0)
        self.linear(f"{name}.o_proj", HIDDEN, inner)

    def mla(self, name: str) -> None:
        """Attention with one latent vector per token (MLA)."""
        self.linear(
            f"{name}.q_proj", HEADS * (MLA["qk_nope_head_dim"] + MLA["qk_rope_head_dim"]), HIDDEN, gain=2.2
        )
        self.linear(
            f"{name}.kv_a_proj_with_mqa", MLA["kv_lora_rank"] + MLA["qk_rope_head_dim"], HIDDEN, gain=2.2
        )
        self.constant(f"{name}.kv_a_layernorm", MLA["kv_lora_rank"], 1.0)
        self.linear(
            f"{name}.kv_b_proj", HEADS * (MLA["qk_nope_head_dim"] + MLA["v_head_dim"]), MLA["kv_lora_rank"]
        )
        self.linear(f"{name}.o_proj", HIDDEN, HEADS * MLA["v_head_dim"])


def make_image_model(directory: Path, *, image_mean: float = 0.5) -> Path:
    """Write a Qwen2.5-VL with its image processor and tokenizer."""
    weights = Weights(seed=2)
    for name in weights.decoder(vocabulary=IMAGE_VOCABULARY):
        weights.attention(f"{name}.self_attn")
        for part in ("q_proj", "k_proj", "v_proj"):
            weights.tensors[f"{name}.self_attn.{part}.bias"] = torch.zeros(HEADS * HEAD_SIZE)
        weights.mlp(f"{name}.mlp")
    _vision_tower(weights)
    _write(directory, weights, "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", **_image_config())
    write_tokenizer(directory, IMAGE_SPECIAL)
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
        weights.mlp(f"{name}.mlp", hidden=size, bias=True)
    merged = size * MERGE**2
    weights.constant("visual.merger.ln_q", size, 1.0)
    weights.linear("visual.merger.mlp.0", merged, merged, bias=True)
    weights.linear("visual.merger.mlp.2", HIDDEN, merged, gain=2.0, bias=True)


def _image_config() -> dict[str, object]:
    return {
        "image_token_id": IMAGE_PAD,
        "video_token_id": VIDEO_PAD,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "vocab_size": IMAGE_VOCABULARY,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
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


def write_tokenizer(directory: Path, special: tuple[str, ...] = ()) -> None:
    """Write a tokenizer with one token for each word `t<id>` and the special tokens after them."""
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
    """Write the Llama that most tests use: the demo's, but smaller and without a tokenizer."""
    return make_model(directory, None, size=LLAMA, seed=1)


def make_gemma3n(directory: Path) -> Path:
    """Write a Gemma 3n. Its last three layers have no KV, and use that of the last earlier layer of their kind."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    layers = 9
    config = Gemma3nTextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=HIDDEN,
        hidden_size_per_layer_input=32,
        intermediate_size=[HIDDEN] * layers,
        activation_sparsity_pattern=[0.0] * layers,
        num_hidden_layers=layers,
        num_kv_shared_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 3,
        sliding_window=WINDOW,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        altup_num_inputs=2,
        laurel_rank=16,
        max_position_embeddings=LLAMA.max_tokens,
    )
    model = Gemma3nForCausalLM(config)
    generator = torch.Generator().manual_seed(25)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                scale = 0.1 if "embed" in name else weight.shape[-1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    model.float().save_pretrained(directory)
    return directory


def make_embedding_model(directory: Path) -> Path:
    """Write the small Llama with a tokenizer, which vLLM requires for a pooling model."""
    make_llama(directory)
    write_tokenizer(directory)
    return directory


def make_adapter(directory: Path, *, seed: int) -> Path:
    """Write a LoRA adapter of the Llama that changes every projection of the attention."""
    weights, rank, size = Weights(seed), 8, HEADS * HEAD_SIZE
    parts = ["q_proj", "k_proj", "v_proj", "o_proj"]
    for layer in range(LLAMA.layers):
        for part in parts:
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights.linear(f"{name}.lora_A", rank, HIDDEN)
            weights.linear(f"{name}.lora_B", size, rank)
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": parts, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights.tensors, directory / "adapter_model.safetensors")
    return directory


def make_qwen3(directory: Path) -> Path:
    """Write a Qwen3: norms of queries and keys, and keys shared by two queries each."""
    weights = Weights(seed=7)
    for name in weights.decoder():
        weights.attention(f"{name}.self_attn", kv_heads=KV_HEADS, norm=2.2)
        weights.mlp(f"{name}.mlp")
    return _write(directory, weights, "Qwen3ForCausalLM", "qwen3", num_key_value_heads=KV_HEADS)


def make_qwen3_moe(directory: Path) -> Path:
    weights = Weights(seed=8)
    for name in weights.decoder():
        weights.attention(f"{name}.self_attn", kv_heads=KV_HEADS, norm=2.2)
        weights.experts(f"{name}.mlp")
    return _write(
        directory,
        weights,
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        num_key_value_heads=KV_HEADS,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=EXPERT_SIZE,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    )


def make_mixtral(directory: Path) -> Path:
    weights = Weights(seed=9)
    for name in weights.decoder():
        weights.attention(f"{name}.self_attn", kv_heads=KV_HEADS)
        weights.experts(f"{name}.block_sparse_moe", parts=("w1", "w3", "w2"))
    return _write(
        directory,
        weights,
        "MixtralForCausalLM",
        "mixtral",
        num_key_value_heads=KV_HEADS,
        intermediate_size=EXPERT_SIZE,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=None,
    )


def make_phi3(directory: Path) -> Path:
    """Write a Phi-3, whose projections are stored together."""
    weights, size = Weights(seed=10), HEADS * HEAD_SIZE
    for name in weights.decoder():
        weights.linear(f"{name}.self_attn.qkv_proj", 3 * size, HIDDEN, gain=2.2)
        weights.linear(f"{name}.self_attn.o_proj", HIDDEN, size, gain=0.5)
        weights.linear(f"{name}.mlp.gate_up_proj", 2 * HIDDEN, HIDDEN)
        weights.linear(f"{name}.mlp.down_proj", HIDDEN, HIDDEN, gain=0.5)
    return _write(directory, weights, "Phi3ForCausalLM", "phi3", pad_token_id=0)


def make_gemma2(directory: Path) -> Path:
    """Write a Gemma 2: capped scores, and in every other layer a sliding window that ends inside a block."""
    weights = Weights(seed=11)
    for name in weights.decoder(layers=4, norms=_GEMMA_NORMS, norm=0.0, tied=True):
        weights.attention(f"{name}.self_attn", kv_heads=KV_HEADS)
        weights.mlp(f"{name}.mlp")
    return _write(
        directory,
        weights,
        "Gemma2ForCausalLM",
        "gemma2",
        num_hidden_layers=4,
        num_key_value_heads=KV_HEADS,
        query_pre_attn_scalar=HEAD_SIZE,
        sliding_window=GEMMA2_WINDOW,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )


def make_gpt_oss(directory: Path) -> Path:
    """Write a gpt-oss: attention sinks, a sliding window in every other layer, and a mixture of experts."""
    weights = Weights(seed=12)
    for name in weights.decoder(layers=4):
        weights.attention(f"{name}.self_attn", kv_heads=KV_HEADS, bias=True)
        weights.normal(f"{name}.self_attn.sinks", HEADS)
        weights.linear(f"{name}.mlp.router", EXPERTS, HIDDEN, bias=True)
        weights.fused_experts(f"{name}.mlp.experts", bias=True)
    return _write(
        directory,
        weights,
        "GptOssForCausalLM",
        "gpt_oss",
        num_hidden_layers=4,
        num_key_value_heads=KV_HEADS,
        intermediate_size=EXPERT_SIZE,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=GPT_OSS_WINDOW,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 1024,
        },
    )


def make_llama4(directory: Path) -> Path:
    """Write a Llama 4: three layers of chunked local attention, then one of full attention without positions."""
    weights, layers = Weights(seed=13), 4
    for index, name in enumerate(weights.decoder(layers=layers)):
        weights.attention(f"{name}.self_attn", kv_heads=KV_HEADS)
        if index % 2:
            weights.linear(f"{name}.feed_forward.router", EXPERTS, HIDDEN)
            weights.fused_experts(f"{name}.feed_forward.experts")
            weights.mlp(f"{name}.feed_forward.shared_expert", size=EXPERT_SIZE)
        else:
            weights.mlp(f"{name}.feed_forward")
    return _write(
        directory,
        weights,
        "Llama4ForCausalLM",
        "llama4_text",
        num_hidden_layers=layers,
        num_key_value_heads=KV_HEADS,
        intermediate_size=EXPERT_SIZE,
        intermediate_size_mlp=HIDDEN,
        num_local_experts=EXPERTS,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        no_rope_layers=[1] * (layers - 1) + [0],
        use_qk_norm=False,
        attention_chunk_size=LLAMA4_CHUNK,
        attn_temperature_tuning=False,
    )


def make_mla_model(directory: Path) -> Path:
    """Write a DeepSeek-V2 with dense layers only."""
    weights = Weights(seed=3)
    for name in weights.decoder():
        weights.mla(f"{name}.self_attn")
        weights.mlp(f"{name}.mlp")
    return _write(
        directory,
        weights,
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        **MLA,
        q_lora_rank=None,
        head_dim=MLA["qk_rope_head_dim"],
        moe_intermediate_size=HIDDEN,
        n_routed_experts=2,
        num_experts_per_tok=1,
        first_k_dense_replace=LAYERS,
        moe_layer_freq=1,
    )


def make_sliding_window_model(
    directory: Path, *, pattern: str = "wwf", repeats: int = 1, window: int = WINDOW, max_tokens: int = 4096
) -> Path:
    """Write a Gemma 3 with the given numbers of layers with a sliding window (w) and with full attention (f)."""
    types = {"w": "sliding_attention", "f": "full_attention"}
    weights, layers = Weights(seed=4), len(pattern) * repeats
    for name in weights.decoder(layers=layers, norms=_GEMMA_NORMS, norm=0.0, tied=True):
        weights.attention(f"{name}.self_attn", norm=0.5)  # one is added to norms
        weights.mlp(f"{name}.mlp")
    return _write(
        directory,
        weights,
        "Gemma3ForCausalLM",
        "gemma3_text",
        query_pre_attn_scalar=HEAD_SIZE,
        num_hidden_layers=layers,
        sliding_window=window,
        max_position_embeddings=max_tokens,
        layer_types=[types[each] for each in pattern * repeats],
        rope_local_base_freq=10000.0,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )


def make_gemma4(directory: Path) -> Path:
    """Write a Gemma 4: heads of full attention are twice as large as those with a sliding window."""
    types = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]
    weights = Weights(seed=24)
    for kind, name in zip(types, weights.decoder(norms=_GEMMA_NORMS, tied=True), strict=True):
        size = HEAD_SIZE if kind == "sliding_attention" else 2 * HEAD_SIZE
        for part in ("q_proj", "k_proj", "v_proj"):
            weights.linear(f"{name}.self_attn.{part}", HEADS * size, HIDDEN)
        weights.linear(f"{name}.self_attn.o_proj", HIDDEN, HEADS * size)
        for part in ("q_norm", "k_norm"):
            weights.constant(f"{name}.self_attn.{part}", size, 0.5)
        weights.mlp(f"{name}.mlp")
    return _write(
        directory,
        weights,
        "Gemma4ForCausalLM",
        "gemma4_text",
        sliding_window=WINDOW,
        layer_types=types,
        global_head_dim=2 * HEAD_SIZE,
        num_global_key_value_heads=HEADS,
        hidden_size_per_layer_input=0,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )


def make_eagle_head(directory: Path) -> Path:
    """Write an EAGLE head: a layer that reads the embedding of a token and the target's hidden state before it."""
    weights = Weights(seed=22)
    weights.linear("fc", HIDDEN, 2 * HIDDEN)
    weights.attention("layers.0.self_attn")
    weights.mlp("layers.0.mlp")
    weights.constant("layers.0.post_attention_layernorm", HIDDEN, 1.0)
    return _write(directory, weights, "LlamaForCausalLM", "llama", num_hidden_layers=1)


def make_eagle3_head(directory: Path) -> Path:
    """Write an EAGLE-3 head: a layer that reads the embedding of a token and hidden states of three layers."""
    weights = Weights(seed=23)
    weights.linear("fc", HIDDEN, 3 * HIDDEN)
    weights.attention("midlayer.self_attn")
    for part in ("q_proj", "k_proj", "v_proj"):
        weights.linear(f"midlayer.self_attn.{part}", HEADS * HEAD_SIZE, 2 * HIDDEN)
    weights.mlp("midlayer.mlp")
    for norm in (*(f"midlayer.{each}" for each in (*_NORMS, "hidden_norm")), "norm"):
        weights.constant(norm, HIDDEN, 1.0)
    weights.linear("lm_head", VOCABULARY, HIDDEN)
    return _write(
        directory,
        weights,
        "LlamaForCausalLMEagle3",
        "llama",
        num_hidden_layers=1,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    )


def make_windows_only_model(directory: Path) -> Path:
    """Write a Mistral with a sliding window in every layer."""
    weights = Weights(seed=5)
    for name in weights.decoder():
        weights.attention(f"{name}.self_attn")
        weights.mlp(f"{name}.mlp")
    return _write(directory, weights, "MistralForCausalLM", "mistral", sliding_window=WINDOW)


def make_recurrent_model(
    directory: Path, *, repeats: int = 1, heads: int = HEADS, max_tokens: int = 4096
) -> Path:
    """Write a Qwen3-Next: three layers with a recurrent state (Gated DeltaNet), then one of full attention, repeated.

    vLLM's kernel for CPUs wants states of 64 by 64 numbers and bfloat16. The states decay slowly, so that they depend
    on tokens far back.
    """
    layers, keys, values = 4 * repeats, 2, 2
    types = (["linear_attention"] * 3 + ["full_attention"]) * repeats
    weights = Weights(seed=6)
    names = weights.decoder(layers=layers, norm=0.0, final_norm=0.0)  # the model adds 1 to norms
    for index, name in enumerate(names):
        if types[index] == "linear_attention":
            weights.recurrent(f"{name}.linear_attn", keys, values)
            weights.mlp(f"{name}.mlp")
        else:
            weights.attention(f"{name}.self_attn", heads=heads, kv_heads=heads, norm=1.2)
            weights.linear(f"{name}.self_attn.q_proj", 2 * heads * HEAD_SIZE, HIDDEN)  # with a gate
            weights.experts(f"{name}.mlp", more=["shared_expert_gate"])
            weights.mlp(f"{name}.mlp.shared_expert", size=EXPERT_SIZE)
    weights.tensors = {name: tensor.bfloat16() for name, tensor in weights.tensors.items()}
    return _write(
        directory,
        weights,
        "Qwen3NextForCausalLM",
        "qwen3_next",
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_tokens,
        layer_types=types,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=HEAD_SIZE,
        linear_value_head_dim=HEAD_SIZE,
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=EXPERT_SIZE,
        shared_expert_intermediate_size=EXPERT_SIZE,
        decoder_sparse_step=1,
        mlp_only_layers=[index for index, each in enumerate(types) if each == "linear_attention"],
        norm_topk_prob=True,
        partial_rotary_factor=0.25,
        torch_dtype="bfloat16",
    )


def make_granite4(directory: Path, *, repeats: int = 1) -> Path:
    """Write a Granite 4: three layers with a recurrent state (Mamba 2), then one of full attention, repeated."""
    heads, states = 4, 32
    types = (["mamba"] * 3 + ["attention"]) * repeats
    weights = Weights(seed=13)
    for name, kind in zip(weights.decoder(layers=len(types)), types, strict=True):
        if kind == "mamba":
            weights.mamba2(f"{name}.mamba", heads, states)
        else:
            weights.attention(f"{name}.self_attn", kv_heads=KV_HEADS)
        weights.linear(f"{name}.shared_mlp.input_linear", 2 * HIDDEN, HIDDEN)
        weights.linear(f"{name}.shared_mlp.output_linear", HIDDEN, HIDDEN, gain=0.5)
    return _write(
        directory,
        weights,
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        num_hidden_layers=len(types),
        num_key_value_heads=KV_HEADS,
        layer_types=types,
        position_embedding_type="rope",
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=HIDDEN,
        attention_multiplier=HEAD_SIZE**-0.5,
        mamba_n_heads=heads,
        mamba_d_head=HEAD_SIZE,
        mamba_d_state=states,
        mamba_n_groups=1,
        mamba_expand=heads * HEAD_SIZE // HIDDEN,
        mamba_d_conv=4,
        mamba_chunk_size=64,
    )


def make_falcon_h1(directory: Path) -> Path:
    """Write a Falcon-H1: each layer has a recurrent state (Mamba 2) and full attention."""
    heads, states = 4, 32
    weights = Weights(seed=14)
    for name in weights.decoder(norms=("input_layernorm", "pre_ff_layernorm")):
        weights.mamba2(f"{name}.mamba", heads, states)
        weights.attention(f"{name}.self_attn", kv_heads=KV_HEADS)
        weights.mlp(f"{name}.feed_forward")
    weights.tensors["model.final_layernorm.weight"] = weights.tensors.pop("model.norm.weight")
    return _write(
        directory,
        weights,
        "FalconH1ForCausalLM",
        "falcon_h1",
        num_key_value_heads=KV_HEADS,
        mamba_d_ssm=heads * HEAD_SIZE,
        mamba_n_heads=heads,
        mamba_d_head=HEAD_SIZE,
        mamba_d_state=states,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_chunk_size=64,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        projectors_bias=False,
    )


def make_nemotron_h(directory: Path) -> Path:
    """Write a Nemotron-H: each layer is a recurrent state (Mamba 2), an MLP or full attention."""
    heads, states = 4, 32
    pattern = "M-M-M*-"
    weights = Weights(seed=16)
    for name, kind in zip(weights.decoder(layers=len(pattern), norms=("norm",)), pattern, strict=True):
        if kind == "M":
            weights.mamba2(f"{name}.mixer", heads, states)
        elif kind == "*":
            weights.attention(f"{name}.mixer", kv_heads=KV_HEADS)
        else:
            weights.linear(f"{name}.mixer.up_proj", HIDDEN, HIDDEN)
            weights.linear(f"{name}.mixer.down_proj", HIDDEN, HIDDEN, gain=0.5)
    weights.tensors["model.norm_f.weight"] = weights.tensors.pop("model.norm.weight")
    weights.tensors["model.embeddings.weight"] = weights.tensors.pop("model.embed_tokens.weight")
    return _write(
        directory,
        weights,
        "NemotronHForCausalLM",
        "nemotron_h",
        num_hidden_layers=len(pattern),
        num_key_value_heads=KV_HEADS,
        hybrid_override_pattern=pattern,
        layer_norm_epsilon=1e-6,
        mamba_num_heads=heads,
        mamba_head_dim=HEAD_SIZE,
        ssm_state_size=states,
        n_groups=1,
        conv_kernel=4,
        expand=heads * HEAD_SIZE // HIDDEN,
        chunk_size=64,
    )


def make_jamba(directory: Path) -> Path:
    """Write a Jamba: three layers with a recurrent state (Mamba 1), then one of full attention."""
    states, rank, expand = 16, 16, 2
    weights = Weights(seed=15)
    for index, name in enumerate(weights.decoder(layers=4, norms=("input_layernorm", "pre_ff_layernorm"))):
        if index < 3:
            weights.mamba1(f"{name}.mamba", expand * HIDDEN, states, rank)
        else:
            weights.attention(f"{name}.self_attn", kv_heads=KV_HEADS)
        weights.mlp(f"{name}.feed_forward")
    weights.tensors["model.final_layernorm.weight"] = weights.tensors.pop("model.norm.weight")
    return _write(
        directory,
        weights,
        "JambaForCausalLM",
        "jamba",
        num_hidden_layers=4,
        num_key_value_heads=KV_HEADS,
        attn_layer_period=4,
        attn_layer_offset=3,
        num_experts=1,
        num_experts_per_tok=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=states,
        mamba_d_conv=4,
        mamba_expand=expand,
        mamba_dt_rank=rank,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
        use_mamba_kernels=False,
    )


def make_kimi_linear(directory: Path) -> Path:
    """Write a Kimi Linear: three layers with a recurrent state (KDA), then one of MLA."""
    weights = Weights(seed=17)
    for index, name in enumerate(weights.decoder(layers=4)):
        if index < 3:
            weights.kda(f"{name}.self_attn", HEADS)
        else:
            weights.mla(f"{name}.self_attn")
        weights.mlp(f"{name}.mlp")
    return _write(
        directory,
        weights,
        "KimiLinearForCausalLM",
        "kimi_linear",
        **MLA,
        q_lora_rank=None,
        num_hidden_layers=4,
        mla_use_nope=True,
        linear_attn_config={
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": HEADS,
            "head_dim": HEAD_SIZE,
            "short_conv_kernel_size": 4,
        },
        pad_token_id=0,
        rms_norm_eps=1e-5,  # of the norm of a KDA layer, whatever the config says
        moe_intermediate_size=HIDDEN,
        num_experts=2,
        num_experts_per_token=1,
        first_k_dense_replace=4,
    )


def _write(directory: Path, weights: Weights, architecture: str, model_type: str, **own: object) -> Path:
    """Write the weights and the config: the common keys, updated with those of this family."""
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config | own))
    save_file(weights.tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
