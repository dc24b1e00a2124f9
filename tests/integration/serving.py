"""`vllm serve` with the command of the quickstart and a small model."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import free_port

START_S, END_S, DEADLINE_S = 300.0, 30.0, 120.0
ROOT = Path(__file__).parents[2]

COMMANDS = re.findall(
    r"^```bash\n(.*?)^```",
    (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)
"""Commands of the quickstart: install, serve, ask."""
MODEL = "Qwen/Qwen3-0.6B"
"""Name of the model in these commands."""

STARTUP = "from tests.integration import forking\n\nforking.fork_instead_of_spawn()\n"
"""Module `sitecustomize` of vLLM's processes."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_ASYNC_ARENA__MAX_BYTES": "512MiB",
    "LMCACHE_ASYNC_VLLM__LOOKUP_TIMEOUT_S": "10",  # the machine may be busy, and these tests need hits
    "LMCACHE_ASYNC_VLLM__LOAD_POLICY": "always",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # it would spend half a minute on compiling the ranks of log-probabilities
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # required to reset vLLM's prefix cache
}


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of a process that runs the command `vllm` or imports it.

    Args:
        directory: For modules that the process imports.
    """
    (directory / "sitecustomize.py").write_text(STARTUP)
    paths = [str(ROOT), str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # The CPU build has another name, and its command looks up this one.
        metadata = directory / "vllm-0.dist-info"
        metadata.mkdir(exist_ok=True)
        version = importlib.metadata.version("vllm-cpu")
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | _ENVIRONMENT | {"PATH": path, "PYTHONPATH": os.pathsep.join(paths)}


SLOW_START = "assert addresses.coordinator_input is not None"
"""With one replica vLLM ends with this line if one of its threads takes ten seconds to start, as on a busy machine."""


class Serving:
    """A server that is ready.

    Attributes:
        events: The address of its KV events.
    """

    def __init__(self, port: int, events: str, log: Path, environment: dict[str, str]) -> None:
        self.port = port
        self.events = events
        self.environment = environment
        self._log = log

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def loaded_tokens(self) -> float:
        """Tokens loaded by the connector so far, from the counter named in the quickstart."""
        found = re.search(
            r"^vllm:external_prefix_cache_hits_total\S* (\S+)$", self.get("/metrics"), re.MULTILINE
        )
        return float(found[1]) if found else 0.0

    def get(self, path: str) -> str:
        return self._request(path, None)

    def post(self, path: str) -> str:
        return self._request(path, b"")

    def _request(self, path: str, body: bytes | None) -> str:
        with urllib.request.urlopen(self.url + path, data=body, timeout=DEADLINE_S) as answer:
            text = answer.read()
        assert isinstance(text, bytes)
        return text.decode()


@contextlib.contextmanager
def serving(command: str, directory: Path, *more: str, kv_events: bool = True) -> Iterator[Serving]:
    """Run the quickstart's command with additional options, on its own port.

    Args:
        kv_events: Publish KV events; vLLM rejects an `ipc` endpoint with data parallelism.
    """
    port, log = free_port(), directory / "server.log"
    events = f"ipc://{directory}/events"
    told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events}
    published = [f"--kv-events-config={json.dumps(told)}"] if kv_events else []
    options = shlex.join([f"--port={port}", *published, *more])
    environ = environment(directory)

    def start() -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                ["bash", "-c", f"exec {command.strip()} {options}"],
                cwd=directory,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    server, process = Serving(port, events, log, environ), start()
    try:
        try:
            _wait_ready(server, process)
        except AssertionError:
            if SLOW_START not in server.log:
                raise
            _end(process)
            process = start()
            _wait_ready(server, process)
        yield server
    finally:
        _end(process)


def _wait_ready(server: Serving, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            server.get("/health")
            return
        assert process.poll() is None, server.log[-4000:]
        assert time.monotonic() < deadline, server.log[-4000:]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.25)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
