"""A `vllm serve` with two data-parallel replicas, or on two hosts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.integration.serving import COMMANDS, DEADLINE_S, MODEL, Serving, environment, serving
from tests.integration.vllm_answers import Answer, Question
from tests.integration.vllm_driver import BLOCK, CHUNK
from tests.support.processes import free_port

REPLICAS = (0, 1)
NETWORK = "198.18.77"
"""First numbers of the addresses of the hosts, which only exist on this machine. The range is for benchmarks (RFC 2544)."""
_CONFIG = """
chunk_size: {chunk}
arena: {{max_bytes: 256MiB}}
tiers:
  - {{name: disk, path: {disk}, max_bytes: 1GiB}}
"""
_OPTIONS = {
    "dtype": "float32",
    "block-size": BLOCK,
    "max-model-len": 2048,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 256,
    "num-gpu-blocks-override": 256,
    "max-logprobs": 5,
}
# The worker of each replica is in its engine's process: a separate worker imports vLLM again.
_OF_REPLICAS = {
    "data-parallel-size": len(REPLICAS),
    "distributed-executor-backend": "uni",
    "api-server-count": 1,
}
_OF_HOSTS = {
    "tensor-parallel-size": 2,
    "nnodes": 2,
    "distributed-executor-backend": "mp",
    "master-addr": f"{NETWORK}.1",
}
_FLAGS = ("--enforce-eager", "--enable-prompt-tokens-details", "--return-tokens-as-token-ids")


def answers_of_replicas(
    model: Path, directory: Path, questions: Sequence[Question], hits: Sequence[int]
) -> dict[str, list[Answer]]:
    """Ask each replica each question, until it is loaded as far as expected.

    Args:
        directory: Directory for the disk tier and for the server's log.
        hits: Expected number of loaded tokens of each question.

    Returns:
        The first and the last answers of each replica, by description.
    """
    command = f"env VLLM_ENABLE_V1_MULTIPROCESSING=0 {_command(model, directory)}"
    options = [f"--{name}={value}" for name, value in (_OPTIONS | _OF_REPLICAS).items()]
    found = {}
    with serving(command, directory, *options, *_FLAGS, kv_events=False) as server:
        for replica in REPLICAS:
            found[f"cold, replica {replica}"] = [_ask(server, question, replica) for question in questions]
            found[f"warm, replica {replica}"] = [
                _until_loaded(server, question, replica, hit)
                for question, hit in zip(questions, hits, strict=True)
            ]
    return found


def answers_of_two_hosts(
    model: Path, directory: Path, questions: Sequence[Question], hits: Sequence[int]
) -> dict[str, list[Answer]]:
    """Ask a vLLM with a rank on each of two hosts: this one, and a network namespace.

    Args:
        directory: Directory for the disk tiers and for the log.
        hits: Expected number of loaded tokens of each question.

    Returns:
        The first and the last answers, by description.

    Raises:
        OSError: No network namespace can be created.
    """
    found = {}
    command = _command(model, directory)
    shared = _OPTIONS | _OF_HOSTS | {"master-port": free_port()}
    options = [*(f"--{name}={value}" for name, value in shared.items()), *_FLAGS]
    with _second_host() as (own, namespace, other):
        ranks = [
            f"env VLLM_HOST_IP={NETWORK}.{number} GLOO_SOCKET_IFNAME={interface} {command} --node-rank={number - 1}"
            for number, interface in ((1, own), (2, other))
        ]
        with (
            _running(["ip", "netns", "exec", namespace, "bash", "-c"], ranks[1], directory, options),
            serving(ranks[0], directory, *options, kv_events=False) as server,
        ):
            found["cold, two hosts"] = [_ask(server, question, 0) for question in questions]
            found["warm, two hosts"] = [
                _until_loaded(server, question, 0, hit) for question, hit in zip(questions, hits, strict=True)
            ]
    return found


@contextlib.contextmanager
def _second_host() -> Iterator[tuple[str, str, str]]:
    """Create a network namespace and a connection to it. Yield its end here, the namespace, and the end there."""
    if shutil.which("ip") is None or os.geteuid():
        raise OSError("a network namespace needs the command `ip` and root")
    namespace, own, other = (f"lmc{os.getpid()}{end}" for end in "nab")
    steps = [
        ["netns", "add", namespace],
        ["link", "add", own, "type", "veth", "peer", "name", other],
        ["link", "set", other, "netns", namespace],
        ["addr", "add", f"{NETWORK}.1/24", "dev", own],
        ["link", "set", own, "up"],
        ["-n", namespace, "addr", "add", f"{NETWORK}.2/24", "dev", other],
        ["-n", namespace, "link", "set", other, "up"],
        ["-n", namespace, "link", "set", "lo", "up"],
    ]
    try:
        for step in steps:
            ran = subprocess.run(["ip", *step], capture_output=True, text=True, check=False)
            if ran.returncode:
                raise OSError(f"ip {' '.join(step)}: {ran.stderr.strip()}")
        yield own, namespace, other
    finally:
        subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


@contextlib.contextmanager
def _running(prefix: Sequence[str], command: str, directory: Path, options: Sequence[str]) -> Iterator[None]:
    """Run the rank of the second host, which serves no requests."""
    with (directory / "second-host.log").open("wb") as log:
        process = subprocess.Popen(
            [*prefix, f"exec {command} --headless {' '.join(options)}"],
            cwd=directory,
            env=environment(directory),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _command(model: Path, directory: Path) -> str:
    """The quickstart's command with this model and a disk tier in the directory, which is created."""
    directory.mkdir(parents=True)
    config = directory / "cache.yaml"
    config.write_text(_CONFIG.format(chunk=CHUNK, disk=directory / "kv"))
    return f"env LMCACHE_ASYNC_CONFIG_FILE={config} {COMMANDS[1].strip().replace(MODEL, str(model))}"


def _until_loaded(server: Serving, question: Question, replica: int, hit: int) -> Answer:
    """Return the first answer with a hit of the expected length, or after a deadline the last one: writes may be late."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        answer = _ask(server, question, replica)
        if answer.cached_tokens >= hit or time.monotonic() > deadline:
            return answer


def _ask(server: Serving, question: Question, replica: int) -> Answer:
    begin = time.monotonic()
    body = {
        "prompt": question.prompt,
        "max_tokens": question.max_tokens,
        "temperature": 0,
        "logprobs": 5,
        "ignore_eos": True,
    }
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(replica)}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        answered: dict[str, Any] = json.load(response)
    [choice] = answered["choices"]
    logged = choice["logprobs"]
    return Answer(
        cached_tokens=(answered["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        finish_reason=choice["finish_reason"],
        tokens=[int(_number(token)) for token in logged["tokens"]],
        logprobs=[
            {_number(token): value for token, value in place.items()} for place in logged["top_logprobs"]
        ],
        seconds=time.monotonic() - begin,
    )


def _number(token: str) -> str:
    return token.removeprefix("token_id:")
