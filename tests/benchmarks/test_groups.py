"""The benchmark of models with several KV groups, with fake vLLM processes."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
from pathlib import Path

import pytest

from lmcache_async.bench.measure import Frame, Row
from lmcache_async.errors import ConfigError
from tools.benchmarks import groups, serve_engine
from tools.benchmarks.serve_engine import ServeError

FAKE = Path(__file__).parent / "serve_fake.py"


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_engine, "COMMAND", (sys.executable, str(FAKE)))


def measured(models: str = "gemma-3", executors: str = "mp") -> list[Row]:
    frame = Frame(rounds=2, quick=True, chosen=random.Random(0))

    async def rows() -> list[Row]:
        settings = dataclasses.replace(groups.QUICK, models=models, executors=executors)
        return [row async for row in groups.run(settings, frame)]

    return asyncio.run(rows())


def test_hits_of_each_model_and_executor_are_beside_the_peer_and_vllms_own_hit() -> None:
    rows = measured("gemma-3,qwen3-next", "mp,uni")

    assert [(row.name, row.limit_name, round(row.ratio, 6)) for row in rows] == [
        (f"known prompt, {model}, {executor}", limit, ratio)
        for model in ("gemma-3", "qwen3-next")
        for executor in ("mp", "uni")
        for limit, ratio in (("OffloadingConnector", 1), ("own hit", 2))
    ]
    assert [len(row.ratios) for row in rows] == [2] * 8


@pytest.mark.parametrize("connector", ["LMCacheAsyncConnector", "OffloadingConnector"])
@pytest.mark.parametrize(
    ("fault", "told"),
    [("wrong", "the answer differs"), ("misses", "0 tokens came from a cache"), ("dead", "no such device")],
)
def test_a_wrong_answer_or_a_miss_gives_no_figures(
    connector: str, fault: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAULT", f"{connector}:{fault}")

    with pytest.raises(ServeError, match=told):
        measured()


def test_an_unknown_model_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no model 'gema-3'; did you mean 'gemma-3'"):
        measured("gema-3")
