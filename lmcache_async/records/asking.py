"""A running vLLM asked for one token of each prompt: the one way to its own memory, from outside of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lmcache_async.errors import ConfigError, TierUnavailableError
from lmcache_async.memory.threads import in_thread
from lmcache_async.records.flight import Meter, each, in_order
from lmcache_async.records.prompts import Prompt

API_KEY = "VLLM_API_KEY"
"""The variable with the server's key, as vLLM itself reads it."""
MAX_ANSWER_BYTES = 1 << 20


@dataclass(slots=True)
class Asked:
    """What the requests came to.

    Attributes:
        prompts: Requests that were answered.
        tokens: Their prompt tokens, as the server counts them.
        cached_tokens: Of these, how many it had, or loaded; None where it does not say (vLLM says so with
            `--enable-prompt-tokens-details`).
        refused: Requests that it answered with an error, such as a prompt that is too long.
        first_refusal: What it said to the first of them.
    """

    url: str
    model: str = ""
    prompts: int = 0
    tokens: int = 0
    cached_tokens: int | None = None
    refused: int = 0
    first_refusal: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "model": self.model,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "cached_tokens": self.cached_tokens,
            "refused": self.refused,
            "first_refusal": self.first_refusal or None,
        }


async def ask(
    url: str, prompts: Sequence[Prompt], meter: Meter, *, model: str | None, in_flight: int, timeout_s: float
) -> Asked:
    """Send each prompt with `max_tokens` 1. What no tier has is computed, and then stored as with any request.

    Raises:
        ConfigError: The address is none.
        TierUnavailableError: The server cannot be reached, or does not answer in time.
    """
    server = _Server(url, timeout_s)
    report = Asked(url)
    with contextlib.ExitStack() as undo:
        threads = ThreadPoolExecutor(in_flight, thread_name_prefix="lmcache-ask")
        undo.callback(threads.shutdown)
        call = functools.partial(_in_thread, threads)
        report.model = model or await _first_model(server, call)
        meter.begin("prompts", records=len(prompts))

        async def work(prompt: Prompt) -> tuple[int, Any]:
            text_or_ids = prompt.text if prompt.tokens is None else prompt.tokens.tolist()
            body = {"model": report.model, "prompt": text_or_ids, "max_tokens": 1, "temperature": 0}
            return await call(server.request("POST", "/v1/completions", body))

        async with contextlib.aclosing(in_order(each(prompts), work, in_flight=in_flight)) as results:
            async for status, answer in results:
                _count(report, status, answer)
                meter.advance(1, 0)
    return report


def _count(report: Asked, status: int, answer: Any) -> None:
    if status != http.HTTPStatus.OK:
        report.refused += 1
        report.first_refusal = report.first_refusal or f"{status}: {json.dumps(answer)[:500]}"
        return
    usage = answer.get("usage") or {} if isinstance(answer, dict) else {}
    report.prompts += 1
    report.tokens += int(usage.get("prompt_tokens") or 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None:
        report.cached_tokens = (report.cached_tokens or 0) + int(cached)


async def _first_model(server: _Server, call: Callable[..., Any]) -> str:
    status, answer = await call(server.request("GET", "/v1/models", None))
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise TierUnavailableError(
            f"{server.url}/v1/models answered {status} and names no model: name one with --model, or see whether this"
            " is a vLLM server"
        ) from None


class _Server:
    """Where requests go."""

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
            http.client.HTTPConnection(host or "", port)  # connects to nothing yet, and refuses odd names
        except (ValueError, http.client.InvalidURL):
            raise self._refused(url) from None
        if parts.scheme not in {"http", "https"} or not host or parts.query or parts.fragment:
            raise self._refused(url)
        self.url = url.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._place = (host, port)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s

    @staticmethod
    def _refused(url: str) -> ConfigError:
        return ConfigError(
            f"--url {url}: expected the address of a vLLM server, such as http://localhost:8000"
        )

    def request(self, method: str, path: str, body: Any) -> _Request:
        host, port = self._place
        connection = self._kind(host, port, timeout=self._timeout_s)
        return _Request(connection, method, self._path + path, body, f"{self.url}: ")


class _Request:
    """One request, which another thread can end."""

    def __init__(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any, where: str
    ) -> None:
        self._connection = connection
        self._method, self._path, self._where = method, path, where
        self._body = None if body is None else json.dumps(body)

    def __call__(self) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        try:
            self._connection.request(self._method, self._path, self._body, headers)
            response = self._connection.getresponse()
            data = response.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:  # the last: no name, path or key
            raise TierUnavailableError(f"{self._where}{type(error).__name__}: {error}") from error
        finally:
            self._connection.close()
        try:
            return response.status, json.loads(data)
        except ValueError:
            return response.status, data.decode("utf-8", "replace")[:500]

    def end(self) -> None:
        """Whatever it waits for ends now."""
        if (connected := self._connection.sock) is not None:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


async def _in_thread(threads: ThreadPoolExecutor, request: _Request) -> tuple[int, Any]:
    work = asyncio.ensure_future(in_thread(threads, request))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        request.end()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # looked at, so that asyncio does not warn of it
        raise
