"""The facade with LMCache's names: same arguments, same masks, usable in any thread, without leaks."""

import asyncio
import contextlib
import gc
import re
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from lmcache_async.cache_engine import LMCacheEngine, LMCacheEngineBuilder, LMCacheEngineMetadata
from lmcache_async.config import load_config
from lmcache_async.engine import engine as engine_module
from lmcache_async.engine import sync
from lmcache_async.engine.loop import LoopThread
from lmcache_async.errors import ChainError, ConfigError, EngineClosedError, TierUnavailableError
from lmcache_async.testing.fakes import FaultyTier, installed
from lmcache_async.testing.rig import Rig
from tests.support.tiers import Made, ParkingTier, registry_of

TOKENS = list(range(100, 140))  # 5 chunks of 8
LAYERS, BLOCKS, BLOCK_SIZE, WIDTH = 2, 32, 4, 4
SLOTS = BLOCKS * BLOCK_SIZE
LONG_S = 150  # only a hang takes so long


def config(**settings):
    base = {
        "chunk_size": 8,
        "arena.max_bytes": 32 * 8192,
        "arena.prefault": False,
        "arena.huge_pages": False,
        "store.allocate_timeout_s": 0.05,
        "shutdown_timeout_s": LONG_S,
    }
    return load_config(env={}, extra=base | settings)


class Paged(Rig):
    """A paged KV cache in LMCache's form: [2, blocks, block size, heads, head size] per layer."""

    def __init__(self):
        super().__init__(layers=LAYERS, blocks=BLOCKS, block_size=BLOCK_SIZE, head_dim=WIDTH)
        self.caches = [torch.zeros(2, BLOCKS, BLOCK_SIZE, 1, WIDTH) for _ in range(LAYERS)]
        self.tensors = [(cache[0], cache[1]) for cache in self.caches]

    def fill(self, tokens, slots):
        self.write(slots, self.content(tokens))

    def check(self, tokens, slots, hit):
        """Check that these tokens are in their slots, and that no other slot was changed."""
        slots, hit = list(slots), list(hit)
        used = [slots[i] for i in hit]
        assert torch.equal(self.read(used), self.content(tokens)[:, :, hit])
        assert (self.read(sorted(set(range(SLOTS)) - set(used))) == -7.0).all()


