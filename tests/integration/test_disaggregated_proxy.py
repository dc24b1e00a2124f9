"""The example's proxy between real HTTP servers that record requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from examples.disaggregated import proxy as proxy_module
from examples.disaggregated.proxy import DOWN_S, Pool, Proxy, decode_body, prefill_body
from lmcache_async.config import load_config

EXAMPLE = Path(proxy_module.__file__).parent
TOLD = {"lmcache_async": {"version": 1, "tokens": 32}}


@dataclass
class VLLM:
    """A server that answers like vLLM's, or as configured by the test."""

    status: int = 200
    told: Any = field(default_factory=lambda: TOLD)
    breaks_off: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    hold: asyncio.Event | None = None
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.headers.append(request.headers)
        if self.status != 200:
            return web.json_response({"error": {"message": "no such model"}}, status=self.status)
        if body.get("stream"):
            return await self._stream(request)
        return web.json_response({"choices": [{"text": "whole"}], "kv_transfer_params": self.told})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": ["m"]})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        if self.breaks_off:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


class Setup:
    """Two prefillers, two decoders, the proxy and a client."""

    def __init__(self) -> None:
        self.prefillers, self.decoders = [VLLM(), VLLM()], [VLLM(), VLLM()]
        self.client: aiohttp.ClientSession
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Setup]:
        async with contextlib.AsyncExitStack() as stack:
            for vllm in (*self.prefillers, *self.decoders):
                app = web.Application()
                app.router.add_post("/v1/completions", vllm.generate)
                app.router.add_post("/v1/chat/completions", vllm.generate)
                app.router.add_get("/v1/models", vllm.models)
                vllm.url = await stack.enter_async_context(serving(app))
            pools = [Pool([vllm.url for vllm in kind]) for kind in (self.prefillers, self.decoders)]
            proxy = Proxy(*pools, prefill_timeout_s=20.0)
            self.url = await stack.enter_async_context(serving(proxy.application()))
            self.client = await stack.enter_async_context(aiohttp.ClientSession())
            yield self

    async def ask(self, **body: Any) -> tuple[int, Any]:
        async with self.client.post(f"{self.url}/v1/completions", json={"prompt": "p", **body}) as answer:
            return answer.status, await answer.json()


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with Setup().running() as setup:
        yield setup


async def test_a_request_is_prefilled_for_one_token_and_then_decoded(setup: Setup):
    status, answer = await setup.ask(model="m", max_tokens=50, kv_transfer_params={"tags": {"team": "a"}})

    assert (status, answer["choices"]) == (200, [{"text": "whole"}])
    [prefill] = setup.prefillers[0].asked
    [decode] = setup.decoders[0].asked
    assert prefill == {
        "prompt": "p",
        "model": "m",
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": {"tags": {"team": "a"}, "do_remote_decode": True},
    }
    assert decode == {
        "prompt": "p",
        "model": "m",
        "max_tokens": 50,
        "kv_transfer_params": {"tags": {"team": "a"}, **TOLD},
    }


