"""A table of ways in which a tier can misbehave, and a tier that misbehaves on demand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.fakes import DictTier
from lmcache_async.tiers.base import Allocate, Capabilities, Tier, TierConfig, TierStatistics
from lmcache_async.types import ChunkKey

Kind: TypeAlias = Literal["answer", "exception", "loop", "buffer", "memory", "time", "other"]


@dataclass(frozen=True, slots=True, eq=False)
class Misbehaviour:
    """One way to misbehave.

    Attributes:
        name: Description of the behaviour, unique in the table.
        kind: Category.
        verbs: Replacements for methods of the tier; each is called with the tier and the method's arguments.
        capabilities: Capabilities that the tier declares.
        ends_loop: The running event loop ends. Only an engine with its own loop thread continues.
        hangs: Calls do not end by themselves, so the tier needs a short `timeout_s`.
        serves: Other tiers serve the same chunks meanwhile. If False, wrong records are detected only after
            they were read, and the prompt is recomputed.
    """

    name: str
    kind: Kind
    verbs: dict[str, Callable[..., Any]]
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(removes=True, lists=True))
    ends_loop: bool = False
    hangs: bool = False
    serves: bool = True

    def __str__(self) -> str:
        return self.name


class MisbehavingTier(DictTier):
    """A DictTier that misbehaves between `begin` and `end`.

    Attributes:
        mode: The misbehaviour.
        active: Whether it is active now.
        tasks: References to background tasks of the tier, until they end.
        kept: Buffers that the tier keeps although it must not.
        released: Set by `end`; calls that ignore cancellation wait for it.
    """

    def __init__(self, mode: Misbehaviour, config: TierConfig | None = None) -> None:
        super().__init__(config)
        self.mode = mode
        self.active = False
        self.tasks: set[asyncio.Task[Any]] = set()
        self.kept: list[Buffer] = []
        self.views: list[Any] = []
        self.released = asyncio.Event()
        self.arena: Arena | None = None

    def begin(self) -> None:
        self.active = True

    def end(self) -> None:
        self.active = False
        self.released.set()

    def spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """Run `work` in a background task of the tier."""
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self.tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved, so that asyncio does not report it

    def _replacement(self, verb: str) -> Callable[..., Any] | None:
        return self.mode.verbs.get(verb) if self.active else None

    @property
    def capabilities(self) -> Capabilities:
        if (replacement := self._replacement("capabilities")) is not None:
            return replacement(self)
        return self.mode.capabilities

    def bind(self, arena: Arena) -> None:
        self.arena = arena

    async def contains(self, key: ChunkKey) -> bool:
        if (replacement := self._replacement("contains")) is not None:
            return await replacement(self, key)
        return await DictTier.contains(self, key)

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        if (replacement := self._replacement("contains_many")) is not None:
            return await replacement(self, keys)
        return await Tier.contains_many(self, keys)

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        if (replacement := self._replacement("count_prefix")) is not None:
            return await replacement(self, keys)
        return await Tier.count_prefix(self, keys)

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        if (replacement := self._replacement("get")) is not None:
            return await replacement(self, key, allocate)
        return await DictTier.get(self, key, allocate)

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        if (replacement := self._replacement("get_many")) is not None:
            return await replacement(self, keys, allocate)
        return await Tier.get_many(self, keys, allocate)

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        if (replacement := self._replacement("put")) is not None:
            return await replacement(self, key, buffer)
        return await DictTier.put(self, key, buffer)

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        if (replacement := self._replacement("put_many")) is not None:
            return await replacement(self, items)
        return await Tier.put_many(self, items)

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        if (replacement := self._replacement("reject")) is not None:
            return await replacement(self, key, cause)
        return await DictTier.reject(self, key, cause)

    async def keys(self) -> AsyncIterator[ChunkKey]:
        if (replacement := self._replacement("keys")) is not None:
            for key in replacement(self):
                yield key
        else:
            async for key in DictTier.keys(self):
                yield key

    def statistics(self) -> TierStatistics:
        if (replacement := self._replacement("statistics")) is not None:
            return replacement(self)
        return DictTier.statistics(self)

    async def __aexit__(self, *error: object) -> None:
        for task in self.tasks:
            task.cancel()
        if (replacement := self._replacement("__aexit__")) is not None:
            await replacement(self)


# Wrong return values.


def _gives(answer: Callable[..., object]) -> Callable[..., Any]:
    """Return a method that returns `answer()` of its first argument."""

    async def verb(tier: MisbehavingTier, *arguments: Any) -> object:
        return answer(*arguments[:1])

    return verb


_SINGLE: dict[str, dict[str, Callable[[Any], object]]] = {
    "contains": {
        "None": lambda _: None,
        "a word": lambda _: "no",
        "a float": lambda _: 0.5,
        "an exception": lambda _: ValueError("of this test"),
    },
    "count_prefix": {
        "None": lambda _: None,
        "a str": lambda keys: str(len(keys)),
        "a float": lambda keys: float(len(keys)),
        "a negative number": lambda _: -1,
        "more than was asked for": lambda keys: len(keys) + 1,
        "a list": lambda keys: [True] * len(keys),
    },
    "contains_many": {
        "None": lambda _: None,
        "a number": lambda keys: len(keys),
        "a word": lambda keys: "y" * len(keys),
        "too few answers": lambda keys: [True] * (len(keys) - 1),
        "too many answers": lambda keys: [True] * (len(keys) + 1),
        "words": lambda keys: ["no"] * len(keys),
        "a generator": lambda keys: (True for _ in keys),
    },
    "get": {
        "bytes": lambda key: bytes(key),
        "a memoryview": lambda _: memoryview(b"record"),
        "an array": lambda _: np.zeros(100, np.uint8),
        "True": lambda _: True,
        "an exception": lambda _: ValueError("of this test"),
        "the class Buffer": lambda _: Buffer,
    },
    "get_many": {
        "None": lambda _: None,
        "a number": lambda keys: len(keys),
        "too few answers": lambda keys: [None] * (len(keys) - 1),
        "too many answers": lambda keys: [None] * (len(keys) + 1),
        "bytes in a list": lambda keys: list(keys),
        "a dict": lambda keys: dict.fromkeys(keys),
        "other exceptions": lambda keys: [ValueError("of this test")] * len(keys),
        "the class TierError": lambda keys: [TierError] * len(keys),
    },
    "put_many": {
        "None": lambda _: None,
        "a number": lambda items: len(items),
        "too few answers": lambda items: [None] * (len(items) - 1),
        "too many answers": lambda items: [None] * (len(items) + 1),
        "words": lambda items: ["stored"] * len(items),
        "other exceptions": lambda items: [ValueError("of this test")] * len(items),
    },
    "reject": {
        "None": lambda _: None,
    },
}


def _answers() -> list[Misbehaviour]:
    modes = []
    for verb, answers in _SINGLE.items():
        for what, answer in answers.items():
            local = Capabilities(removes=True, lists=True, local_index=verb == "contains_many")
            modes.append(Misbehaviour(f"{verb} answers {what}", "answer", {verb: _gives(answer)}, local))

    async def lies(tier: MisbehavingTier, key: ChunkKey) -> bool:
        return key not in tier.records

    modes.append(Misbehaviour("contains answers the opposite", "answer", {"contains": lies}))
    return modes


# Exceptions.


class UnprintableError(Exception):
    """An error whose `str` and `repr` fail."""

    def __str__(self) -> str:
        raise RuntimeError("str() of this error fails")

    def __repr__(self) -> str:
        raise RuntimeError("repr() of this error fails")


class UnprintableTierError(TierError):
    """A TierError whose `str` raises SystemExit."""

    def __str__(self) -> str:
        raise SystemExit("str() of this error ends the process")


class OwnBaseError(BaseException):
    """An error derived directly from BaseException."""


_RAISED: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("of this test"),
    "SystemExit": lambda: SystemExit(1),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": lambda: asyncio.CancelledError("of the tier's own client"),
    "StopAsyncIteration": StopAsyncIteration,
    "TimeoutError": TimeoutError,
    "MemoryError": MemoryError,
    "an exception group": lambda: ExceptionGroup("of this test", [TierError("inside")]),
    "a base exception group": lambda: BaseExceptionGroup("of this test", [SystemExit(1), ValueError()]),
    "a BaseException of its own": lambda: OwnBaseError("of this test"),
    "an unprintable error": UnprintableError,
    "an unprintable TierError": UnprintableTierError,
    "BudgetExceededError": lambda: BudgetExceededError("of this test"),
}


def _raises(make: Callable[[], BaseException]) -> Callable[..., Any]:
    async def verb(tier: MisbehavingTier, *arguments: Any) -> object:
        await asyncio.sleep(0)
        raise make()

    return verb


def _raises_at_once(make: Callable[[], BaseException]) -> Callable[..., Any]:
    def verb(tier: MisbehavingTier, *arguments: Any) -> object:
        raise make()

    return verb


def _exceptions() -> list[Misbehaviour]:
    def mode(verb: str, what: str, raises: Callable[..., Any] = _raises) -> Misbehaviour:
        name = "closing" if verb == "__aexit__" else verb
        return Misbehaviour(f"{name} raises {what}", "exception", {verb: raises(_RAISED[what])})

    batches = ("SystemExit", "CancelledError", "an unprintable error")
    closings = ("ValueError", "SystemExit", "CancelledError")
    return [
        *(mode(verb, what) for what in _RAISED for verb in ("count_prefix", "get", "put")),
        *(mode(verb, what) for verb in ("get_many", "put_many", "reject") for what in batches),
        *(mode(verb, "SystemExit", _raises_at_once) for verb in ("statistics", "capabilities", "keys")),
        *(mode("__aexit__", what) for what in closings),
    ]


# The event loop and its tasks.


async def _stops_loop(tier: MisbehavingTier, *_: Any) -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


async def _fails_in_task(tier: MisbehavingTier, *_: Any) -> None:
    async def work() -> None:
        raise SystemExit(1)

    await tier.spawn(work())


async def _fails_in_background(tier: MisbehavingTier, *_: Any) -> None:
    async def work() -> None:
        raise KeyboardInterrupt

    tier.spawn(work())
    await asyncio.sleep(0)


async def _fails_in_callback(tier: MisbehavingTier, *_: Any) -> None:
    def callback() -> None:
        raise SystemExit(1)

    asyncio.get_running_loop().call_soon(callback)
    await asyncio.sleep(0)


async def _cancels_itself(tier: MisbehavingTier, *_: Any) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel("by the tier itself")
    await asyncio.sleep(0)


async def _awaits_cancelled(tier: MisbehavingTier, *_: Any) -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel("by the tier's own client")
    await future


def _loop_modes() -> list[Misbehaviour]:
    modes = []
    for verb in ("count_prefix", "get", "put"):
        for what, work in (
            ("stops the loop", _stops_loop),
            ("raises SystemExit in a task of its own", _fails_in_task),
            ("raises KeyboardInterrupt in the background", _fails_in_background),
            ("raises SystemExit in a callback", _fails_in_callback),
        ):
            modes.append(Misbehaviour(f"{verb} {what}", "loop", {verb: work}, ends_loop=True))
        modes.append(Misbehaviour(f"{verb} awaits what was cancelled", "loop", {verb: _awaits_cancelled}))
        modes.append(Misbehaviour(f"{verb} cancels its own task", "loop", {verb: _cancels_itself}))
    return modes


# The buffer of a put.


async def _writes_view(tier: MisbehavingTier, key: ChunkKey, buffer: Buffer) -> None:
    buffer.view[-8:] = b"\xee" * 8


async def _writes_padding(tier: MisbehavingTier, key: ChunkKey, buffer: Buffer) -> None:
    buffer.padded_view[buffer.nbytes // 2] ^= 0xFF


async def _writes_array(tier: MisbehavingTier, key: ChunkKey, buffer: Buffer) -> None:
    array = buffer.array
    array.flags.writeable = True
    array[-8:] ^= 0xFF


async def _writes_tensor(tier: MisbehavingTier, key: ChunkKey, buffer: Buffer) -> None:
    buffer.tensor(torch.uint8, (buffer.nbytes,))[-8:] = 0xEE
    tier.records[key] = bytes(buffer.view)


async def _writes_through_retained(tier: MisbehavingTier, key: ChunkKey, buffer: Buffer) -> None:
    with buffer.retain() as lease:
        lease.view[-8:] = b"\xee" * 8


async def _resizes(tier: MisbehavingTier, key: ChunkKey, buffer: Buffer) -> None:
    tier.records[key] = bytes(buffer.view)
    buffer.resize(1)


async def _releases(tier: MisbehavingTier, key: ChunkKey, buffer: Buffer) -> None:
    tier.records[key] = bytes(buffer.view)
    buffer.release()


async def _releases_twice(tier: MisbehavingTier, key: ChunkKey, buffer: Buffer) -> None:
    buffer.release()
    buffer.release()


async def _writes_later(tier: MisbehavingTier, key: ChunkKey, buffer: Buffer) -> None:
    view = buffer.view

    async def later() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
            with contextlib.suppress(TypeError, ValueError):
                view[-8:] = b"\xee" * 8
            with contextlib.suppress(TypeError, ValueError):
                buffer.view[-8:] = b"\xee" * 8

    tier.records[key] = bytes(view)
    tier.spawn(later())


async def _keeps(tier: MisbehavingTier, key: ChunkKey, buffer: Buffer) -> None:
    tier.records[key] = bytes(buffer.view)
    for kept in tier.kept:
        with contextlib.suppress(ValueError, RuntimeError):
            kept.release()
    tier.kept = [buffer]


async def _changes_items(tier: MisbehavingTier, items: Any) -> object:
    count = len(items)
    with contextlib.suppress(AttributeError):
        items.clear()
    return [None] * count


def _buffer_modes() -> list[Misbehaviour]:
    verbs: dict[str, Callable[..., Any]] = {
        "put writes into the view of its buffer": _writes_view,
        "put writes into the padded view of its buffer": _writes_padding,
        "put writes into the array of its buffer": _writes_array,
        "put writes into a tensor of its buffer": _writes_tensor,
        "put writes through a lease of its own": _writes_through_retained,
        "put resizes its buffer": _resizes,
        "put releases its buffer": _releases,
        "put releases its buffer twice": _releases_twice,
        "put writes into its buffer later": _writes_later,
        "put keeps its buffer and releases it later": _keeps,
    }
    modes = [Misbehaviour(name, "buffer", {"put": verb}) for name, verb in verbs.items()]
    modes.append(
        Misbehaviour("put_many empties the list of its items", "buffer", {"put_many": _changes_items})
    )
    return modes


# The buffers of a get.


async def _fails_after_allocate(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> Buffer:
    await allocate(100)
    raise ValueError("of this test")


async def _exits_after_allocate(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> Buffer:
    await allocate(100)
    raise SystemExit(1)


async def _looks_and_fails(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> Buffer:
    buffer = await allocate(len(tier.records.get(key, b"12345678")))
    _array, _slice = buffer.array, buffer.view[2:5]  # referenced by the frame in the traceback
    raise ValueError("of this test")


async def _forgets(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> None:
    await allocate(100)


async def _keeps_memory(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> None:
    tier.kept.append(await allocate(100))


async def _retains_memory(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> Buffer:
    buffer = await allocate(len(tier.records[key]))
    buffer.view[:] = tier.records[key]
    tier.kept.append(buffer.retain())
    return buffer


async def _wants_all(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> Buffer:
    while True:
        await allocate(100)


async def _leases_twice(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> Buffer | None:
    await allocate(100)
    return await DictTier.get(tier, key, allocate)


def _allocates(nbytes: object) -> Callable[..., Any]:
    async def get(tier: MisbehavingTier, key: ChunkKey, allocate: Any) -> Buffer | None:
        await allocate(nbytes)
        return await DictTier.get(tier, key, allocate)

    return get


async def _allocates_later(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> Buffer | None:
    async def later() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        with contextlib.suppress(Exception):
            tier.kept.append(await allocate(100))

    tier.spawn(later())
    return await DictTier.get(tier, key, allocate)


async def _released(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> Buffer | None:
    buffer = await DictTier.get(tier, key, allocate)
    assert buffer is not None
    buffer.release()
    return buffer


async def _released_twice(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> Buffer | None:
    buffer = await _released(tier, key, allocate)
    assert buffer is not None
    buffer.release()
    return buffer


async def _released_later(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> Buffer | None:
    buffer = await DictTier.get(tier, key, allocate)
    assert buffer is not None

    async def later() -> None:
        await asyncio.sleep(0)
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                buffer.release()

    tier.spawn(later())
    return buffer


async def _writes_after_get(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> Buffer | None:
    buffer = await DictTier.get(tier, key, allocate)
    assert buffer is not None
    view = buffer.view

    async def later() -> None:
        for _ in range(50):
            await asyncio.sleep(0)
            with contextlib.suppress(TypeError, ValueError):
                view[-8:] = b"\xee" * 8
            with contextlib.suppress(TypeError, ValueError):
                buffer.view[-8:] = b"\xee" * 8

    tier.spawn(later())
    return buffer


async def _earlier_buffers(
    tier: MisbehavingTier, keys: Sequence[ChunkKey], allocate: Allocate
) -> list[Buffer | None]:
    """Return the buffers of the previous call."""
    before, tier.kept = tier.kept, [await allocate(len(tier.records[keys[0]])) for _ in keys]
    return [*before, *[None] * len(keys)][: len(keys)]


async def _of_another_arena(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> Buffer | None:
    record = tier.records[key]
    other = Arena(1 << 16, len(record), huge_pages=False, prefault=False)
    buffer = other.lease_nowait(len(record))
    assert buffer is not None
    buffer.view[:] = record
    tier.views.append((other, buffer))
    return buffer


async def _same_buffer_for_all(
    tier: MisbehavingTier, keys: Sequence[ChunkKey], allocate: Allocate
) -> list[Buffer | None]:
    return [await DictTier.get(tier, keys[0], allocate)] * len(keys)


async def _too_few_buffers(
    tier: MisbehavingTier, keys: Sequence[ChunkKey], allocate: Allocate
) -> list[Buffer | None]:
    return [await DictTier.get(tier, key, allocate) for key in keys][:-1]


async def _too_many_buffers(
    tier: MisbehavingTier, keys: Sequence[ChunkKey], allocate: Allocate
) -> list[Buffer | None]:
    return [await DictTier.get(tier, key, allocate) for key in [*keys, keys[0]]]


async def _reversed_buffers(
    tier: MisbehavingTier, keys: Sequence[ChunkKey], allocate: Allocate
) -> list[Buffer | None]:
    return [await DictTier.get(tier, key, allocate) for key in reversed(keys)]


async def _changes_keys(tier: MisbehavingTier, keys: Any, allocate: Allocate) -> list[Any]:
    answers = await Tier.get_many(tier, keys, allocate)
    with contextlib.suppress(AttributeError, TypeError):
        keys.reverse()
    return answers


async def _another_record(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> Buffer | None:
    return await DictTier.get(tier, next(other for other in tier.records if other != key), allocate)


def _edited(edit: Callable[[bytearray], object]) -> Callable[..., Any]:
    async def get(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        record = bytearray(tier.records[key])
        edit(record)
        buffer = await allocate(len(record))
        buffer.view[:] = record
        return buffer

    return get


def _flip(record: bytearray) -> None:
    record[-1] ^= 0xFF


def _memory_modes() -> list[Misbehaviour]:
    verbs: dict[str, Callable[..., Any]] = {
        "get raises after allocate": _fails_after_allocate,
        "get raises SystemExit after allocate": _exits_after_allocate,
        "get raises with views of its memory in the traceback": _looks_and_fails,
        "get allocates and answers None": _forgets,
        "get keeps its memory and answers None": _keeps_memory,
        "get keeps a further lease of its memory": _retains_memory,
        "get allocates without end": _wants_all,
        "get allocates twice": _leases_twice,
        "get allocates a str": _allocates("100"),
        "get allocates a float": _allocates(100.5),
        "get allocates a negative number": _allocates(-1),
        "get allocates more than a slab": _allocates(1 << 40),
        "get allocates after its end": _allocates_later,
        "get answers a released buffer": _released,
        "get answers a buffer released twice": _released_twice,
        "get releases its buffer after its end": _released_later,
        "get answers a buffer of another arena": _of_another_arena,
    }
    modes = [Misbehaviour(name, "memory", {"get": verb}) for name, verb in verbs.items()]
    wrong: dict[str, Callable[..., Any]] = {
        "get writes into its buffer after its end": _writes_after_get,
        "get answers another chunk's record": _another_record,
        "get answers a changed record": _edited(_flip),
        "get answers a record cut short": _edited(lambda record: record.__delitem__(slice(-9, None))),
        "get answers a record of no bytes": _edited(bytearray.clear),
        "get answers a record of zeros": _edited(
            lambda record: record.__setitem__(slice(None), bytes(len(record)))
        ),
    }
    modes += [Misbehaviour(name, "memory", {"get": verb}, serves=False) for name, verb in wrong.items()]
    batches: dict[str, tuple[Callable[..., Any], bool]] = {
        "get_many answers the buffers of an earlier call": (_earlier_buffers, True),
        "get_many answers one buffer for all keys": (_same_buffer_for_all, False),
        "get_many answers too few buffers": (_too_few_buffers, True),
        "get_many answers too many buffers": (_too_many_buffers, True),
        "get_many answers the buffers in another order": (_reversed_buffers, False),
        "get_many reverses the list of its keys": (_changes_keys, True),
    }
    modes += [
        Misbehaviour(name, "memory", {"get_many": verb}, serves=serves)
        for name, (verb, serves) in batches.items()
    ]
    own = Capabilities(removes=True, lists=True, own_memory=True)
    owned: dict[str, dict[str, Callable[..., Any]]] = {
        "get of a tier with memory of its own answers a released buffer": {"get": _released},
        "get of a tier with memory of its own answers bytes": {"get": _gives(lambda key: bytes(key))},
        "get of a tier with memory of its own releases later": {"get": _released_later},
        "get_many of a tier with memory of its own answers too few": {"get_many": _too_few_buffers},
    }
    modes += [Misbehaviour(name, "memory", verbs, own) for name, verbs in owned.items()]
    return modes


# Time.


async def _never_ends(tier: MisbehavingTier, *_: Any) -> None:
    await asyncio.get_running_loop().create_future()


async def _allocates_and_never_ends(tier: MisbehavingTier, key: ChunkKey, allocate: Allocate) -> None:
    await allocate(100)
    await asyncio.get_running_loop().create_future()


async def _ignores_cancellation(tier: MisbehavingTier, *_: Any) -> None:
    while not tier.released.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await tier.released.wait()


async def _uncancels(tier: MisbehavingTier, *_: Any) -> None:
    task = asyncio.current_task()
    assert task is not None
    try:
        await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        task.uncancel()
        raise


async def _answers_after_cancellation(
    tier: MisbehavingTier, key: ChunkKey, allocate: Allocate
) -> Buffer | None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.get_running_loop().create_future()
    return await DictTier.get(tier, key, allocate)


async def _fails_after_cancellation(tier: MisbehavingTier, *_: Any) -> None:
    try:
        await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        raise ValueError("raised for a cancellation") from None


def _time_modes() -> list[Misbehaviour]:
    modes = []
    for verb in ("count_prefix", "get", "put"):
        for what, work in (
            ("never ends", _never_ends),
            ("ignores cancellation", _ignores_cancellation),
            ("takes its cancellation back", _uncancels),
            ("raises ValueError when it is cancelled", _fails_after_cancellation),
        ):
            modes.append(Misbehaviour(f"{verb} {what}", "time", {verb: work}, hangs=True))
    modes.append(
        Misbehaviour("get allocates and never ends", "time", {"get": _allocates_and_never_ends}, hangs=True)
    )
    modes.append(
        Misbehaviour(
            "get answers when it is cancelled", "time", {"get": _answers_after_cancellation}, hangs=True
        )
    )
    modes.append(Misbehaviour("closing never ends", "time", {"__aexit__": _never_ends}, hangs=True))
    return modes


# Other.


def _other_modes() -> list[Misbehaviour]:
    return [
        Misbehaviour("contains is no coroutine", "other", {"contains": lambda tier, key: True}),
        Misbehaviour("get is no coroutine", "other", {"get": lambda tier, key, allocate: None}),
        Misbehaviour("put is no coroutine", "other", {"put": lambda tier, key, buffer: None}),
        Misbehaviour("statistics answers None", "other", {"statistics": lambda tier: None}),
        Misbehaviour("capabilities answers None", "other", {"capabilities": lambda tier: None}),
    ]


def _arena_modes() -> list[Misbehaviour]:
    """Misbehaviours of a tier that declares `in_arena`. It has no deadline and no write queue."""
    verbs: dict[str, dict[str, Callable[..., Any]]] = {
        "answers no list": {"contains_many": _gives(lambda _: None)},
        "looks up with CancelledError": {"contains_many": _raises(_RAISED["CancelledError"])},
        "reads with SystemExit": {"get": _raises(_RAISED["SystemExit"])},
        "reads bytes": {"get": _gives(lambda key: bytes(key))},
        "reads a released buffer": {"get": _released},
        "reads a buffer and releases it later": {"get": _released_later},
        "reads too few buffers": {"get_many": _too_few_buffers},
        "raises after allocate": {"get": _fails_after_allocate},
        "writes with KeyboardInterrupt": {"put": _raises(_RAISED["KeyboardInterrupt"])},
        "answers None for a batch of writes": {"put_many": _gives(lambda _: None)},
        "writes into its buffer": {"put": _writes_view},
    }
    arena = Capabilities(removes=True, lists=True, in_arena=True, local_index=True)
    return [
        Misbehaviour(f"a tier in the arena {name}", "other", replaced, arena)
        for name, replaced in verbs.items()
    ]


MISBEHAVIOURS: tuple[Misbehaviour, ...] = (
    *_answers(),
    *_exceptions(),
    *_loop_modes(),
    *_buffer_modes(),
    *_memory_modes(),
    *_time_modes(),
    *_other_modes(),
    *_arena_modes(),
)
"""All ways to misbehave, with unique names."""
