"""An engine in a process of its own over one tier: `python -m tests.tiers.mooncake_engine VERB TIER`."""

from __future__ import annotations

import asyncio
import json
import sys

from lmcache_async.testing.rig import Rig

TOKENS = list(range(100, 140))  # five chunks


async def main(verb: str, tier: dict[str, object]) -> int:
    """`store`: how many chunks were; `retrieve`: how many tokens came back as they were."""
    rig = Rig()
    slots = range(len(TOKENS))
    async with rig.open(tiers=[tier]) as engine:
        if verb == "store":
            rig.write(slots, rig.content(TOKENS))
            report = await engine.store(TOKENS, slots)
            assert await engine.flush(timeout_s=60)
            return report.stored
        rig.wipe()
        hit = int((await engine.retrieve(TOKENS, slots)).sum())
        assert (rig.read(slots[:hit]) == rig.content(TOKENS)[:, :, :hit]).all()
        return hit


if __name__ == "__main__":
    sys.stdout.write(f"came to {asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))}\n")
