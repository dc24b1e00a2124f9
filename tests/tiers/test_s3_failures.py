"""The s3 tier with failures of servers and networks, and changes by other clients."""

from __future__ import annotations

import asyncio
import logging

import pytest

from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.plugins.s3 import S3Config, S3Tier
from lmcache_async.plugins.s3.bucket import Bucket, name_of, open_store
from lmcache_async.testing.conformance.base import TierRig, in_time
from lmcache_async.testing.records import key_of, record
from lmcache_async.testing.steps import turns
from tests.support.certificates import Authority
from tests.support.processes import free_port
from tests.support.proxy import Proxy
from tests.support.s3_server import SECRET_KEY
from tests.support.tiers import handle_of

WHOLE: dict[str, object] = {}
IN_PARTS: dict[str, object] = {"part_bytes": 4096}
SLOW_DOWN = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@pytest.fixture
async def proxy(s3_server):
    async with Proxy(s3_server.port) as proxy:
        yield proxy


def through(proxy: Proxy, config: S3Config, **options: object) -> S3Config:
    """The same options, through the proxy."""
    return config.model_copy(update={"endpoint": f"http://127.0.0.1:{proxy.port}", **options})


async def open_tier(config: S3Config, arena: Arena) -> S3Tier:
    tier = S3Tier(config)
    tier.bind(arena)
    return await tier.__aenter__()


@pytest.mark.parametrize("options", [WHOLE, IN_PARTS], ids=["whole", "parts"])
async def test_a_killed_server_causes_misses_until_its_restart(s3_server, proxy, arena, allocate, options):
    async with await open_tier(through(proxy, s3_server.config(**options)), arena) as tier:
        await TierRig(tier, arena).put(*range(4))
        proxy.answers.shut()
        reading = asyncio.ensure_future(tier.get_many([key_of(number) for number in range(4)], allocate))
        with record(arena, 5) as buffer:
            writing = asyncio.ensure_future(tier.put(key_of(5), buffer))
            await proxy.answers.reached()
            try:
                s3_server.kill_gateway()
                await proxy.cut()
                proxy.answers.open()
                answers = await in_time(reading)
                assert [type(answer) for answer in answers] == [TierUnavailableError] * 4
                with pytest.raises(TierUnavailableError, match=name_of(key_of(5))):
                    await in_time(writing)
                with pytest.raises(TierUnavailableError, match=f"at http://127.0.0.1:{proxy.port}"):
                    await tier.count_prefix([key_of(0)])
            finally:
                s3_server.start_gateway()
        await TierRig(tier, arena).check_leases()

        assert await tier.count_prefix([key_of(number) for number in range(5)]) == 4
        await TierRig(tier, arena).put(5)
        assert await TierRig(tier, arena).holds(0, 1, 2, 3, 5)


async def test_wrong_credentials_stop_the_start_and_are_not_shown(s3_server, arena, caplog):
    config = s3_server.config(secret_key="wrong-" + SECRET_KEY)
    with pytest.raises(TierError, match=r"SignatureDoesNotMatch.*credentials") as caught:
        await open_tier(config, arena)

    assert not caught.value.retryable
    assert f"{config.url} at {config.endpoint}" in str(caught.value)
    assert SECRET_KEY not in caplog.text + str(caught.value) + str(caught.value.__cause__) + repr(config)


async def test_revoked_credentials_are_an_error_of_every_call(s3_server, arena):
    config = s3_server.config(secret_key="wrong-" + SECRET_KEY)
    bucket = Bucket(config, open_store(config))
    with record(arena, 1) as buffer:
        for call in (
            bucket.find(key_of(1)),
            bucket.read(key_of(1), 1000),
            bucket.write(key_of(1), buffer),
            bucket.delete(key_of(1)),
            bucket.delete_all(),
        ):
            with pytest.raises(TierError, match=rf"{config.url}.* at {config.endpoint}: HTTP 403") as caught:
                await call
            assert not caught.value.retryable


async def test_a_missing_bucket_stops_the_start(s3_server, arena):
    config = s3_server.config(url="s3://missing-bucket/kv")
    with pytest.raises(TierError, match=r"s3://missing-bucket/kv at .*NoSuchBucket.*create it"):
        await open_tier(config, arena)
    bucket = Bucket(config, open_store(config))
    with record(arena, 1) as buffer, pytest.raises(TierError, match="the bucket does not exist"):
        await bucket.write(key_of(1), buffer)


async def test_a_store_that_does_not_answer_yet_does_not_stop_the_start(
    s3_server, proxy, arena, allocate, caplog
):
    proxy.refuses = True
    with caplog.at_level(logging.WARNING):
        tier = await open_tier(through(proxy, s3_server.config()), arena)
    async with tier:
        assert "misses every chunk until the store answers" in caplog.text
        with pytest.raises(TierUnavailableError):
            await tier.get(key_of(1), allocate)
        proxy.refuses = False
        await TierRig(tier, arena).put(1)

        assert await TierRig(tier, arena).holds(1)


