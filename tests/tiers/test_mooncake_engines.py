"""Whole engines over the mooncake tier: in processes of their own, and over a master that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import uvloop

from lmcache_async.testing.rig import Rig
from tests.support import native
from tests.support.mooncake_pool import MooncakePool, kill_master, running
from tests.tiers.mooncake_engine import TOKENS

ROOT = Path(__file__).parents[2]


def engine(verb: str, tier: dict[str, object]) -> str:
    """What an engine in another process came to."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.tiers.mooncake_engine", verb, json.dumps(tier)],
        cwd=ROOT,
        env=native.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_what_one_engine_stored_another_loads_after_it_has_ended(mooncake_pool: MooncakePool) -> None:
    tier = mooncake_pool.tier | {"prefix": "engines/"}

    assert engine("store", tier) == "came to 5"
    assert engine("retrieve", tier) == f"came to {len(TOKENS)}"


def test_an_engine_goes_on_without_its_master(tmp_path: Path) -> None:
    uvloop.run(
        lose_master(tmp_path)
    )  # once: each call to a master that is away takes the client four seconds


async def lose_master(directory: Path) -> None:
    rig = Rig()
    slots = range(len(TOKENS))
    rig.write(slots, rig.content(TOKENS))
    with running(directory, 64 << 20) as pool:
        tier = pool.tier | {"timeout_s": 0.5, "layers": ["metrics", "deadline"]}
        async with rig.open(tiers=[tier]) as opened:
            assert (await opened.store(TOKENS, slots)).stored == 5
            assert await opened.flush(timeout_s=60)
            assert (await opened.retrieve(TOKENS, slots)).all()
            kill_master(pool)
            start = time.monotonic()
            assert not (await opened.retrieve(TOKENS, slots)).any()
            others = [token + 1000 for token in TOKENS]
            await opened.store(others, slots)
            assert await opened.flush(timeout_s=60)
            assert time.monotonic() - start < 10

            assert opened.statistics().counts["mooncake.dropped.TierUnavailableError"] == 5
            pool.start_master()
            while not (await opened.retrieve(TOKENS, slots)).all():
                await opened.store(TOKENS, slots)
                assert await opened.flush(timeout_s=60)
