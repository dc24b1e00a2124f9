"""OpenAI-compatible proxy for disaggregated prefill and decode, in front of vLLM instances that share a cache.

A request goes to a prefiller, which computes the prompt and one token. Then it goes, with the `kv_transfer_params` of the
prefiller's response, to a decoder, whose response is returned to the client. Needs aiohttp, which vLLM installs.

    python proxy.py --prefill http://localhost:8100 --decode http://localhost:8200 --port 8000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
from aiohttp import web

logger = logging.getLogger("proxy")

DOWN_S = 5.0
"""Seconds for which an unreachable vLLM is skipped, if there is another one."""

MAX_BODY_BYTES = 64 << 20

_UNREACHABLE = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, asyncio.TimeoutError)
_FORWARDED_HEADERS = ("Authorization", "Content-Type", "X-Request-Id")
_RESPONSE_OPTIONS = (
    "stream_options",
    "best_of",
    "min_tokens",
    "echo",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
)


class Pool:
    """vLLM instances of one kind, used in turn."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._clock = clock
        self._next = 0
        self._down: dict[str, float] = {}

    def take(self) -> str:
        """Return the next URL that is not marked as down; the next one if all are."""
        turn = self._urls[self._next :] + self._urls[: self._next]
        now = self._clock()
        url = next((url for url in turn if self._down.get(url, 0.0) <= now), turn[0])
        self._next = (self._urls.index(url) + 1) % len(self._urls)
        return url

    def failed(self, url: str) -> None:
        self._down[url] = self._clock() + DOWN_S


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request for the prefiller: the same prompt, one token, with the KV stored for a decoder."""
    kept = {name: value for name, value in body.items() if name not in _RESPONSE_OPTIONS}
    limit = {name: 1 for name in ("max_tokens", "max_completion_tokens") if name in body} or {"max_tokens": 1}
    params = {**(body.get("kv_transfer_params") or {}), "do_remote_decode": True}
    return {**kept, **limit, "n": 1, "stream": False, "kv_transfer_params": params}


def decode_body(body: dict[str, Any], params: dict[str, Any] | None) -> dict[str, Any]:
    """Return the request for the decoder: that of the client, with the parameters from the prefiller."""
    if not params:
        return body
    return {**body, "kv_transfer_params": {**(body.get("kv_transfer_params") or {}), **params}}


class Proxy:
    """Handlers for aiohttp. If a client disconnects, its request is cancelled.

    Args:
        prefill_timeout_s: Seconds after which the decoder computes the prompt itself.
    """

    def __init__(self, prefillers: Pool, decoders: Pool, *, prefill_timeout_s: float = 60.0) -> None:
        self._prefillers = prefillers
        self._decoders = decoders
        self._prefill_timeout = aiohttp.ClientTimeout(total=prefill_timeout_s, connect=5.0)
        self._decode_timeout = aiohttp.ClientTimeout(total=None, connect=5.0)
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_route("*", "/{path:.*}", self.forward)
        app.cleanup_ctx.append(self._open)
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Prefill, then decode. The prefiller rejects invalid requests with vLLM's own message."""
        try:
            body = await request.json()
        except ValueError as error:
            return _error(400, f"the body is not JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, "the body is not a JSON object")
        refusal, params = await self._prefill(request, body)
        if refusal is not None:
            return refusal
        return await self._answer(request, json.dumps(decode_body(body, params)).encode())

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Forward all other paths, such as models and health, to a decoder."""
        return await self._answer(request, await request.read())

    async def _prefill(
        self, request: web.Request, body: dict[str, Any]
    ) -> tuple[web.Response | None, dict[str, Any] | None]:
        """Return the error response, or the parameters from the prefiller.

        If the prefiller fails there are no parameters, and the decoder computes the prompt.
        """
        url = self._prefillers.take()
        try:
            async with self.session.post(
                url + request.path_qs,
                json=prefill_body(body),
                headers=_headers(request, "Content-Type"),
                timeout=self._prefill_timeout,
            ) as answer:
                content = await answer.read()
                if 400 <= answer.status < 500:
                    return web.Response(
                        status=answer.status, body=content, content_type=answer.content_type
                    ), None
                if answer.status == 200:
                    return None, json.loads(content).get("kv_transfer_params")
                logger.warning("%s answered %d; the decoder prefills", url, answer.status)
        except (*_UNREACHABLE, ValueError) as error:
            self._prefillers.failed(url)
            logger.warning("%s did not prefill (%r); the decoder does", url, error)
        return None, None

    async def _answer(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Stream the response of a decoder to the client."""
        url = self._decoders.take()
        response: web.StreamResponse | None = None
        try:
            async with self.session.request(
                request.method,
                url + request.path_qs,
                data=body or None,
                headers=_headers(request),
                timeout=self._decode_timeout,
            ) as answer:
                response = web.StreamResponse(status=answer.status, reason=answer.reason)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except _UNREACHABLE as error:
            self._decoders.failed(url)
            logger.warning("%s: %r", url, error)
            if response is None:
                return _error(502, f"the decoder cannot be reached: {type(error).__name__}")
            if request.transport is not None:
                request.transport.abort()  # so that the client does not treat a partial response as complete
            return response

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the application runs"
        return self._session

    async def _open(self, app: web.Application) -> Any:
        del app
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=True) as self._session:
            yield


def _headers(request: web.Request, *but: str) -> dict[str, str]:
    return {
        name: request.headers[name]
        for name in _FORWARDED_HEADERS
        if name in request.headers and name not in but
    }


def _error(status: int, message: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "proxy_error", "code": status}}, status=status
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefill in some vLLM instances, decode in others.")
    parser.add_argument("--prefill", action="append", required=True, metavar="URL", help="may be repeated")
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="may be repeated")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill-timeout", type=float, default=60.0, metavar="SECONDS")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    proxy = Proxy(Pool(given.prefill), Pool(given.decode), prefill_timeout_s=given.prefill_timeout)
    web.run_app(proxy.application(), host=given.host, port=given.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
