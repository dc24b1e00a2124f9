"""Program of the campaign `kill`: forks engines that store prompts until they are killed.

Each input line `<max bytes> <first number> <directory>` starts an engine. It prints its process id, `began
<number>` before each prompt, and `stored <number>` when its disk tier has stored all of it; `dead <status>`
follows its exit. Slow imports happen once, before any thread is started.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from pathlib import Path

import uvloop

from lmcache_async.registry import STAGES, TIERS
from tools.torture.prompts import Bench, disk_tiers, prompt

AT_ONCE = 3


async def store(bench: Bench, path: Path, max_bytes: int, first: int) -> None:
    rig = bench.rig
    async with rig.open(registry=bench.registry, tiers=disk_tiers(path, max_bytes)) as engine:
        for start in itertools.count(first, AT_ONCE):
            prompts = {number: prompt(number) for number in range(start, start + AT_ONCE)}
            os.write(1, "".join(f"began {number}\n" for number in prompts).encode())
            before = engine.statistics().counts.get("disk.stored", 0)
            calls = []
            for place, tokens in enumerate(prompts.values()):
                slots = range(64 * place, 64 * place + len(tokens))
                rig.write(slots, rig.content(tokens))
                calls.append(engine.store(tokens, slots))
            await asyncio.gather(*calls)
            stored = engine.statistics().counts.get("disk.stored", 0) - before
            if stored == sum(len(bench.chunks(tokens)) for tokens in prompts.values()):
                os.write(1, "".join(f"stored {number}\n" for number in prompts).encode())


def main() -> None:
    bench = Bench()
    config = bench.rig.config()
    for name in (*config.store.stages, *config.retrieve.stages):  # imported here, not by every fork
        bench.registry.load(STAGES, name)
    for name in ("cpu", "disk"):
        bench.registry.load(TIERS, name)
    os.write(1, b"ready\n")
    for line in sys.stdin:
        max_bytes, first, path = line.strip().split(" ", 2)
        child = os.fork()
        if child == 0:
            os.write(1, f"pid {os.getpid()}\n".encode())
            try:
                uvloop.run(store(bench, Path(path), int(max_bytes), int(first)))
            finally:
                os._exit(3)  # must be killed, not exit
        _, status = os.waitpid(child, 0)
        os.write(1, f"dead {status}\n".encode())


if __name__ == "__main__":
    main()
