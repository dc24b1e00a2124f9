"""The model of docs/scale.md: its invariants, and that the page's tables are up to date."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tools.scale import costs
from tools.scale.__main__ import main
from tools.scale.backends import BACKENDS, Machines
from tools.scale.load import TRACES, Load
from tools.scale.result import percentile, simulate

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
COMMANDS = re.findall(r"^python -m tools\.scale (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_tables_of_the_page_equal_the_output_of_its_commands(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(command)) == 0

    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert len(rows) > 2
    assert [row for row in rows if row not in page] == []


def test_the_page_shows_each_backend() -> None:
    assert all(any(f"--backends {name}" in command for command in COMMANDS) for name in BACKENDS)


@pytest.mark.parametrize("trace", list(TRACES))
def test_a_smaller_pool_and_more_engines_hit_less(trace: str) -> None:
    load = Load(trace=trace)
    pools = [replace(load, pool_bytes=nbytes).hits for nbytes in (1e10, 1e11, 1e12, 1e13)]
    engines = [replace(load, engines=count).hits for count in (64, 16, 4, 1)]

    assert pools == sorted(pools)
    assert pools[0] < pools[-1] <= TRACES[trace].repeated
    assert engines == sorted(engines)


@pytest.mark.parametrize("tokens", [1024, 131072])
def test_bytes_and_the_time_they_are_kept_agree(tokens: int) -> None:
    load = Load(trace="agents", prompt_tokens=tokens)
    asked = load.requests_per_s * tokens * load.token_bytes

    assert load.stored_bytes_per_s + load.loaded_bytes_per_s == pytest.approx(asked)
    assert load.kept_s == pytest.approx(load.pool_bytes / load.stored_bytes_per_s)
    assert load.hits == pytest.approx(TRACES["agents"].hits(load.kept_s))
    assert load.requests_per_s <= load.engines * load.max_requests_per_s


def test_requests_are_the_same_for_a_seed_and_as_many_as_said() -> None:
    load = Load()
    requests = list(load.requests(4000, 3))

    assert requests == list(load.requests(4000, 3))
    assert len(requests) / requests[-1][0] == pytest.approx(load.requests_per_s, rel=0.05)
    mean = sum(loaded + stored for *_, loaded, stored in requests) * load.chunk_tokens / len(requests)
    assert mean == pytest.approx(load.prompt_tokens, rel=0.1)


@pytest.mark.parametrize("name", list(BACKENDS))
def test_a_prompts_bytes_are_all_moved_and_half_the_network_is_busy_twice_as_much(name: str) -> None:
    load = Load(engines=4, prompt_tokens=8192)
    fast, slow = (simulate(name, load, Machines(network_gbit=gbit), requests=100) for gbit in (100, 50))
    coming = list(load.requests(100, 1))
    loaded = sum(row[2] for row in coming) * load.chunk_bytes / coming[-1][0]

    if name == "host":
        assert fast.busy == slow.busy
        link_s = loaded / load.engines / Machines().link_bytes_per_s
        assert fast.busy["link"] == pytest.approx(link_s)
    else:
        assert fast.busy["host in"] == pytest.approx(loaded / Machines(network_gbit=100).network_bytes_per_s)
        assert slow.busy["host in"] == pytest.approx(2 * fast.busy["host in"])
        alone_s = [sum(one.loads_s) - sum(one.waits_s) for one in (fast, slow)]
        assert alone_s[0] < alone_s[1]


def test_the_thread_of_a_valkey_node_works_at_the_measured_rate() -> None:
    load, machines = Load(engines=1, prompt_tokens=65536), Machines(nodes=1)
    result = simulate("valkey", load, machines, requests=50)
    coming = list(load.requests(50, 1))
    loaded, stored = (sum(row[column] for row in coming) for column in (2, 3))
    worked = load.chunk_bytes * (loaded * costs.VALKEY_GET_S_PER_BYTE + stored * costs.VALKEY_PUT_S_PER_BYTE)

    assert result.busy["thread"] * coming[-1][0] == pytest.approx(worked, rel=0.03)  # the rest is messages


def test_overload_has_no_wait_and_names_the_bottleneck() -> None:
    load = Load(engines=64, trace="agents", prompt_tokens=131072)
    narrow = simulate("host", load, Machines(memory_bytes_per_s=costs.COPY_BYTES_PER_S), requests=50)
    small = simulate("host", Load(engines=1, pool_bytes=1e10), Machines(), requests=50)
    easy = simulate("host", Load(engines=1), Machines(), requests=50)
    many = simulate(
        "host", Load(engines=257, pool_bytes=1e15), Machines(memory_bytes_per_s=1e15), requests=50
    )

    assert (narrow.first, narrow.wait_s(0.95)) == ("memory", math.inf)
    assert (small.first, many.first) == ("capacity", "connections")
    assert easy.first.startswith("none")
    assert 0 <= easy.wait_s(0.5) <= easy.wait_s(0.95) < math.inf


@pytest.mark.parametrize(("share", "value"), [(0.95, 19), (1.0, 20), (0.5, 10), (0.0, 1)])
def test_percentiles(share: float, value: int) -> None:
    assert percentile(list(range(20, 0, -1)), share) == value