@pytest.fixture
def paged():
    return Paged()


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Check that a test leaves neither threads nor engines in the builder."""
    before = set(threading.enumerate())
    yield
    assert LMCacheEngineBuilder._engines == {}
    assert our_threads(before) == []


def our_threads(before):
    ours = [t for t in set(threading.enumerate()) - before if t.name.startswith("lmcache-async")]
    for thread in ours:
        if thread.name == "lmcache-async-descriptors":
            thread.join()  # it ends by itself, on a busy machine after the engine was closed
    return [thread.name for thread in ours if thread.is_alive()]


@pytest.fixture
def engine(paged):
    with LMCacheEngine(config(), kv_caches=paged.caches) as engine:
        yield engine


@pytest.fixture(autouse=True)
def plugins_read_once(monkeypatch):
    monkeypatch.setattr(engine_module, "Registry", installed)


@pytest.fixture
def made(monkeypatch):
    """A tier `dict` that outlives engines, with a gate."""
    made = Made(ParkingTier)
    monkeypatch.setattr(engine_module, "Registry", lambda: made.registry)
    return made


def store(engine, paged, tokens=TOKENS, slots=None, **kwargs):
    slots = list(range(len(tokens))) if slots is None else slots
    paged.fill(tokens, slots)
    engine.store(tokens, slot_mapping=torch.tensor(slots), **kwargs)


def check_retrieve(engine, paged, tokens=TOKENS, *, expected, mask=None, **kwargs):
    paged.wipe()
    slots = list(range(SLOTS - 1, SLOTS - 1 - len(tokens), -1))
    result = engine.retrieve(tokens, mask, slot_mapping=torch.tensor(slots), **kwargs)

    assert (result.dtype, result.device.type) == (torch.bool, "cpu")
    assert result.tolist() == expected
    paged.check(tokens, slots, [i for i, there in enumerate(expected) if there])


def in_thread(function, *arguments, **kwargs):
    pool = ThreadPoolExecutor(1, thread_name_prefix="test")
    future = pool.submit(function, *arguments, **kwargs)
    pool.shutdown(wait=False)
    return future


def wait_parked(engine, tier):
    engine._loop.submit(tier.parked.wait()).result(LONG_S)


# Arguments.


@pytest.mark.parametrize(
    "form",
    [
        torch.tensor,
        lambda s: torch.tensor(s, dtype=torch.int32),
        list,
        np.array,
        lambda s: range(s[0], s[-1] + 1),
    ],
    ids=["int64", "int32", "list", "numpy", "range"],
)
def test_slots_may_have_any_usual_form(engine, paged, form):
    slots = list(range(50, 90))
    paged.fill(TOKENS, slots)
    engine.store(TOKENS, slot_mapping=form(slots))

    check_retrieve(engine, paged, expected=[True] * 40)


@pytest.mark.parametrize("name", ["kv_caches", "kvcaches"])
@pytest.mark.parametrize(
    "form",
    [
        list,
        lambda caches: {f"layer.{index}": cache for index, cache in enumerate(caches)},
        lambda caches: [(cache[0], cache[1]) for cache in caches],
    ],
    ids=["tensors", "named layers", "pairs of K and V"],
)
def test_the_cache_may_come_with_the_first_store_by_either_name_in_any_form(paged, name, form):
    given = {"kv_caches": None, "kvcaches": None} | {name: form(paged.caches)}
    with LMCacheEngine(config(), LMCacheEngineMetadata(block_size=BLOCK_SIZE)) as engine:
        store(engine, paged, **given)

        check_retrieve(engine, paged, expected=[True] * 40, **given)


def test_the_first_store_or_retrieve_must_bring_the_cache_and_each_one_its_slots(engine):
    with LMCacheEngine(config()) as without_cache:
        for verb in ("store", "retrieve"):
            with pytest.raises(ValueError, match="needs kv_caches="):
                getattr(without_cache, verb)(TOKENS, slot_mapping=torch.arange(40))
            with pytest.raises(ValueError, match="slot_mapping= is missing"):
                getattr(engine, verb)(TOKENS)


def test_without_a_cache_lookups_are_misses():
    with LMCacheEngine(config()) as engine:
        assert engine.lookup(TOKENS) == 0
        assert engine.lookup(TOKENS, lookup_id="a", pin=True) == 0
        assert engine.prefetch(TOKENS) == 0
        assert engine.clear() == 0
        assert engine.statistics() is None
        engine.lookup_unpin("a")


def test_another_cache_than_the_first_is_refused_and_not_written(engine, paged):
    store(engine, paged)
    other = Paged()
    other.wipe()
    for verb in (engine.store, engine.retrieve):
        with pytest.raises(ValueError, match="kv_caches"):
            verb(TOKENS, slot_mapping=torch.arange(40), kvcaches=other.caches)
    other.check(TOKENS, range(40), [])

    views = [tensor.view(tensor.shape) for tensor in paged.caches]  # the same memory
    check_retrieve(engine, paged, expected=[True] * 40, kvcaches=views)


def test_a_cache_of_no_tensors_is_refused_when_the_engine_is_open(engine):
    with pytest.raises(TypeError, match=r"layer 0 .* ndarray; expected a tensor"):
        engine.store(TOKENS, slot_mapping=torch.arange(40), kvcaches=[np.zeros(3)])


def test_a_cache_of_no_known_form_is_refused_and_a_right_one_taken_later(paged):
    with LMCacheEngine(config()) as engine:
        with pytest.raises(ValueError, match="shape"):
            engine.store(TOKENS, slot_mapping=torch.arange(40), kvcaches=[torch.zeros(3, 3)])
        store(engine, paged, kvcaches=paged.caches)

        assert engine.lookup(TOKENS) == 40


def test_no_tokens_are_nothing(engine):
    engine.store([], slot_mapping=torch.arange(0))

    assert engine.lookup([]) == 0
    assert engine.retrieve([], slot_mapping=torch.arange(0)).tolist() == []


# Masks.


def test_tokens_that_are_false_in_the_mask_or_have_no_slot_are_not_loaded(engine, paged):
    """test_tokens.py has the property for all masks and slots."""
    store(engine, paged)
    paged.wipe()
    slots = torch.arange(40)
    slots[[9, 17]] = -1
    expected = [token >= 3 and token not in (9, 17) for token in range(40)]

    result = engine.retrieve(TOKENS, torch.arange(40) >= 3, slot_mapping=slots)

    assert result.tolist() == expected
    paged.check(TOKENS, range(40), [token for token in range(40) if expected[token]])


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("cachesalt", "did you mean 'cache_salt'?"),
        ("Cache_Salt", "did you mean 'cache_salt'?"),
        ("lora_name", "did you mean 'lora'?"),
        ("tag", "did you mean 'tags'?"),
        ("slotmapping", "did you mean 'slot_mapping'?"),
        ("kv_cache", "did you mean 'kv_caches'?"),
        ("request_id", "did you mean 'req_id'?"),
        ("request_config", "did you mean 'request_configs'?"),
        (
            "tenant",
            "expected one of kv_caches, kvcaches, slot_mapping, req_id, cache_salt, lora, tags, request_configs",
        ),
        ("offset", "it is an argument of LMCache; leading tokens are skipped with the mask"),
    ],
)
@pytest.mark.parametrize("verb", ["store", "retrieve", "lookup", "prefetch"])
def test_an_unknown_argument_is_refused_with_the_nearest_right_one(engine, paged, verb, name, advice):
    paged.fill(TOKENS, range(40))
    with pytest.raises(TypeError, match=re.escape(f"{verb}() has no argument {name!r}; {advice}")):
        getattr(engine, verb)(TOKENS, slot_mapping=torch.arange(40), **{name: "tenant-a"})

    assert engine.lookup(TOKENS) == 0, "what was meant for one tenant is there for everybody"


def test_an_unknown_argument_is_refused_before_the_cache_is_known():
    with LMCacheEngine(config()) as engine:
        for verb in (engine.lookup, engine.prefetch):
            with pytest.raises(TypeError, match="did you mean 'cache_salt'"):
                verb(TOKENS, cachesalt="a")
        with pytest.raises(TypeError, match="did you mean 'lookup_id'"):
            engine.lookup(TOKENS, lookupid="a", pin=True)


def test_the_arguments_of_a_store_fit_every_call(engine, paged):
    arguments = {
        "kvcaches": paged.caches,
        "slot_mapping": torch.arange(40),
        "req_id": "r1",
        "cache_salt": "a",
        "lora": "b",
        "tags": {"c": "d"},
        "request_configs": {"lmcache.tag.e": "f"},
    }
    paged.fill(TOKENS, range(40))
    engine.store(TOKENS, **arguments)

    assert engine.lookup(TOKENS, **arguments) == engine.prefetch(TOKENS, **arguments) == 40
    assert engine.retrieve(TOKENS, **arguments).all()


def test_arguments_that_are_none_are_ignored(engine, paged):
    names = ("kv_caches", "kvcaches", "req_id", "cache_salt", "lora", "tags", "request_configs")
    store(engine, paged, **dict.fromkeys(names))

    assert engine.lookup(TOKENS) == 40


def test_the_cache_by_both_names_is_refused(engine, paged):
    with pytest.raises(TypeError, match="are the same argument"):
        store(engine, paged, kv_caches=paged.caches, kvcaches=paged.caches)


# Other inputs of keys.


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"cache_salt": 0}, "cache_salt is of type int; expected a string"),
        ({"cache_salt": False}, "cache_salt is of type bool"),
        ({"cache_salt": b"a"}, "cache_salt is of type bytes"),
        ({"lora": 0}, "lora is of type int; expected a string"),
        ({"lora": []}, "lora is of type list"),
        ({"tags": ["ab"]}, "tags is a list; expected a mapping"),
        ({"tags": []}, "tags is a list; expected a mapping"),
        ({"tags": "ab"}, "tags is a str; expected a mapping"),
        ({"tags": {"user": None}}, "value of tag 'user' is a NoneType; expected a string or a number"),
        ({"tags": {1: "a"}}, "tags has the name 1, a int; expected a string"),
        ({"request_configs": ["lmcache.tag.user"]}, "request_configs is a list; expected a mapping"),
        ({"request_configs": 0}, "request_configs is a int; expected a mapping"),
        ({"request_configs": {"lmcache.tag.user": ["a"]}}, "value of tag 'lmcache.tag.user' is a list"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("verb", ["store", "retrieve", "lookup", "prefetch"])
def test_invalid_tenants_are_refused(engine, paged, verb, kwargs, match):
    paged.fill(TOKENS, range(40))
    with pytest.raises(TypeError, match=match):
        getattr(engine, verb)(TOKENS, slot_mapping=torch.arange(40), **kwargs)

    assert engine.lookup(TOKENS) == 0


@pytest.mark.parametrize(
    "kwargs",
    [
        {"cache_salt": "a"},
        {"lora": "a"},
        {"tags": {"user": "a"}},
        {"request_configs": {"lmcache.tag.user": "a"}},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_requests_with_other_labels_are_misses(engine, paged, kwargs):
    store(engine, paged, **kwargs)
    other = {name: {"b": 1} if isinstance(value, dict) else "b" for name, value in kwargs.items()}
    if "request_configs" in kwargs:
        other = {"request_configs": {"lmcache.tag.user": "b"}}

    assert engine.lookup(TOKENS, **kwargs) == 40
    assert engine.lookup(TOKENS) == engine.lookup(TOKENS, **other) == 0
    check_retrieve(engine, paged, expected=[False] * 40)
    check_retrieve(engine, paged, expected=[True] * 40, **kwargs)


def test_settings_of_a_request_that_are_no_tags_change_nothing(engine, paged):
    store(engine, paged, request_configs={"lmcache.skip": "x"})

    assert engine.lookup(TOKENS) == 40


# Lookup, pin, prefetch, clear.


def test_a_pinned_lookup_keeps_its_chunks_until_it_is_unpinned(paged):
    settings = {"arena.max_bytes": 5 * 8192, "vllm.max_pinned_fraction": 1.0}
    others = [token + 1000 for token in TOKENS]
    with LMCacheEngine(config(**settings), kv_caches=paged.caches) as engine:
        store(engine, paged)
        assert engine.statistics().arena.num_slabs == 5
        assert engine.lookup(TOKENS, lookup_id="a", pin=True) == 40
        assert engine.statistics().pinned_chunks == 5
        store(engine, paged, others)
        assert engine.lookup(others) == 0

        engine.lookup_unpin(["a", "never held"])
        assert engine.statistics().pinned_chunks == 0
        store(engine, paged, others)
        assert engine.lookup(others, lookup_id="b") == engine.lookup(others, lookup_id="abc", pin=True) == 40
        assert engine.statistics().pinned_chunks == 5
        engine.lookup_unpin("abc")
        assert engine.statistics().pinned_chunks == 0


def test_a_pin_needs_an_id(engine):
    with pytest.raises(ValueError, match="lookup_id"):
        engine.lookup(TOKENS, pin=True)


def test_clear_removes_the_content_of_memory_or_of_all_tiers(made, paged):
    with LMCacheEngine(config(tiers=["cpu", "dict"]), kv_caches=paged.caches) as engine:
        store(engine, paged)
        assert engine.clear(memory_only=True) == 5
        assert (engine.lookup(TOKENS), len(made.records)) == (40, 5)
        assert engine.clear() == 5
        assert (engine.lookup(TOKENS), len(made.records)) == (0, 0)


def test_one_tier_that_cannot_be_cleared_does_not_keep_the_others(monkeypatch, paged):
    first, second = Made(FaultyTier), Made()
    registry = registry_of(dict=first.tier_class, second=second.tier_class)
    monkeypatch.setattr(engine_module, "Registry", lambda: registry)

    async def away():
        raise TierUnavailableError("away")

    with LMCacheEngine(config(tiers=["dict", "second"]), kv_caches=paged.caches) as engine:
        store(engine, paged)
        first.tier.clear = away
        with pytest.raises(TierUnavailableError, match="away"):
            engine.clear()
        assert second.records == {}


def test_a_fence_is_taken_on_the_callers_thread(engine, paged, monkeypatch):
    threads = []
    copier = engine._engine.copier
    monkeypatch.setattr(copier, "fence", lambda: threads.append(threading.current_thread()) or object())

    store(engine, paged)
    check_retrieve(engine, paged, expected=[True] * 40)

    assert set(threads) == {threading.current_thread()}, "what the caller's stream does was not waited for"


def test_tensors_of_a_device_are_copied_on_the_callers_thread(engine, paged, monkeypatch):
    """Kernels of the caller's current stream may compute them, and the event loop has another current stream."""
    threads, cpu = {}, torch.Tensor.cpu

    def copied(tensor):
        threads.setdefault(tensor.data_ptr(), threading.current_thread())  # further copies do nothing
        return cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", copied)
    paged.fill(TOKENS, range(40))
    for call in (engine.store, engine.retrieve):
        call(torch.tensor(TOKENS), torch.ones(40, dtype=torch.bool), slot_mapping=torch.arange(40))
        assert len(threads) == 3
        assert set(threads.values()) == {threading.current_thread()}
        threads.clear()
    for call in (engine.lookup, engine.prefetch):
        call(torch.tensor(TOKENS))
        assert list(threads.values()) == [threading.current_thread()]
        threads.clear()


