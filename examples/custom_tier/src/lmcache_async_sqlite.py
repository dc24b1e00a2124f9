"""A tier in its own distribution: chunks in an SQLite file.

A tier needs only the three coroutines. This one also opens and closes its file.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from lmcache_async import (
    Allocate,
    Buffer,
    Capabilities,
    ChunkKey,
    Tier,
    TierClosedError,
    TierConfig,
    TierUnavailableError,
)


class SQLiteConfig(TierConfig):
    """Options of the tier."""

    path: Path


class SQLiteTier(Tier[SQLiteConfig]):
    config_type = SQLiteConfig
    _file: sqlite3.Connection | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(persistent=True)

    async def contains(self, key: ChunkKey) -> bool:
        return bool(await self._run("SELECT 1 FROM chunks WHERE key = ?", key))

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        rows = await self._run("SELECT record FROM chunks WHERE key = ?", key)
        if not rows:
            return None
        buffer = await allocate(len(rows[0][0]))
        buffer.view[:] = rows[0][0]
        return buffer

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        # A copy: after a cancellation the thread continues, but must not read the caller's buffer any more.
        await self._run("INSERT OR IGNORE INTO chunks VALUES (?, ?)", key, bytes(buffer.view))

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1)  # SQLite requires one thread per connection
        self._file = await self._in_thread(sqlite3.connect, self.config.path)
        await self._run("CREATE TABLE IF NOT EXISTS chunks (key BLOB PRIMARY KEY, record BLOB)")
        return self

    async def __aexit__(self, *error: object) -> None:
        file, self._file = self._file, None
        if file is not None:
            await self._in_thread(file.close)
        self._thread.shutdown()

    async def _run(self, statement: str, *values: bytes) -> list[Any]:
        file = self._file
        if file is None:
            raise TierClosedError(f"sqlite at {self.config.path} is not open")

        def execute() -> list[Any]:
            with file:  # a transaction
                return file.execute(statement, values).fetchall()

        try:
            rows: list[Any] = await self._in_thread(execute)
        except sqlite3.Error as error:
            raise TierUnavailableError(f"sqlite at {self.config.path}: {error}") from error
        return rows

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
