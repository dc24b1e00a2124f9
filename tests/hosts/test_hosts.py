"""Three hosts share a tier over an unreliable network: no wrong bytes, no late call, and hits after recovery."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.network import Network
from tests.hosts.shared_tiers import TIERS
from tools.torture.hosts import torture
from tools.torture.outcome import Outcome


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(5) as network:
        yield network


@pytest.mark.parametrize("tier", TIERS)
def test_a_bad_network_costs_only_hits(network: Network, tier: str) -> None:
    outcome = Outcome("hosts")

    torture(network, tier, outcome)

    assert outcome.problems == []
    assert outcome.counts["packets lost"] > 0
    assert outcome.counts["hosts cut off"] > 0  # a host that is cut off has no hits, or the cut had no effect