class InterruptedWait:
    """A future whose `result` raises KeyboardInterrupt when `begun` is set."""

    def __init__(self, future, begun):
        self.future, self.begun = future, begun

    def result(self):
        assert self.begun.wait(LONG_S)
        raise KeyboardInterrupt

    def cancel(self):
        return self.future.cancel()


def test_an_interrupted_call_returns_after_its_copy_has_ended(engine, paged, monkeypatch):
    """The caller may use the slots again."""
    store(engine, paged)
    begun, ended, submit = threading.Event(), [], engine._loop.submit

    async def scatter(jobs, fence=None, progress=None):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    def submit_first(coroutine):
        monkeypatch.setattr(engine._loop, "submit", submit)
        return InterruptedWait(submit(coroutine), begun)

    monkeypatch.setattr(engine._engine.copier, "scatter", scatter)
    monkeypatch.setattr(engine._loop, "submit", submit_first)
    with pytest.raises(KeyboardInterrupt):
        engine.retrieve(TOKENS, slot_mapping=torch.arange(40))
    assert ended == [True]


def test_an_interrupt_at_any_point_of_a_wait_ends_the_call(engine, paged):
    """Also between the submission of the call and the wait for it."""
    store(engine, paged)
    traced = {LMCacheEngine._wait.__code__: "line", LoopThread.submit.__code__: "return"}

    def retrieve(interrupted_at):
        points = 0

        def trace(frame, event, _):
            nonlocal points
            if frame.f_code not in traced:
                return None
            if event == traced[frame.f_code]:
                points += 1
                if points == interrupted_at:
                    raise KeyboardInterrupt
            return trace

        former = sys.gettrace()
        sys.settrace(trace)
        try:
            engine.retrieve(TOKENS, slot_mapping=torch.arange(40))
        finally:
            sys.settrace(former)
        return points

    for point in range(1, retrieve(None) + 1):
        with pytest.raises(KeyboardInterrupt):
            retrieve(point)
        assert engine.statistics().running == 0, f"interrupted at point {point}"


