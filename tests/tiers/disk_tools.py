"""Tools to change the disk tier's directory and to replace its system calls."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import pages
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.plugins.disk import files as disk_files
from lmcache_async.testing.records import FORMAT, check_record, key_of, record
from lmcache_async.tiers.base import Allocate
from tests.support.gates import Gate

RECORD_BYTES = pages(FORMAT.record_bytes(5000))


def path_of(config: DiskConfig, number: int) -> Path:
    name = key_of(number).hex()
    return config.root / name[:2] / name


def files_in(root: Path) -> list[Path]:
    return [
        path
        for path in root.rglob("*")
        if path.is_file() and path.name != "lock" and path.parent.name != "quarantine"
    ]


def bytes_in(root: Path) -> int:
    return sum(path.stat().st_size for path in files_in(root))


async def put(tier: DiskTier, arena: Arena, *numbers: int) -> None:
    for number in numbers:
        with record(arena, number) as buffer:
            await tier.put(key_of(number), buffer)


async def get(tier: DiskTier, allocate: Allocate, number: int) -> bool:
    """Return whether the chunk is a hit, and compare its content."""
    buffer = await tier.get(key_of(number), allocate)
    if buffer is None:
        return False
    with buffer:
        check_record(buffer, number)
    return True


def gate_of(monkeypatch: pytest.MonkeyPatch, name: str, *, shut: bool = False) -> Gate:
    """Return a gate in front of an os function. Records are written by single calls from Python."""
    monkeypatch.setattr(disk_files, "publish_file", None)
    return Gate(monkeypatch, os, name, shut=shut)


class FailingCall:
    """A replacement of an os function that fails on request. Records are written by single calls from Python."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setattr(disk_files, "publish_file", None)
        self.error = 0
        self.times = 0
        real = getattr(os, name)

        def call(*args: object, **options: object) -> object:
            if self.times > 0:
                self.times -= 1
                raise OSError(self.error, os.strerror(self.error))
            return real(*args, **options)

        monkeypatch.setattr(disk_files.os, name, call)

    def fail(self, error: int, times: int = 1) -> None:
        self.error, self.times = error, times


async def turns() -> None:
    """Run the loop until only threads can make progress."""
    for _ in range(10):
        await asyncio.sleep(0)
