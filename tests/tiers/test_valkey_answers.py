"""Server responses to the valkey tier: passwords, permissions, TLS, limits and expiry. No message shows a secret."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from lmcache_async.errors import ConfigError, TierError, TierFullError, TierUnavailableError
from lmcache_async.plugins.valkey import ValkeyTier
from lmcache_async.plugins.valkey.connection import Connection
from lmcache_async.plugins.valkey.protocol import Reply
from lmcache_async.testing.records import SLAB_BYTES, key_of, record
from lmcache_async.types import ChunkKey
from tests.support.certificates import Authority
from tests.support.outcomes import get, put
from tests.support.processes import free_port
from tests.support.proxy import Proxy
from tests.support.secret_files import secret_file
from tests.support.valkey_servers import running
from tests.tiers.valkey_tools import bound, config

SECRET = "s3cr3t-p4ssw0rd"


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def closed_server():
    """A server with the user kv, limited to keys that begin with kv:, and without a default user."""
    user = f"kv on >{SECRET} ~kv:* +get +set +exists +unlink +scan".split()
    with running("--user", *user, "--user", "default", "off") as server:
        yield server


def password_file(folder: Path, text: str) -> Path:
    return secret_file(folder, f"{text}\n")


async def _listed(tier: ValkeyTier) -> list[ChunkKey]:
    return [key async for key in tier.keys()]  # noqa: SIM118 - no dict


async def test_a_user_with_few_rights_is_enough(closed_server, arena, allocate, tmp_path):
    url = f"valkey://kv@127.0.0.1:{closed_server.port}"
    settings = config(url, password_file=password_file(tmp_path, SECRET), key_prefix="kv:")
    async with bound(settings, arena) as tier:
        assert await put(tier, arena, 1, 2) == [None, None]
        assert await get(tier, allocate, 1, 3) == ["hit", "miss"]
        assert await tier.remove(key_of(1))
        assert await _listed(tier) == [key_of(2)]
        assert await tier.clear() == 1


async def test_the_error_for_a_user_without_rights_names_the_permissions(
    closed_server, arena, tmp_path, caplog
):
    options = {"username": "kv", "password_file": password_file(tmp_path, SECRET), "key_prefix": "other:"}
    async with bound(config(closed_server.url, **options), arena) as tier:
        [answer] = await put(tier, arena, 1)
        assert isinstance(answer, TierError)
        assert not answer.retryable
        assert "key_prefix" in str(answer)
    assert "misses every chunk until the cause is corrected: valkey at" in caplog.text


@pytest.mark.parametrize("reply", [None, 1, b"QUEUED"])
async def test_a_put_whose_reply_is_not_ok_has_failed(server, arena, monkeypatch, reply):
    async def store(*_: object) -> Reply:
        return reply

    monkeypatch.setattr(Connection, "store", store)
    async with bound(config(server.url), arena) as tier:
        [error] = await put(tier, arena, 1)

    assert isinstance(error, TierUnavailableError)
    assert f"is {reply!r}, expected OK" in str(error)


@pytest.mark.parametrize("password", ["wrong-" + SECRET, None])
async def test_a_wrong_password_stops_the_start_and_is_not_shown(
    closed_server, monkeypatch, caplog, password
):
    caplog.set_level(logging.DEBUG)
    options = {}
    if password:
        monkeypatch.setenv("KV_PASSWORD", password)
        options = {"username": "kv", "password_variable": "KV_PASSWORD"}
    tier = ValkeyTier(config(closed_server.url, **options))
    with pytest.raises(ConfigError, match="password_file") as caught:
        await tier.__aenter__()

    chain = f"{caught.value} {caught.value.__cause__!r} {tier.config!r} {vars(tier)!r}"
    assert str(closed_server.socket) in str(caught.value)
    assert SECRET not in chain + caplog.text


async def test_a_wrong_password_for_a_cluster_stops_the_start():
    options = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--requirepass", SECRET)
    with running(*options) as node:
        tier = ValkeyTier(config(f"{node.tcp_url},127.0.0.1:{free_port()}", mode="cluster"))
        with pytest.raises(ConfigError, match=r"NOAUTH.*set username and password_file"):
            await tier.__aenter__()


async def test_a_wrong_password_for_the_sentinels_stops_the_start(server):
    with running("--sentinel", "--requirepass", SECRET, config="port 0\n") as sentinel:
        tier = ValkeyTier(config(f"valkey-sentinel://127.0.0.1:{sentinel.port}"))
        with pytest.raises(ConfigError, match=r"NOAUTH.*set sentinel_username and sentinel_password_file"):
            await tier.__aenter__()


async def test_a_database_that_does_not_exist_stops_the_start(server):
    with pytest.raises(
        ConfigError, match=r"DB index is out of range'; check the number of the database in url"
    ):
        await ValkeyTier(config(f"{server.tcp_url}/99")).__aenter__()


async def test_an_error_of_a_server_that_echoes_its_input_shows_no_secret(monkeypatch):
    monkeypatch.setenv("KV_PASSWORD", SECRET)
    with running("--rename-command", "AUTH", "''") as server:
        tier = ValkeyTier(config(server.url, password_variable="KV_PASSWORD"))
        with pytest.raises(ConfigError, match="answered 'ERR'") as caught:
            await tier.__aenter__()
    assert SECRET not in f"{caught.value} {caught.value.__cause__!r}"


async def test_a_full_server_drops_and_counts(arena, allocate):
    with running("--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        async with bound(config(server.url), arena) as tier:
            taken = 0
            while (answer := (await put(tier, arena, taken))[0]) is None:
                taken += 1
            assert isinstance(answer, TierFullError)
            assert "maxmemory-policy" in str(answer)
            assert await get(tier, allocate, 0, taken) == ["hit", "miss"]
            for number in range(taken):
                await tier.remove(key_of(number))
            assert await put(tier, arena, taken) == [None]


@pytest.mark.parametrize(("ttl_s", "least", "most"), [(86.4, 80_000, 86_400), (None, -1, -1)])
async def test_records_expire_after_the_given_time_or_never(server, arena, ttl_s, least, most):
    settings = config(server.url, ttl_s=ttl_s)
    async with bound(settings, arena) as tier:
        await put(tier, arena, 1)

    left = server.ask("PTTL", settings.key_prefix + key_of(1).hex())
    assert isinstance(left, int)
    assert least <= left <= most


@pytest.mark.parametrize("nbytes", [SLAB_BYTES + 1, 0])
async def test_a_value_whose_length_no_record_can_have_is_a_miss_and_removed(server, arena, allocate, nbytes):
    settings = config(server.url)
    name = settings.key_prefix + key_of(1).hex()
    tier = bound(settings, arena)
    evicted = []
    tier.on_evicted = evicted.extend
    async with tier:
        server.ask("SET", name, bytes(nbytes))
        assert await get(tier, allocate, 1) == ["miss"]
        assert evicted == [key_of(1)]
        assert tier.statistics().corrupt_by_cause == {"length": 1}
        assert server.ask("EXISTS", name) == 0
        server.ask("LPUSH", name, "x")  # a value of another program under the tier's name
        assert await get(tier, allocate, 1) == ["TierError"]
        assert await put(tier, arena, 1) == [None]
        assert await get(tier, allocate, 1) == ["hit"]


async def test_keys_of_others_are_neither_listed_nor_removed(server, arena):
    settings = config(server.url, key_prefix="a[b]*?\\:")
    others = ["a[b]*?\\:x", "ab:" + "0" * 32, "a[b]*?\\:" + "0" * 33, "a[b]*?\\:" + "G" * 32]
    async with bound(settings, arena) as tier:
        await put(tier, arena, 1)
        for other in others:
            server.ask("SET", other, "x")
        assert await _listed(tier) == [key_of(1)]
        assert await tier.clear() == 1
        assert server.ask("EXISTS", *others) == 4


async def test_tls_with_certificates_of_both_ends(server, arena, allocate, tmp_path):
    authority = Authority(tmp_path)
    async with Proxy(server.port, tls=authority.server_context(require_client=True)) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}"
        settings = config(url, tls_ca_file=authority.file, tls_cert_file=authority.issue("client"))
        async with bound(settings, arena) as tier:
            with record(arena, 7, 60_000) as buffer:
                await tier.put(key_of(7), buffer)
            got = await tier.get(key_of(7), allocate)
            assert got is not None
            with got:
                assert got.nbytes == 60_000 + 4096
        async with bound(config(url, tls_ca_file=authority.file), arena) as tier:
            with pytest.raises(TierUnavailableError, match=r"valkey at 127.*tls_cert_file"):
                await tier.contains(key_of(1))


async def test_a_certificate_of_another_authority_is_rejected(server, tmp_path):
    authority, other = Authority(tmp_path), Authority(tmp_path, "another authority")
    async with Proxy(server.port, tls=authority.server_context()) as proxy:
        tier = ValkeyTier(config(f"valkeys://127.0.0.1:{proxy.port}", tls_ca_file=other.file))
        with pytest.raises(TierError, match=r"certificate is rejected.*tls_ca_file") as caught:
            async with tier:
                await tier.contains(key_of(1))
        assert not caught.value.retryable


async def test_the_error_of_a_cluster_node_names_the_required_mode(arena):
    with running("--cluster-enabled", "yes", "--cluster-port", str(free_port())) as node:
        node.ask("CLUSTER", "ADDSLOTSRANGE", 0, 100)
        async with bound(config(node.tcp_url), arena) as tier:
            with pytest.raises(TierError, match=r"CLUSTERDOWN|mode to cluster"):
                await tier.contains(key_of(1))


async def test_too_many_clients_are_refused_as_unavailable(server):
    with running("--maxclients", "1") as small:
        async with ValkeyTier(config(small.url)) as tier:
            assert not await tier.contains(key_of(1))
            async with ValkeyTier(config(small.url)) as second:
                with pytest.raises(TierUnavailableError):  # an error reply, or the end of the connection
                    await second.contains(key_of(1))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"-ERR max number of clients reached\r\n", "max number of clients reached'; raise its maxclients"),
        (b"", "connection was lost.*tls_cert_file"),
    ],
)
async def test_a_server_that_ends_the_greeting_is_an_error_with_its_reason(monkeypatch, answer, message):
    monkeypatch.setenv("KV_PASSWORD", SECRET)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"SELECT")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"valkey://127.0.0.1:{server.sockets[0].getsockname()[1]}/1"
        async with ValkeyTier(config(url, password_variable="KV_PASSWORD")) as tier:
            with pytest.raises(TierUnavailableError, match=message):
                await tier.contains(key_of(1))