def test_an_engine_whose_opening_was_interrupted_at_its_end_is_open(paged, tmp_path, monkeypatch):
    """Opened a second time, it would find its directory in use."""
    settings = config(tiers=[{"name": "disk", "path": str(tmp_path), "max_bytes": "1MiB"}])
    with LMCacheEngine(settings) as engine:
        submit = engine._loop.submit

        def submit_first(coroutine):
            monkeypatch.setattr(engine._loop, "submit", submit)
            future, ended = submit(coroutine), threading.Event()
            future.add_done_callback(lambda _: ended.set())
            return InterruptedWait(future, ended)

        monkeypatch.setattr(engine._loop, "submit", submit_first)
        with pytest.raises(KeyboardInterrupt):
            engine.attach(paged.caches)

        engine.attach(paged.caches)
        assert engine.lookup(TOKENS) == 0


def test_calls_are_refused_at_once_while_the_engine_closes(paged, monkeypatch):
    engine = LMCacheEngine(config(), kv_caches=paged.caches)
    with engine._lock:  # as `close` does until everything is closed
        engine._closed = True
        with ThreadPoolExecutor(1) as pool, pytest.raises(EngineClosedError):
            pool.submit(engine.lookup, TOKENS).result(LONG_S)
        engine._closed = False
    engine.close()


