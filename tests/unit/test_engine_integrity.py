"""Records that fail verification: a miss, counted by cause, logged once, set aside."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from lmcache_async.errors import EngineClosedError
from lmcache_async.memory import record
from lmcache_async.memory.header import read_header
from lmcache_async.memory.record import RecordFormat, seal
from lmcache_async.stages import seal as seal_stage
from lmcache_async.testing.rig import Rig
from lmcache_async.tiers.base import ScrubReport
from lmcache_async.types import Chunk
from tests.support import engines

TOKENS = list(range(100, 140))  # 40 tokens: 5 chunks of 8


def settings(tmp_path: Path, **options: object) -> dict[str, Any]:
    tier = {"name": "disk", "path": str(tmp_path), "max_bytes": "64MiB", "layers": [], **options}
    return {"tiers": [tier]}


async def store(rig: Rig, engine: Any) -> None:
    await engines.store(rig, engine, TOKENS)


async def retrieve(rig: Rig, engine: Any) -> int:
    return await engines.hits(rig, engine, TOKENS)


def files(tmp_path: Path) -> dict[tuple[int, ...], Path]:
    """Return record files by the tokens of their chunks."""
    found = {}
    for path in tmp_path.glob("??/*"):
        header = read_header(memoryview(path.read_bytes()))
        found[tuple(header.tokens.tolist())] = path
    return found


def sealed_again(path: Path, **changes: Any) -> None:
    """Seal a record again with other content and valid checksums."""
    data = bytearray(path.read_bytes())
    header = read_header(memoryview(data))
    said = {
        "namespace": header.namespace,
        "layout": header.layout,
        "dtype": header.dtype,
        "key": header.key,
        "tokens": header.tokens,
        "request_namespace": header.request_namespace,
        "shape": header.shape,
        **changes,
    }
    seal(
        memoryview(data)[: header.header_bytes + header.payload_bytes],
        format=RecordFormat(
            namespace=said["namespace"], layout=said["layout"], dtype=said["dtype"], chunk_size=8
        ),
        chunk=Chunk(
            key=said["key"], start=0, tokens=np.asarray(said["tokens"], np.int32), extra=header.extra
        ),
        request_namespace=said["request_namespace"],
        shape=said["shape"],
        payload_bytes=header.payload_bytes,
    )
    path.write_bytes(data)


DOUBTS: dict[str, Callable[[Path], None]] = {
    "tokens": lambda path: sealed_again(path, tokens=[1, 2, 3, 4, 5, 6, 7, 8]),  # a hash collision
    "key": lambda path: sealed_again(path, key=b"0123456789abcdef"),
    "namespace": lambda path: sealed_again(path, request_namespace='{"salt":"another"}'),
    "layout": lambda path: sealed_again(path, dtype="float16"),
    "layout, shape": lambda path: sealed_again(path, shape=(1, 2)),
    "checksum": lambda path: path.write_bytes(
        path.read_bytes()[:4100] + b"\x01\x02" + path.read_bytes()[4102:]
    ),
}


@pytest.mark.parametrize("quarantine", [True, False])
@pytest.mark.parametrize("cause", sorted(DOUBTS))
async def test_a_record_that_fails_verification_is_a_miss_counted_by_cause_logged_once_and_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cause: str, quarantine: bool
) -> None:
    rig, doubt = Rig(), DOUBTS[cause]
    cause = cause.partition(",")[0]
    async with rig.open(**settings(tmp_path, quarantine=quarantine)) as engine:
        await store(rig, engine)
        path = files(tmp_path)[tuple(TOKENS[16:24])]
        doubt(path)
        content = path.read_bytes()

        with caplog.at_level(logging.WARNING):
            assert await retrieve(rig, engine) == 16
        assert engine.statistics().counts[f"disk.corrupt.{cause}"] == 1
        [line] = [entry.getMessage() for entry in caplog.records]
        assert f"({cause}: " in line
        assert not path.exists()
        kept = tmp_path / "quarantine" / f"{path.name}.{cause}"
        assert kept.exists() == quarantine
        if quarantine:
            assert kept.read_bytes() == content
        assert await retrieve(rig, engine) == 16  # a plain miss by now
        assert engine.statistics().counts[f"disk.corrupt.{cause}"] == 1
        assert engine.metrics.read().get("corrupt_records_total", "disk", cause, "verify") == 1
        await store(rig, engine)
        assert await retrieve(rig, engine) == 40
        assert engine.statistics().arena.leased_slabs == 0


async def test_a_record_that_grew_beyond_a_slab_between_two_runs_is_a_miss_and_stored_again(
    tmp_path: Path,
) -> None:
    rig = Rig()
    async with rig.open(**settings(tmp_path)) as engine:
        await store(rig, engine)
    path = files(tmp_path)[tuple(TOKENS[16:24])]
    path.write_bytes(path.read_bytes() + bytes(1 << 20))
    async with rig.open(**settings(tmp_path)) as engine:
        assert await retrieve(rig, engine) == 16
        assert engine.statistics().tiers["disk"].corrupt_by_cause == {"length": 1}
        await store(rig, engine)
        assert await retrieve(rig, engine) == 40


async def test_a_scrub_of_the_engine_finds_damage_of_unread_records(tmp_path: Path) -> None:
    rig = Rig()
    options = settings(tmp_path)
    async with rig.open(tiers=["cpu", *options["tiers"]]) as engine:
        await store(rig, engine)
        DOUBTS["checksum"](files(tmp_path)[tuple(TOKENS[16:24])])

        reports = await engine.scrub()
        assert reports["cpu"] == ScrubReport()
        assert (reports["disk"].chunks, reports["disk"].corrupt) == (4, {"checksum": 1})
        assert engine.statistics().tiers["disk"].corrupt_by_cause == {"checksum": 1}
        assert (await engine.scrub())["disk"].corrupt == {}
    with pytest.raises(EngineClosedError):
        await engine.scrub()


@pytest.mark.parametrize("tiers", [["cpu"], ["disk"], ["cpu", "disk"]])
async def test_checksums_are_never_computed_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: list[str]
) -> None:
    threads: set[int] = set()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads.add(threading.get_ident())
            return function(*args)

        return call

    for module in (record, seal_stage):
        monkeypatch.setattr(module, "payload_checksum", noting(xxhash.xxh3_128_digest))
    monkeypatch.setattr(record, "xxhash", SimpleNamespace(xxh3_128=noting(xxhash.xxh3_128)))
    made = {"cpu": "cpu", "disk": settings(tmp_path)["tiers"][0]}
    rig = Rig()
    async with rig.open(**{"tiers": [made[name] for name in tiers], "retrieve.verify_arena": True}) as engine:
        await store(rig, engine)
        stored = len(threads)
        assert await retrieve(rig, engine) == 40
        await engine.scrub()

    assert stored
    assert threading.get_ident() not in threads
