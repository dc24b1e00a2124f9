"""Engines of `tools.gpu.serving`: each is a vLLM with a model of random weights, its answers and times.

    python -m tools.gpu.serving_engine SETTINGS

SETTINGS is a list of `Settings` as JSON. vLLM is imported once. Each engine then runs in a child process, one after
the other, so that nothing else runs during its measurements. Its result is written to `Settings.result`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

START_S = 120.0
SETTLE_S = 120.0
MAX_TOKENS = 8
LOADS = 2
"""Loads of each prompt."""

MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "gemma3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 256,
    },
}
"""`config.json` by model: the shapes of Llama 3 8B and of the text part of Gemma 3 4B, which has seven KV cache groups."""

QUICK = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "sliding_window": 128,
    "query_pre_attn_scalar": 64,
}

COMMON = {
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one engine.

    Attributes:
        lengths: Tokens of the prompts: one more than a multiple of a chunk or, in quick form, of a block.
        prompts: Prompts of each length.
        batch: Prompts of half of the first length that are asked at once.
        eager: Run without CUDA graphs.
        quick: A tiny model; times have no meaning.
        options: More options of `vllm.LLM`.
        config: More configuration keys of this connector.
    """

    model: str
    engine: str
    directory: str
    lengths: tuple[int, ...]
    prompts: int = 3
    batch: int = 8
    eager: bool = True
    quick: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def result(self) -> Path:
        """File for the result; `{"failed": why}` if there is none."""
        return Path(self.directory) / f"{self.model}-{self.engine}.json"


