"""Repetition of measurements, and result rows."""

from __future__ import annotations

import platform
import random
from dataclasses import dataclass

import pytest

from lmcache_async.bench import measure
from lmcache_async.bench.measure import Case, Frame, Row, document, run

pytestmark = pytest.mark.one_loop


@dataclass
class Settings:
    tokens: int


class Probes:
    """Probes that record their order and return figures from a list, or a constant."""

    def __init__(self):
        self.calls = []

    def probe(self, name, *figures):
        left = iter(figures)

        async def probe():
            self.calls.append(name)
            return next(left, figures[-1])

        return probe


async def test_the_ratio_is_the_median_of_the_rounds_own_ratios():
    probes = Probes()
    # The first figures are the warm-up. The ratios are 1/2, 4/4 and 90/10; the ratio of the medians would be 1.
    case = Case("it", "GB/s", probes.probe("it", 7, 1, 4, 90), {"limit": probes.probe("limit", 7, 2, 4, 10)})

    [row] = await Frame(rounds=3).compare([case])

    assert (row.value, row.limit_value, row.ratio) == (4, 4, 1)
    assert row.ratios == (0.5, 1, 9)
    assert (row.name, row.unit, row.limit_name, row.better) == ("it", "GB/s", "limit", "more")


async def test_a_figure_and_its_limits_are_measured_next_to_each_other_in_every_round():
    probes = Probes()
    cases = [
        Case(name, "ms", probes.probe(name, 1), {"x": probes.probe(name, 1), "y": probes.probe(name, 1)})
        for name in "abc"
    ]

    await Frame(rounds=2).compare(cases)

    threes = [probes.calls[at : at + 3] for at in range(0, len(probes.calls), 3)]
    assert all(len(set(three)) == 1 for three in threes)
    for at in (0, 3, 6):  # two rounds and the warm-up
        assert {three[0] for three in threes[at : at + 3]} == set("abc")


async def test_the_order_is_drawn_for_each_round():
    probes = Probes()
    case = Case("it", "ms", probes.probe("it", 1), {"limit": probes.probe("limit", 1)})

    await Frame(rounds=20, chosen=random.Random(0)).compare([case])

    firsts = set(probes.calls[::2])
    assert firsts == {"it", "limit"}


async def test_progress_is_reported_to_the_end():
    told = []
    probes = Probes()
    case = Case("it", "ms", probes.probe("it", 1), {"limit": probes.probe("limit", 1)})

    await Frame(rounds=2, progress=lambda done, total: told.append((done, total))).compare([case])

    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(("unit", "better"), [("GB/s", "more"), ("M tokens/s", "more"), ("ms", "less")])
def test_more_of_a_rate_is_better_and_less_of_all_else(unit, better):
    row = Row.of("it", unit, [1.0], "limit", [2.0], {"threads": 1})

    assert row.as_dict()["better"] == better


async def _two_rows(settings, frame):
    yield Row.of("it", "GB/s", [1.0, 3.0], "limit", [2.0, 4.0], {"threads": 1})
    yield Row.of("other", "ms", [12345.6], "limit", [2.0], {})
    frame.leave_out("more", "no room")


def test_a_result_has_its_rows_as_text_and_as_a_document():
    result = run("name", "what it is", _two_rows, Settings(5), Frame(rounds=2))

    assert result.lines() == [
        "name: what it is",
        "              unit  limit            ratio",
        "it         2  GB/s      3  limit     0.625",
        "other  12346  ms        2  limit  6172.800",
        "left out: more: no room",
    ]
    whole = document([result], rounds=2, quick=True)
    assert (whole["rounds"], whole["quick"]) == (2, True)
    assert whole["benchmarks"]["name"]["settings"] == {"tokens": 5}
    assert whole["benchmarks"]["name"]["rows"][0]["ratios"] == (0.5, 0.75)


@pytest.mark.parametrize(
    ("text", "cpu"), [("model name\t: Fast CPU\n", "Fast CPU"), ("Features: fp\n", None), (None, None)]
)
def test_the_processor_is_named_by_its_architecture_if_its_model_is_unknown(text, cpu, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "CPUINFO", tmp_path / "cpuinfo")
    if text is not None:
        measure.CPUINFO.write_text(text)

    assert document([], rounds=1, quick=True)["machine"]["cpu"] == (cpu or platform.machine())
