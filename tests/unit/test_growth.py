"""A full engine does not grow in objects and entries with further new prompts."""

import gc

from lmcache_async.tiers.eviction import MIN_HINTS
from tools.growth import CHUNK_SIZE, entries, iterate, small_engine

ITERATIONS = 80
"""More prompts than fill memory and disk (51 and 102 chunks), with two chunks each."""


def test_new_keys_and_new_request_ids_leave_nothing_behind(tmp_path):
    with small_engine(str(tmp_path)) as engine:
        engine.lookup(range(2 * MIN_HINTS * CHUNK_SIZE))  # one never stored, longer than the remembered hints
        for number in range(ITERATIONS):
            iterate(engine, number)
        gc.collect()
        first, objects = entries(engine), len(gc.get_objects())
        for number in range(ITERATIONS, 2 * ITERATIONS):
            iterate(engine, number)
        gc.collect()
        second, more_objects = entries(engine), len(gc.get_objects())

        statistics = engine.statistics()

    assert statistics.tiers["cpu"].evictions > 2 * ITERATIONS
    assert statistics.tiers["disk"].evictions > ITERATIONS
    hints = [count for place, count in second.items() if place.endswith("._hints")]
    assert len(hints) == 2, "the policies of memory and disk are not found"
    assert all(0 < count <= MIN_HINTS for count in hints)
    grown = {place: count for place, count in (second - first).items() if count > 2}
    assert grown == {}
    assert more_objects - objects < ITERATIONS // 2
