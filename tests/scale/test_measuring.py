"""The measuring tools run, and their results are plausible."""

from __future__ import annotations

import asyncio
import re

import pytest

from tools.benchmarks import servers
from tools.scale import measure, messages


@pytest.mark.parametrize("name", ["host", "valkey"])
def test_each_figure_is_measured(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    monkeypatch.setattr(measure, "COUNTS", (1, 128))
    monkeypatch.setattr(measure, "LARGE_BYTES", 1 << 20)

    asyncio.run(measure.measure(name))

    printed = capsys.readouterr().out
    figures = re.findall(r"^(put|lookup|get) of .* ([\d.]+) us of CPU a call", printed, re.MULTILINE)
    assert len(figures) == (6 if name == "host" else 8)
    assert sum(float(spent) for _, spent in figures) > 0


def test_the_cpu_time_is_that_of_the_process_we_started() -> None:
    assert measure.cpu_s("host_daemon") == 0
    with servers.host_daemon(1 << 24):
        assert measure.cpu_s("host_daemon") > 0
    assert measure.cpu_s("host_daemon") == 0


def test_messages_are_counted_and_leases_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "CHUNKS", 4)

    counted = messages.count("3MiB")

    assert counted["lookup"] == {"CONTAINS": 1}
    assert counted["retrieve"] == {"CONTAINS": 1, "LEASE": 4, "RELEASE": 4}
    assert counted["store"]["CONTAINS"] == 1
    assert 1 <= counted["store"]["RESERVE"] == counted["store"]["COMMIT"] <= 4
