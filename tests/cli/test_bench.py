"""`lmcache-async bench`: memory, disk and one tier, with small sizes."""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import resource
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from lmcache_async.bench import raw
from lmcache_async.bench.measure import Frame
from lmcache_async.bench.memory import CacheForm, PromptCache
from lmcache_async.bench.raw import move_all
from lmcache_async.errors import TierError
from lmcache_async.types import StoreReport
from tests.support.daemons import WAITS, socket_path
from tests.support.valkey_servers import running
from tools.benchmarks.servers import host_daemon, valkey_server

ABSENT = {
    "name": "valkey",
    "url": "valkey://127.0.0.1:1",
    "connect_timeout_s": 0.1,
    "lookup_timeout_s": 0.1,
    "transfer_timeout_s": 0.1,
}


@pytest.fixture(scope="module")
def valkey():
    with valkey_server() as url:
        yield url


@pytest.fixture
def arguments(request, tmp_path):
    """Arguments of a benchmark, by its case."""
    match request.param:
        case "memory" | "disk" as name:
            return [name]
        case "tier of a config":
            config = tmp_path / "kv.yaml"
            tier = {"name": "disk", "id": "local", "path": f"file://{tmp_path}/kv", "max_bytes": "1GiB"}
            config.write_text(json.dumps({"tiers": ["cpu", tier]}))
            return ["tier", "local", "--config", str(config)]
        case "tier by JSON":
            tier = {"name": "host", "socket": str(request.getfixturevalue("daemon")), **WAITS}
            return ["tier", json.dumps(tier)]
        case _:
            return ["tier", request.getfixturevalue("valkey")]


@pytest.fixture
def daemon():
    with host_daemon(32 << 20) as path:
        yield path


LIMITS = {
    "memory": {"memcpy of the same rows", "memcpy layer by layer"},
    "disk": {"pwrite", "pread"},
    "tier of a config": {"memcpy, 1 thread", "raw files"},
    "tier by JSON": {"memcpy, 1 thread"},
    "tier by URL": {"memcpy, 1 thread", "bare sockets"},
}


def test_a_file_that_cannot_be_written_is_reported_before_the_measurement(invoke, tmp_path):
    result = invoke("bench", "memory", "--quick", "--json", tmp_path / "none" / "figures.json")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "No such file or directory" in result.stderr


@pytest.mark.parametrize(("arguments", "limits"), LIMITS.items(), ids=LIMITS, indirect=["arguments"])
def test_figures_are_written_beside_their_limits(invoke, arguments, limits, tmp_path):
    path = tmp_path / "figures.json"

    result = invoke("bench", *arguments, "--quick", "--rounds", "1", "--json", str(path))

    assert result.exit_code == 0, result.output
    whole = json.loads(path.read_text())
    [measured] = whole["benchmarks"].values()
    assert whole["quick"]
    assert whole["rounds"] == 1
    assert {row["limit_name"] for row in measured["rows"]} == limits
    assert measured["left_out"] == []
    for row in measured["rows"]:
        assert row["name"] in result.stdout
        assert 0 < row["ratio"] < math.inf
        assert row["ratio"] == pytest.approx(row["value"] / row["limit_value"])


