"""vLLM processes of the serve benchmark: model, options, connectors, requests, comparison of answers."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import itertools
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lmcache_async.errors import ConfigError, LMCacheAsyncError

COMMAND = (sys.executable, "-m", "tools.benchmarks.serve_child")
START_S, ANSWER_S, EXIT_S = 600.0, 300.0, 30.0
ANSWER_TOKENS = 4
SHORT_PROMPT = list(range(100, 116))  # shorter than a block, so it is never cached

CHUNK = 256
CPU_BLOCK, GPU_BLOCK = 128, 16
POOL_PROMPTS = 5  # a store may hold a quarter of all blocks, which is more than a prompt
MIN_POOL_TOKENS = 8192
ANSWER_ROOM = 512  # tokens of a request in addition to the prompt
MAX_REQUESTS = 64
GIB = 1 << 30

TOLERANCES = {"float32": 1e-3}
"""Tolerances of log-probabilities by dtype. One wrong block changes them by far more than 0.1."""
ROUGH_TOLERANCE = 0.1

ALL = "all"
NO_CONNECTOR = "NoConnector"
ON_DISK = "/disk"

_LAST_LINES = 25
_GONE_S = 10.0
_ERROR = re.compile(r"(?:^|\s)(?P<error>(?:[A-Za-z_.]*(?:Error|Exception)): .+)")
SHARED = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
ON_CPU = {
    "OMP_NUM_THREADS": "1",  # the model uses one core, so that copies have another
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "4",  # an upper bound; the number of blocks is given
    "TORCH_COMPILE_DISABLE": "1",  # compiling the ranks of log-probabilities takes seconds
}


class ServeError(LMCacheAsyncError):
    """A vLLM did not start, ended, answered wrongly or missed a hit. There are no figures."""

    @property
    def first_line(self) -> str:
        """The message without the end of a log."""
        return str(self).partition("\n")[0]


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        max_tokens: Number of tokens to generate.
        after: Send it when the requests with `after` 0 have generated that many tokens together; 0 sends it
        at once.
    """

    prompt: Sequence[int]
    max_tokens: int
    after: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    Attributes:
        sent: Seconds since the start of its operation.
        times: Arrival of each token, on the same clock.
        logprobs: The best tokens and their log-probabilities at each generated position.
        cached_tokens: Prompt tokens that were not computed, as counted by vLLM.
    """

    sent: float
    times: Sequence[float]
    tokens: Sequence[int]
    logprobs: Sequence[Mapping[str, float]]
    cached_tokens: int
    finish_reason: str

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.times[0] - self.sent)

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between each token and the next."""
        return [1e3 * (after - before) for before, after in itertools.pairwise(self.times)]


def difference(answer: Answer, reference: Answer, tolerance: float) -> float:
    """Return the largest difference of a log-probability; infinite if tokens differ.

    Greedy tokens with equal probability within the tolerance may be exchanged. Tokens after such a position
    are not compared.
    """
    if len(answer.tokens) != len(reference.tokens):
        return math.inf
    largest = 0.0
    for place, (ours, theirs) in enumerate(zip(answer.logprobs, reference.logprobs, strict=True)):
        shared = ours.keys() & theirs.keys()
        if not shared:
            return math.inf
        largest = max([largest, *(abs(ours[token] - theirs[token]) for token in shared)])
        chosen, expected = str(answer.tokens[place]), str(reference.tokens[place])
        if chosen != expected:
            tie = abs(theirs[expected] - theirs.get(chosen, -math.inf)) <= tolerance
            return largest if tie else math.inf
    return largest


def check_same(what: str, answer: Answer, reference: Answer, dtype: str) -> None:
    """Compare an answer with that of a vLLM without a connector.

    Raises:
        ServeError: They differ.
    """
    tolerance = TOLERANCES.get(dtype, ROUGH_TOLERANCE)
    if answer.finish_reason != reference.finish_reason:
        raise ServeError(f"{what}: the request ended with {answer.finish_reason!r}")
    apart = difference(answer, reference, tolerance)
    if apart > tolerance:
        raise ServeError(
            f"{what}: the answer differs from that without a connector: tokens {list(answer.tokens)} and"
            f" {list(reference.tokens)}, log-probabilities by {apart:.3g}"
        )