# The builder.


@pytest.fixture
def builder():
    yield LMCacheEngineBuilder
    for instance_id in list(LMCacheEngineBuilder._engines):
        LMCacheEngineBuilder.destroy(instance_id)


def test_one_id_is_one_engine(builder, paged):
    metadata = LMCacheEngineMetadata(model_name="m")
    engine = builder.get_or_create("a", config(), metadata)
    assert builder.get_or_create("a", kv_caches=paged.caches) is engine  # a later call may bring the cache
    store(engine, paged)

    assert engine.lookup(TOKENS) == 40
    assert builder.get("a") is engine
    assert builder.get_or_create("a") is engine
    assert builder.get_or_create("a", config(), LMCacheEngineMetadata(model_name="m")) is engine
    assert builder.get("b") is None
    assert builder.get_or_create("b", config()) is not engine


def test_another_config_or_other_metadata_under_one_id_are_refused(builder):
    engine = builder.get_or_create("a", config(), LMCacheEngineMetadata(model_name="m"))
    with pytest.raises(ConfigError, match="'a' exists with another config"):
        builder.get_or_create("a", config(chunk_size=16))
    with pytest.raises(ConfigError, match="'a' exists with another config or other metadata"):
        builder.get_or_create("a", config(), LMCacheEngineMetadata(model_name="other"))

    assert builder.get("a") is engine