def test_parameters_of_the_answer_are_not_sent_to_the_prefiller():
    body = {
        "messages": [],
        "tools": [{}],
        "max_completion_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 3,
        "logprobs": True,
        "min_tokens": 5,
    }

    assert prefill_body(body) == {
        "messages": [],
        "tools": [{}],
        "max_completion_tokens": 1,
        "stream": False,
        "n": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert decode_body(body, None) is body


async def test_requests_go_to_all_in_turn(setup: Setup):
    for _ in range(4):
        await setup.ask()

    assert [len(vllm.asked) for vllm in (*setup.prefillers, *setup.decoders)] == [2, 2, 2, 2]


async def test_the_headers_of_a_client_are_forwarded(setup: Setup):
    headers = {"Authorization": "Bearer k", "X-Request-Id": "7", "Cookie": "c"}
    async with setup.client.post(f"{setup.url}/v1/completions", json={}, headers=headers) as answer:
        assert answer.status == 200

    for vllm in (setup.prefillers[0], setup.decoders[0]):
        [got] = vllm.headers
        assert (got["Authorization"], got["X-Request-Id"], "Cookie" in got) == ("Bearer k", "7", False)


async def test_a_stream_is_passed_on_as_it_comes(setup: Setup):
    setup.decoders[0].hold = asyncio.Event()
    body = {"messages": [], "stream": True}
    async with setup.client.post(f"{setup.url}/v1/chat/completions", json=body) as answer:
        assert answer.content_type == "text/event-stream"
        assert await answer.content.readline() == b"data: one\n"  # before the decoder sends more
        setup.decoders[0].hold.set()
        assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")


async def test_a_client_that_hangs_up_ends_the_decoder_s_work(setup: Setup):
    setup.decoders[0].hold = asyncio.Event()
    answer = await setup.client.post(f"{setup.url}/v1/completions", json={"stream": True})
    await answer.content.readline()
    answer.close()

    await setup.decoders[0].hung_up.wait()


REFUSED, WHOLE = (
    {"error": {"message": "no such model"}},
    {"choices": [{"text": "whole"}], "kv_transfer_params": TOLD},
)


@pytest.mark.parametrize(
    ("prefiller", "decoder", "answer", "decoded"),
    [
        ({"status": 404}, {}, (404, REFUSED), []),  # the request is wrong
        ({"status": 503}, {}, (200, WHOLE), [{"prompt": "p"}]),
        ({"told": None}, {}, (200, WHOLE), [{"prompt": "p"}]),
        ({"told": {}}, {}, (200, WHOLE), [{"prompt": "p"}]),
        ({}, {"status": 500}, (500, REFUSED), [{"prompt": "p", "kv_transfer_params": TOLD}]),
    ],
    ids=["refused", "prefiller failed", "no parameters", "empty parameters", "decoder failed"],
)
async def test_the_decoder_computes_what_a_prefiller_did_not_and_errors_are_passed_on(
    setup: Setup, prefiller: dict[str, Any], decoder: dict[str, Any], answer: Any, decoded: Any
):
    for vllm, changes in ((setup.prefillers[0], prefiller), (setup.decoders[0], decoder)):
        for name, value in changes.items():
            setattr(vllm, name, value)

    assert await setup.ask() == answer
    assert setup.decoders[0].asked == decoded


async def test_a_decoder_that_breaks_off_breaks_off_for_the_client(setup: Setup):
    setup.decoders[0].breaks_off = True
    async with setup.client.post(f"{setup.url}/v1/completions", json={"stream": True}) as answer:
        with pytest.raises(aiohttp.ClientError):
            await answer.content.read()


async def test_unreachable_servers_are_skipped():
    async with contextlib.AsyncExitStack() as stack:
        app = web.Application()
        vllm = VLLM()
        app.router.add_post("/v1/completions", vllm.generate)
        url = await stack.enter_async_context(serving(app))
        closed = "http://127.0.0.1:9"
        proxy = Proxy(Pool([closed]), Pool([closed, url]))
        front = await stack.enter_async_context(serving(proxy.application()))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        statuses = []
        for _ in range(3):
            async with client.post(f"{front}/v1/completions", json={}) as answer:
                statuses.append(answer.status)
                body = await answer.read()

    assert statuses == [502, 200, 200]
    assert json.loads(body)["choices"]
    assert vllm.asked == [{}, {}]


def test_a_pool_uses_a_failed_server_again_after_a_pause():
    time = 0.0
    pool = Pool(["http://a/", "http://b"], clock=lambda: time)
    pool.failed("http://a")

    assert [pool.take() for _ in range(2)] == ["http://b"] * 2
    pool.failed("http://b")
    assert pool.take() == "http://a"  # all are down
    time = DOWN_S
    assert {pool.take(), pool.take()} == {"http://a", "http://b"}


async def test_other_paths_are_forwarded_to_a_decoder(setup: Setup):
    async with setup.client.get(f"{setup.url}/v1/models") as answer:
        assert await answer.json() == {"data": ["m"]}


@pytest.mark.parametrize("body", [b"no json", b"[]", b"\xff"])
async def test_a_body_that_is_no_object_is_refused(setup: Setup, body: bytes):
    async with setup.client.post(f"{setup.url}/v1/completions", data=body) as answer:
        assert answer.status == 400
    assert setup.prefillers[0].asked == []


def test_the_configs_of_the_example_fit_together():
    prefiller, decoder = (load_config(EXAMPLE / f"{name}.yaml", env={}) for name in ("prefiller", "decoder"))

    assert prefiller.tiers == decoder.tiers
    assert decoder.vllm.wait_for_producer_s == 2.0