def transfer_config(settings: Settings) -> dict[str, Any] | None:
    """Return the `kv_transfer_config` of an engine."""
    if settings.engine == "plain":
        return None
    nbytes = 256 << 20 if settings.quick else 24 << 30
    if settings.engine == "offloading":
        extra: dict[str, Any] = {"cpu_bytes_to_use": nbytes}
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    disk = {"name": "disk", "path": f"{settings.directory}/disk-{settings.model}", "max_bytes": 2 * nbytes}
    extra = {
        "arena.max_bytes": nbytes,
        "tiers": ["cpu", disk],
        "vllm.load_policy": "always",  # also from a disk that is slower than the prefill
        "store.max_pending_write_bytes": nbytes,
        "store.max_pending_write_s": 600,
        "store.timeout_s": 600,
        **settings.config,
    }
    return {"kv_connector": "LMCacheAsyncConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def prompt(name: str, length: int) -> list[int]:
    seed = [*name.encode(), length]
    found: list[int] = np.random.default_rng(seed).integers(10, 500, length).tolist()
    return found


class Engine:
    """A vLLM. Its scheduler and worker are in another process unless `VLLM_ENABLE_V1_MULTIPROCESSING` is 0."""

    def __init__(self, settings: Settings) -> None:
        from vllm import LLM

        model = Path(settings.directory) / settings.model
        model.mkdir(exist_ok=True)
        config = COMMON | MODELS[settings.model]
        if settings.quick:
            config |= {key: QUICK[key] for key in QUICK.keys() & config.keys()}
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        sizes: dict[str, Any] = {"kv_cache_memory_bytes": 14 << 30, "gpu_memory_utilization": 0.25}
        if settings.quick:
            sizes = {"num_gpu_blocks_override": 2048, "block_size": 32, "gpu_memory_utilization": 0.1}
        options: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "float32" if settings.quick else "bfloat16",
            "seed": 0,
            "enforce_eager": settings.eager,
            "max_model_len": max(settings.lengths) + 64,
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 32,
            "disable_log_stats": False,
        }
        if (transfer := transfer_config(settings)) is not None:
            options["kv_transfer_config"] = transfer
        self.ours = settings.engine in ("ours", "restarted")
        self.pins = self.ours and not settings.quick
        self._llm = LLM(model=str(model), **(options | sizes | dict(settings.options)))
        self._llm.apply_model(randomize)
        self._number = 0

    def ask(self, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Ask all prompts at once; return the answers, each with the seconds until its first token."""
        from vllm import SamplingParams

        engine: Any = self._llm.llm_engine
        sampling = SamplingParams(
            temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=5, detokenize=False
        )
        start, first, answers = time.perf_counter(), dict[str, float](), dict[str, dict[str, Any]]()
        names = []
        for tokens in prompts:
            self._number += 1
            names.append(f"q{self._number}")
            engine.add_request(names[-1], {"prompt_token_ids": list(tokens)}, sampling)
        while len(answers) < len(names):
            for output in engine.step():
                name = output.request_id
                if output.outputs[0].token_ids:
                    first.setdefault(name, time.perf_counter() - start)
                if output.finished:
                    answers[name] = answer(output)
        return [answers[name] | {"ttft_s": first[name]} for name in names]

    def forget(self) -> dict[str, Any]:
        """Wait until all loads and stores have ended, and empty vLLM's own prefix cache.

        Returns:
            Statistics of the connector of this project, else nothing.
        """
        deadline = time.monotonic() + SETTLE_S
        found: dict[str, Any] = {}
        while time.monotonic() < deadline:
            if self.ours:
                found = self.statistics()
                idle = not (found["running"] or found["pinned_chunks"])
                settled = idle and found["leased_slabs"] == found["chunks"]["cpu"]
            else:
                settled = True
            if settled and self._llm.reset_prefix_cache():
                return found
            # An engine core in this process does not step by itself.
            if hasattr(self._llm.llm_engine.engine_core, "engine_core"):
                self._llm.llm_engine.step()
            time.sleep(0.02)
        raise RuntimeError(f"stores or loads have not ended: {found}")

    def statistics(self) -> dict[str, Any]:
        from tests.integration import vllm_worker_calls

        found: dict[str, Any] = self._llm.collective_rpc(vllm_worker_calls.statistics)[0]
        return found

    def wait_until_ready(self, length: int) -> None:
        """Wait until a prompt is loaded: the arena is pinned, and the scheduler asks its worker."""
        deadline = time.monotonic() + START_S
        tokens = prompt("ready", length)
        while time.monotonic() < deadline:
            [asked] = self.ask([tokens])
            pinned = not self.pins or self.statistics()["pinned"]
            if asked["cached_tokens"] and pinned:
                return
            self.forget()
            time.sleep(0.2)
        raise RuntimeError("nothing was loaded")

    def facts(self) -> dict[str, Any]:
        """Return what the engine runs: versions and settings that vLLM chose."""
        import torch
        import vllm

        config = self._llm.llm_engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "blocks": config.cache_config.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
            "worker": self._llm.collective_rpc(worker_facts)[0],
        }

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def answer(output: Any) -> dict[str, Any]:
    completion, times = output.outputs[0], output.metrics
    return {
        "wait_s": times.scheduled_ts - times.queued_ts,
        "step_s": times.first_token_ts - times.scheduled_ts,
        "cached_tokens": output.num_cached_tokens or 0,
        "tokens": list(completion.token_ids),
        "logprobs": [{str(t): p.logprob for t, p in place.items()} for place in completion.logprobs or []],
    }


def randomize(model: Any) -> None:
    """Give every weight random values of a scale with which all tokens of a prompt change the answer."""
    import torch

    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    # Gemma multiplies its embeddings by the root of their size, and adds 1 to norms.
    gemma = "Gemma" in type(model).__name__
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim < 2:
                weight.fill_(0.0 if gemma else 1.0)
                continue
            scale = 1.0 if "embed" in name and not gemma else float(weight.shape[-1]) ** -0.5
            scale *= 2.0 if "qkv" in name or "lm_head" in name else 1.0
            weight.normal_(0.0, scale, generator=generator)


def worker_facts(worker: Any) -> dict[str, str]:
    """Return what the worker runs. It may have changed the mode of CUDA graphs that was asked for."""
    runner = worker.model_runner
    groups = getattr(runner, "attn_groups", None) or []
    backends = {group.backend.get_name() for each in groups for group in each}
    return {
        "runner": f"{type(runner).__module__}.{type(runner).__name__}",
        "backends": ", ".join(sorted(backends)),
        "cuda_graphs": worker.vllm_config.compilation_config.cudagraph_mode.name,
    }


def run_engine(settings: Settings) -> None:
    """Run one engine and write its answers and times."""
    began = time.perf_counter()
    engine = Engine(settings)
    ready = time.perf_counter()
    found: dict[str, Any] = {"facts": engine.facts(), "start_s": ready - began, "rows": []}
    measure(engine, settings, found)
    found["seconds"] = time.perf_counter() - ready
    engine.close()
    write(settings.result, found)


def succeeded(path: Path) -> bool:
    return path.exists() and "failed" not in json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, result: Mapping[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result), encoding="utf-8")
    part.rename(path)


def measure(engine: Engine, settings: Settings, found: dict[str, Any]) -> None:
    loads = settings.engine != "plain"
    if loads and settings.engine != "restarted":
        engine.wait_until_ready(settings.lengths[0])
    else:
        engine.forget()
    engine.ask([prompt("warm up", length) for length in settings.lengths])
    for length in settings.lengths:
        for number in range(settings.prompts):
            tokens = prompt(f"prompt {number}", length)
            row: dict[str, Any] = {"tokens": length, "number": number}
            engine.forget()
            row["first"] = engine.ask([tokens])[0]
            row["own"] = engine.ask([tokens])[0]
            row["loads"] = []
            for _ in range(LOADS * loads):
                engine.forget()
                row["loads"].append(engine.ask([tokens])[0])
            found["rows"].append(row)
    length = (settings.lengths[0] - 1) // 2 + 1
    batch = [prompt(f"batch {number}", length) for number in range(settings.batch)]
    engine.forget()
    found["batch"] = {"tokens": length, "first": engine.ask(batch)}
    engine.forget()
    found["batch"]["again"] = engine.ask(batch)
    changed = prompt("prompt 0", settings.lengths[0])
    changed[-min(300, len(changed) // 2)] += 1
    engine.forget()
    found["changed"] = engine.ask([changed])[0]
    found["statistics"] = engine.forget()


def main() -> None:
    """Run the engines of the settings in the first argument."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for functions that run in the worker
    import vllm  # noqa: F401  takes half of the start

    fork = multiprocessing.get_context("fork")
    for given in json.loads(sys.argv[1]):
        settings = Settings(**given | {"lengths": tuple(given["lengths"])})
        first = dataclasses.replace(settings, engine="ours").result
        if settings.engine == "restarted" and not succeeded(first):
            write(settings.result, {"failed": "it needs the engine ours"})
            continue
        process = fork.Process(target=run_engine, args=(settings,))
        process.start()
        process.join()
        if not settings.result.exists():
            write(settings.result, {"failed": f"ended without a result, exit status {process.exitcode}"})


if __name__ == "__main__":
    # Functions of `__main__` cannot be sent to vLLM's worker.
    importlib.import_module("tools.gpu.serving_engine").main()