def test_an_engine_that_cannot_open_is_not_kept(builder, paged):
    with pytest.raises(ConfigError, match="one chunk needs"):
        builder.get_or_create("a", config(**{"arena.max_bytes": 4096}), kv_caches=paged.caches)
    assert builder.get("a") is None

    builder.get_or_create("a", config(), kv_caches=paged.caches)


@pytest.mark.parametrize("end", ["close", "destroy"])
def test_after_close_or_destroy_the_id_is_free_and_unknown_ids_are_fine(builder, end):
    first = builder.get_or_create("a", config())
    for _ in range(2):
        first.close() if end == "close" else builder.destroy("a")
    builder.destroy("never there")

    assert builder.get("a") is None
    with pytest.raises(EngineClosedError):
        first.lookup(TOKENS)
    second = builder.get_or_create("a", config(chunk_size=16))
    assert second is not first
    assert second.lookup(TOKENS) == 0


@pytest.mark.parametrize("clear", [False, True])
def test_destroy_keeps_the_content_of_persistent_tiers_unless_clear_is_given(builder, made, paged, clear):
    engine = builder.get_or_create("a", config(tiers=["cpu", "dict"]), kv_caches=paged.caches)
    store(engine, paged)
    builder.destroy("a", clear=clear)

    engine = builder.get_or_create("a", config(tiers=["cpu", "dict"]), kv_caches=paged.caches)
    hit = 0 if clear else 40
    assert engine.lookup(TOKENS) == hit
    check_retrieve(engine, paged, expected=[True] * hit + [False] * (40 - hit))


def test_destroy_writes_the_queue_first(builder, made, paged):
    engine = builder.get_or_create(
        "a", config(tiers=["cpu", "dict"], shutdown_timeout_s=LONG_S), kv_caches=paged.caches
    )
    made.tier.close_gate("put")
    storing = in_thread(store, engine, paged)
    wait_parked(engine, made.tier)
    destroying = in_thread(builder.destroy, "a")
    while not engine._closed:
        pass
    engine._loop.call_soon(made.tier.open_gate)
    destroying.result(LONG_S)

    assert storing.exception(LONG_S) is None
    assert len(made.records) == 5


