"""Data-parallel replicas of one `vllm serve` and one config, each with its own disk directory."""

from __future__ import annotations

import json
import os
import random
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.serving import COMMANDS, DEADLINE_S, MODEL, Serving, serving
from tests.integration.vllm_records import record_of

pytestmark = pytest.mark.vllm

CHUNK = 256
CONFIG = """
arena: {{max_bytes: 128MiB}}
tiers:
  - {{name: disk, path: {disk}, max_bytes: 256MiB}}
"""
# The worker of each replica is in its engine's process: a separate worker imports vLLM again, a third of the time.
OPTIONS = [
    "--data-parallel-size=2",
    "--distributed-executor-backend=uni",
    "--api-server-count=1",
    "--dtype=float32",
    "--enforce-eager",
    "--enable-prompt-tokens-details",
    "--max-model-len=2048",
    "--max-num-seqs=4",
    "--num-gpu-blocks-override=32",
]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas") / "kv"


@pytest.fixture(scope="module")
def replicas(served_model: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The quickstart's command with two replicas, and without vLLM's prefix cache: every hit is the connector's."""
    directory = tmp_path_factory.mktemp("serve")
    config = directory / "cache.yaml"
    config.write_text(CONFIG.format(disk=disk))
    variables = f"VLLM_ENABLE_V1_MULTIPROCESSING=0 LMCACHE_ASYNC_CONFIG_FILE={config}"
    command = f"env {variables} {COMMANDS[1].replace(MODEL, str(served_model))}"
    with serving(command, directory, *OPTIONS, kv_events=False) as server:
        yield server


def prompt(seed: str) -> tuple[int, ...]:
    """A prompt of three chunks and a partial one."""
    chosen = random.Random(seed)
    return tuple(chosen.randrange(5, 900) for _ in range(3 * CHUNK + 8))


def ask(server: Serving, asked: tuple[int, ...], replica: int | None) -> tuple[int, dict[str, Any]]:
    """Return the number of cached prompt tokens, and the answer with its log-probabilities.

    Args:
        replica: Replica that answers; None for the choice of vLLM's load balancer.
    """
    body = {"prompt": asked, "max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    if replica is not None:
        headers["X-data-parallel-rank"] = str(replica)
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        answer = json.load(response)
    [choice] = answer["choices"]
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0), choice


def until_loaded(server: Serving, asked: tuple[int, ...], replica: int | None) -> dict[str, Any]:
    """Return the first answer whose full chunks were loaded; a write may end after the next question."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        cached, choice = ask(server, asked, replica)
        if cached == 3 * CHUNK:
            return choice
        assert cached in {0, CHUNK, 2 * CHUNK}
        assert time.monotonic() < deadline, server.log[-4000:]


def assert_same(choice: dict[str, Any], first: dict[str, Any]) -> None:
    assert choice["text"] == first["text"]
    assert choice["logprobs"]["tokens"] == first["logprobs"]["tokens"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(
        first["logprobs"]["token_logprobs"], abs=1e-4
    )


def test_each_replica_stores_and_finds_in_its_own_directory(replicas: Serving, disk: Path) -> None:
    directories = [disk, disk / "dp1"]
    holders = [int((directory / "lock").read_text()) for directory in directories]
    own = [prompt("of replica 0"), prompt("of replica 1")]
    first = []
    for replica, asked in enumerate(own):
        cached, choice = ask(replicas, asked, replica)
        assert cached == 0
        first.append(choice)
    again = [until_loaded(replicas, asked, replica) for replica, asked in enumerate(own)]

    assert len(set(holders)) == 2
    for holder in holders:
        os.kill(holder, 0)  # it is alive
    for choice, expected in zip(again, first, strict=True):
        assert_same(choice, expected)
    for replica, asked in enumerate(own):
        for start in range(0, 3 * CHUNK, CHUNK):
            record_of(directories[replica], asked, start)
        with pytest.raises(FileNotFoundError):
            record_of(directories[1 - replica], asked, 0)


def test_a_replica_computes_what_the_other_has_and_answers_the_same(replicas: Serving) -> None:
    asked = prompt("of both")
    _, first = ask(replicas, asked, 0)
    until_loaded(replicas, asked, 0)
    cached, second = ask(replicas, asked, 1)

    assert cached == 0
    assert_same(second, first)
    assert_same(until_loaded(replicas, asked, 1), first)
    for _ in range(4):  # now either of them has it
        cached, choice = ask(replicas, asked, None)
        assert cached == 3 * CHUNK
        assert_same(choice, first)
