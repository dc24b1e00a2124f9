"""A tier of its own distribution: chunks in an SQLite file.

The three coroutines are all that a tier must have; opening and closing are here because a file wants it.
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
    """Options, checked at start-up."""

    path: Path


class SQLiteTier(Tier):
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
        # A copy: a cancelled call must not read the caller's buffer any more, but the thread goes on.
        await self._run("INSERT OR IGNORE INTO chunks VALUES (?, ?)", key, bytes(buffer.view))

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1)  # SQLite wants one thread for one connection
        self._file = await self._in_thread(sqlite3.connect, self.config.path)
        await self._run("CREATE TABLE IF NOT EXISTS chunks (key BLOB PRIMARY KEY, record BLOB)")
        return self

    async def __aexit__(self, *error: object) -> None:
        file, self._file = self._file, None
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
            return await self._in_thread(execute)
        except sqlite3.Error as error:
            raise TierUnavailableError(f"sqlite at {self.config.path}: {error}") from error

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
