"""Client of an engine process."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

START_S, ASK_S, EXIT_S = 600.0, 300.0, 60.0
WARM_UP_PROMPT = list(range(300, 316))  # shorter than a block, so that no cache stores it


class EngineError(RuntimeError):
    """The engine process ended or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one request.

    Attributes:
        ttft_s: Seconds from the request to the first token, by vLLM's own metric.
        cached_tokens: Prompt tokens that were not computed, by vLLM's count.
        logprobs: The best tokens of each generated position and their log-probabilities.
        log: Log of the engine during the request.
    """

    ttft_s: float
    seconds: float
    cached_tokens: int
    finish_reason: str
    tokens: list[int]
    logprobs: list[dict[str, float]]
    text: str
    log: str = ""


class Engine:
    """A vLLM process. `start` does not wait; `wait_ready` does."""

    def __init__(
        self, name: str, options: Mapping[str, Any], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "examples.demo.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | environment,
                start_new_session=True,  # its workers end with it, see close
                text=True,
            )
        self._send(options)

    def wait_ready(self) -> None:
        self._receive(START_S)

    def ask(self, prompt: list[int], max_tokens: int = 16) -> Answer:
        position = self.log.stat().st_size
        self._send({"do": "ask", "prompt": prompt, "max_tokens": max_tokens})
        fields = self._receive(ASK_S)
        with self.log.open("rb") as log:
            log.seek(position)
            return Answer(**fields, log=log.read().decode(errors="replace"))

    def reset(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._send({"do": "reset", "prompt": WARM_UP_PROMPT})
        self._receive(ASK_S)

    def settle(self, seconds: float) -> None:
        """Wait for background stores, then run a step so that vLLM is notified."""
        time.sleep(seconds)
        self.ask(WARM_UP_PROMPT, max_tokens=1)

    def close(self) -> None:
        """End the process, and its whole process group if it does not end."""
        try:
            if self._process.poll() is None:
                self._send({"do": "exit"})
                self._process.wait(EXIT_S)
        except (subprocess.TimeoutExpired, EngineError):
            pass  # the group is ended below
        finally:
            _end_group(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            _end_group(self._process)

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure("ended") from error

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while not select.select([self._process.stdout], [], [], 1.0)[0]:
            if self._process.poll() is not None:  # its workers may keep the pipe open
                raise self._failure("ended")
            if time.monotonic() > deadline:
                raise self._failure(f"did not answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure("ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self, what: str) -> EngineError:
        tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
        return EngineError(f"engine {self.name} {what}; the end of {self.log}:\n" + "\n".join(tail))


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
