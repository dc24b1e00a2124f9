"""The disk tier's index: exact byte counts, and times that keep prefixes the newest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.errors import TierFullError
from lmcache_async.plugins.disk.index import STAMP_AGE_NS, DiskIndex, Entry, Reservation
from lmcache_async.testing.records import key_of
from lmcache_async.tiers.offline import StoredRecord

PAGE = 4096


class Clock:
    def __init__(self) -> None:
        self.now = 10**18

    def __call__(self) -> int:
        return self.now


@given(data=st.data())
def test_counted_bytes_cover_the_disk_and_never_exceed_the_limit(data):
    """The model is the disk: the sizes of published files and of those being written."""
    index = DiskIndex(10 * PAGE)
    disk: dict[int, int] = {}
    writing: dict[int, Reservation] = {}
    taken: dict[int, Entry] = {}
    numbers = st.integers(0, 7)
    for verb in data.draw(st.lists(st.sampled_from("rcfxtgsda"), max_size=40), label="verbs"):
        number = data.draw(numbers, label="number")
        key = key_of(number)
        busy = {key_of(n) for n in [*writing, *taken]}
        if verb == "r" and key not in index and number not in writing and number not in taken:
            nbytes = data.draw(st.integers(1, 11)) * PAGE
            try:
                writing[number] = index.reserve(
                    key, nbytes, busy=busy, evict_bytes=data.draw(st.sampled_from([0, PAGE]))
                )
            except TierFullError:
                continue
            for victim in writing[number].victims:
                assert victim not in busy
        elif verb == "c" and number in writing:
            reservation = writing.pop(number)
            for victim in reservation.victims:
                del disk[int.from_bytes(victim, "big")]
            disk[number] = reservation.entry.nbytes  # replaces one that cannot be deleted
            index.commit(reservation)
            assert key not in index.undeletable
        elif verb == "f" and number in writing:
            reservation = writing.pop(number)
            victims = sorted(reservation.victims)
            left = set(victims[: data.draw(st.integers(0, len(victims)))])
            for victim in reservation.victims:
                if victim not in left:
                    del disk[int.from_bytes(victim, "big")]
            index.cancel(reservation, left=left)
        elif verb == "t" and number not in writing and number not in taken:
            entry = index.take(key)
            if entry is not None:
                taken[number] = entry
        elif verb == "g" and number in taken:
            del disk[number]
            index.forget(taken.pop(number))
        elif verb == "s" and number in taken:
            index.restore(key, taken.pop(number))
        elif verb == "d" and number in taken:
            index.add_undeletable(key, taken.pop(number))
            assert key not in index
        elif verb == "a" and key in index.undeletable and number not in writing:
            index.drop_undeletable([key])
            del disk[number]
        elif verb == "x":
            index.policy.touch([key_of(n) for n in data.draw(st.lists(numbers))], gapless=False)

        being_written = sum(
            max(0, r.entry.nbytes - sum(v.nbytes for v in r.victims.values())) for r in writing.values()
        )
        assert sum(disk.values()) + being_written <= index.used_bytes <= 10 * PAGE
        if not writing:
            assert index.used_bytes == sum(disk.values())
            assert len(index) == len(disk) - len(taken) - len(index.undeletable)


def test_a_record_read_or_busy_is_not_evicted():
    index = DiskIndex(2 * PAGE)
    index.load([StoredRecord(key_of(1), PAGE, 1), StoredRecord(key_of(2), PAGE, 2)])

    for _ in range(2):
        index.begin_reading(key_of(1))
    index.end_reading(key_of(1))
    with pytest.raises(TierFullError, match="in use"):
        index.reserve(key_of(3), PAGE, busy={key_of(2)})
    assert set(index.reserve(key_of(3), PAGE, busy=set()).victims) == {key_of(2)}
    index.end_reading(key_of(1))
    assert set(index.reserve(key_of(4), PAGE, busy=set()).victims) == {key_of(1)}


def test_a_file_larger_than_the_tier_makes_room_for_nothing():
    index = DiskIndex(4 * PAGE)
    found = [
        StoredRecord(key_of(1), PAGE, 1),
        StoredRecord(key_of(2), 1 << 50, 3),
        StoredRecord(key_of(3), 4 * PAGE, 2),
    ]

    assert index.load(found) == [key_of(1), key_of(2)]
    assert list(index) == [key_of(3)]
    assert (index.used_bytes, index.evictions) == (4 * PAGE, 2)


def test_foreign_stamps_keep_their_order():
    clock = Clock()
    index = DiskIndex(5 * PAGE, clock_ns=clock)
    stamps = [-(2**90), -1, clock.now, clock.now + 1, 2**90]
    assert (
        index.load([StoredRecord(key_of(n), PAGE, stamp) for n, stamp in reversed([*enumerate(stamps)])])
        == []
    )

    assert [index.entry(key_of(n)).stamp for n in range(5)] == [0, 0, clock.now, clock.now, clock.now]
    assert [*index.reserve(key_of(9), 3 * PAGE, busy=set()).victims] == [key_of(0), key_of(1), key_of(2)]
    clock.now += STAMP_AGE_NS
    assert index.restamp([key_of(4)]) == [(key_of(4), clock.now)]


def test_the_prefix_of_a_record_is_not_evicted_for_it():
    index = DiskIndex(2 * PAGE)
    index.load([StoredRecord(key_of(1), PAGE, 2), StoredRecord(key_of(2), PAGE, 1)])
    index.policy.touch([key_of(1), key_of(2), key_of(3)], gapless=False)

    with pytest.raises(TierFullError):
        index.reserve(key_of(3), PAGE, busy=set())
    assert len(index) == 2


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 3))
def test_a_prompt_put_in_parts_is_found_again_prefix_newest(parts, minutes):
    clock = Clock()
    index = DiskIndex(1000 * PAGE, clock_ns=clock)
    prompt = [key_of(number) for number in range(sum(parts))]
    index.policy.touch(prompt, gapless=False)
    for chunk, key in enumerate(prompt):
        index.commit(index.reserve(key, PAGE, busy=set()))
        clock.now += minutes * STAMP_AGE_NS * (chunk % 2)
    clock.now += STAMP_AGE_NS
    index.restamp(prompt[len(prompt) // 2 :])

    stamps = [entry.stamp for key in prompt if (entry := index.entry(key)) is not None]
    assert stamps == sorted(stamps, reverse=True)
    assert len(set(stamps)) == len(stamps)
    assert stamps[0] == clock.now  # the prefix of the chunks read counts as used too


def test_stamps_are_valid_times_of_files_also_before_the_epoch():
    clock = Clock()
    clock.now = -5
    index = DiskIndex(10 * PAGE, clock_ns=clock)
    index.commit(index.reserve(key_of(1), PAGE, busy=()))

    assert index.entry(key_of(1)).stamp == 0


def test_stamps_change_at_most_once_per_interval():
    clock = Clock()
    index = DiskIndex(10 * PAGE, clock_ns=clock)
    index.commit(index.reserve(key_of(1), PAGE, busy=set()))
    assert index.restamp([key_of(1), key_of(2)]) == []
    clock.now += STAMP_AGE_NS

    assert index.restamp([key_of(1), key_of(2)]) == [(key_of(1), clock.now)]
    assert index.restamp([key_of(1), key_of(2)]) == []


def test_a_chunk_that_was_selected_and_not_deleted_is_selected_again_before_its_prefix():
    """Its put was cancelled before the deletion, or its file could not be deleted."""
    index = DiskIndex(4 * PAGE)
    prompt = [key_of(number) for number in range(4)]
    index.policy.touch(prompt, gapless=False)
    for key in prompt:
        index.commit(index.reserve(key, PAGE, busy=()))
    index.policy.touch_each(prompt)

    for nbytes in (PAGE, 2 * PAGE, PAGE):
        reservation = index.reserve(key_of(9), nbytes, busy=())
        expected = [prompt[3], prompt[2]][: nbytes // PAGE]
        assert list(reservation.victims) == expected
        index.cancel(reservation, left=set(expected))
        assert index.used_bytes == 4 * PAGE


def test_the_stamp_of_a_chunk_after_one_from_the_epoch_is_not_negative():
    """A file system has no times before the epoch."""
    index = DiskIndex(4 * PAGE, clock_ns=Clock())
    index.load([StoredRecord(key_of(1), PAGE, 0)])
    index.policy.touch([key_of(1), key_of(2)])

    assert index.reserve(key_of(2), PAGE, busy=()).entry.stamp == 0
