"""The queues compared with known results, and invariants of all queues."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.scale.queueing import Job, Station, run


@pytest.mark.parametrize("busy", [0.3, 0.5, 0.8])
def test_one_server_waits_as_known_of_poisson_arrivals_and_equal_work(busy: float) -> None:
    """M/D/1: the average wait is busy / (2 (1 - busy)) of one service time."""
    dice = random.Random(5)
    station, at_s, jobs = Station("one"), 0.0, []
    for _ in range(60_000):
        at_s += dice.expovariate(busy)
        jobs.append(Job(at_s, [(station, 1.0)]))

    waited = fmean(run(jobs)) - 1.0

    assert waited == pytest.approx(busy / (2 * (1 - busy)), rel=0.05)
    assert station.waited_s / station.served == pytest.approx(waited)


def test_the_third_of_three_waits_for_one_of_two_servers() -> None:
    station = Station("two", servers=2)

    assert run([Job(0.0, [(station, 1.0)]), Job(0.0, [(station, 2.0)]), Job(0.5, [(station, 1.0)])]) == [
        1,
        2,
        1.5,
    ]


@pytest.mark.parametrize(("window", "seconds"), [(1, 13.0), (2, 7.0), (4, 7.0)])
def test_pieces_follow_the_first_as_many_at_a_time_as_the_window_lets(window: int, seconds: float) -> None:
    asked, two = Station("asked"), Station("two", servers=2)

    [took] = run([Job(3.0, [(asked, 1.0)], [[(two, 3.0)]] * 4, window)])

    assert took == seconds


SECONDS = st.integers(0, 20).map(float)
STEPS = st.lists(st.tuples(st.integers(0, 2), SECONDS), max_size=3)
PLANS = st.lists(
    st.tuples(SECONDS, STEPS, st.lists(STEPS, max_size=4), st.integers(1, 3)), min_size=1, max_size=8
)


@given(PLANS, st.integers(1, 3))
def test_all_work_is_done_once_and_nothing_ends_before_it_could(
    plans: list[tuple[float, list[tuple[int, float]], list[list[tuple[int, float]]], int]], servers: int
) -> None:
    stations = [Station(str(number), servers) for number in range(3)]
    jobs = [
        Job(
            at_s,
            [(stations[number], seconds) for number, seconds in first],
            [[(stations[number], seconds) for number, seconds in piece] for piece in pieces],
            window,
        )
        for at_s, first, pieces, window in plans
    ]

    took = run(jobs)

    steps = [step for job in jobs for piece in (job.first, *job.pieces) for step in piece]
    for station in stations:
        own = [seconds for where, seconds in steps if where is station]
        assert (station.busy_s, station.served) == (sum(own), len(own))
    for job, seconds in zip(jobs, took, strict=True):
        lengths = [sum(seconds for _, seconds in piece) for piece in job.pieces]
        least = sum(seconds for _, seconds in job.first) + max([0.0, *lengths])
        assert least <= seconds
        assert job.at_s + seconds <= max(job.at_s for job in jobs) + sum(seconds for _, seconds in steps)
