"""Start, query and stop vLLM engines in separate processes, and compare their answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.integration.model_families import LLAMA, make_llama
from tests.integration.vllm_answers import Answer, Question, tokens
from tests.support import native

CHUNK, BLOCK = 64, 32
DEADLINE_S = 300.0

_ENVIRONMENT = {
    "NUMBA_DISABLE_JIT": "1",  # otherwise the n-gram proposer of speculative decoding is compiled, which takes seconds
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # otherwise the ranks of log-probabilities are compiled, which takes seconds
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # to call functions in the worker
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_ROOT = Path(__file__).parents[2]
_names = itertools.count(1)


def connector(
    *,
    disk: Path | None = None,
    valkey: str = "",
    arena_chunks: int = 400,
    role: str = "kv_both",
    **extra: Any,
) -> dict[str, Any]:
    """Return the `kv_transfer_config` of an engine. Settings with a default in vLLM are omitted."""
    tiers: list[Any] = ["cpu"]
    if disk is not None:
        tiers.append({"name": "disk", "path": str(disk), "max_bytes": "1GiB"})
    if valkey:
        tiers.append({"name": "valkey", "url": valkey})
    settings = {
        "chunk_size": CHUNK,
        "arena.max_bytes": arena_chunks * (CHUNK * LLAMA.kv_bytes + 4096),
        "vllm.lookup_timeout_s": 10.0,  # the machine may be busy, and these tests need hits
        "vllm.lookup_pin_ttl_s": 600.0,  # a pin that is never released must not expire
        "vllm.load_policy": "always",  # computing with this small model is faster than reading a busy disk
        "tiers": tiers,
    }
    return {
        "kv_connector": "LMCacheAsyncConnector",
        "kv_role": role,
        "kv_connector_extra_config": settings | extra,
    }


OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "CPUOffloadingSpecOnCPU",
        "spec_module_path": "tests.integration.cpu_offloading",
        "cpu_bytes_to_use": 1 << 28,
    },
}
"""The `kv_transfer_config` of vLLM's own connector."""


def several(*transfers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `kv_transfer_config` of vLLM's MultiConnector with these connectors."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(transfers)},
    }


def complaints(log: str) -> list[str]:
    """Return the warnings and errors of a log, except vLLM's own about signals."""
    lines = [line for line in log.splitlines() if "[shutdown]" not in line]
    return [line for line in lines if any(word in line for word in ("WARNING", "ERROR", "Traceback"))]


class EngineError(RuntimeError):
    """The engine process ended or did not answer in time."""