def check_cached(what: str, answer: Answer, *, least: int, most: int) -> None:
    """Check the number of prompt tokens that came from a cache.

    Raises:
        ServeError: There were more or fewer.
    """
    if not least <= answer.cached_tokens <= most:
        expected = str(least) if least == most else f"{least} to {most}"
        raise ServeError(f"{what}: {answer.cached_tokens} tokens came from a cache, expected {expected}")


class Engine:
    """A vLLM process. It starts at once; `wait_ready` waits for the end of the start.

    Every call waits for its end, so no two engines compute at the same time.

    Args:
        options: Arguments of vLLM's engine, `kv_transfer_config` a mapping.
        environment: Added to the environment of this process without its LMCACHE_ variables.
    """

    def __init__(
        self, name: str, options: Mapping[str, Any], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.facts: Mapping[str, Any] = {}
        self._log = log
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("LMCACHE_")}
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=inherited | dict(environment),
                start_new_session=True,  # its workers are killed with it, see `kill`
            )
        self._send(options)

    def wait_ready(self) -> None:
        self.facts = self._receive(START_S)

    def ask(self, prompt: Sequence[int], max_tokens: int = ANSWER_TOKENS) -> Answer:
        """Send one request alone."""
        return self.serve([Request(prompt, max_tokens)])[0]

    def serve(self, requests: Sequence[Request]) -> list[Answer]:
        """Send requests concurrently, each when it is due."""
        self._send({"do": "serve", "requests": [asdict(request) for request in requests]})
        return [Answer(**fields) for fields in self._receive(ANSWER_S)]

    def reset(self) -> None:
        """Empty vLLM's own prefix cache, after the end of stores that pin its blocks."""
        self._send({"do": "reset", "prompt": SHORT_PROMPT})
        self._receive(ANSWER_S)

    def wake(self) -> None:
        """Make the processes spin again, and let vLLM process the stores that have ended."""
        self.ask(SHORT_PROMPT, 1)

    def close(self) -> None:
        """End the process like a server, and kill its group if it does not end."""
        try:
            if self._process.poll() is None:
                self._send({"do": "exit"})
                self._process.wait(EXIT_S)
        except (subprocess.TimeoutExpired, ServeError):
            pass  # the group is killed below
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the process group and wait some seconds for the end of every process."""
        deadline = time.monotonic() + _GONE_S
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(0.02)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure("ended") from error

    def _receive(self, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while not select.select([self._process.stdout], [], [], 1.0)[0]:
            if self._process.poll() is not None:  # its workers may keep the pipe open
                raise self._failure("ended")
            if time.monotonic() > deadline:
                raise self._failure(f"did not answer in {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure("ended")
        return json.loads(line)

    def _failure(self, what: str) -> ServeError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = (found["error"] for line in lines if (found := _ERROR.search(line)))
        first = next(errors, lines[-1] if lines else "nothing was logged")
        tail = "\n".join(lines[-_LAST_LINES:])
        return ServeError(f"the vLLM {self.name!r} {what}: {first}\nThe end of its log:\n{tail}")


@dataclass(frozen=True, slots=True)
class Contestant:
    """A vLLM to compare.

    Attributes:
        transfer: Its `kv_transfer_config`; None for no connector.
        environment: Its environment variables.
        files: The directory of its KV, if hits must come from the disk and not from the page cache.
    """

    name: str
    transfer: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Path | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the created model; by default 32 KiB of float32 KV per token."""

    layers: int = 8
    hidden: int = 512
    heads: int = 4
    head_dim: int = 128
    vocabulary: int = 4096


