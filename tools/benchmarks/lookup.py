"""Lookup of a long prompt that is stored completely: in the engine, and from the scheduler connector.

Lookups of the scheduler connector include its thread, the message, the server and the engine in another
process, until the scheduler's thread can see the answer. The limits are an echo of the same number of bytes
between the same two processes, and one dict lookup for each key.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop

from lmcache_async.bench.measure import Case, Frame, Probe, Row
from lmcache_async.engine.engine import CacheEngine
from lmcache_async.hashing import ChunkHasher, RequestNamespace
from lmcache_async.integration.vllm.groups import KVGroup, KVGroups
from lmcache_async.integration.vllm.keys import RequestKeys
from lmcache_async.integration.vllm.lookup import LookupClient
from lmcache_async.integration.vllm.lookup_server import PROTOCOL, Identity, LookupServer, encode
from lmcache_async.testing.rig import Rig
from lmcache_async.types import ChunkKey
from tools.benchmarks.command import option
from tools.benchmarks.repetition import mean_figure, mean_seconds

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Stored:
    """A prompt that is stored completely, and its chunk size."""

    tokens: int
    chunk_size: int

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        return np.random.default_rng(0).integers(1000, 128000, self.tokens, np.int32)

    @property
    def rig(self) -> Rig:
        """Chunks of minimum size, in an arena whose pin limit is not reached by a lookup."""
        slabs = 4 * (self.tokens // self.chunk_size)
        return Rig(
            layers=1, blocks=1, block_size=BLOCK_SIZE, head_dim=1, chunk_size=self.chunk_size, slabs=slabs
        )

    async def fill(self, engine: CacheEngine) -> None:
        """Store the prompt. The positions of its KV do not matter."""
        await engine.store(self.prompt, np.zeros(self.tokens, np.int64))
        if (found := await engine.lookup(self.prompt)) != self.tokens:
            raise RuntimeError(f"{found} of {self.tokens} tokens were stored: {engine.statistics()}")


@dataclass(frozen=True, slots=True)
class Places:
    """Sockets of the two servers."""

    lookups: Path
    echo: Path


def serve(stored: Stored, places: Places, message_bytes: int, ready: Any) -> None:
    """Main function of the other process: answer lookups until it is terminated."""

    async def main() -> None:
        rig = stored.rig
        async with rig.open() as engine:
            await stored.fill(engine)
            echo = threading.Thread(
                target=_echo_server, args=(_listen(places.echo), message_bytes), daemon=True
            )
            echo.start()
            identity = Identity(
                PROTOCOL, rig.namespace.root(), rig.namespace.algorithm, stored.chunk_size, BLOCK_SIZE
            )
            await LookupServer(engine, identity, places.lookups, clear=_never).start()
            ready.set()
            await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(main())


def receive_exactly(connection: socket.socket, view: memoryview) -> None:
    """Fill the view.

    Raises:
        EOFError: The other side closed.
    """
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:])
        if not count:
            raise EOFError("the other side closed")
        done += count


def _listen(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()
    return listening


def _echo_server(listening: socket.socket, message_bytes: int) -> None:
    """Send back the received messages of one size, for one connection."""
    with listening:
        connection, _ = listening.accept()
    view = memoryview(bytearray(message_bytes))
    with connection, contextlib.suppress(EOFError, ConnectionError):
        while True:
            receive_exactly(connection, view)
            connection.sendall(view)


async def _never(epoch: int, memory_only: bool) -> int:
    raise RuntimeError(f"unexpected clear ({epoch}, {memory_only})")


UNIT = "ms"
LIMITS = {
    "engine, keys": ("one dict lookup a key",),
    "engine, keys, pinned": ("one dict lookup a key",),
    "engine, int32 array": ("one dict lookup a key",),
    "scheduler connector, hashed before": ("one dict lookup a key", "echo through a unix socket"),
    "scheduler connector, fresh list": ("echo through a unix socket", "np.array(list, int32)"),
}
_START_S = 120.0
_ANSWER_S = 10.0
_LOOK_S = 10e-6  # between two polls for the answer, as short as a sleep can be


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes are options; see docs/benchmarks.md."""

    tokens: int = option(131072, "tokens of the prompt")
    chunk_size: int = option(256, "tokens of a chunk")


QUICK = Settings(tokens=4096)


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    stored = Stored(settings.tokens, settings.chunk_size)
    namespace = stored.rig.namespace
    root = RequestNamespace().root(namespace.root(), namespace.algorithm, b"")
    keys = ChunkHasher(root, chunk_size=settings.chunk_size).extend_keys(stored.prompt)
    message = encode(
        {"op": "lookup", "lookup_id": "benchmark#1", "keys": b"".join(keys), "runs": [], "id": 1}
    )
    parameters = {"tokens": settings.tokens, "chunk_size": settings.chunk_size, "message_bytes": len(message)}
    async with stored.rig.open() as engine:
        await stored.fill(engine)
        with (
            _other_process(stored, len(message)) as places,
            _client(stored, places) as client,
            _echo(places, message) as echo,
        ):
            bounds = {
                "one dict lookup a key": _milliseconds(frame, _dict_lookups(keys)),
                "echo through a unix socket": _milliseconds(frame, echo),
                "np.array(list, int32)": _milliseconds(frame, _as_array(stored)),
            }
            cases = [
                Case(name, UNIT, probe, {limit: bounds[limit] for limit in LIMITS[name]}, parameters)
                for name, probe in _probes(stored, frame, engine, keys, client).items()
            ]
            for row in await frame.compare(cases):
                yield row


