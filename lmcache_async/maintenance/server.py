"""Warmup of the memory of a running vLLM server, by requests for one token of each prompt."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from lmcache_async.errors import ConfigError, TierUnavailableError
from lmcache_async.maintenance.concurrency import Meter, for_each
from lmcache_async.maintenance.http import open_client, parse_address, request
from lmcache_async.maintenance.prompts import Prompt

API_KEY = "VLLM_API_KEY"
"""Environment variable with the server's key, the same as vLLM's own."""


@dataclass
class Requests:
    """Result of the requests.

    Attributes:
        url: Address of the server.
        model: Model of the requests.
        prompts: Requests that were answered.
        tokens: Their prompt tokens, as the server counts them.
        cached_tokens: Of these, tokens that the server had or loaded; None if the server does not report them
            (vLLM does with `--enable-prompt-tokens-details`).
        refused: Requests answered with an error, for example because the prompt is too long.
        first_refusal: The first of these answers.
    """

    url: str
    model: str
    prompts: int = 0
    tokens: int = 0
    cached_tokens: int | None = None
    refused: int = 0
    first_refusal: str | None = None

    def add(self, status: int, answer: Any) -> None:
        if status != httpx.codes.OK:
            self.refused += 1
            self.first_refusal = self.first_refusal or f"{status}: {json.dumps(answer)[:500]}"
            return
        usage = answer.get("usage") or {} if isinstance(answer, dict) else {}
        self.prompts += 1
        self.tokens += int(usage.get("prompt_tokens") or 0)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            self.cached_tokens = (self.cached_tokens or 0) + int(cached)


async def warm_server(
    url: str, prompts: Sequence[Prompt], meter: Meter, *, model: str | None, in_flight: int, timeout_s: float
) -> Requests:
    """Send each prompt with `max_tokens` 1.

    The server loads the prefix that a tier has, and computes and stores the rest.

    Args:
        url: Address of the server.
        prompts: Prompts to send.
        meter: Receives the progress.
        model: Model of the requests; by default the server's first one.
        in_flight: Number of concurrent requests.
        timeout_s: Deadline of each request.

    Raises:
        ConfigError: The URL is not an HTTP address, or the server's key is invalid.
        TierUnavailableError: The server cannot be reached, or does not answer in time.
    """
    base, key = _base_url(url), os.environ.get(API_KEY, "")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{API_KEY} contains characters that a key cannot have, such as a line break")
    async with open_client(key) as client:
        report = Requests(url, model or await _first_model(client, base, timeout_s))

        async def work(prompt: Prompt) -> int:
            text_or_ids = prompt.text if prompt.tokens is None else prompt.tokens.tolist()
            body = {"model": report.model, "prompt": text_or_ids, "max_tokens": 1, "temperature": 0}
            report.add(*await _ask(client, "POST", f"{base}/v1/completions", timeout_s, body))
            return 0

        await for_each("prompts", prompts, work, meter, in_flight=in_flight)
    return report


def _base_url(text: str) -> str:
    """Return the server's address without `/v1`."""
    try:
        parts = parse_address(text.rstrip("/"))
        if not parts.query and not parts.fragment:
            return parts.geturl().removesuffix("/v1")
    except ValueError:
        pass
    raise ConfigError(f"--url {text}: expected the address of a vLLM server, such as http://localhost:8000")


async def _first_model(client: httpx.AsyncClient, base: str, timeout_s: float) -> str:
    url = f"{base}/v1/models"
    status, answer = await _ask(client, "GET", url, timeout_s)
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise TierUnavailableError(
            f"{url} answered {status} and names no model: name one with --model, or check that this is a vLLM server"
        ) from None


async def _ask(
    client: httpx.AsyncClient, method: str, url: str, timeout_s: float, body: Any = None
) -> tuple[int, Any]:
    """Return the status and the decoded answer; its first characters if it is not JSON."""
    try:
        status, data = await request(client, method, url, timeout_s=timeout_s, body=body)
    except TimeoutError:
        raise TierUnavailableError(f"{url}: no answer in {timeout_s} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TierUnavailableError(f"{url}: {type(error).__name__}: {error}") from error
    try:
        return status, json.loads(data)
    except (ValueError, RecursionError):
        return status, data[:500].decode("utf-8", "replace")
