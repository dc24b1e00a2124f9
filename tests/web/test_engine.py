"""The status endpoint of a real engine: content and configuration errors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.testing.rig import Rig
from lmcache_async.types import RequestPlan
from tests.support import forked_python
from tests.support.http_client import DEADLINE_S, ask

ON = {"http.listen": "127.0.0.1:0"}
TOKENS = list(range(40))


async def status(engine: CacheEngine) -> Any:
    assert engine.status_url is not None
    return (await ask(engine.status_url, "/status.json")).json()


async def test_the_status_of_an_engine_has_its_tiers_and_requests(tmp_path: Path) -> None:
    rig = Rig()
    tiers = ["cpu", {"name": "disk", "path": str(tmp_path), "max_bytes": "64MiB"}]
    async with rig.open(tiers=tiers, **ON) as engine:
        rig.write(range(40), rig.content(TOKENS))
        engine.planned(
            RequestPlan(request_id="r-1", prompt_tokens=56, load_tokens=40, decided="load", why="so")
        )
        await engine.store(TOKENS, list(range(40)), request_id="r-1")
        await engine.clear(memory_only=True)
        assert (await engine.retrieve(TOKENS, list(range(40, 80)), request_id="r-1")).all()
        assert await engine.flush(timeout_s=DEADLINE_S)
        told = await status(engine)
        metrics = (await ask(engine.status_url or "", "/metrics")).body.decode()

    assert (told["kind"], told["title"]) == ("engine", rig.model)
    cpu, disk = told["tiers"]
    assert (cpu["id"], cpu["in_place"], cpu["queue"], cpu["breaker"]) == ("cpu", True, None, None)
    assert disk["breaker"] == {"lookup": "closed", "read": "closed", "write": "closed"}
    assert (disk["hit_tokens"], disk["hit_chunks"], disk["stored_chunks"]) == (40, 5, 5)
    assert disk["calls"]["put_many"]["bytes"] > 0
    assert disk["queue"]["bytes"] == 0
    assert told["totals"]["hit_tokens"] == 40
    assert told["totals"]["prompt_tokens"] == 56
    assert told["memory"]["bytes"] == rig.slabs * rig.slab_bytes
    (request,) = told["recent"]
    assert request["loaded"]["by_tier"] == [["disk", 40]]
    assert request["plan"]["decided"] == "load"
    assert request["stored"]["chunks"] == 5
    assert 'lmcache_async_retrieve_hit_tokens_total{tier="disk"} 40' in metrics


async def test_charts_are_made_from_samples_taken_while_serving() -> None:
    rig = Rig()
    async with rig.open(**ON) as engine:
        await engine.store(TOKENS, list(range(40)))
        await engine.retrieve(TOKENS, list(range(40, 80)))
        async with asyncio.timeout(DEADLINE_S):
            while not (charts := (await status(engine))["charts"])["list"]:
                await asyncio.sleep(0.05)

    shares, moved, memory = charts["list"]
    assert shares["series"] == [{"name": "cpu", "values": [1.0]}]
    assert moved["unit"] == "bytes/s"
    assert all(series["values"][0] > 0 for series in moved["series"])
    assert memory["series"][0]["values"][0] > 0


async def test_without_http_listen_nothing_is_served() -> None:
    rig = Rig()
    async with rig.open() as engine:
        assert engine.status_url is None


def test_a_missing_aiohttp_is_reported_with_the_extra(tmp_path: Path) -> None:
    """In a separate process, because aiohttp is already imported in this one."""
    code = (
        "import sys; sys.modules['aiohttp'] = None\n"
        "from lmcache_async.config import HTTPConfig, load_config\n"
        "from lmcache_async.engine.check import problems\n"
        "from lmcache_async.metrics.endpoint import status_server\n"
        "from lmcache_async.registry import Registry\n"
        "for listen in ('127.0.0.1:0', 'none'):\n"
        "    print(problems(load_config(env={}, extra={'http.listen': listen}), Registry()))\n"
        "status_server(None, HTTPConfig(listen='127.0.0.1:0'))\n"
    )
    (tmp_path / "without.py").write_text(code)

    ended = forked_python.run("without.py", cwd=tmp_path, path=[Path(__file__).parents[2]])

    assert ended.status == 1
    assert "http.listen needs the package aiohttp" in ended.output
    assert "[]" in ended.output.splitlines()
    assert "MissingDependencyError" in ended.output
    assert "pip install 'lmcache-async[http]'" in ended.output