@pytest.mark.parametrize("parks_at", ["put", "clear"])
def test_an_id_that_is_being_destroyed_is_created_again_when_its_tiers_are_closed(
    builder, made, paged, tmp_path, monkeypatch, parks_at
):
    disk = {"name": "disk", "path": str(tmp_path), "max_bytes": "1MiB"}
    tiers = config(tiers=["dict", disk], shutdown_timeout_s=LONG_S)
    engine = builder.get_or_create("a", tiers, kv_caches=paged.caches)
    clears, tier = parks_at == "clear", made.tier
    if clears:
        store(engine, paged)
    tier.close_gate(parks_at)
    destroyed = [] if clears else [in_thread(store, engine, paged)]
    if not clears:
        wait_parked(engine, tier)
    destroyed.append(in_thread(builder.destroy, "a", clear=clears))
    while "a" not in builder._destroying:
        pass
    ended = builder._destroying["a"].ended
    wait = ended.wait

    def let_it_end(timeout_s=None):
        engine._loop.call_soon(tier.open_gate)
        return wait(timeout_s)

    monkeypatch.setattr(ended, "wait", let_it_end)
    try:
        second = builder.get_or_create("a", tiers, kv_caches=paged.caches)
    finally:
        with contextlib.suppress(EngineClosedError):  # it has ended
            let_it_end()

    assert [future.exception(LONG_S) for future in destroyed] == [None] * len(destroyed)
    assert builder.get("a") is second
    assert second.lookup(TOKENS) == (0 if clears else 40)


def test_an_interrupt_at_the_end_of_a_destruction_does_not_block_the_id(builder, paged, monkeypatch):
    engine = builder.get_or_create("a", config(), kv_caches=paged.caches)
    lock = builder._lock

    class InterruptedLock:
        def __enter__(self):
            if engine.closed:
                raise KeyboardInterrupt
            lock.acquire()

        def __exit__(self, *error):
            lock.release()

    with monkeypatch.context() as patch:
        patch.setattr(builder, "_lock", InterruptedLock())
        with contextlib.suppress(KeyboardInterrupt):
            builder.destroy("a")

    monkeypatch.setattr(sync, "CLEAR_S", -10 * LONG_S)  # do not wait
    assert builder.get_or_create("a", config(), kv_caches=paged.caches) is not engine


def test_an_id_that_is_destroyed_for_too_long_is_not_created(builder, made, paged, monkeypatch):
    engine = builder.get_or_create("a", config(tiers=["dict"]), kv_caches=paged.caches)
    monkeypatch.setattr(sync, "CLEAR_S", -10 * LONG_S)
    made.tier.close_gate("clear")
    destroying = in_thread(builder.destroy, "a", clear=True)
    wait_parked(engine, made.tier)

    with pytest.raises(EngineClosedError, match=r"'a' is still being destroyed after"):
        builder.get_or_create("a", config(tiers=["dict"]))

    engine._loop.call_soon(made.tier.open_gate)
    assert destroying.exception(LONG_S) is None


def test_destroy_frees_threads_and_memory(builder, paged):
    before = set(threading.enumerate())
    engine = builder.get_or_create(
        "a", config(**{"arena.prefault": True, "arena.huge_pages": True}), kv_caches=paged.caches
    )
    store(engine, paged)
    check_retrieve(engine, paged, expected=[True] * 40)
    assert any(name.startswith("lmcache-async-loop") for name in our_threads(before))
    memory = weakref.ref(engine._engine._parts.arena.region.obj)

    builder.destroy("a")

    assert our_threads(before) == []
    gc.collect()
    assert memory() is None, "the arena is still mapped"


@pytest.mark.parametrize("opened", [True, False])
def test_an_engine_that_is_collected_without_close_frees_threads_and_descriptors(made, paged, opened):
    before = set(threading.enumerate())
    engine = LMCacheEngine(config(tiers=["cpu", "dict"]), kv_caches=paged.caches if opened else None)
    if opened:
        store(engine, paged)
    loop = engine._loop._loop

    del engine
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(LONG_S)

    assert our_threads(before) == []
    assert loop.is_closed(), "its file descriptors are open"
    assert len(made.records) == (5 if opened else 0)


def test_a_failed_opening_frees_threads_and_memory(paged):
    before = set(threading.enumerate())
    with pytest.raises(ChainError):
        LMCacheEngine(config(**{"store.stages": ["hash"], "arena.prefault": True}), kv_caches=paged.caches)

    assert our_threads(before) == []


