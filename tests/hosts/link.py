"""How the way between two hosts is: what a network between machines does, and one between processes does not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of the way.

    Attributes:
        delay_s: What everything takes at least, in seconds.
        jitter_s: What some of it takes longer, at most.
        loss: The share of packets that never arrive.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
