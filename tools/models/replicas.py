"""Two data-parallel replicas of one `vllm serve`."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.integration.serving import COMMANDS, DEADLINE_S, MODEL, Serving, serving
from tests.integration.vllm_answers import Answer, Question
from tests.integration.vllm_driver import BLOCK, CHUNK

REPLICAS = (0, 1)
_CONFIG = """
chunk_size: {chunk}
arena: {{max_bytes: 256MiB}}
tiers:
  - {{name: disk, path: {disk}, max_bytes: 1GiB}}
"""
# The worker of each replica is in its engine's process: a separate worker imports vLLM again.
_OPTIONS = {
    "data-parallel-size": len(REPLICAS),
    "distributed-executor-backend": "uni",
    "api-server-count": 1,
    "dtype": "float32",
    "block-size": BLOCK,
    "max-model-len": 2048,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 256,
    "num-gpu-blocks-override": 256,
    "max-logprobs": 5,
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
    directory.mkdir(parents=True)
    config = directory / "cache.yaml"
    config.write_text(_CONFIG.format(chunk=CHUNK, disk=directory / "kv"))
    variables = f"VLLM_ENABLE_V1_MULTIPROCESSING=0 LMCACHE_ASYNC_CONFIG_FILE={config}"
    command = f"env {variables} {COMMANDS[1].replace(MODEL, str(model))}"
    options = [f"--{name}={value}" for name, value in _OPTIONS.items()]
    found = {}
    with serving(command, directory, *options, *_FLAGS, kv_events=False) as server:
        for replica in REPLICAS:
            found[f"cold, replica {replica}"] = [_ask(server, question, replica) for question in questions]
            found[f"warm, replica {replica}"] = [
                _until_loaded(server, question, replica, hit)
                for question, hit in zip(questions, hits, strict=True)
            ]
    return found


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
