"""What the benchmark of the mooncake tier compares it with: Mooncake's own client; and a pool for both."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_async.bench.moved import TIMEOUT_S, Moved
from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lmcache_async.memory.buffer import Buffer


@dataclass(frozen=True, slots=True)
class Peer:
    """Mooncake's client by its batch calls that copy nothing, from threads as the tier makes them."""

    moved: Moved
    store: Any
    batch_records: int

    @classmethod
    @contextlib.contextmanager
    def open(cls, moved: Moved, batch_bytes: int) -> Iterator[Peer]:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        master = moved.url.rpartition("/")[2]
        _check(store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master))
        try:
            _check(store.register_buffer(moved.arena.address, len(moved.arena.region)))
            yield cls(moved, store, max(1, batch_bytes // moved.record.nbytes))
            store.unregister_buffer(moved.arena.address)
        finally:
            store.close()

    async def put(self) -> float:
        self.clear()
        return self._all(self._put, [self.moved.record] * self.moved.count, self.batch_records)

    async def put_at_once(self) -> float:
        self.clear()
        return self._all(self._put, [self.moved.record] * self.moved.count, self.moved.count)

    async def get(self) -> float:
        return await self._get_all(self.batch_records)

    async def get_at_once(self) -> float:
        return await self._get_all(self.moved.count)

    def clear(self) -> None:
        for name in self.moved.names:
            self.store.remove(name, force=True)

    async def _get_all(self, batch_records: int) -> float:
        """Of what was put before: the probe before this one in the first round is no put for certain."""
        moved = self.moved
        if self.store.batch_is_exist(moved.names) != [1] * moved.count:
            await self.put()
        buffers = [await moved.arena.lease(moved.record.nbytes, timeout_s=TIMEOUT_S) for _ in moved.names]
        rate = self._all(self._get, buffers, batch_records)
        moved.check(buffers)
        return rate

    def _all(
        self, work: Callable[[list[str], Sequence[Buffer]], None], buffers: list[Buffer], batch_records: int
    ) -> float:
        moved = self.moved
        places = range(0, moved.count, batch_records)
        batches = iter(
            [(moved.names[at : at + batch_records], buffers[at : at + batch_records]) for at in places]
        )

        def thread(_: int) -> None:
            for names, memory in batches:  # the next one, whichever thread is free
                work(names, memory)

        with ThreadPoolExecutor(moved.connections) as pool:
            start = time.perf_counter()
            list(pool.map(thread, range(moved.connections)))
            return moved.rate(start)

    def _put(self, names: list[str], buffers: Sequence[Buffer]) -> None:
        codes = self.store.batch_put_from(names, [b.address for b in buffers], [b.nbytes for b in buffers])
        _check(next((code for code in codes if code), 0))

    def _get(self, names: list[str], buffers: Sequence[Buffer]) -> None:
        codes = self.store.batch_get_into(names, [b.address for b in buffers], [b.nbytes for b in buffers])
        _check(next((code for code in codes if code < 0), 0))


@contextlib.contextmanager
def own_pool(nbytes: int) -> Iterator[str]:
    """A master of our own on the loopback, and so much memory in another process."""
    spec = importlib.util.find_spec("mooncake")
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        raise ConfigError("there is no master: name one with --url, or pip install 'lmcache-async[mooncake]'")
    with socket.socket() as probe, socket.socket() as other:
        for one in (probe, other):
            one.bind(("127.0.0.1", 0))
        port, metrics_port = probe.getsockname()[1], other.getsockname()[1]
    master = [str(Path(places[0]) / "mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
    master += [f"--metrics_port={metrics_port}", "--enable_metric_reporting=false"]
    store = [sys.executable, "-P", str(Path(__file__).with_name("mooncake_store.py"))]
    store += [f"127.0.0.1:{port}", str(nbytes)]
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as stack:
        stack.enter_context(_running(master, log))
        _wait_for(port)
        memory = stack.enter_context(_running(store, log))
        for line in memory.stdout or ():
            if line == b"ready\n":
                break
        else:
            log.seek(0)
            raise ConfigError(
                f"a pool of our own does not start: {log.read()[-2000:].decode(errors='replace')}"
            )
        yield f"mooncake://127.0.0.1:{port}"


@contextlib.contextmanager
def _running(command: list[str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            if time.monotonic() > deadline:
                return  # the store says what is wrong
            time.sleep(0.02)
        else:
            return


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"Mooncake's client answers with code {code}")
