"""How the vLLMs are started: what differs between a CPU and a GPU, and what is configured."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmcache_async.bench.serve_engine import Engine
from lmcache_async.bench.serve_model import Shape, make_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

CHUNK = 256
CPU_BLOCK, GPU_BLOCK = 128, 16
POOL_PROMPTS = 5  # a store may hold a quarter of all blocks, which is more than a prompt
MIN_POOL_TOKENS = 8192
ANSWER_ROOM = 512  # tokens of a request beside a prompt
MAX_REQUESTS = 64

_SHARED = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_ON_CPU = {
    "OMP_NUM_THREADS": "1",  # the model has one core, so that copies have another
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "4",  # an upper bound; the number of blocks is given
    "TORCH_COMPILE_DISABLE": "1",  # it would compile the ranks of log-probabilities, for seconds
}


@dataclass(frozen=True, slots=True)
class Contestant:
    """A vLLM that is to take part.

    Attributes:
        transfer: Its `kv_transfer_config`; None for no connector.
        environment: Of its own.
        files: Where it keeps KV that is to come from the disk, and not from the page cache.
    """

    name: str
    transfer: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Path | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the vLLMs run."""

    gpu: bool

    @classmethod
    def detect(cls) -> Machine:
        import torch

        return cls(gpu=torch.cuda.is_available())

    @property
    def environment(self) -> dict[str, str]:
        return _SHARED | ({} if self.gpu else _ON_CPU)

    def options(self, tokens: int, *, own_model: bool, together: int) -> dict[str, Any]:
        """Arguments of vLLM's engine, of which `together` are alive at the same time.

        vLLM's pool of blocks has room for a few prompts and little more: all of its memory has been touched
        once the warm-up is over, and first touches are not measured. A prompt is one step.
        """
        pool = max(POOL_PROMPTS * tokens, MIN_POOL_TOKENS)
        common: dict[str, Any] = {
            "max_model_len": tokens + ANSWER_ROOM,
            "max_num_batched_tokens": tokens + ANSWER_ROOM,
            "max_num_seqs": MAX_REQUESTS,
        }
        if self.gpu:  # the made model's weights are of a type that fast attention takes
            return common | {
                "gpu_memory_utilization": round(0.9 / together, 3),
                "num_gpu_blocks_override": math.ceil(pool / GPU_BLOCK) + 4,
                "block_size": GPU_BLOCK,
            }
        return common | {
            "enforce_eager": True,
            "dtype": "float32" if own_model else "auto",
            "block_size": CPU_BLOCK,
            "num_gpu_blocks_override": math.ceil(pool / CPU_BLOCK) + 4,
        }


@dataclass(frozen=True, slots=True)
class Starter:
    """Starts vLLMs of one model, with all they write under one directory.

    Attributes:
        sockets: Where vLLM makes its sockets, whose paths must be short.
        together: How many are alive at the same time.
    """

    directory: Path
    sockets: Path
    model: str
    tokens: int
    machine: Machine
    own_model: bool
    together: int

    @classmethod
    def of(
        cls,
        places: tuple[Path, Path],
        model: str,
        shape: Shape,
        tokens: int,
        *,
        machine: Machine,
        together: int,
    ) -> Starter:
        """With a model made on the spot where none is named."""
        directory, sockets = places
        own = not model
        if own:
            model = str(directory / "model")
            dtype = "bfloat16" if machine.gpu else "float32"
            make_model(directory / "model", shape, dtype=dtype, max_tokens=tokens + ANSWER_ROOM)
        return cls(directory, sockets, model, tokens, machine, own, together)

    @contextlib.contextmanager
    def started(self, contestants: Sequence[Contestant]) -> Iterator[list[Engine]]:
        """Those vLLMs, which answer; ended in the end.

        Raises:
            ServeError: One did not start.
        """
        with contextlib.ExitStack() as stack:
            engines = []
            for contestant in contestants:
                engine = self._start(contestant)
                stack.callback(engine.kill)
                engines.append(engine)
                if self.machine.gpu:  # each looks how much memory the others have left
                    engine.wait_ready()
            for engine in engines:
                if not self.machine.gpu:
                    engine.wait_ready()
            yield engines

    def _start(self, contestant: Contestant) -> Engine:
        machine = self.machine
        options = machine.options(self.tokens, own_model=self.own_model, together=self.together)
        if contestant.transfer is not None:
            options["kv_transfer_config"] = dict(contestant.transfer)
        options["model"] = self.model
        environment = machine.environment | {"TMPDIR": str(self.sockets)} | dict(contestant.environment)
        name = contestant.name.replace(" ", "-").replace(",", "").replace("/", "-")
        log = self.directory / f"{name}.log"
        return Engine(contestant.name, options, environment, log)


def ours(tiers: Sequence[Any], arena_bytes: int, **settings: Any) -> dict[str, Any]:
    """The `kv_transfer_config` of our connector, its settings the default ones but for what is given."""
    return {
        "kv_connector": "LMCacheAsyncConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "chunk_size": CHUNK,
            "arena.max_bytes": arena_bytes,
            "vllm.lookup_timeout_s": 5.0,  # on a busy machine a late answer would be a miss, and end the run
            "tiers": list(tiers),
            **settings,
        },
    }


def disk_tier(path: Path, **settings: Any) -> dict[str, Any]:
    return {"name": "disk", "path": str(path), "max_bytes": "1TiB", **settings}


def slow_tier(path: Path, delay_s: float) -> dict[str, Any]:
    """Each read waits so long before it begins, and no deadline ends it."""
    delay = {"name": "faults", "delay_s": delay_s, "get": {"delay": 1.0}}
    return disk_tier(path, layers=[delay], timeout_s=60.0 + 4 * delay_s)
