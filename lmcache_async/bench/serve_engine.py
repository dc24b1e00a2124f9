"""The driver's end of a vLLM process. Every call waits for its end, so that no two engines compute at a time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lmcache_async.bench.serve_answers import Answer, ServeError
from lmcache_async.bench.serve_load import Request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

COMMAND = (sys.executable, "-m", "lmcache_async.bench.serve_child")
START_S, ANSWER_S, EXIT_S = 600.0, 300.0, 30.0
ANSWER_TOKENS = 4
SHORT_PROMPT = list(range(100, 116))  # less than a block, so that no cache ever keeps it

_LAST_LINES = 25
_GONE_S = 10.0
_ERROR = re.compile(r"(?:^|\s)(?P<error>(?:[A-Za-z_.]*(?:Error|Exception)): .+)")


class Engine:
    """A vLLM process. It begins to start at once; `wait_ready` waits for it.

    Args:
        options: Arguments of vLLM's engine, `kv_transfer_config` a mapping.
        environment: On top of our own, of which what configures us is left out.
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
                start_new_session=True,  # its workers end with it, see close
            )
        self._send(options)

    def wait_ready(self) -> None:
        self.facts = self._receive(START_S)

    def ask(self, prompt: Sequence[int], max_tokens: int = ANSWER_TOKENS) -> Answer:
        """One request by itself."""
        return self.serve([Request(prompt, max_tokens)])[0]

    def serve(self, requests: Sequence[Request]) -> list[Answer]:
        """Requests at the same time; each is sent when it is due."""
        self._send({"do": "serve", "requests": [asdict(request) for request in requests]})
        return [Answer(**fields) for fields in self._receive(ANSWER_S)]

    def reset(self) -> None:
        """Empty vLLM's own prefix cache. It waits for the stores that hold blocks of it."""
        self._send({"do": "reset", "prompt": SHORT_PROMPT})
        self._receive(ANSWER_S)

    def wake(self) -> None:
        """Its processes are awake after it, and vLLM has heard of the stores that have ended."""
        self.ask(SHORT_PROMPT, 1)

    def close(self) -> None:
        """End the process as a server ends, and its whole group if it does not follow."""
        try:
            if self._process.poll() is None:
                self._send({"do": "exit"})
                self._process.wait(EXIT_S)
        except (subprocess.TimeoutExpired, ServeError):
            pass  # the group is ended below
        finally:
            self.kill()

    def kill(self) -> None:
        """End every process of it, now; they are gone when this returns, as far as that takes seconds."""
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
                raise self._failure(f"gave no answer in {timeout_s:.0f} s")
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
