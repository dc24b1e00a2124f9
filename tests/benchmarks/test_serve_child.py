"""One real vLLM as started by the serve benchmark: a new prompt, a hit of vLLM, and a hit of the connector."""

from __future__ import annotations

import random
import sys

import pytest

from tools.benchmarks import serve_engine
from tools.benchmarks.serve import QUICK, prompt
from tools.benchmarks.serve_engine import Contestant, Starter, check_cached, check_same, ours

FORKING = """
from tests.integration import forking

forking.fork_instead_of_spawn()  # importing vLLM in the engine's process would take ten seconds of CPU
from tools.benchmarks import serve_child

serve_child.main()
"""


@pytest.mark.vllm
def test_a_real_vllm_answers_the_same_from_each_cache(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(serve_engine, "COMMAND", (sys.executable, "-c", FORKING))
    starter = Starter(
        tmp_path, tmp_path_factory.mktemp("s"), "", QUICK.shape, QUICK.tokens, gpu=False, together=1
    )
    contestant = Contestant("ours", ours(["cpu"], QUICK.arena_mib << 20))
    with starter.started([contestant]) as [engine]:
        asked = prompt(random.Random(0), QUICK.tokens, engine.facts["vocabulary"])
        cold = engine.ask(asked)
        own = engine.ask(asked)
        engine.reset()
        hit = engine.ask(asked)
        engine.close()

    check_cached("new", cold, least=0, most=0)
    for what, answer in (("own hit", own), ("hit", hit)):
        check_cached(what, answer, least=512, most=513)
        check_same(what, answer, cold, engine.facts["dtype"])
    assert cold.ttft_ms > 0
    assert len(cold.gaps_ms) == len(cold.tokens) - 1 == 3
