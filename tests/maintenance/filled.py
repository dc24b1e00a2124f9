"""Directories of the disk tier filled by a real engine, for tests of the tools."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from typer.testing import CliRunner, Result

from lmcache_async.cli.app import app
from lmcache_async.errors import TierError
from lmcache_async.hashing import RequestNamespace
from lmcache_async.maintenance.stores import TierStore
from lmcache_async.memory.header import RecordHeader, peek_sizes, read_header
from lmcache_async.memory.record import RecordFormat, seal
from lmcache_async.testing.fakes import DictTier
from lmcache_async.testing.records import SLAB_BYTES, key_of, record, small_arena
from lmcache_async.testing.rig import Rig
from lmcache_async.tiers.base import Tier
from lmcache_async.tiers.offline import OfflineOptions
from lmcache_async.types import Chunk, ChunkKey
from tests.support import engines
from tests.support.secret_files import secret_file
from tests.support.tiers import handle_of

TOKENS = list(range(100, 140))
"""Tokens of a prompt: five chunks of 8."""


def rig_of(model: str = "model-a", **options: object) -> Rig:
    return Rig(**{"slabs": 64, "blocks": 64, "model": model, **options})


def open_on(root: Path | None, rig: Rig, config: dict[str, Any]) -> Any:
    """Open an engine whose only tier is the directory, unless the config has other tiers."""
    tiers = [{"name": "disk", "path": str(root), "max_bytes": "64MiB"}]
    return rig.open(**{"tiers": tiers, **config})


def filled(
    root: Path,
    *prompts: Sequence[int],
    rig: Rig | None = None,
    cache_salt: str = "",
    **config: object,
) -> Rig:
    """Fill a directory with the records of these prompts, from a test without a running loop."""
    rig = rig or rig_of()

    async def fill() -> None:
        async with open_on(root, rig, config) as engine:
            for tokens in prompts or (TOKENS,):
                await engines.store(rig, engine, tokens, namespace=RequestNamespace(cache_salt=cache_salt))

    uvloop.run(fill())
    return rig


def loaded(rig: Rig, root: Path | None, tokens: Sequence[int] = TOKENS, **config: object) -> int:
    """Return the number of tokens that an engine loads from the directory; their content is compared bit by bit."""

    async def load() -> int:
        async with open_on(root, rig, config) as engine:
            return await engines.hits(rig, engine, tokens)

    return uvloop.run(load())


def record_files(root: Path) -> list[Path]:
    """Record files, the most recently used first."""
    found = [path for path in root.glob("[0-9a-f][0-9a-f]/*") if path.is_file()]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def content(root: Path) -> dict[str, bytes]:
    """Records by name, without the padding of their files."""
    found = {}
    for path in record_files(root):
        data = path.read_bytes()
        _, nbytes = peek_sizes(memoryview(data))
        found[path.name] = data[:nbytes]
    return found


def damage(path: Path, at: int = 4200) -> None:
    """Flip a bit, by default of the payload, and preserve the time of use."""
    data = bytearray(path.read_bytes())
    status = path.stat()
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))


def plant(root: Path, namespace: str, number: int) -> Path:
    """Write a valid record with this number as its key and this namespace next to another one."""
    header = read_header(memoryview(record_files(root)[0].read_bytes()))
    key = ChunkKey(number.to_bytes(16, "big"))
    path = root / key.hex()[:2] / key.hex()
    path.parent.mkdir(exist_ok=True)
    return rewrite(path, header, namespace, Chunk(key, 0, header.tokens))


def rewrite(path: Path, header: RecordHeader, namespace: str, chunk: Chunk) -> Path:
    """Write a valid record of this chunk, in the form of another one."""
    made = RecordFormat(namespace=namespace, layout=header.layout, dtype=header.dtype, chunk_size=8)
    record_bytes = made.record_bytes(header.payload_bytes)
    data = bytearray(-(-record_bytes // 4096) * 4096)
    seal(
        memoryview(data)[:record_bytes],
        format=made,
        chunk=chunk,
        request_namespace="",
        shape=header.shape,
        payload_bytes=header.payload_bytes,
    )
    path.write_bytes(data)
    return path


def key_file(folder: Path) -> Path:
    """Write a file with a new encryption key."""
    return secret_file(folder, secrets.token_hex(32))


def sealed(payloads: Sequence[int]) -> dict[ChunkKey, bytes]:
    """Sealed records with payloads of these lengths, with keys 1, 2 and so on."""
    arena = small_arena(2)
    made = {}
    for number, nbytes in enumerate(payloads, 1):
        with record(arena, number, nbytes) as buffer:
            made[key_of(number)] = bytes(buffer.view)
    return made


class Failing(DictTier):
    """A store in which one record can be neither read nor written."""

    async def get(self, key, allocate):
        if key == key_of(1):
            raise TierError("it cannot be read")
        return await super().get(key, allocate)

    async def put(self, key, buffer):
        if key == key_of(2):
            raise TierError("it cannot be written")
        await super().put(key, buffer)


def store_of(
    tier: Tier, *, timeout_s: float = 30.0, max_record_bytes: int = SLAB_BYTES, in_flight: int = 3
) -> TierStore:
    handle = handle_of(tier, timeout_s=timeout_s, close_timeout_s=0.1)
    options = OfflineOptions(change=True, in_flight=in_flight, max_record_bytes=max_record_bytes)
    return TierStore(handle, options, list_timeout_s=timeout_s)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def told(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Return the output of the command with --json, which prints nothing else."""
    result = invoke(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (code, ""), result.output
    return json.loads(result.stdout)
