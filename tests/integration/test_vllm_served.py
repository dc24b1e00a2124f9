"""The cache warming command and the KV events of a running `vllm serve`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from tests.integration.serving import DEADLINE_S, Serving

pytestmark = pytest.mark.vllm

CHUNK = 256
SEEDS = iter(range(10_000))


def prompts(count: int, num_tokens: int) -> list[list[int]]:
    """Prompts that were not used before."""
    chosen = random.Random(f"served {next(SEEDS)}")
    return [[chosen.randrange(5, 900) for _ in range(num_tokens)] for _ in range(count)]


def warm(server: Serving, asked: Sequence[Sequence[int]], folder: Path) -> dict[str, Any]:
    """Run `lmcache-async warm --url` and return its report."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(ids) + "\n" for ids in asked))
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "lmcache_async.cli",
            "warm",
            "--url",
            server.url,
            "--prompts",
            str(file),
            "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert isinstance(told, dict)
    return told


def test_warm_has_a_server_compute_and_then_load(server: Serving, tmp_path: Path) -> None:
    asked = prompts(3, 3 * CHUNK + 8)
    first = warm(server, asked, tmp_path)

    assert first["prompts"] == 3
    assert first["tokens"] == 3 * len(asked[0])
    assert first["cached_tokens"] == 0
    assert first["refused"] == 0

    deadline, before = time.monotonic() + DEADLINE_S, server.loaded_tokens
    while server.loaded_tokens - before < 9 * CHUNK:  # a store may end after the next question
        assert time.monotonic() < deadline, server.log[-4000:]
        server.post("/reset_prefix_cache")
        before = server.loaded_tokens
        again = warm(server, asked, tmp_path)
        assert again["prompts"] == 3
    assert again["cached_tokens"] == 9 * CHUNK


def test_warm_reports_prompts_that_the_server_refuses(server: Serving, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps([7] * 1_000_000) + "\n")
    ran = subprocess.run(
        [sys.executable, "-m", "lmcache_async.cli", "warm", "--url", server.url, "--prompts", str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )

    assert ran.returncode == 1
    assert "1 request failed, the first with 400" in ran.stdout + ran.stderr


@pytest.fixture
def events(server: Serving) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.setsockopt(zmq.RCVTIMEO, 500)
        subscriber.connect(server.events)
        yield subscriber


def stored(events: zmq.Socket[bytes]) -> Iterator[dict[str, Any]]:
    """Return the events of the tier `cpu` received so far."""
    while True:
        try:
            _, _, body = events.recv_multipart()
        except zmq.Again:
            return
        _, batch, *_ = msgpack.unpackb(body)
        for event in batch:
            if event["type"] == "BlockStored" and event.get("ownership") == "cpu":
                yield event


def test_a_router_learns_which_chunks_a_tier_has(
    server: Serving, events: zmq.Socket[bytes], tmp_path: Path
) -> None:
    asked: list[int] = []
    found: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < 2:
        assert time.monotonic() < deadline, server.log[-4000:]
        if not found:  # the first one may be stored before this subscriber is connected
            [asked] = prompts(1, 2 * CHUNK + 8)
        warm(server, [asked, *prompts(1, 32)], tmp_path)  # events are sent with steps
        for event in stored(events):
            for begin in (0, CHUNK):
                if event["token_ids"] == asked[begin : begin + CHUNK]:
                    found[begin] = event

    assert not found[0].get("parent_block_hash")
    assert [found[CHUNK]["parent_block_hash"]] == found[0]["block_hashes"]
    for event in found.values():
        assert event["block_size"] == CHUNK
        assert (event["medium"], event["locality"]) == ("CPU", "LOCAL")