def test_a_probe_of_a_tier_leaves_nothing_behind(invoke, valkey):
    import redis

    server = redis.Redis.from_url(valkey.replace("valkey", "redis"))
    server.set("mine", "kept")

    result = invoke("bench", "tier", valkey, "--quick", "--rounds", "1")

    assert result.exit_code == 0, result.output
    assert server.keys() == [b"mine"]
    server.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tier", "cpu"], "lmcache-async bench memory"),
        (["tier", "nowhere", "--mib", "1"], "nowhere"),
        (["tier", ""], "TIER: name is '': expected a name"),
        (["tier", '{"name": '], "TIER: expected a tier as JSON"),
        (["tier", json.dumps(ABSENT), "--mib", "1"], "127.0.0.1:1"),
        (["tier", "disk"], "path"),
        (["tier", "kv", "--config", "kv.yaml"], "kv.yaml has no tier 'kv'; its tiers are cpu"),
        (["memory", "--quick", "--tokens", "1000"], "each must be a multiple of the next"),
        (["disk", "--quick", "--path", "/nowhere"], "dir '/nowhere' does not exist"),
        (["disk", "--quick", "--threads", "500"], "Invalid value for '--threads'"),
        (["memory", "--quick", "--tokens", str(256 * 10**15)], "of memory are required, and"),
        (["memory", "--quick", "--layers", "100000000"], "of memory are required, and"),
        (["disk", "--quick", "--mib", "1000000000"], "of memory are required, and"),
        (["tier", json.dumps(ABSENT), "--mib", "1000000000"], "of memory are required, and"),
    ],
)
def test_a_wrong_argument_ends_with_2_and_a_message(invoke, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("kv.yaml").write_text("tiers: [cpu]")

    result = invoke("bench", *arguments, "--rounds", "1")

    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_directory_in_use_by_another_process_ends_with_2(invoke, tmp_path):
    """The advice and the exit code of the commands on records are not given: a benchmark cannot read it either."""
    tier = json.dumps({"name": "disk", "path": str(tmp_path), "max_bytes": "1GiB"})
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = invoke("bench", "tier", tier, "--quick", "--rounds", "1")

    assert result.exit_code == 2
    assert f"{tmp_path} is in use" in result.stderr
    assert "it can be read" not in result.stderr


def test_the_time_of_a_limit_begins_when_its_threads_run(monkeypatch):
    events = []
    start, clock = threading.Thread.start, time.perf_counter
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (events.append("thread"), start(thread)))
    monkeypatch.setattr(time, "perf_counter", lambda: (events.append("clock"), clock())[1])

    move_all(lambda worker, item: events.append("item"), range(3), range(5), 1)

    assert events == [*["thread"] * 3, "clock", *["item"] * 5, "clock"]


def test_the_client_of_a_server_that_does_not_answer_at_its_unix_socket_gives_up(monkeypatch):
    monkeypatch.setattr(raw, "SOCKET_TIMEOUT_S", 0.01)
    with socket_path() as path, socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        client = raw.RespSockets(f"unix://{path}", 1, ["name"], [memoryview(b"record")])

        with pytest.raises(TimeoutError):
            client.clear()


def test_a_tier_that_evicts_the_records_is_reported(invoke):
    with running("--maxmemory", "2500kb", "--maxmemory-policy", "allkeys-lru") as server:
        result = invoke("bench", "tier", server.tcp_url, "--quick", "--rounds", "1")

    assert result.exit_code == 2, result.output
    # The server refuses a record, or evicts one.
    assert any(text in result.stderr for text in ("OOM command", "the tier may be too small for"))


@pytest.mark.parametrize("interrupt", [signal.default_int_handler, signal.SIG_IGN])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_benchmark_and_its_files_are_removed(
    invoke, tmp_path, monkeypatch, number, interrupt
):
    before = signal.signal(signal.SIGINT, interrupt)
    before_number = signal.signal(number, signal.SIG_DFL)  # SIGHUP is ignored if the tests run under nohup

    async def killed(*_):
        assert list(tmp_path.iterdir())
        assert signal.getsignal(number) is not signal.SIG_DFL
        signal.raise_signal(number)
        await asyncio.Event().wait()

    monkeypatch.setattr(Frame, "compare", killed)

    try:
        result = invoke("bench", "disk", "--quick", "--path", tmp_path)
        after_number = signal.getsignal(number)
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(number, before_number)

    assert result.exit_code == 130, result.output
    assert list(tmp_path.iterdir()) == []
    assert after_number is signal.SIG_DFL


async def test_chunks_that_are_not_stored_are_counted_by_cause():
    class Engine:
        async def store(self, *_):
            return StoreReport(stored=1, dropped=Counter(TierFullError=3))

    with pytest.raises(TierError, match=r"^1 of 4 chunks were stored; dropped: 3 TierFullError$"):
        await PromptCache(CacheForm(1024)).store(Engine())


def test_a_full_disk_is_reported(invoke, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512 << 10, limits[1]))
    try:
        result = invoke("bench", "disk", "--quick", "--rounds", "1", "--path", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert result.exit_code == 2, result.output
    assert any(text in result.stderr for text in ("short read or write", "chunks were stored"))
    assert list(tmp_path.iterdir()) == []
