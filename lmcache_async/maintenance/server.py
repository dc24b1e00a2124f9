"""Warmup of the memory of a running vLLM server, by requests for one token of each prompt."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import numpy as np

from lmcache_async.config.validation import without_user
from lmcache_async.errors import ConfigError, TierUnavailableError
from lmcache_async.maintenance.concurrency import Progress, for_each
from lmcache_async.maintenance.http import open_client, parse_address, request_json
from lmcache_async.maintenance.prompts import Prompt

API_KEY = "VLLM_API_KEY"
"""Environment variable with the server's key, the same as vLLM's own."""


@dataclass
class Requests:
    """Result of `warm_server`: sums over its requests."""

    url: str
    model: str
    prompts: int = 0
    tokens: int = 0
    cached_tokens: int | None = None  # None if the server does not report them
    refused: int = 0  # answered with an error
    first_refusal: str | None = None

    def add(self, status: int, answer: Any) -> None:
        if status != HTTPStatus.OK:
            self.refused += 1
            self.first_refusal = self.first_refusal or f"{status}: {json.dumps(answer)[:500]}"
            return
        self.prompts += 1
        self.tokens += _count(answer, "usage", "prompt_tokens") or 0
        cached = _count(answer, "usage", "prompt_tokens_details", "cached_tokens")
        if cached is not None:
            self.cached_tokens = (self.cached_tokens or 0) + cached


def _count(answer: Any, *path: str) -> int | None:
    """Return a number of the answer; None if the server does not report it."""
    for name in path:
        answer = answer.get(name) if isinstance(answer, dict) else None
    return answer if isinstance(answer, int) else None


async def warm_server(
    url: str,
    prompts: Sequence[Prompt],
    progress: Progress,
    *,
    model: str | None,
    in_flight: int,
    timeout_s: float,
) -> Requests:
    """Send each prompt with `max_tokens` 1.

    The server loads the prefix that a tier has, and computes and stores the rest. By default the server's first
    model is used.
    """
    shown = without_user(url)
    advice = f"--url {shown}: expected the address of a vLLM server, such as http://localhost:8000"
    parts = parse_address(url.rstrip("/"), advice)
    if parts.query or parts.fragment:
        raise ConfigError(advice)
    base = parts.geturl().removesuffix("/v1")
    async with open_client(os.environ.get(API_KEY, ""), API_KEY) as client:
        ask = partial(request_json, client, timeout_s=timeout_s, hint="is vLLM running there?")
        report = Requests(shown, model or _first_model(base, *await ask("GET", f"{base}/v1/models")))

        async def work(prompt: Prompt) -> int:
            text_or_ids = prompt if isinstance(prompt, str) else np.frombuffer(prompt, np.int32).tolist()
            body = {"model": report.model, "prompt": text_or_ids, "max_tokens": 1, "temperature": 0}
            report.add(*await ask("POST", f"{base}/v1/completions", body))
            return 0

        await for_each("prompts", prompts, work, progress, in_flight=in_flight)
    return report


def _first_model(base: str, status: int, answer: Any) -> str:
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise TierUnavailableError(
            f"{without_user(base)}/v1/models answered {status} and names no model: name one with --model, or check that this is a"
            " vLLM server"
        ) from None