# Threads.


def test_calls_may_come_from_several_threads(engine, paged):
    def one(number):
        tokens = [1000 * number + token for token in range(16)]
        slots = list(range(16 * number, 16 * number + 16))
        paged.fill(tokens, slots)
        for _ in range(3):
            engine.store(tokens, slot_mapping=slots)
            assert engine.lookup(tokens, lookup_id=str(number), pin=True) == 16
            paged.write(slots, torch.full_like(paged.read(slots), -7.0))
            assert engine.retrieve(tokens, slot_mapping=slots).all()
            assert torch.equal(paged.read(slots), paged.content(tokens))
            engine.lookup_unpin(str(number))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(6)))
    statistics = engine.statistics()
    assert (statistics.running, statistics.pinned_chunks) == (0, 0)
    assert statistics.arena.leased_slabs == statistics.tiers["cpu"].chunks == 12


def test_several_first_calls_open_one_engine(paged):
    with LMCacheEngine(config()) as engine:
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda _: engine.lookup(TOKENS, kvcaches=paged.caches), range(12)))

        assert found == [0] * 12
        assert sum(t.name.startswith("lmcache-async-copy") for t in threading.enumerate()) <= 2


def test_several_threads_get_one_engine_of_an_id(builder):
    with ThreadPoolExecutor(6) as pool:
        engines = list(pool.map(lambda _: builder.get_or_create("a", config()), range(12)))

    assert len({id(engine) for engine in engines}) == 1


@pytest.mark.parametrize(
    ("verb", "parks_at"), [("store", "put"), ("retrieve", "get"), ("lookup", "contains")]
)
def test_a_call_that_meets_the_closing_ends(made, paged, verb, parks_at):
    engine = LMCacheEngine(config(tiers=["cpu", "dict"], shutdown_timeout_s=0.05), kv_caches=paged.caches)
    store(engine, paged)
    engine.clear(memory_only=True)
    if verb == "store":
        engine.clear()
    made.tier.close_gate(parks_at)
    arguments = {} if verb == "lookup" else {"slot_mapping": torch.arange(40)}
    call = in_thread(getattr(engine, verb), TOKENS, **arguments)
    wait_parked(engine, made.tier)

    engine.close()

    error = call.exception(LONG_S)
    assert error is None or isinstance(error, EngineClosedError), error
    engine.close()
    for late in (lambda: engine.lookup(TOKENS), lambda: engine.clear(), lambda: engine.lookup_unpin("a")):
        with pytest.raises(EngineClosedError):
            late()


def test_a_pinning_lookup_that_meets_the_closing_leaves_no_lease(made, paged):
    engine = LMCacheEngine(config(tiers=["cpu", "dict"], shutdown_timeout_s=0.05), kv_caches=paged.caches)
    store(engine, paged)
    memory = weakref.ref(engine._engine._parts.arena.region.obj)
    made.tier.close_gate("contains")
    call = in_thread(engine.lookup, [*TOKENS, *range(8)], lookup_id="a", pin=True)
    wait_parked(engine, made.tier)

    engine.close()

    error = call.exception(LONG_S)
    assert error is None or isinstance(error, EngineClosedError), error
    del call, error
    gc.collect()
    assert memory() is None


def test_closing_does_not_wait_for_a_tier_that_cannot_be_stopped(made, paged):
    tiers = ["cpu", {"name": "dict", "timeout_s": 3600}]
    engine = LMCacheEngine(config(tiers=tiers, shutdown_timeout_s=0.05), kv_caches=paged.caches)
    made.tier.close_gate("put")
    made.tier.stubborn = True
    storing = in_thread(store, engine, paged)
    wait_parked(engine, made.tier)
    closing = in_thread(engine.close)

    assert closing.exception(LONG_S) is None
    assert isinstance(storing.exception(LONG_S), EngineClosedError | None)


def test_closing_from_several_threads_closes_once(paged):
    engine = LMCacheEngine(config(), kv_caches=paged.caches)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: engine.close(), range(8)))

    assert not engine._loop._thread.is_alive()
