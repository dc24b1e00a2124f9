"""What a tier may hold and what it must hold, from the calls that were made: the model of TierMachine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lmcache_async.errors import TierError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.records import check_record, is_proven, key_of
from lmcache_async.tiers.base import TierStatistics
from lmcache_async.types import ChunkKey


class TierModel:
    """Two sets of chunk numbers, one on each side of the truth.

    Args:
        lengths: Payload bytes by number.
        reliable: Whether the tier promises to keep anything.

    Attributes:
        maybe: What may be there; nothing else is.
        sure: What must be there, less what the tier counts as evicted.
        damaged: What somebody damaged behind the tier's back: found out, or a miss.
        late: What a call that was cut off may still put or remove, at any time from then on.
    """

    def __init__(self, lengths: Sequence[int], *, reliable: bool) -> None:
        self.maybe: set[int] = set()
        self.sure: set[int] = set()
        self.damaged: set[int] = set()
        self.late: set[int] = set()
        self._lengths = lengths
        self._reliable = reliable
        self._evictions = 0

    def opened(self, statistics: TierStatistics) -> None:
        self._evictions = statistics.evictions

    def put(self, numbers: Sequence[int], answers: Sequence[TierError | None]) -> None:
        self.maybe.update(numbers)
        for number, answer in zip(numbers, answers, strict=True):
            if answer is None and self._reliable and number not in self.damaged | self.late:
                self.sure.add(number)
            else:
                self.sure.discard(number)

    def unsure(self, numbers: Iterable[int], *, maybe: Iterable[int]) -> None:
        """Calls on these numbers overlap or are cut off; of them `maybe` may be there afterwards."""
        self.sure.difference_update(numbers)
        self.maybe.update(maybe)

    def cut_off(self, numbers: Sequence[int], *, maybe: Iterable[int], late: bool) -> None:
        """A call that puts or removes these was cut off; `late`: its words may still be on their way."""
        self.unsure(numbers, maybe=maybe)
        if late:
            self.late.update(numbers)

    def removed(self, number: int, was_there: bool) -> None:
        if self._reliable:
            assert was_there or number not in self.sure, f"remove says that chunk {number} was not there"
            assert not was_there or number in self.maybe, f"remove says that chunk {number} was there"
        self._gone(number)

    def cleared(self, count: int) -> None:
        if self._reliable:
            assert len(self.sure) <= count <= len(self.maybe), f"clear says that there were {count} chunks"
        self.forget_all()

    def forget_all(self) -> None:
        for number in tuple(self.maybe):
            self._gone(number)

    def damaged_one(self, number: int) -> None:
        self.sure.discard(number)
        self.damaged.add(number)

    def check_got(self, numbers: Sequence[int], answers: Sequence[Buffer | TierError | None]) -> set[int]:
        """Check the answers of `get`; the numbers whose bytes prove themselves wrong."""
        wrong = set()
        for number, answer in zip(numbers, answers, strict=True):
            if isinstance(answer, Buffer):
                assert number in self.maybe, f"chunk {number} is not there, and was got"
                if is_proven(answer, number):
                    check_record(answer, number, self._lengths[number])
                else:
                    assert number in self.damaged or not self._reliable, f"the bytes of {number} are wrong"
                    wrong.add(number)
            else:
                assert number not in self.sure, f"chunk {number} was put, and get gave {answer!r}"
        return wrong

    def check_found(self, numbers: Sequence[int], there: Sequence[bool], count: int, first: bool) -> None:
        """Check the answers of `contains_many`, `count_prefix` and `contains`, asked one after the other."""
        assert len(there) == len(numbers)
        if not self._reliable:
            return
        for number, present in zip(numbers, there, strict=True):
            assert present or number not in self.sure, f"chunk {number} was put, and is not there"
            assert not present or number in self.maybe, f"chunk {number} is not there, and contains says so"
        assert count == [*there, False].index(False), f"count_prefix gave {count}, contains_many {there}"
        assert first == there[0], "contains and contains_many do not agree"

    def check_held(self, statistics: TierStatistics, keys: set[ChunkKey] | None) -> None:
        """Check what the tier says of itself, and learn what it has evicted."""
        if statistics.max_bytes is not None:
            assert statistics.bytes <= statistics.max_bytes, "more is held than max_bytes"
        evicted, self._evictions = statistics.evictions - self._evictions, statistics.evictions
        assert evicted == 0 or statistics.max_bytes is not None, "evicted without a limit"
        if keys is None:
            if evicted:
                self.sure.clear()
            return
        held = {number for number in range(len(self._lengths)) if key_of(number) in keys}
        assert len(held) == len(keys), "there are keys that nobody has put"
        assert statistics.chunks in {0, len(held)}, f"{statistics.chunks} are counted, {len(held)} listed"
        if self._reliable:
            assert held <= self.maybe, f"chunks {held - self.maybe} are listed and not there"
            lost = self.sure - held
            assert len(lost) <= evicted, f"chunks {lost} are lost, {evicted} were evicted"
            for number in self.maybe - held:
                self._gone(number)
            self.sure = held - self.damaged - self.late

    def _gone(self, number: int) -> None:
        if number not in self.late:
            self.maybe.discard(number)
        self.sure.discard(number)
        self.damaged.discard(number)
