"""Device memory of a simulated worker: one region of rows for each client, poisoned when it is not in use."""

from __future__ import annotations

from random import Random

import numpy as np

from lmcache_async.testing.rig import Rig
from lmcache_async.testing.simulation.errors import Violation
from lmcache_async.testing.simulation.prompts import Content
from lmcache_async.types import BlockIds

POISON = 0xA5


class Region:
    """The rows that one client stores from and retrieves into.

    Whatever it holds beyond what a call is to read or has to write is poison: a copy too early, too late
    or of too much shows.
    """

    def __init__(self, rig: Rig, first: int, rows: BlockIds) -> None:
        self.rows = rows
        self._planes = [
            part.view(rig.num_slots, -1).numpy().view(np.uint8)[first : first + len(rows)]
            for pair in rig.tensors
            for part in pair
        ]
        self._order = rows - first
        self.poison()

    def poison(self) -> None:
        for plane in self._planes:
            plane.fill(POISON)

    def write(self, content: Content) -> None:
        """What the model computes for the first tokens."""
        places = self._order[: len(content)]
        at = 0
        for plane in self._planes:
            width = plane.shape[1]
            plane[places] = content[:, at : at + width]
            at += width

    def check(self, content: Content, start: int, stop: int) -> None:
        """Tokens `start` to `stop` have their content, and nothing else was touched.

        Raises:
            Violation: A byte is another one.
        """
        places = self._order[start:stop]
        at = 0
        for index, plane in enumerate(self._planes):
            width = plane.shape[1]
            wrong = plane[places] != content[start:stop, at : at + width]
            if wrong.any():
                token = start + int(np.flatnonzero(wrong.any(axis=1))[0])
                raise Violation(f"wrong bytes: token {token} of a hit of {start} to {stop}, plane {index}")
            at += width
            plane[places] = POISON
            if (plane != POISON).any():
                row = int(np.flatnonzero((plane != POISON).any(axis=1))[0])
                raise Violation(
                    f"row {row} outside the hit of tokens {start} to {stop} was written, plane {index}"
                )


def make_regions(rig: Rig, rng: Random, *, count: int, num_rows: int) -> list[Region]:
    """`count` regions side by side, each with its rows in an order of its own."""
    regions: list[Region] = []
    for index in range(count):
        rows = list(range(index * num_rows, (index + 1) * num_rows))
        if rng.random() < 0.5:
            rng.shuffle(rows)
        regions.append(Region(rig, index * num_rows, np.asarray(rows, np.int64)))
    return regions
