"""Closing the mooncake tier while a call of Mooncake's client does not return, with a fake client."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import types
import weakref

import pytest

from lmcache_async.errors import TierClosedError, TierError, TierUnavailableError
from lmcache_async.plugins.mooncake import MooncakeConfig, MooncakeTier
from lmcache_async.plugins.mooncake import pool as pool_module
from lmcache_async.testing.conformance.base import in_time
from lmcache_async.testing.records import SLAB_BYTES, allocator, key_of, small_arena
from tests.support.gates import WAIT_S, Gate
from tests.support.tiers import handle_of

pytestmark = pytest.mark.one_loop


class Client:
    """Mooncake's client, without a pool.

    Attributes:
        calls: Names of the calls that have ended, in order.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._closed = threading.Event()

    def setup(self, options: dict[str, str]) -> int:
        self.calls.append("setup")
        return 0

    def register_buffer(self, address: int, nbytes: int) -> int:
        self.calls.append("register_buffer")
        return 0

    def unregister_buffer(self, address: int) -> int:
        self.calls.append("unregister_buffer")
        return 0

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.calls.append("batch_get_into")
        return [-704] * len(names)

    def close(self) -> None:
        self.calls.append("close")
        self._closed.set()

    async def wait_closed(self) -> None:
        assert await asyncio.to_thread(self._closed.wait, WAIT_S)


@pytest.fixture
def client(monkeypatch):
    client = Client()
    module = types.SimpleNamespace(
        MooncakeDistributedStore=lambda: client, ReplicateConfig=types.SimpleNamespace
    )
    monkeypatch.setattr(pool_module, "_client_module", lambda: module)
    monkeypatch.setattr(pool_module, "_OPEN_S", 0.0)  # join in the background
    return client


@pytest.fixture
def config():
    with socket.create_server(("127.0.0.1", 0)) as master:
        yield MooncakeConfig(url=f"mooncake://127.0.0.1:{master.getsockname()[1]}", batch_bytes=SLAB_BYTES)


@pytest.fixture
def handle(config, arena):
    handle = handle_of(MooncakeTier(config), close_timeout_s=0.01)
    handle.bind(arena)
    return handle


async def test_closing_does_not_wait_for_a_client_that_does_not_join(client, handle, monkeypatch, caplog):
    gate = Gate(monkeypatch, client, "setup", shut=True)
    await handle.__aenter__()
    await gate.reached()

    await in_time(handle.__aexit__())

    assert "did not close within 0.01 s; it is abandoned" in caplog.text
    gate.open()
    await client.wait_closed()
    assert client.calls == ["setup", "close"]


async def test_an_opening_that_takes_too_long_does_not_wait_for_the_client(
    client, config, arena, monkeypatch
):
    monkeypatch.setattr(pool_module, "_OPEN_S", WAIT_S)
    gate = Gate(monkeypatch, client, "setup", shut=True)
    handle = handle_of(MooncakeTier(config), open_timeout_s=0.01)
    handle.bind(arena)

    with pytest.raises(TierUnavailableError, match=r"did not open within 0\.01 s"):
        await in_time(handle.__aenter__())

    gate.open()
    await client.wait_closed()
    assert client.calls == ["setup", "close"]


@pytest.mark.parametrize("verb", ["register_buffer", "unregister_buffer"])
async def test_the_arena_stays_mapped_while_the_client_uses_it(client, config, monkeypatch, verb):
    arena = small_arena(4)
    memory = weakref.ref(arena.region.obj)
    gate = Gate(monkeypatch, client, verb, shut=verb == "register_buffer")
    handle = handle_of(MooncakeTier(config), close_timeout_s=0.01)
    handle.bind(arena)
    await handle.__aenter__()
    if verb == "unregister_buffer":
        while client.calls != ["setup", "register_buffer"]:
            await asyncio.sleep(0)
        gate.shut()
    else:
        await gate.reached()

    await in_time(handle.__aexit__())
    arena.close()
    del arena, handle
    gc.collect()

    assert memory() is not None, "the client may register, read or write memory that is not mapped any more"
    gate.open()
    await client.wait_closed()
    while memory() is not None:  # until the thread has dropped it
        gc.collect()
    assert client.calls == ["setup", "register_buffer", "unregister_buffer", "close"]


async def test_the_client_is_closed_after_its_last_call(client, handle, arena, monkeypatch):
    gate = Gate(monkeypatch, client, "batch_get_into", shut=True)
    await handle.__aenter__()
    while "register_buffer" not in client.calls:
        await asyncio.sleep(0)
    reads = [asyncio.ensure_future(handle.get([key_of(i)], allocator(arena))) for i in range(2)]
    await gate.reached()

    await in_time(handle.__aexit__())
    await in_time(asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED))  # the call that had not begun

    assert "close" not in client.calls
    gate.open()
    first, second = await in_time(asyncio.gather(*reads, return_exceptions=True))
    await client.wait_closed()
    assert client.calls == ["setup", "register_buffer", "batch_get_into", "unregister_buffer", "close"]
    assert first == [None]
    assert isinstance(second[0], TierClosedError)
    with pytest.raises(TierError):
        await handle.lookup([key_of(1)])


@pytest.mark.parametrize("abandoned", [False, True])
async def test_the_client_is_closed_if_the_memory_cannot_be_unregistered(
    client, config, arena, monkeypatch, caplog, abandoned
):
    def fail(address: int) -> int:
        raise RuntimeError("no such buffer")

    monkeypatch.setattr(client, "unregister_buffer", fail)
    pool = pool_module.Pool(config, arena)
    await pool.open()
    while "register_buffer" not in client.calls:
        await asyncio.sleep(0)

    if abandoned:
        pool.close_later()
        await client.wait_closed()
        while "did not leave its pool: no such buffer" not in caplog.text:
            await asyncio.sleep(0)
    else:
        with pytest.raises(RuntimeError, match="no such buffer"):
            await pool.aclose()

    assert client.calls[-1] == "close"