@pytest.mark.parametrize("options", [WHOLE, IN_PARTS], ids=["whole", "parts"])
async def test_a_slow_server_is_an_error_within_request_timeout_s(s3_server, proxy, arena, allocate, options):
    config = s3_server.config(**options)
    async with await open_tier(config, arena) as tier:
        await TierRig(tier, arena).put(1)
    slow = through(proxy, config, request_timeout_s=0.3)
    async with await open_tier(slow, arena) as tier:
        proxy.answers.shut()
        with pytest.raises(TierUnavailableError, match=r"read|find"):
            await in_time(tier.get(key_of(1), allocate))
        with record(arena, 2) as buffer, pytest.raises(TierUnavailableError, match="write"):
            await in_time(tier.put(key_of(2), buffer))
        proxy.answers.open()
        await TierRig(tier, arena).check_leases()

    async with await open_tier(config, arena) as tier:
        assert await TierRig(tier, arena).holds(1)


async def test_an_engine_gets_the_error_of_a_store_that_cannot_be_reached(s3_server, proxy, arena, allocate):
    tier = S3Tier(through(proxy, s3_server.config(**IN_PARTS)))
    handle = handle_of(tier, timeout_s=60)
    handle.bind(arena)
    keys = [key_of(1), key_of(2)]

    async def allocate_and_cut(nbytes: int) -> Buffer:
        proxy.refuses = True
        await proxy.cut()
        return await allocate(nbytes)

    async with handle:
        await TierRig(tier, arena, lambda _: 30_000).put(1, 2)
        while_reading = await handle.get(keys, allocate_and_cut)
        before = [*await handle.get(keys, allocate), *await handle.get(keys[:1], allocate)]
        for exact in (True, False):
            with pytest.raises(TierUnavailableError, match="cannot find"):
                await handle.lookup(keys, exact=exact)

    assert [type(error) for error in (*while_reading, *before)] == [TierUnavailableError] * 5
    await TierRig(tier, arena).check_leases()


async def test_a_throttling_server_is_a_retryable_error(s3_server, proxy, arena, allocate):
    async with await open_tier(through(proxy, s3_server.config()), arena) as tier:
        await proxy.cut()
        proxy.answer = SLOW_DOWN
        said = ""
        while "HTTP 503" not in said:
            with pytest.raises(TierUnavailableError) as caught:
                await tier.get(key_of(1), allocate)
            assert caught.value.retryable
            said = str(caught.value)
            assert "HTTP 503" in said or "error sending request" in said  # on a connection that was just cut


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (b"ExpiredToken", TierError, "session_token"),
        (b"InvalidToken", TierError, "session_token"),
        (b"RequestTimeout", TierUnavailableError, "$"),
        (b"AuthorizationHeaderMalformed", TierError, "check region and endpoint"),
    ],
)
async def test_an_invalid_request_is_explained_by_its_code(s3_server, proxy, code, kind, advice):
    body = b"<Error><Code>%b</Code><Message>It is wrong.</Message></Error>" % code
    proxy.answer = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (
        len(body),
        body,
    )
    config = through(proxy, s3_server.config())

    with pytest.raises(TierError, match=f"HTTP 400: {code.decode()}: It is wrong.*{advice}") as caught:
        await Bucket(config, open_store(config)).read(key_of(1), 1000)

    assert type(caught.value) is kind


def at(port: int, *, scheme: str = "http", **options: object) -> S3Config:
    """Options for a server at this port that need no real server."""
    given = {
        "url": "s3://b/kv",
        "endpoint": f"{scheme}://127.0.0.1:{port}",
        "allow_http": True,
        "region": "r",
    }
    return S3Config.model_validate(given | {"access_key_id": "a", "secret_key": "b"} | options)


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        ("400 Bad Request", "temporary credentials.*region and endpoint"),
        ("403 Forbidden", "credentials.*clock"),
        ("301 Moved Permanently", "check region and endpoint"),
    ],
)
async def test_an_error_of_a_lookup_has_no_code_and_names_the_possible_causes(status, advice):
    async with Proxy(1) as proxy:
        proxy.answer = f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode()
        config = at(proxy.port)

        with pytest.raises(TierError, match=advice) as caught:
            await Bucket(config, open_store(config)).find(key_of(1))

    assert not caught.value.retryable


