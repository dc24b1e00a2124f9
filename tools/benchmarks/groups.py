"""Time to the first token of a hit with several KV groups, compared with vLLM's prefix cache and OffloadingConnector.

Three vLLM processes with the same model get the same prompt in turn: one without a connector, one with this connector
and one with OffloadingConnector, whose copies run on a thread in place of a CUDA stream, or at once. Every answer must
equal that of vLLM's own prefix cache, and every hit must be as long; otherwise there are no figures.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from lmcache_async.bench.measure import Case, Frame, Parameter, Row
from tests.integration import cpu_models
from tools.benchmarks.command import option
from tools.benchmarks.serve_engine import (
    ON_CPU,
    SHARED,
    Answer,
    Engine,
    check_cached,
    check_same,
    choose,
    ours,
)

PLAIN, OURS, PEER = "no connector", "lmcache-async", "OffloadingConnector"
COPIES = {"thread": "CPUOffloadingSpecWithStream", "at-once": "CPUOffloadingSpecOnCPU"}
"""How OffloadingConnector's copies run, and the class of `tests.integration.cpu_offloading`."""
IDLE_S = 1.2
"""Pause before another engine gets requests, in seconds. vLLM's processes poll for a second after their last work."""
HITS = 5
"""Hits of an engine in a round, of which the median counts. The first dozens of hits of a process are slower."""
MIB = 1 << 20
EXECUTORS = {"mp": "mp", "uni": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
"""The name of an executor, and what vLLM is given. On a CPU it uses `mp` if it is given `uni`."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model with random weights.

    Attributes:
        make: Function of `tests.integration.model_families` and its arguments.
        options: Arguments of vLLM's engine.
    """

    make: str
    arguments: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)


MODELS = {
    "gemma-3": Model(
        "make_sliding_window_model",
        {"pattern": "wwwwwf", "repeats": 4, "window": 1024},
        options={"block_size": 128},
    ),
    "qwen3-next": Model(
        "make_recurrent_model",
        {"repeats": 4, "heads": 16},
        options={"mamba_cache_mode": "align"},
    ),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes with a help text are options; see docs/benchmarks.md."""

    tokens: int = option(4098, "tokens of the prompt")
    models: str = option(",".join(MODELS), "the models", parse=str)
    executors: str = option(
        "mp,uni",
        "mp: vLLM's worker in a process of its own; uni: in the scheduler's process, as with one GPU",
        parse=str,
    )
    copies: str = option(
        "thread",
        "thread: OffloadingConnector's copies run on a thread, as on a CUDA stream; at-once: in the step that starts them",
        parse=str,
    )
    arena_mib: int = option(2048, "MiB of host memory for the cache")
    idle_s: float = field(default=IDLE_S)
    warm_up: int = field(default=10)


QUICK = Settings(tokens=514, executors="uni", arena_mib=256, idle_s=0.0, warm_up=0)


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    """Measure the selected models, one after the other.

    Raises:
        ConfigError: There is no such model.
        ServeError: A vLLM did not start, missed a hit or answered wrongly.
    """
    executors = choose("executor", settings.executors, tuple(EXECUTORS))
    copies = choose("kind of copies", settings.copies, tuple(COPIES))
    for name, executor, kind in product(choose("model", settings.models, tuple(MODELS)), executors, copies):
        with ExitStack() as stack:
            contest = Contest(name, executor, kind, settings, frame, stack)
            for row in await frame.compare([contest.case()]):
                yield row


class Contest:
    """The engines of one model, with one prompt that all of them have computed.

    Args:
        stack: Ends the engines.
    """

    def __init__(
        self, name: str, executor: str, copies: str, settings: Settings, frame: Frame, stack: ExitStack
    ) -> None:
        self._name = name
        self._executor = executor
        self._copies = copies
        self._settings = settings
        self._model = MODELS[name]
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lma")))
        _make(self._model, directory / "model", settings.tokens)
        cpu_models.install(directory)
        transfers = {
            PLAIN: None,
            OURS: ours(["cpu"], settings.arena_mib * MIB, **{"vllm.load_policy": "always"}),
            PEER: _offloading(COPIES[copies], settings.arena_mib * MIB),
        }
        self._engines = {
            who: self._start(who, transfer, directory, stack) for who, transfer in transfers.items()
        }
        for engine in self._engines.values():
            engine.wait_ready()
        vocabulary = int(self._engines[PLAIN].facts["vocabulary"])
        self._prompt = [frame.chosen.randrange(3, vocabulary) for _ in range(settings.tokens)]
        self._reference = self._warm_up()

    def case(self) -> Case:
        probes = {who: partial(self._hit_ms, who) for who in self._engines}
        parameters: dict[str, Parameter] = {
            "tokens": self._settings.tokens,
            "model": self._name,
            "executor": self._executor,
            "copies": self._copies,
        }
        limits = {PEER: probes[PEER], "own hit": probes[PLAIN]}
        return Case(f"known prompt, {self._name}, {self._executor}", "ms", probes[OURS], limits, parameters)

    def _start(
        self, who: str, transfer: Mapping[str, Any] | None, directory: Path, stack: ExitStack
    ) -> Engine:
        room = self._settings.tokens + 512
        options: dict[str, Any] = {
            "model": str(directory / "model"),
            "max_model_len": room,
            "max_num_batched_tokens": room,
            "max_num_seqs": 4,
            "enforce_eager": True,
            "distributed_executor_backend": EXECUTORS[self._executor],
            **self._model.options,
        }
        if transfer is not None:
            options["kv_transfer_config"] = dict(transfer)
        environment = (
            SHARED
            | ON_CPU
            | {"TMPDIR": str(directory), "PYTHONPATH": os.pathsep.join([str(directory), *sys.path])}
        )
        engine = Engine(who, options, environment, directory / f"{who.replace(' ', '-')}.log")
        stack.callback(engine.kill)
        return engine

    def _warm_up(self) -> Answer:
        """Compute the prompt in each engine. Return the answer of vLLM's own prefix cache."""
        for engine in self._engines.values():
            engine.ask(self._prompt)
            engine.wake()
        plain = self._engines[PLAIN].ask(self._prompt)
        for who in (OURS, PEER):
            for _ in range(self._settings.warm_up):
                self._hit(who, plain)
        return plain

    async def _hit_ms(self, who: str) -> float:
        """Return the median time to the first token of some hits, in milliseconds."""
        await asyncio.sleep(self._settings.idle_s)
        self._engines[who].wake()
        return statistics.median(self._hit(who, self._reference).ttft_ms for _ in range(HITS))

    def _hit(self, who: str, reference: Answer) -> Answer:
        engine = self._engines[who]
        if who != PLAIN:
            engine.reset()
        answer = engine.ask(self._prompt)
        check_cached(
            f"{self._name}, {who}", answer, least=reference.cached_tokens, most=self._settings.tokens - 1
        )
        check_same(f"{self._name}, {who}", answer, reference, str(engine.facts["dtype"]))
        return answer


def _make(model: Model, directory: Path, tokens: int) -> None:
    from tests.integration import model_families

    make: Callable[..., Path] = getattr(model_families, model.make)
    make(directory, max_tokens=tokens + 512, **model.arguments)


def _offloading(specification: str, nbytes: int) -> dict[str, Any]:
    """Return the `kv_transfer_config` of OffloadingConnector on a CPU."""
    return {
        "kv_connector": PEER,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": specification,
            "spec_module_path": "tests.integration.cpu_offloading",
            "cpu_bytes_to_use": nbytes,
        },
    }