class Engine:
    """A vLLM engine. Calls wait for their end, so engines do not compute concurrently."""

    def __init__(self, pid: int, channel: socket.socket, log: Path) -> None:
        self.log_file = log
        self._pid = pid
        self._process = os.pidfd_open(pid)
        self._channel = channel
        self._stream = channel.makefile("rw", encoding="utf-8")
        self._ended = False

    def start(self, options: Mapping[str, Any]) -> None:
        self._send(options)
        self._receive()

    def ask(self, question: Question) -> Answer:
        return self.ask_all([question])[0]

    def ask_all(self, questions: Sequence[Question]) -> list[Answer]:
        """Ask all questions at once."""
        position = self.log_size
        names = self.add(*questions)
        self.call("run")
        return [self.take(name, position) for name in names]

    def ask_all_watched(self, questions: Sequence[Question]) -> tuple[list[Answer], list[bool]]:
        """Ask all questions at once. Return the answers, and for each whether vLLM preempted the request."""
        position = self.log_size
        names = self.add(*questions)
        preempted = self.call("run_watched")
        return [self.take(name, position) for name in names], [name in preempted for name in names]

    def add(self, *questions: Question) -> list[str]:
        """Add requests and return their names, which are also in the log."""
        requests = [{"name": f"q{next(_names)}", **asdict(question)} for question in questions]
        self.call("add", requests=requests)
        return [request["name"] for request in requests]

    def take(self, name: str, position: int = 0) -> Answer:
        """Return the answer of a finished request, with the log from `position` on."""
        return Answer(**self.call("take", name=name), log=self.log(position))

    def step_until(self, wanted: str, name: str) -> None:
        """Step the engine until the request is in that state."""
        for _ in self.until(f"request {name} is not {wanted}"):
            if self.call("state", name=name) == wanted:
                return
            self.call("step")

    def settle(self) -> dict[str, Any]:
        """Step until all loads, stores and disk writes have ended, and empty vLLM's own prefix cache.

        Afterwards no block of vLLM is held, and no host memory except that of the tier `cpu`.

        Returns:
            Statistics of the first worker's cache engine.
        """
        for _ in self.until("holds blocks or leases"):
            workers: list[dict[str, Any]] = self.call("call_all", name="statistics")
            idle = not any(found["running"] or found["pinned_chunks"] for found in workers)
            released = all(found["leased_slabs"] == found["chunks"]["cpu"] for found in workers)
            if idle and released and self.call("reset", connector=False):
                return workers[0]
            self.call("step")
        raise AssertionError

    def forget(self) -> None:
        """Reset vLLM's prefix cache, and ours as configured by `vllm.reset_cache`."""
        self.settle()
        assert self.call("reset", connector=True)
        self.wait_connected()

    def wait_connected(self) -> None:
        """Wait until lookups are answered: the scheduler is connected to the workers, and no reset is in progress."""
        for _ in self.until("does not ask its worker"):
            if self.call("asks"):
                return

    def wait_for_hit(self) -> None:
        """Wait until a prompt is loaded from the connector: the scheduler is connected to the workers.

        For engines in separate processes, whose scheduler the test cannot inspect.
        """
        probe = Question(tokens("is it connected", 200), max_tokens=1)
        for _ in self.until("loads nothing"):
            hit = self.ask(probe).cached_tokens > 0
            self.settle()
            if hit:
                return

    def call(self, operation: str, **arguments: Any) -> Any:
        """Call an operation of `vllm_child.Child` and return its answer."""
        self._send({"do": operation, **arguments})
        return self._receive()

    @property
    def log_size(self) -> int:
        return self.log_file.stat().st_size

    def log(self, position: int = 0) -> str:
        with self.log_file.open("rb") as log:
            log.seek(position)
            return log.read().decode(errors="replace")

    def close(self) -> str:
        """Shut vLLM down and return the log output meanwhile."""
        position = self.log_size
        self.call("shut_down")
        self.kill()
        return self.log(position)

    def kill(self) -> None:
        """Send SIGKILL to every process of the engine and wait for the exit of the first one."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        select.select([self._process], [], [])
        os.close(self._process)
        with contextlib.suppress(BrokenPipeError):
            self._stream.close()
        self._channel.close()

    def until(self, failure: str) -> Iterator[None]:
        """Yield repeatedly. After a minute, fail the test with this text and the engine's log."""
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            yield
        raise self._failure(failure)

    def _send(self, request: Mapping[str, Any]) -> None:
        try:
            self._stream.write(json.dumps(request) + "\n")
            self._stream.flush()
        except BrokenPipeError as error:
            raise self._failure("ended") from error

    def _receive(self) -> Any:
        if not select.select([self._channel, self._process], [], [], DEADLINE_S)[0]:
            raise self._failure(f"did not answer in {DEADLINE_S:.0f} s")
        line = self._stream.readline() if select.select([self._channel], [], [], 0)[0] else ""
        if not line:
            raise self._failure("ended")
        return json.loads(line)

    def _failure(self, what: str) -> EngineError:
        return EngineError(f"the engine {what}; the end of its log:\n" + self.log()[-4000:])


