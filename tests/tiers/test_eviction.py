"""Guarantees of the LRU policy for interleaved requests that share prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_async.testing.records import key_of as key
from lmcache_async.tiers.eviction import MIN_HINTS, LRUPolicy
from lmcache_async.types import ChunkKey


def anyone(_: ChunkKey) -> bool:
    return True


@dataclass(frozen=True)
class Forest:
    """Prompts that share prefixes: the chunk before each chunk, None for a first one."""

    parents: tuple[int | None, ...]

    def path(self, node: int) -> list[ChunkKey]:
        """The prompt that ends with `node`, from its first chunk on."""
        path: list[ChunkKey] = []
        step: int | None = node
        while step is not None:
            path.append(key(step))
            step = self.parents[step]
        return path[::-1]

    def parent(self, child: ChunkKey) -> ChunkKey | None:
        parent = self.parents[int.from_bytes(child, "big")]
        return None if parent is None else key(parent)


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    parents: list[int | None] = []
    for node in range(draw(st.integers(1, 25))):
        before = draw(st.none() | st.integers(0, node - 1)) if node else None
        parents.append(before)
    return Forest(tuple(parents))


def use(policy: LRUPolicy, batch: list[ChunkKey]) -> None:
    """Update the policy as a tier does in `put_many`: touch the batch, and add the chunks that are new."""
    policy.touch(batch)
    for chunk in batch:
        if chunk not in policy:
            policy.add(chunk, 1)


@given(forest=forests(), data=st.data())
def test_no_prefix_is_evicted_before_its_suffix(forest, data):
    policy = LRUPolicy()
    nodes = st.integers(0, len(forest.parents) - 1)
    for _ in range(data.draw(st.integers(1, 20), label="steps")):
        use(policy, forest.path(data.draw(nodes, label="prompt")))
        leased = {key(node) for node in data.draw(st.sets(nodes, max_size=4), label="leased")}
        free = set(policy) - leased
        policy.evict(data.draw(st.integers(0, 8), label="wanted"), free.__contains__)

        held = set(policy)
        assert all(forest.parent(chunk) in held | {None} for chunk in held)


@given(forest=forests(), data=st.data())
def test_prompts_stored_piecewise_and_interleaved_keep_their_prefixes(forest, data):
    policy = LRUPolicy()
    prompts = [
        forest.path(data.draw(st.integers(0, len(forest.parents) - 1)))
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    for prompt in prompts:
        policy.touch(prompt)  # the lookup, before anything is stored
    left = [list(prompt) for prompt in prompts]
    while any(left):
        prompt = data.draw(st.sampled_from([prompt for prompt in left if prompt]), label="next")
        count = data.draw(st.integers(1, 4), label="count")
        use(policy, prompt[:count])
        del prompt[:count]

    while len(policy):
        before = set(policy)
        (victim,) = policy.evict(1, anyone)
        assert victim not in {forest.parent(chunk) for chunk in before}


@given(forest=forests(), data=st.data())
def test_a_batch_without_its_beginning_is_evicted_suffix_first(forest, data):
    policy = LRUPolicy()
    prompt = forest.path(data.draw(st.integers(0, len(forest.parents) - 1)))
    first = data.draw(st.integers(0, len(prompt) - 1))
    use(policy, prompt[first:])

    assert policy.evict(len(prompt) - first, anyone) == prompt[first:][::-1]


@given(forest=forests(), data=st.data())
def test_chunks_are_evicted_in_order_of_last_use_and_after_their_continuations(forest, data):
    """A use is a whole prompt, or its end from a stored chunk on, as in decoding."""
    policy = LRUPolicy()
    used: dict[ChunkKey, int] = {}
    depth: dict[ChunkKey, int] = {}
    for time in range(data.draw(st.integers(1, 15), label="uses")):
        path = forest.path(data.draw(st.integers(0, len(forest.parents) - 1), label="prompt"))
        starts = [0, *(place for place, chunk in enumerate(path) if chunk in used)]
        use(policy, path[data.draw(st.sampled_from(starts), label="start") :])
        # A chunk is as recent as the newest chunk that continues it.
        used.update(dict.fromkeys(path, time))
        depth.update({chunk: place for place, chunk in enumerate(path)})

    assert policy.evict(len(policy), anyone) == sorted(used, key=lambda chunk: (used[chunk], -depth[chunk]))


@given(
    sizes=st.lists(st.integers(1, 10), min_size=1, max_size=12),
    wanted=st.integers(0, 80),
    leased=st.sets(st.integers(0, 11)),
)
def test_eviction_is_all_or_nothing_and_never_takes_a_leased_chunk(sizes, wanted, leased):
    policy = LRUPolicy()
    for number, size in enumerate(sizes):
        policy.add(key(number), size)
    free = {key(number): size for number, size in enumerate(sizes) if number not in leased}

    victims = policy.evict(wanted, lambda chunk: chunk in free)

    if sum(free.values()) < wanted:
        assert victims == []
        assert len(policy) == len(sizes)
    else:
        assert sum(free[victim] for victim in victims) >= wanted
        assert sum(free[victim] for victim in victims[:-1]) < max(wanted, 1)
        assert set(policy) == {key(number) for number in range(len(sizes))} - set(victims)


@given(forest=forests(), data=st.data())
def test_as_a_last_resort_any_chunk_that_is_not_in_use_can_be_evicted(forest, data):
    policy = LRUPolicy()
    for node in data.draw(st.lists(st.integers(0, len(forest.parents) - 1), min_size=1)):
        use(policy, forest.path(node))
    held = set(policy)
    free = data.draw(st.sets(st.sampled_from(sorted(held))))
    wanted = data.draw(st.integers(0, len(free)))

    victims = policy.evict(wanted, free.__contains__, last_resort=True)

    assert len(victims) == len(set(victims)) == wanted
    assert free >= set(victims)
    assert set(policy) == held - set(victims)
    for position, victim in enumerate(victims):  # no prefix goes before a suffix that can go
        later = free.difference(victims[:position])
        assert not any(victim in forest.path(int.from_bytes(chunk, "big"))[:-1] for chunk in later)
    assert len(policy.evict(len(policy), anyone)) == len(held) - wanted


class CountedKey(bytes):
    """Key that counts how often it is looked up."""

    hashes = 0

    def __hash__(self) -> int:
        CountedKey.hashes += 1
        return super().__hash__()


def test_the_cost_of_a_last_resort_is_proportional_to_the_chunks_in_use():
    def cost(chunks: int) -> int:
        policy = LRUPolicy()
        use(policy, [ChunkKey(CountedKey(key(number))) for number in range(chunks)])
        CountedKey.hashes = 0
        assert policy.evict(1, lambda _: False, last_resort=True) == []
        return CountedKey.hashes

    assert cost(400) <= 2.1 * cost(200)


@given(forest=forests(), data=st.data())
def test_a_failed_eviction_changes_no_order(forest, data):
    tried, plain = LRUPolicy(), LRUPolicy()
    for node in data.draw(st.lists(st.integers(0, len(forest.parents) - 1), min_size=1)):
        use(tried, forest.path(node))
        use(plain, forest.path(node))
    count = len(plain)
    root = next(chunk for chunk in plain if forest.parent(chunk) is None)

    last_resort = data.draw(st.booleans())
    assert tried.evict(count, lambda chunk: chunk != root, last_resort=last_resort) == []

    # The leased chunk counts as touched; the order of the others does not change.
    plain.touch([root])
    assert tried.evict(count, anyone) == plain.evict(count, anyone)


@given(
    batches=st.lists(st.tuples(st.lists(st.integers(0, 7), max_size=6), st.booleans(), st.booleans())),
    drop=st.sets(st.integers(0, 7)),
)
def test_every_chunk_stays_evictable_for_any_order_of_calls(batches, drop):
    policy = LRUPolicy(max_hints=3)
    for numbers, gapless, add in batches:
        batch = [key(number) for number in numbers]
        policy.touch(batch, gapless=gapless)
        if add:
            use(policy, batch)
    for number in drop:
        policy.discard(key(number))

    count = len(policy)
    assert len(policy.evict(count, anyone)) == count


def test_a_batch_with_gaps_keeps_the_order_of_an_earlier_gapless_one():
    policy = LRUPolicy()
    use(policy, [key(0), key(1), key(2)])
    policy.touch([key(0), key(2)], gapless=False)
    policy.touch([key(2)])

    assert policy.evict(3, anyone) == [key(2), key(1), key(0)]


def test_the_prefix_of_a_chunk_stays_although_a_chunk_between_is_not_stored():
    policy = LRUPolicy()
    policy.touch([key(number) for number in range(4)])
    for number in (0, 1, 3):
        policy.add(key(number), 1)

    assert policy.evict(3, lambda chunk: chunk != key(3)) == []
    assert policy.before(key(3)) == key(1)
    assert policy.evict(3, anyone) == [key(3), key(1), key(0)]


@pytest.mark.parametrize("touched", [False, True])
def test_the_prefix_of_a_chunk_stays_although_a_chunk_between_found_no_room(touched):
    policy = LRUPolicy()
    prompt = [key(n) for n in range(4)]
    policy.touch(prompt)
    for n in (0, 1, 2):
        policy.add(key(n), 1)
    assert policy.discard(key(2))  # as a tier does if it finds no room

    policy.add(key(3), 1)
    if touched:
        policy.touch(prompt, gapless=False)

    assert policy.evict(1, lambda chunk: chunk != key(3)) == []


def test_chunks_left_out_of_one_batch_are_linked_with_the_next():
    policy = LRUPolicy()
    use(policy, [key(0), key(3)])
    policy.touch([key(number) for number in range(4)], gapless=False)
    for number in (1, 2):
        policy.add(key(number), 1)
    for number in (3, 2, 1, 0):
        policy.touch([key(number)])

    assert policy.evict(4, anyone) == [key(3), key(2), key(1), key(0)]


def test_parked_and_leased_chunks_are_visited_once():
    policy = LRUPolicy()
    prompt = [key(number) for number in range(1000)]
    use(policy, prompt)
    for chunk in prompt:
        policy.touch([chunk])  # prefixes are the oldest: the worst order
    looks: list[ChunkKey] = []

    def look(chunk: ChunkKey) -> bool:
        looks.append(chunk)
        return True

    for _ in range(1000):
        policy.evict(1, look)

    assert looks == prompt[::-1]


@pytest.mark.parametrize(("held", "remembered"), [(0, MIN_HINTS), (MIN_HINTS + 100, MIN_HINTS + 100)])
def test_predecessors_are_remembered_for_as_many_chunks_as_are_stored_or_a_minimum(held, remembered):
    policy = LRUPolicy()
    for number in range(held):
        policy.add(key(number), 1)
    pairs = [(key(10**6 + 2 * i), key(10**6 + 2 * i + 1)) for i in range(2 * remembered)]
    for parent, child in pairs:
        policy.touch([parent, child])
    for _, child in pairs:
        policy.add(child, 1)

    known = [policy.before(child) == parent for parent, child in pairs]
    assert known == [False] * remembered + [True] * remembered


def test_adding_a_stored_chunk_is_refused():
    policy = LRUPolicy()
    policy.add(key(1), 1)

    with pytest.raises(ValueError, match="stored already"):
        policy.add(key(1), 1)
    assert policy.discard(key(1))
    assert not policy.discard(key(1))
    assert key(1) not in policy


def test_the_cost_of_chunks_that_are_refused_is_proportional_to_their_number():
    """A pool without room refuses every chunk of a long prompt that was looked up."""

    def cost(chunks: int) -> int:
        policy, keys = LRUPolicy(), [ChunkKey(CountedKey(key(number))) for number in range(chunks)]
        policy.touch(keys)
        CountedKey.hashes = 0
        for each in keys:
            policy.add(each, 1)
            policy.discard(each)
        return CountedKey.hashes

    assert cost(2000) <= 2.2 * cost(1000)
