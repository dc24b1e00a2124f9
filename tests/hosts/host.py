"""One host: a process with servers and an engine.

It reads operations from a socket, one per line, and answers each with a line. It exits at the end of the input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from typing import Any

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.testing.rig import Rig
from tests.support.valkey_servers import Server

CHUNK, CHUNKS = 8, 5
PROMPT = CHUNK * CHUNKS
STORE_S = RETRIEVE_S = 1.0
"""Timeouts of the engine."""


class Host:
    """Operations of a host: its public methods."""

    def __init__(self) -> None:
        self.rig = Rig(layers=4, head_dim=64, slabs=60)  # records of 36 KiB
        self._servers: dict[int, Server] = {}
        self._opened = contextlib.AsyncExitStack()
        self._engine: CacheEngine | None = None

    async def serve(self, options: list[str]) -> int:
        """Start a Valkey, and return its port."""
        server = Server(*options)
        self._servers[server.port] = server
        server.start()
        return server.port

    async def ask(self, port: int, words: list[str | int]) -> Any:
        """Send a command to a server on this host and return the answer."""
        reply = self._servers[port].ask(*words)
        return reply.decode() if isinstance(reply, bytes) else reply

    async def open(self, tier: dict[str, Any]) -> None:
        """Open an engine with only this tier."""
        settings = {"store.timeout_s": STORE_S, "retrieve.timeout_s": RETRIEVE_S, "tiers": [tier]}
        self._engine = await self._opened.enter_async_context(self.rig.open(**settings))

    async def store(self, numbers: list[int]) -> dict[str, Any]:
        """Store these prompts, then wait until the tier has finished its writes."""
        latest = 0.0
        for number in numbers:
            tokens = prompt(number)
            self.rig.write(range(PROMPT), self.rig.content(tokens))
            begin = time.monotonic()
            await self.engine.store(tokens, range(PROMPT))
            latest = max(latest, time.monotonic() - begin)
        await self.engine.flush(timeout_s=60)
        return {"latest": latest}

    async def read(self, numbers: list[int]) -> dict[str, Any]:
        """Retrieve these prompts. Return hit tokens, number of prompts with wrong content, and the longest time in s."""
        latest, hit_tokens, wrong = 0.0, 0, []
        slots = range(PROMPT, 2 * PROMPT)
        for number in numbers:
            tokens = prompt(number)
            self.rig.wipe()
            begin = time.monotonic()
            hit = int((await self.engine.retrieve(tokens, slots)).sum())
            latest = max(latest, time.monotonic() - begin)
            got, right = self.rig.read(slots), self.rig.content(tokens)
            if not ((got[:, :, :hit] == right[:, :, :hit]).all() and (got[:, :, hit:] == -7).all()):
                wrong.append(number)
            hit_tokens += hit
        return {"latest": latest, "hit_tokens": hit_tokens, "wrong": wrong}

    async def counts(self) -> dict[str, int]:
        """Return the counts of misses, drops and errors of the engine's tier, by name."""
        return dict(self.engine.statistics().counts)

    @property
    def engine(self) -> CacheEngine:
        assert self._engine is not None, "open it first"
        return self._engine

    async def close(self) -> None:
        """Close the engine and kill the servers; new ones can be started afterwards."""
        try:
            await self._opened.aclose()
        finally:
            self._engine = None
            while self._servers:
                self._servers.popitem()[1].stop()


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + PROMPT))


async def run(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    host = Host()
    try:
        while line := await reader.readline():
            call = json.loads(line)
            answer = await getattr(host, call.pop("do"))(**call)
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
    finally:
        await host.close()
        writer.close()


def main(channel: socket.socket) -> None:
    """Run a host until `channel` is closed."""
    os.setsid()  # its servers are killed together with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends it
    asyncio.run(run(channel))