async def test_the_error_of_a_failed_connection_names_its_cause(tmp_path):
    authority, other = Authority(tmp_path), Authority(tmp_path, "another authority")
    async with Proxy(1, tls=other.server_context()) as proxy:
        for config, cause in (
            (at(free_port()), "Connection refused"),
            (at(proxy.port, scheme="https", ca_file=authority.file), "UnknownIssuer"),
        ):
            with pytest.raises(TierUnavailableError, match=f"error sending request: {cause}"):
                await Bucket(config, open_store(config)).find(key_of(1))


async def test_credentials_that_no_server_provides_are_named_as_the_cause(arena, monkeypatch, caplog):
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    async with Proxy(1) as proxy:
        config = at(proxy.port, access_key_id=None, secret_key=None)
        async with await open_tier(config, arena) as tier:
            with pytest.raises(TierUnavailableError, match=r"no credentials.*AWS_ACCESS_KEY_ID"):
                await tier.contains(key_of(1))

    assert "no credentials" in caplog.text


async def test_a_session_token_of_the_environment_is_not_sent_with_another_key(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-other")
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for options in ({}, {"session_token": "own"}):
            config = at(port, **options)
            assert await Bucket(config, open_store(config)).find(key_of(1)) is None

    assert all(b"Credential=a/" in request for request in requests)
    assert [b"security-token: own" in request for request in requests] == [False, True]
    assert b"token-of-other" not in b"".join(requests)


@pytest.mark.parametrize("options", [WHOLE, IN_PARTS], ids=["whole", "parts"])
async def test_after_a_cancelled_get_nothing_is_written(s3_server, proxy, arena, allocate, options):
    async with await open_tier(through(proxy, s3_server.config(**options)), arena) as tier:
        await TierRig(tier, arena).put(*range(3))

        async def allocate_and_shut(nbytes: int) -> Buffer:
            proxy.answers.shut()
            return await allocate(nbytes)

        if not options:  # without parts, memory is leased when the whole answer has arrived
            proxy.answers.shut()
        reading = asyncio.ensure_future(tier.get(key_of(1), allocate_and_shut))
        await proxy.answers.reached()
        reading.cancel()
        await in_time(asyncio.wait({reading}))
        await TierRig(tier, arena).check_leases()
        taken = [arena.lease_nowait(arena.slab_bytes) for _ in range(arena.statistics().num_slabs)]
        for buffer in taken:
            buffer.view[:] = b"\xaa" * buffer.nbytes
        proxy.answers.open()
        assert await tier.contains(key_of(2))  # the pending data has arrived by now

        assert all(bytes(buffer.view) == b"\xaa" * buffer.nbytes for buffer in taken)
        for buffer in taken:
            buffer.release()


async def test_a_cancelled_put_ends_with_its_request_and_its_record_stays(s3_server, proxy, arena):
    async with await open_tier(through(proxy, s3_server.config()), arena) as tier:
        proxy.answers.shut()
        buffer = record(arena, 1)
        writing = asyncio.ensure_future(tier.put(key_of(1), buffer))
        await proxy.answers.reached()
        for _ in range(3):
            writing.cancel()
            await turns(5)
        assert not writing.done()
        proxy.answers.open()
        await in_time(asyncio.wait({writing}))
        assert writing.cancelled()
        buffer.release()
        TierRig(tier, arena).overwrite_free_memory()

        assert await TierRig(tier, arena).holds(1)


async def test_an_interrupted_upload_stores_no_record(s3_server, proxy, arena):
    config = s3_server.config()
    async with await open_tier(through(proxy, config), arena) as tier:
        await proxy.cut()
        proxy.requests.break_after = 20_000
        with record(arena, 1, 60_000) as buffer, pytest.raises(TierUnavailableError, match="write"):
            await in_time(tier.put(key_of(1), buffer))
        await TierRig(tier, arena).check_leases()
    async with await open_tier(config, arena) as tier:
        assert not await tier.contains(key_of(1))
        assert await TierRig(tier, arena).keys() == set()
        await TierRig(tier, arena, lambda _: 60_000).put(1)
        assert await TierRig(tier, arena, lambda _: 60_000).holds(1)


@pytest.mark.parametrize("options", [WHOLE, IN_PARTS], ids=["whole", "parts"])
async def test_a_truncated_response_is_an_error_and_the_record_stays(
    s3_server, proxy, arena, allocate, options
):
    config = s3_server.config(**options)
    async with await open_tier(through(proxy, config), arena) as tier:
        await TierRig(tier, arena, lambda _: 60_000).put(1)
        await proxy.cut()
        proxy.answers.break_after = 3000
        with pytest.raises(TierUnavailableError, match=r"cannot (find|read)"):
            await in_time(tier.get(key_of(1), allocate))
        await TierRig(tier, arena).check_leases()
        proxy.answers.break_after = None

        assert await TierRig(tier, arena, lambda _: 60_000).holds(1)
        assert tier.statistics().corrupt == 0