class Engines:
    """Starts engines. `close` ends all of them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._model = make_llama(directory / "model")
        self._calls, theirs = socket.socketpair()
        self._numbers = itertools.count()
        self._started: list[Engine] = []
        command = [sys.executable, "-m", "tests.integration.vllm_child", str(theirs.fileno())]
        environment = native.environment() | _ENVIRONMENT
        environment["TMPDIR"] = str(directory)  # vLLM creates sockets there
        with (directory / "nursery.log").open("wb") as log:
            self._nursery = subprocess.Popen(
                command, env=environment, cwd=_ROOT, pass_fds=[theirs.fileno()], stdout=log, stderr=log
            )
        theirs.close()
        if self._calls.recv(1) != b".":
            raise EngineError((directory / "nursery.log").read_text())

    def start(
        self,
        transfer: Mapping[str, Any] | None = None,
        *,
        processes: bool = False,
        unsupported: bool = False,
        **options: Any,
    ) -> Engine:
        """Start an engine and wait until it answers.

        Args:
            transfer: Its `kv_transfer_config`.
            unsupported: Whether the connector is expected to turn itself off, so that the scheduler never connects.
            processes: Run the scheduler and the worker in separate processes, as vLLM does by default.
                Otherwise they run in one process, which starts in seconds and is stepped by the test.
        """
        engine = self._fork({"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes))})
        settings = {
            "model": str(self._model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,  # most prompts are longer: prefills are chunked
            "num_gpu_blocks_override": 256,
        }
        if transfer is not None:
            settings["kv_transfer_config"] = transfer
        engine.start(settings | options)
        if transfer is not None and not processes and not unsupported:
            engine.wait_connected()
        return engine

    @contextlib.contextmanager
    def started(self, transfer: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
        """Start an engine and kill it at the end of the block."""
        engine = self.start(transfer, **options)
        try:
            yield engine
        finally:
            engine.kill()

    def run_module(self, module: str, *arguments: str) -> str:
        """Run a module like `python -m`, in a process that has imported vLLM, and return its output."""
        process = self._fork({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        process.start({"module": module, "arguments": arguments})
        process.kill()
        return process.log()

    def close(self) -> None:
        for engine in self._started:
            engine.kill()
        self._calls.close()
        self._nursery.wait(60)

    def _fork(self, environment: Mapping[str, str]) -> Engine:
        path = self._directory / f"engine-{next(self._numbers)}.log"
        ours, theirs = socket.socketpair()
        with path.open("ab") as log, theirs:
            message = json.dumps(environment).encode()
            socket.send_fds(self._calls, [message], [theirs.fileno(), log.fileno()])
            pid = int.from_bytes(self._calls.recv(4), "little")
        engine = Engine(pid, ours, path)
        self._started.append(engine)
        return engine


class Reference:
    """Answers of a vLLM without connector. Each question is computed once, with an empty cache."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[Question, Answer] = {}

    def __call__(self, question: Question) -> Answer:
        alone = self._alone(question)
        if alone not in self._known:
            assert self._engine.call("reset", connector=False)
            self._known[alone] = self._engine.ask(alone)
        return self._known[alone]

    def own_hit(self, question: Question) -> Answer:
        """Return the answer from vLLM's own prefix cache."""
        alone = self._alone(question)
        assert self._engine.call("reset", connector=False)
        self._known[alone] = self._engine.ask(alone)
        return self._engine.ask(alone)

    def own_hits(self, questions: Sequence[Question]) -> list[Answer]:
        """Return the answers to questions in order, with hits of vLLM's own prefix cache for earlier ones."""
        assert self._engine.call("reset", connector=False)
        return [self._engine.ask(question) for question in questions]

    def together(self, questions: Sequence[Question]) -> tuple[list[Answer], list[Answer]]:
        """Return the answers to questions asked at the same time, with an empty cache and again with its hits."""
        assert self._engine.call("reset", connector=False)
        alone = [self._alone(question) for question in questions]
        return self._engine.ask_all(alone), self._engine.ask_all(alone)

    def _alone(self, question: Question) -> Question:
        return replace(question, cache_salt="", params=None)