def make_model(directory: Path, shape: Shape, *, dtype: str, max_tokens: int) -> None:
    """Write a small Llama with seeded weights and without a tokenizer. Prompts are token ids.

    The weights are random with a realistic scale, and queries and keys have a gain above 1: attention is
    peaked, so one wrong block of KV changes the answer.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_tokens,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call, unused-ignore]
    gains = {"q_proj": 2.2, "k_proj": 2.2, "lm_head": 2.0, "down_proj": 0.5}
    generator = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
            else:
                gain = next((gain for part, gain in gains.items() if part in name), 1.0)
                scale = 1.0 if "embed_tokens" in name else gain / math.sqrt(weight.shape[1])
                weight.normal_(generator=generator).mul_(scale)
    model.to(getattr(torch, dtype)).save_pretrained(directory)


@dataclass(frozen=True, slots=True)
class Starter:
    """Starts vLLM processes for one model.

    vLLM's block pool has room for a few prompts: after the warm-up all its memory has been touched, and first
    touches are not measured. A prompt is one step.

    Attributes:
        directory: For the model, logs and KV.
        sockets: Directory for the sockets of vLLM, whose paths must be short.
        together: Number of vLLM processes at the same time.
    """

    directory: Path
    sockets: Path
    model: str
    shape: Shape
    tokens: int
    gpu: bool
    together: int

    @contextlib.contextmanager
    def started(self, contestants: Sequence[Contestant]) -> Iterator[list[Engine]]:
        """Start vLLM processes and yield them when they are ready. They are killed at the end of the block.

        Raises:
            ServeError: One did not start.
        """
        with contextlib.ExitStack() as stack:
            engines = []
            for contestant in contestants:
                engine = self._start(contestant)
                stack.callback(engine.kill)
                engines.append(engine)
                if self.gpu:  # each measures the memory that the others leave
                    engine.wait_ready()
            for engine in [] if self.gpu else engines:
                engine.wait_ready()
            yield engines

    def _start(self, contestant: Contestant) -> Engine:
        options = self._options() | {"model": self._model()}
        if contestant.transfer is not None:
            options["kv_transfer_config"] = dict(contestant.transfer)
        environment = SHARED | ({} if self.gpu else ON_CPU) | {"TMPDIR": str(self.sockets)}
        name = contestant.name.replace(" ", "-").replace(",", "").replace("/", "-")
        log = self.directory / f"{name}.log"
        return Engine(contestant.name, options, environment | dict(contestant.environment), log)

    def _model(self) -> str:
        made = self.directory / "model"
        if not self.model and not made.exists():
            dtype = "bfloat16" if self.gpu else "float32"
            make_model(made, self.shape, dtype=dtype, max_tokens=self.tokens + ANSWER_ROOM)
        return self.model or str(made)

    def _options(self) -> dict[str, Any]:
        pool = max(POOL_PROMPTS * self.tokens, MIN_POOL_TOKENS)
        block = GPU_BLOCK if self.gpu else CPU_BLOCK
        common: dict[str, Any] = {
            "max_model_len": self.tokens + ANSWER_ROOM,
            "max_num_batched_tokens": self.tokens + ANSWER_ROOM,
            "max_num_seqs": MAX_REQUESTS,
            "block_size": block,
            "num_gpu_blocks_override": math.ceil(pool / block) + 4,
        }
        if self.gpu:
            return common | {"gpu_memory_utilization": round(0.9 / self.together, 3)}
        return common | {"enforce_eager": True, "dtype": "auto" if self.model else "float32"}


def ours(tiers: Sequence[Any], arena_bytes: int, **settings: Any) -> dict[str, Any]:
    """Return the `kv_transfer_config` of this connector, with default settings except those given."""
    return {
        "kv_connector": "LMCacheAsyncConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "chunk_size": CHUNK,
            "arena.max_bytes": arena_bytes,
            "vllm.lookup_timeout_s": 5.0,  # on a busy machine, a late answer would be a miss and end the run
            "tiers": list(tiers),
            **settings,
        },
    }


def disk_tier(path: Path, **settings: Any) -> dict[str, Any]:
    return {"name": "disk", "path": str(path), "max_bytes": "1TiB", **settings}


@dataclass(frozen=True, slots=True)
class Connector:
    """Another connector of vLLM, with KV in host memory, or on disk if its name ends in `/disk`.

    Attributes:
        memory_key: Name of the option in `kv_connector_extra_config` for the bytes of memory.
        path_key: Name of the option for a directory.
        needs: A required package in addition to vLLM.
        module: Module of the connector, for substitutes of something missing on a CPU.
    """

    name: str
    memory_key: str = ""
    path_key: str = ""
    needs: str = ""
    module: str = ""

    @property
    def missing(self) -> str:
        """The required package if it is not installed, or ""."""
        return self.needs if self.needs and importlib.util.find_spec(self.needs) is None else ""

    def contestant(self, arena_bytes: int, directory: Path) -> Contestant:
        if self.name == NO_CONNECTOR:
            return Contestant(self.name)
        own, on_disk = directory / self.name.replace("/", "-"), self.name.endswith(ON_DISK)
        extra: dict[str, Any] = {self.memory_key: arena_bytes} if self.memory_key else {}
        if self.path_key:
            extra[self.path_key] = str(own)
        transfer: dict[str, Any] = {
            "kv_connector": self.name.removesuffix(ON_DISK),
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        if self.module:
            transfer["kv_connector_module_path"] = self.module
        environment = _lmcache(arena_bytes, own if on_disk else None) if self.needs == "lmcache" else {}
        return Contestant(self.name, transfer, environment, own if on_disk else None)


def _lmcache(arena_bytes: int, disk: Path | None) -> dict[str, str]:
    """Return LMCache's environment. With `disk` it has only the disk, with direct I/O as in the disk tier."""
    common = {
        "LMCACHE_CHUNK_SIZE": str(CHUNK),
        "LMCACHE_SAVE_UNFULL_CHUNK": "False",
        "LMCACHE_TRACK_USAGE": "false",
        "PYTHONHASHSEED": "0",  # its keys are Python's hashes
        "LMCACHE_LOCAL_CPU": str(disk is None),
        "LMCACHE_MAX_LOCAL_CPU_SIZE": str(arena_bytes / (1 if disk is None else 2) / GIB),
    }
    if disk is None:
        return common
    disk.mkdir(exist_ok=True)
    return common | {
        "LMCACHE_LOCAL_DISK": f"file://{disk}/",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "64",
        "LMCACHE_EXTRA_CONFIG": '{"use_odirect": true}',
    }


