"""Three hosts share a tier over an unreliable network: no wrong bytes, no late call, and hits after recovery.

If this machine permits network namespaces, packets are delayed and lost between them. On every machine, connections
go through proxies in this process. `tests.hosts.networks` lists the available networks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.hosts.networks import NETWORKS, Network
from tests.hosts.shared_tiers import TIERS
from tools.torture.hosts import torture
from tools.torture.outcome import Outcome


@pytest.fixture(scope="module")
def networks() -> Iterator[Mapping[str, Network]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(make(5)) for name, make in NETWORKS.items()}


@pytest.mark.parametrize("tier", TIERS)
def test_a_bad_network_costs_hits_alone(networks: Mapping[str, Network], tier: str) -> None:
    """All networks at the same time: most of the time is spent waiting for deadlines."""
    outcomes = {name: Outcome("hosts") for name in networks}

    with ThreadPoolExecutor(len(networks)) as threads:
        runs = [threads.submit(torture, network, tier, outcomes[name]) for name, network in networks.items()]
    for run in runs:
        run.result()

    for name, outcome in outcomes.items():
        assert outcome.problems == [], name
        assert outcome.counts["packets lost"] > 0, name
        # If a host was cut off, hits must be missing; otherwise the cut had no effect.
        assert outcome.counts["hosts cut off"] > 0, name
