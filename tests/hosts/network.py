"""Three hosts, each an engine on an event loop of its own, and proxies between them and servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.engine.loop import LoopThread
from lmcache_async.testing.rig import Rig
from tests.hosts.proxies import Link, Proxies

HOSTS = ("a", "b", "c")
CHUNK, CHUNKS = 8, 5
PROMPT = CHUNK * CHUNKS
STORE_S = RETRIEVE_S = 1.0
"""Timeouts of the engine."""
ANSWER_S = 250.0


class Host:
    """An engine, which shares no memory with those of other hosts."""

    def __init__(self) -> None:
        self.rig = Rig(layers=4, head_dim=64, slabs=60)  # records of 36 KiB
        self._loop = LoopThread("host")
        self._opened = contextlib.AsyncExitStack()
        self._engine: CacheEngine | None = None

    def begin(self, operation: str, **arguments: Any) -> Future[Any]:
        """Start an operation: one of the coroutine methods of this class."""
        return self._loop.submit(getattr(self, operation)(**arguments))

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
        """Close the engine. Another one can be opened afterwards."""
        self._engine = None
        await self._opened.aclose()

    def end(self) -> None:
        """Close the host for good."""
        try:
            self.begin("close").result(ANSWER_S)
        finally:
            self._loop.close()


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + PROMPT))


class Network:
    """Hosts `a`, `b` and `c`; a context manager that ends them. Connections to servers go through proxies.

    Attributes:
        hosts: By name.
    """

    def __init__(self, seed: int) -> None:
        self._proxies = Proxies(seed)
        self._ways: dict[tuple[str, int], int] = {}
        self.hosts = {name: Host() for name in HOSTS}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._proxies.close)
            for host in self.hosts.values():
                stack.callback(host.end)

    def way(self, host: str, port: int) -> int:
        """Return the port at which all hosts reach a server with that port, which belongs to the host."""
        if (host, port) not in self._ways:
            self._ways[host, port] = self._proxies.open(host, port)
        return self._ways[host, port]

    def forget_ways(self) -> None:
        """Forget all ways after their servers have ended."""
        self._ways.clear()

    def become(self, link: Link, cut: Sequence[str] = ()) -> None:
        """Set the properties of all connections, and cut some hosts off."""
        self._proxies.link = link
        self._proxies.cut = frozenset(cut)

    def isolates(self, host: str) -> bool:
        """Whether a host that is cut off has a server that is then unreachable."""
        return any(host == server for server, _ in self._ways)

    @property
    def lost(self) -> int:
        """Return the number of lost pieces."""
        return self._proxies.lost

    def all(
        self, operation: str, arguments: Callable[[str], Mapping[str, Any]] = lambda _: {}
    ) -> dict[str, Any]:
        """Call an operation of all hosts concurrently and return the answers."""
        begun = {name: host.begin(operation, **arguments(name)) for name, host in self.hosts.items()}
        return {name: answer.result(ANSWER_S) for name, answer in begun.items()}
