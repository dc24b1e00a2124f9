"""Three hosts that share a tier over a network with delays, losses and partitions. Checks contents and deadlines."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.hosts.network import HOSTS, PROMPT, RETRIEVE_S, STORE_S, Network
from tests.hosts.proxies import Link
from tests.hosts.shared_tiers import TIERS
from tools.torture.outcome import Outcome

NOISE_S = 15.0
"""Allowance for a busy machine, in addition to a deadline. A call without a deadline takes at least 30 s."""
OWN = 2
"""Prompts that each host stores per condition."""
PATIENCE = 60
"""Attempts until a reconnected host must have hits."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A state of the network.

    Attributes:
        link: Properties of the link of every two hosts.
        cut: Unreachable hosts.
        serves: Whether every host must find what the others store.
    """

    link: Link
    cut: tuple[str, ...] = ()
    serves: bool = False


NEAR = Link(delay_s=0.001)
CONDITIONS: Mapping[str, Condition] = {
    "near": Condition(NEAR, serves=True),
    "far, 2 in 100 lost": Condition(Link(0.01, 0.005, 0.02)),
    "far, 1 in 10 lost": Condition(Link(0.01, 0.01, 0.1)),
    "a host cut off": Condition(NEAR, cut=("a",)),
    "another host cut off": Condition(NEAR, cut=("c",)),
    "reconnected": Condition(NEAR, serves=True),
}


def torture(network: Network, tier: str, outcome: Outcome, *, seconds: float = 0.0) -> None:
    """Run all conditions in turn, repeatedly for `seconds`. The last condition is a good one."""
    network.become(NEAR)
    with TIERS[tier](network) as settings:
        network.all("open", lambda _: {"tier": settings})
        numbers = itertools.count(1)
        until = time.monotonic() + seconds
        while True:
            for name, condition in CONDITIONS.items():
                network.become(condition.link, condition.cut)
                _run_condition(network, f"{tier}, {name}", condition, numbers, outcome)
            if outcome.aborted or time.monotonic() >= until:
                break
        counts = network.all("counts")
        network.all("close")
    network.forget_ways()
    outcome.add("errors counted", sum(_errors(host) for host in counts.values()))
    outcome.add("packets lost", network.lost)


def _run_condition(
    network: Network, what: str, condition: Condition, numbers: Iterator[int], outcome: Outcome
) -> None:
    own = {host: list(itertools.islice(numbers, OWN)) for host in HOSTS}
    others = {host: [n for other in HOSTS if other != host for n in own[other]] for host in HOSTS}
    found = 0
    for _ in range(PATIENCE if condition.serves else 1):
        for host, answer in network.all("store", lambda host: {"numbers": own[host]}).items():
            _check_time(f"{what}: a store of host {host}", answer["latest"], STORE_S, outcome)
        answers = network.all("read", lambda host: {"numbers": others[host]})
        for host, answer in answers.items():
            outcome.add("prompts read", len(others[host]))
            outcome.expect(not answer["wrong"], f"{what}: host {host} got wrong KV of {answer['wrong']}")
            _check_time(f"{what}: a retrieve of host {host}", answer["latest"], RETRIEVE_S, outcome)
        found = min(answer["hit_tokens"] for answer in answers.values())
        outcome.add("tokens from others", sum(answer["hit_tokens"] for answer in answers.values()))
        if found == 2 * OWN * PROMPT:
            break
    if any(map(network.isolates, condition.cut)):
        outcome.add("hosts cut off")
        outcome.expect(found < 2 * OWN * PROMPT, f"{what}: the host is still reachable")
    if condition.serves:
        outcome.expect(
            found == 2 * OWN * PROMPT, f"{what}: a host found {found} tokens of {2 * OWN * PROMPT}"
        )


def _check_time(what: str, seconds: float, deadline_s: float, outcome: Outcome) -> None:
    late = round(seconds - deadline_s, 2)
    outcome.counts["latest, in seconds"] = max(outcome.counts.get("latest, in seconds", late), late)
    outcome.expect(late <= NOISE_S, f"{what} took {seconds:.1f} s; its deadline is {deadline_s} s")


def _errors(counts: Mapping[str, Any]) -> int:
    return sum(count for name, count in counts.items() if ".errors." in name or ".dropped" in name)


def run(*, seconds: float, seed: int) -> Outcome:
    """Run every tier."""
    outcome = Outcome("hosts", {"seed": seed})
    with Network(seed) as network:
        for tier in TIERS:
            torture(network, tier, outcome, seconds=seconds / len(TIERS))
    return outcome.end()
