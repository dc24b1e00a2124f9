"""The other side of the lookup bench: a real engine and its lookup server, as a vLLM worker has them, and an echo."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from lmcache_async.integration.vllm.lookup_server import LookupServer
from lmcache_async.integration.vllm.wire import PROTOCOL, Identity
from lmcache_async.testing.rig import Rig

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from lmcache_async.engine.engine import CacheEngine

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Stored:
    """A prompt all of which is stored, and how its chunks are."""

    tokens: int
    chunk_size: int

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        return np.random.default_rng(0).integers(1000, 128000, self.tokens, np.int32)

    @property
    def rig(self) -> Rig:
        """Chunks as small as they can be, in an arena of which lookups may pin as many as there are."""
        slabs = 4 * (self.tokens // self.chunk_size)
        return Rig(
            layers=1, blocks=1, block_size=BLOCK_SIZE, head_dim=1, chunk_size=self.chunk_size, slabs=slabs
        )

    async def fill(self, engine: CacheEngine) -> None:
        """Store the prompt; where its KV lies does not matter here."""
        await engine.store(self.prompt, np.zeros(self.tokens, np.int64))
        if (found := await engine.lookup(self.prompt)) != self.tokens:
            raise RuntimeError(f"{found} of {self.tokens} tokens were stored: {engine.statistics()}")


@dataclass(frozen=True, slots=True)
class Places:
    """Where the two servers listen."""

    lookups: Path
    echo: Path


def serve(stored: Stored, places: Places, message_bytes: int, ready: Any) -> None:
    """The process: answers lookups until it is ended."""

    async def main() -> None:
        rig = stored.rig
        async with rig.open() as engine:
            await stored.fill(engine)
            echo = threading.Thread(target=_echo, args=(_listen(places.echo), message_bytes), daemon=True)
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


def _echo(listening: socket.socket, message_bytes: int) -> None:
    """Send back what comes, in messages of one size, for one connection."""
    with listening:
        connection, _ = listening.accept()
    view = memoryview(bytearray(message_bytes))
    with connection, contextlib.suppress(EOFError, ConnectionError):
        while True:
            receive_exactly(connection, view)
            connection.sendall(view)


async def _never(epoch: int, memory_only: bool) -> int:
    raise RuntimeError(f"nobody clears here ({epoch}, {memory_only})")