def _probes(
    stored: Stored, frame: Frame, engine: CacheEngine, keys: list[ChunkKey], client: LookupClient
) -> dict[str, Probe]:
    """Return probes in milliseconds, by type and origin of the lookup."""
    prompt, tokens = stored.prompt, stored.prompt.tolist()
    known = _chain(tokens)

    async def by_keys() -> float:
        start = time.perf_counter()
        result = await engine.lookup_keys(keys)
        return _checked(start, result.count, keys)

    async def pinned() -> float:
        start = time.perf_counter()
        result = await engine.lookup_keys(keys, lookup_id="benchmark")
        milliseconds = _checked(start, result.pinned, keys)
        engine.unpin("benchmark")
        return milliseconds

    async def by_tokens() -> float:
        start = time.perf_counter()
        found = await engine.lookup(prompt)
        return _checked(start, found // stored.chunk_size, keys)

    async def hashed_before() -> float:
        return _ask(client, known, len(tokens), keys)

    async def fresh() -> float:
        return _ask(client, _chain(tokens), len(tokens), keys)

    once = {
        "engine, keys": by_keys,
        "engine, keys, pinned": pinned,
        "engine, int32 array": by_tokens,
        "scheduler connector, hashed before": hashed_before,
        "scheduler connector, fresh list": fresh,
    }
    return {name: functools.partial(mean_figure, frame, probe) for name, probe in once.items()}


def _chain(tokens: list[int]) -> RequestKeys:
    return RequestKeys("benchmark", tokens, len(tokens))


def _ask(client: LookupClient, chain: RequestKeys, num_tokens: int, keys: Sequence[ChunkKey]) -> float:
    """Return the milliseconds until the scheduler's thread sees the answer."""
    start = time.perf_counter()
    lookup = client.ask(chain, num_tokens)
    while not (answers := client.take_answers()):
        if time.perf_counter() - start > _ANSWER_S:
            raise RuntimeError(f"no answer within {_ANSWER_S:.0f} s")
        time.sleep(_LOOK_S)
    answer = answers[-1].answer
    milliseconds = _checked(start, answer.chunks, keys)
    client.release(lookup, answer)
    return milliseconds


def _checked(start: float, found: int, keys: Sequence[ChunkKey]) -> float:
    """Return the milliseconds since `start`, for a correct answer."""
    milliseconds = 1e3 * (time.perf_counter() - start)
    if found != len(keys):
        raise RuntimeError(f"{found} of {len(keys)} chunks were found")
    return milliseconds


def _milliseconds(frame: Frame, function: Callable[[], object]) -> Probe:
    async def probe() -> float:
        return 1e3 * mean_seconds(frame, function)

    return probe


def _dict_lookups(keys: Sequence[ChunkKey]) -> Callable[[], object]:
    known = dict.fromkeys(keys)
    others = [bytes(bytearray(key)) for key in keys]  # equal, but not the same objects

    def look() -> bool:
        return sum(map(known.__contains__, others)) == len(keys)

    return look


def _as_array(stored: Stored) -> Callable[[], object]:
    tokens = stored.prompt.tolist()
    return lambda: np.array(tokens, np.int32)


@contextlib.contextmanager
def _other_process(stored: Stored, message_bytes: int) -> Iterator[Places]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lma") as directory:
        places, ready = Places(Path(directory, "lookups"), Path(directory, "echo")), context.Event()
        process = context.Process(target=serve, args=(stored, places, message_bytes, ready), daemon=True)
        process.start()
        try:
            if not ready.wait(_START_S):
                raise RuntimeError(f"the lookup server did not start within {_START_S:.0f} s")
            yield places
        finally:
            process.terminate()
            process.join()


@contextlib.contextmanager
def _client(stored: Stored, places: Places) -> Iterator[LookupClient]:
    client = LookupClient(
        [places.lookups],
        chunk_size=stored.chunk_size,
        groups=KVGroups((KVGroup(0, BLOCK_SIZE),)),
        lookup_timeout_s=_ANSWER_S,
    )
    try:
        deadline = time.monotonic() + _START_S
        while not client.ready:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the lookup server did not answer within {_START_S:.0f} s")
            time.sleep(0.01)
        yield client
    finally:
        client.close(_ANSWER_S)


@contextlib.contextmanager
def _echo(places: Places, message: bytes) -> Iterator[Callable[[], object]]:
    """Connect to the echo server, and yield a function that sends the message and waits for the echo."""
    view = memoryview(bytearray(len(message)))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(places.echo))

        def echo() -> None:
            connection.sendall(message)
            receive_exactly(connection, view)

        yield echo