CONNECTORS = (
    Connector("OffloadingConnector", memory_key="cpu_bytes_to_use"),
    Connector("SimpleCPUOffloadConnector", memory_key="cpu_bytes_to_use"),
    Connector("ExampleConnector", path_key="shared_storage_path"),
    Connector("LMCacheConnectorV1", needs="lmcache"),
    Connector(f"LMCacheConnectorV1{ON_DISK}", needs="lmcache"),
)
ITSELF = Connector(NO_CONNECTOR)
"""A second vLLM without a connector. Smaller differences than its own are not significant."""


def chosen_connectors(names: str) -> list[Connector]:
    """Parse comma-separated names of connectors.

    A name may be followed by `@MODULE`. `all` selects all except `NoConnector`.

    Raises:
        ConfigError: There is no such connector.
    """
    if names.strip() == ALL:
        return list(CONNECTORS)
    parts = (text.partition("@") for text in names.split(","))
    modules = {name.strip(): module.strip() for name, _, module in parts}
    known = {one.name: one for one in (*CONNECTORS, ITSELF)}
    return [
        Connector(one.name, one.memory_key, one.path_key, one.needs, modules[one.name])
        for one in (known[name] for name in choose("connector", ",".join(modules), tuple(known)))
    ]


def choose(what: str, text: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the comma-separated names in the order of `names`.

    Raises:
        ConfigError: One of them is unknown.
    """
    given = [name.strip() for name in text.split(",") if name.strip()]
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f" did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"there is no {what} {name!r};{hint} there are: {', '.join(names)}")
    return tuple(name for name in names if name in given)
