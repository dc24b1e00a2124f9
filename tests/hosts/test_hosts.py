"""Three hosts share a tier over a bad network: no wrong bytes, no call later than its deadline, hits when it is mended.

Where this machine lets us make network namespaces, packets are delayed and lost between them; everywhere, through
proxies in this process. `tests.hosts.networks` says which there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.networks import NETWORKS, Network
from tests.hosts.shared_tiers import TIERS
from tools.torture.hosts import torture
from tools.torture.outcome import Outcome


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with NETWORKS[request.param](5) as network:
        yield network


@pytest.mark.parametrize("tier", TIERS)
def test_a_bad_network_costs_hits_alone(network: Network, tier: str) -> None:
    outcome = Outcome("hosts")

    torture(network, tier, outcome)

    assert outcome.problems == []
    assert outcome.counts["packets lost"] > 0
    assert outcome.counts["hosts cut off"] > 0  # and then hits were missing, or that is a problem too
