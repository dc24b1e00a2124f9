"""Properties of the network between two hosts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection between hosts.

    Attributes:
        delay_s: Minimum delay, in seconds.
        jitter_s: Maximum additional delay of some packets, in seconds.
        loss: Fraction of packets that are lost.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
