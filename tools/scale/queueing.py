"""Discrete-event simulation of queues: jobs of pieces that pass through FIFO stations."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Step: TypeAlias = tuple["Station", float]
"""A station and its service time in seconds."""
Piece: TypeAlias = Sequence[Step]


@dataclass(eq=False, slots=True)
class Station:
    """Servers with one unbounded queue.

    Attributes:
        busy_s: Total service time of all servers so far.
        served: Number of pieces served.
        waited_s: Total waiting time of pieces.
    """

    name: str
    servers: int = 1
    busy_s: float = 0.0
    served: int = 0
    waited_s: float = 0.0
    _free: int = field(init=False)
    _queue: deque[tuple[float, float, _Moving]] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self._free = self.servers


@dataclass(frozen=True, slots=True)
class Job:
    """A job: one piece that all others wait for, then the rest, at most `window` at a time."""

    at_s: float
    first: Piece
    pieces: Sequence[Piece] = ()
    window: int = 1


@dataclass(eq=False, slots=True)
class _Running:
    number: int
    job: Job
    begun: int = 0
    under_way: int = 0


@dataclass(eq=False, slots=True)
class _Moving:
    running: _Running
    piece: Piece
    step: int = 0


def run(jobs: Sequence[Job]) -> list[float]:
    """Run all jobs to their ends and return their durations in order."""
    ended = [0.0] * len(jobs)
    events: list[tuple[float, int, _Moving, bool]] = []
    number = 0

    def push(at_s: float, moving: _Moving, served: bool) -> None:
        nonlocal number
        number += 1  # order of arrival for equal times
        heapq.heappush(events, (at_s, number, moving, served))

    def serve(now: float, came: float, seconds: float, moving: _Moving) -> None:
        station = moving.piece[moving.step][0]
        station._free -= 1
        station.waited_s += now - came
        push(now + seconds, moving, True)

    def arrive(now: float, moving: _Moving) -> None:
        if moving.step == len(moving.piece):
            after(now, moving.running)
            return
        station, seconds = moving.piece[moving.step]
        if station._free:
            serve(now, now, seconds, moving)
        else:
            station._queue.append((now, seconds, moving))

    def after(now: float, running: _Running) -> None:
        """Finish a piece and start the next ones."""
        job = running.job
        running.under_way -= 1
        while running.under_way < job.window and running.begun < len(job.pieces):
            piece = job.pieces[running.begun]
            running.begun += 1
            running.under_way += 1
            push(now, _Moving(running, piece), False)
        if not running.under_way:
            ended[running.number] = now - job.at_s

    for position, job in enumerate(jobs):
        push(job.at_s, _Moving(_Running(position, job, under_way=1), job.first), False)
    while events:
        now, _, moving, served = heapq.heappop(events)
        if served:
            station, seconds = moving.piece[moving.step]
            station._free += 1
            station.busy_s += seconds
            station.served += 1
            if station._queue:
                serve(now, *station._queue.popleft())
            moving.step += 1
        arrive(now, moving)
    return ended
