"""Warmup of the memory of a running vLLM server, by requests for one token of each prompt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from lmcache_async.errors import ConfigError, TierUnavailableError
from lmcache_async.maintenance.concurrency import Meter, map_in_order
from lmcache_async.maintenance.prompts import Prompt

API_KEY = "VLLM_API_KEY"
"""Environment variable with the server's key, the same as vLLM's own."""
MAX_ANSWER_BYTES = 1 << 20


@dataclass(slots=True)
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
    model: str = ""
    prompts: int = 0
    tokens: int = 0
    cached_tokens: int | None = None
    refused: int = 0
    first_refusal: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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
        ConfigError: The URL is not an HTTP address.
        TierUnavailableError: The server cannot be reached, or does not answer in time.
    """
    report = Requests(url)
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(API_KEY)) else {}
    # Each request has a deadline of its own. Proxies of the environment are not used.
    async with httpx.AsyncClient(headers=headers, timeout=None, trust_env=False) as client:
        server = _Server(client, _base_url(url), timeout_s)
        report.model = model or await server.first_model()
        meter.begin("prompts", records=len(prompts))

        async def work(prompt: Prompt) -> tuple[int, Any]:
            text_or_ids = prompt.text if prompt.tokens is None else prompt.tokens.tolist()
            body = {"model": report.model, "prompt": text_or_ids, "max_tokens": 1, "temperature": 0}
            return await server.request("POST", "/v1/completions", body)

        async with contextlib.aclosing(map_in_order(prompts, work, in_flight=in_flight)) as results:
            async for status, answer in results:
                _count(report, status, answer)
                meter.advance(1, 0)
    return report


def _count(report: Requests, status: int, answer: Any) -> None:
    if status != httpx.codes.OK:
        report.refused += 1
        report.first_refusal = report.first_refusal or f"{status}: {json.dumps(answer)[:500]}"
        return
    usage = answer.get("usage") or {} if isinstance(answer, dict) else {}
    report.prompts += 1
    report.tokens += int(usage.get("prompt_tokens") or 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None:
        report.cached_tokens = (report.cached_tokens or 0) + int(cached)


def _base_url(text: str) -> str:
    """Return the server's address without `/v1`."""
    url = (text if "//" in text else f"http://{text}").rstrip("/")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and " " not in parts.netloc
        valid = valid and not parts.query and not parts.fragment and parts.port != 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        valid = False
    if not valid:
        raise ConfigError(
            f"--url {text}: expected the address of a vLLM server, such as http://localhost:8000"
        )
    return url.removesuffix("/v1")


class _Server:
    def __init__(self, client: httpx.AsyncClient, url: str, timeout_s: float) -> None:
        self._client = client
        self._url = url
        self._timeout_s = timeout_s

    async def first_model(self) -> str:
        status, answer = await self.request("GET", "/v1/models", None)
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise TierUnavailableError(
                f"{self._url}/v1/models answered {status} and names no model: name one with --model, or check that"
                " this is a vLLM server"
            ) from None

    async def request(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Return the status and the decoded answer; its first bytes as text if it is not JSON."""
        data = bytearray()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream(method, self._url + path, json=body) as response,
            ):
                async for part in response.aiter_bytes():
                    data += part
                    if len(data) > MAX_ANSWER_BYTES:
                        break
        except TimeoutError:
            raise TierUnavailableError(f"{self._url}: no answer in {self._timeout_s} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TierUnavailableError(f"{self._url}: {type(error).__name__}: {error}") from error
        try:
            return response.status_code, json.loads(data)
        except ValueError:
            return response.status_code, data[:500].decode("utf-8", "replace")
