"""The families of models: how to write a tiny one, and its special properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.integration import model_families as models
from tests.integration.vllm_driver import BLOCK


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        title: Its name in the table.
        cache: Description of the layers' caches.
        make: Writes a model of it to a directory.
        block: Tokens per block of its cache.
        window: Tokens of its window or of its attention chunk; 0 without one.
        reach: Distance from which a token changes the answer. It is short if all layers have a window.
        options: Options of vLLM that it needs.
        rounds: It computes in bfloat16. The answer of a preempted request then differs in plain vLLM too, probably
            because tokens that were generated one by one are computed again in one step. It is not compared.
        modes: Modes of this family, in addition to those of all families.
        without: Modes that it does not support, and the reason.
        images: Its prompts have an image or a video.
        adapters: Number of LoRA adapters that its requests use in turn. All requests of a batch use one, because vLLM's CPU
            build gives a request without adapter another answer in such a batch than alone.
    """

    title: str
    cache: str
    make: Callable[[Path], Path]
    block: int = BLOCK
    window: int = 0
    reach: int = 450
    options: Mapping[str, Any] = field(default_factory=dict)
    rounds: bool = False
    modes: tuple[str, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)
    images: bool = False
    adapters: int = 0


FAMILIES = {
    "llama": Family(
        "Llama", "full attention", models.make_llama, modes=("pipeline", "replicas", "two hosts")
    ),
    "qwen3": Family("Qwen3", "full attention", models.make_qwen3),
    "qwen3-moe": Family("Qwen3-MoE", "full attention", models.make_qwen3_moe),
    "mixtral": Family("Mixtral", "full attention", models.make_mixtral),
    "phi-3": Family("Phi-3", "full attention", models.make_phi3),
    "gemma-2": Family(
        "Gemma 2",
        "sliding windows beside full attention",
        models.make_gemma2,
        window=models.GEMMA2_WINDOW,
    ),
    "gemma-3": Family(
        "Gemma 3",
        "sliding windows beside full attention",
        partial(
            models.make_sliding_window_model, repeats=2
        ),  # so that each pipeline stage has layers of each kind
        window=models.WINDOW,
        modes=("pipeline", "replicas", "two hosts", "long prompt"),
    ),
    "gemma-3n": Family(
        "Gemma 3n",
        "sliding windows beside full attention; the last layers use the KV of earlier ones",
        models.make_gemma3n,
        window=models.WINDOW,
    ),
    "gpt-oss": Family(
        "gpt-oss",
        "sliding windows beside full attention, with attention sinks",
        models.make_gpt_oss,
        window=models.GPT_OSS_WINDOW,
    ),
    "mistral": Family(
        "Mistral 7B v0.1",
        "sliding windows in all layers",
        models.make_windows_only_model,
        window=models.WINDOW,
        reach=models.WINDOW,
    ),
    "llama-4": Family(
        "Llama 4",
        "chunked local attention beside full attention",
        models.make_llama4,
        window=models.LLAMA4_CHUNK,
    ),
    "qwen3-next": Family(
        "Qwen3-Next",
        "recurrent states beside full attention",
        models.make_recurrent_model,
        block=64,  # vLLM makes blocks of attention as large as a state
        options={"dtype": "bfloat16"},
        rounds=True,
        without={"no prefix caching": "vLLM keeps no states then"},
    ),
    "granite-4": Family(
        "Granite 4",
        "recurrent states (Mamba 2) beside full attention",
        models.make_granite4,
        block=64,
        modes=("transformers",),
        without={"no prefix caching": "vLLM keeps no states then"},
    ),
    "falcon-h1": Family(
        "Falcon-H1",
        "recurrent states (Mamba 2) and full attention in each layer",
        models.make_falcon_h1,
        block=64,
        modes=("transformers",),
        without={"no prefix caching": "vLLM keeps no states then"},
    ),
    "nemotron-h": Family(
        "Nemotron-H",
        "recurrent states (Mamba 2), full attention and MLPs in layers of their own",
        models.make_nemotron_h,
        block=64,
        modes=("transformers",),
        without={"no prefix caching": "vLLM keeps no states then"},
    ),
    "jamba": Family(
        "Jamba",
        "recurrent states (Mamba 1) beside full attention",
        models.make_jamba,
        block=64,
        modes=("transformers",),
        without={"no prefix caching": "vLLM keeps no states then"},
    ),
    "deepseek-v2": Family(
        "DeepSeek-V2",
        "MLA",
        models.make_mla_model,
        block=16,
        modes=("transformers",),
        options={"attention_backend": "CPU_MLA", "block_size": 16, "enable_prefix_caching": True},
    ),
    "kimi-linear": Family(
        "Kimi Linear",
        "recurrent states (KDA) beside MLA",
        models.make_kimi_linear,
        block=128,
        modes=("transformers",),
        options={"attention_backend": "CPU_MLA", "enable_prefix_caching": True},
        without={"no prefix caching": "vLLM keeps no states then"},
    ),
    "qwen2.5-vl": Family(
        "Qwen2.5-VL",
        "full attention, prompts with images or videos",
        models.make_image_model,
        options={"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 1}},
        images=True,
    ),
    "llama-lora": Family(
        "Llama with LoRA adapters",
        "full attention",
        models.make_llama,
        options={"enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
        modes=("reloaded adapter",),
        adapters=2,
    ),
}
