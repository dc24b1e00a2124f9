"""A program for the crash test: forks writers that store records until they are killed.

Each line of its input, `<directory> <max bytes> <first number> <call>`, starts one. The writer prints its process id,
then `stored <number>` for each stored record, and kills itself at its `call`-th system call on a file (before an even
one, after an odd one, never for 0). When it is dead, `dead <status>` is printed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
from pathlib import Path

from lmcache_async.memory.arena import Arena
from lmcache_async.plugins.disk import DiskConfig, DiskTier
from lmcache_async.testing.records import SLAB_BYTES, key_of, record

CALLS = ("open", "pwrite", "utime", "fsync", "replace", "unlink", "close", "mkdir")


def die_at(call: int) -> None:
    """Count the calls of these functions by the tier's threads, and kill the process at one of them."""
    numbers = itertools.count(1)

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def wrapped(*args: object, **options: object) -> object:
            if not threading.current_thread().name.startswith("lmcache-disk"):
                return real(*args, **options)
            number = next(numbers)
            if number == call and call % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*args, **options)
            finally:
                if number == call:
                    os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, name, wrapped)

    for name in CALLS:
        wrap(name)


async def store(path: Path, max_bytes: int, first: int) -> None:
    arena = Arena(8 * SLAB_BYTES, SLAB_BYTES, huge_pages=False, prefault=False)
    async with DiskTier(DiskConfig(path=path, max_bytes=max_bytes, io_threads=2)) as tier:
        for start in itertools.count(first, 4):
            items = [(key_of(number), record(arena, number, 60_000)) for number in range(start, start + 4)]
            results = await tier.put_many(items)
            for (key, buffer), result in zip(items, results, strict=True):
                buffer.release()
                if result is None:
                    sys.stdout.write(f"stored {int.from_bytes(key, 'big')}\n")
            sys.stdout.flush()


def main() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        path, max_bytes, first, call = line.split()
        child = os.fork()
        if child == 0:
            sys.stdout.write(f"pid {os.getpid()}\n")
            sys.stdout.flush()
            if int(call):
                die_at(int(call))
            asyncio.run(store(Path(path), int(max_bytes), int(first)))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"dead {status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
