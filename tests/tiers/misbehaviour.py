"""A table of ways in which a tier can misbehave, and a tier that misbehaves on demand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmcache_async.errors import BudgetExceededError, TierError
from lmcache_async.memory.arena import Arena
from lmcache_async.memory.buffer import Buffer
from lmcache_async.testing.fakes import DictTier
from lmcache_async.tiers.base import Capabilities, Tier

REMOTE = Capabilities(removes=True, lists=True)
LOCAL = Capabilities(removes=True, lists=True, local_index=True)
OWN = Capabilities(removes=True, lists=True, own_memory=True)
ARENA = Capabilities(removes=True, lists=True, in_arena=True, local_index=True)


@dataclass(frozen=True, slots=True, eq=False)
class Misbehaviour:
    """One way to misbehave.

    Attributes:
        name: Description of the behaviour, unique in the table.
        verb: Name of the method that is replaced.
        work: The replacement, called with the tier and the method's arguments.
        capabilities: Capabilities that the tier declares.
        ends_loop: The running event loop ends. Only an engine with its own loop thread continues.
        hangs: Calls do not end by themselves, so the tier needs a short `timeout_s`.
        serves: Other tiers serve the same chunks meanwhile. If False, wrong records are detected only after
            they were read, and the prompt is recomputed.
    """

    name: str
    verb: str
    work: Callable[..., Any]
    capabilities: Capabilities = REMOTE
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

    def __init__(self, mode, config=None):
        super().__init__(config)
        self.mode = mode
        self.active = False
        self.tasks = set()
        self.kept = []
        self.others = []
        self.released = asyncio.Event()

    def begin(self):
        self.active = True

    def end(self):
        self.active = False
        self.released.set()

    def spawn(self, work):
        """Run `work` in a background task of the tier."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task):
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved, so that asyncio does not report it

    def replaces(self, verb):
        return self.active and self.mode.verb == verb

    @property
    def capabilities(self):
        return self.mode.work(self) if self.replaces("capabilities") else self.mode.capabilities

    def statistics(self):
        return self.mode.work(self) if self.replaces("statistics") else DictTier.statistics(self)

    async def keys(self):
        if self.replaces("keys"):
            self.mode.work(self)
        async for key in DictTier.keys(self):
            yield key

    async def __aexit__(self, *error):
        for task in self.tasks:
            task.cancel()
        if self.replaces("__aexit__"):
            await self.mode.work(self)


def _replaceable(verb, owner):
    async def method(self, *arguments):
        work = self.mode.work if self.replaces(verb) else getattr(owner, verb)
        return await work(self, *arguments)

    setattr(MisbehavingTier, verb, method)


for _verb in ("contains", "get", "put", "reject"):
    _replaceable(_verb, DictTier)
for _verb in ("contains_many", "count_prefix", "get_many", "put_many"):
    _replaceable(_verb, Tier)

_MODES: list[Misbehaviour] = []


def mode(name, verb=None, **options):
    """Add the decorated function to the table as a replacement of the method that is the name's first word."""

    def add(work):
        _MODES.append(Misbehaviour(name, verb or name.split()[0], work, **options))
        return work

    return add


# Wrong return values.


def gives(answer):
    """Return a method that returns `answer()` of its first argument."""

    async def method(tier, *arguments):
        return answer(*arguments[:1])

    return method


_ANSWERS: dict[str, dict[str, Callable[[Any], object]]] = {
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
for _verb, _answers in _ANSWERS.items():
    for _what, _answer in _answers.items():
        _capabilities = LOCAL if _verb == "contains_many" else REMOTE
        mode(f"{_verb} answers {_what}", capabilities=_capabilities)(gives(_answer))


@mode("contains answers the opposite")
async def _lies(tier, key):
    return key not in tier.records


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


def raises(what):
    async def method(tier, *arguments):
        await asyncio.sleep(0)
        error = _RAISED[what]()
        raise error

    return method


for _verb in ("count_prefix", "get", "put"):
    for _what in _RAISED:
        mode(f"{_verb} raises {_what}")(raises(_what))
for _verb in ("get_many", "put_many", "reject"):
    for _what in ("SystemExit", "CancelledError", "an unprintable error"):
        mode(f"{_verb} raises {_what}")(raises(_what))
for _what in ("ValueError", "SystemExit", "CancelledError"):
    mode(f"closing raises {_what}", "__aexit__")(raises(_what))


@mode("statistics raises SystemExit")
@mode("capabilities raises SystemExit")
@mode("keys raises SystemExit")
def _exits(tier):
    raise SystemExit(1)


# The event loop and its tasks.


async def _stops_loop(tier, *_):
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


async def _raise(error):
    raise error


async def _fails_in_task(tier, *_):
    await tier.spawn(_raise(SystemExit(1)))


async def _fails_in_background(tier, *_):
    tier.spawn(_raise(KeyboardInterrupt()))
    await asyncio.sleep(0)


async def _fails_in_callback(tier, *_):
    asyncio.get_running_loop().call_soon(_exits, tier)
    await asyncio.sleep(0)


async def _cancels_itself(tier, *_):
    asyncio.current_task().cancel("by the tier itself")
    await asyncio.sleep(0)


async def _awaits_cancelled(tier, *_):
    future = asyncio.get_running_loop().create_future()
    future.cancel("by the tier's own client")
    await future


for _verb in ("count_prefix", "get", "put"):
    mode(f"{_verb} stops the loop", ends_loop=True)(_stops_loop)
    mode(f"{_verb} raises SystemExit in a task of its own", ends_loop=True)(_fails_in_task)
    mode(f"{_verb} raises KeyboardInterrupt in the background", ends_loop=True)(_fails_in_background)
    mode(f"{_verb} raises SystemExit in a callback", ends_loop=True)(_fails_in_callback)
    mode(f"{_verb} awaits what was cancelled")(_awaits_cancelled)
    mode(f"{_verb} cancels its own task")(_cancels_itself)


# The buffer of a put.


@mode("a tier in the arena writes into its buffer", "put", capabilities=ARENA)
@mode("put writes into the view of its buffer")
async def _writes_view(tier, key, buffer):
    buffer.view[-8:] = b"\xee" * 8


@mode("put resizes its buffer")
async def _resizes(tier, key, buffer):
    tier.records[key] = bytes(buffer.view)
    buffer.resize(1)


@mode("put releases its buffer")
async def _releases(tier, key, buffer):
    tier.records[key] = bytes(buffer.view)
    buffer.release()


@mode("put releases its buffer twice")
async def _releases_twice(tier, key, buffer):
    buffer.release()
    buffer.release()


async def _write_later(buffer, view, times):
    for _ in range(times):
        await asyncio.sleep(0)
        with contextlib.suppress(TypeError, ValueError):
            view[-8:] = b"\xee" * 8
        with contextlib.suppress(TypeError, ValueError):
            buffer.view[-8:] = b"\xee" * 8


@mode("put writes into its buffer later")
async def _writes_later(tier, key, buffer):
    tier.records[key] = bytes(buffer.view)
    tier.spawn(_write_later(buffer, buffer.view, 20))


@mode("put keeps its buffer and releases it later")
async def _keeps(tier, key, buffer):
    tier.records[key] = bytes(buffer.view)
    for kept in tier.kept:
        with contextlib.suppress(ValueError, RuntimeError):
            kept.release()
    tier.kept = [buffer]


@mode("put_many empties the list of its items")
async def _changes_items(tier, items):
    count = len(items)
    with contextlib.suppress(AttributeError):
        items.clear()
    return [None] * count


# The buffers of a get.


@mode("a tier in the arena raises after allocate", "get", capabilities=ARENA)
@mode("get raises after allocate")
async def _fails_after_allocate(tier, key, allocate):
    await allocate(100)
    raise ValueError("of this test")


@mode("get raises with views of its memory in the traceback")
async def _looks_and_fails(tier, key, allocate):
    buffer = await allocate(len(tier.records.get(key, b"12345678")))
    _array, _slice = buffer.array, buffer.view[2:5]  # referenced by the frame in the traceback
    raise ValueError("of this test")


@mode("get allocates and answers None")
async def _forgets(tier, key, allocate):
    await allocate(100)


@mode("get keeps its memory and answers None")
async def _keeps_memory(tier, key, allocate):
    tier.kept.append(await allocate(100))


@mode("get keeps a further lease of its memory")
async def _retains_memory(tier, key, allocate):
    buffer = await DictTier.get(tier, key, allocate)
    tier.kept.append(buffer.retain())
    return buffer


@mode("get allocates without end")
async def _wants_all(tier, key, allocate):
    while True:
        await allocate(100)


def allocates(nbytes):
    async def get(tier, key, allocate):
        await allocate(nbytes)
        return await DictTier.get(tier, key, allocate)

    return get


mode("get allocates twice")(allocates(100))
mode("get allocates a str")(allocates("100"))
mode("get allocates a float")(allocates(100.5))
mode("get allocates a negative number")(allocates(-1))
mode("get allocates more than a slab")(allocates(1 << 40))


@mode("get allocates after its end")
async def _allocates_later(tier, key, allocate):
    async def later():
        for _ in range(10):
            await asyncio.sleep(0)
        with contextlib.suppress(Exception):
            tier.kept.append(await allocate(100))

    tier.spawn(later())
    return await DictTier.get(tier, key, allocate)


@mode("a tier in the arena reads a released buffer", "get", capabilities=ARENA)
@mode("get of a tier with memory of its own answers a released buffer", capabilities=OWN)
@mode("get answers a released buffer")
async def _released(tier, key, allocate):
    buffer = await DictTier.get(tier, key, allocate)
    buffer.release()
    return buffer


@mode("a tier in the arena reads a buffer and releases it later", "get", capabilities=ARENA)
@mode("get of a tier with memory of its own releases later", capabilities=OWN)
@mode("get releases its buffer after its end")
async def _released_later(tier, key, allocate):
    buffer = await DictTier.get(tier, key, allocate)

    async def later():
        await asyncio.sleep(0)
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                buffer.release()

    tier.spawn(later())
    return buffer


@mode("get writes into its buffer after its end", serves=False)
async def _writes_after_get(tier, key, allocate):
    buffer = await DictTier.get(tier, key, allocate)
    tier.spawn(_write_later(buffer, buffer.view, 50))
    return buffer


@mode("get answers a buffer of another arena")
async def _of_another_arena(tier, key, allocate):
    record = tier.records[key]
    other = Arena(1 << 16, len(record), huge_pages=False, prefault=False)
    buffer = other.lease_nowait(len(record))
    buffer.view[:] = record
    tier.others.append((other, buffer))
    return buffer


@mode("get answers another chunk's record", serves=False)
async def _another_record(tier, key, allocate):
    return await DictTier.get(tier, next(other for other in tier.records if other != key), allocate)


def edited(edit):
    async def get(tier, key, allocate):
        record = edit(tier.records[key])
        buffer = await allocate(len(record))
        buffer.view[:] = record
        return buffer

    return get


mode("get answers a changed record", serves=False)(
    edited(lambda record: record[:-1] + bytes([record[-1] ^ 0xFF]))
)
mode("get answers a record cut short", serves=False)(edited(lambda record: record[:-9]))
mode("get answers a record of no bytes", serves=False)(edited(lambda _: b""))
mode("get answers a record of zeros", serves=False)(edited(lambda record: bytes(len(record))))


@mode("get_many answers the buffers of an earlier call")
async def _earlier_buffers(tier, keys, allocate):
    before, tier.kept = tier.kept, [await allocate(len(tier.records[keys[0]])) for _ in keys]
    return [*before, *[None] * len(keys)][: len(keys)]


@mode("get_many answers one buffer for all keys", serves=False)
async def _same_buffer_for_all(tier, keys, allocate):
    return [await DictTier.get(tier, keys[0], allocate)] * len(keys)


@mode("a tier in the arena reads too few buffers", "get_many", capabilities=ARENA)
@mode("get_many of a tier with memory of its own answers too few", capabilities=OWN)
@mode("get_many answers too few buffers")
async def _too_few_buffers(tier, keys, allocate):
    return [await DictTier.get(tier, key, allocate) for key in keys][:-1]


@mode("get_many answers too many buffers")
async def _too_many_buffers(tier, keys, allocate):
    return [await DictTier.get(tier, key, allocate) for key in [*keys, keys[0]]]


@mode("get_many answers the buffers in another order", serves=False)
async def _reversed_buffers(tier, keys, allocate):
    return [await DictTier.get(tier, key, allocate) for key in reversed(keys)]


@mode("get_many reverses the list of its keys")
async def _changes_keys(tier, keys, allocate):
    answers = await Tier.get_many(tier, keys, allocate)
    with contextlib.suppress(AttributeError, TypeError):
        keys.reverse()
    return answers


mode("get of a tier with memory of its own answers bytes", capabilities=OWN)(gives(bytes))
mode("a tier in the arena reads bytes", "get", capabilities=ARENA)(gives(bytes))
mode("a tier in the arena answers no list", "contains_many", capabilities=ARENA)(gives(lambda _: None))
mode("a tier in the arena answers None for a batch of writes", "put_many", capabilities=ARENA)(
    gives(lambda _: None)
)
mode("a tier in the arena looks up with CancelledError", "contains_many", capabilities=ARENA)(
    raises("CancelledError")
)
mode("a tier in the arena reads with SystemExit", "get", capabilities=ARENA)(raises("SystemExit"))
mode("a tier in the arena writes with KeyboardInterrupt", "put", capabilities=ARENA)(
    raises("KeyboardInterrupt")
)


# Time.


@mode("closing never ends", "__aexit__", hangs=True)
async def _never_ends(tier, *_):
    await asyncio.get_running_loop().create_future()


async def _ignores_cancellation(tier, *_):
    while not tier.released.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await tier.released.wait()


async def _uncancels(tier, *_):
    try:
        await _never_ends(tier)
    except asyncio.CancelledError:
        asyncio.current_task().uncancel()
        raise


async def _fails_after_cancellation(tier, *_):
    try:
        await _never_ends(tier)
    except asyncio.CancelledError:
        raise ValueError("raised for a cancellation") from None


for _verb in ("count_prefix", "get", "put"):
    mode(f"{_verb} never ends", hangs=True)(_never_ends)
    mode(f"{_verb} ignores cancellation", hangs=True)(_ignores_cancellation)
    mode(f"{_verb} takes its cancellation back", hangs=True)(_uncancels)
    mode(f"{_verb} raises ValueError when it is cancelled", hangs=True)(_fails_after_cancellation)


@mode("get allocates and never ends", hangs=True)
async def _allocates_and_never_ends(tier, key, allocate):
    await allocate(100)
    await _never_ends(tier)


@mode("get answers when it is cancelled", hangs=True)
async def _answers_after_cancellation(tier, key, allocate):
    with contextlib.suppress(asyncio.CancelledError):
        await _never_ends(tier)
    return await DictTier.get(tier, key, allocate)


# No coroutine, no value.

mode("contains is no coroutine")(lambda tier, key: True)
mode("get is no coroutine")(lambda tier, key, allocate: None)
mode("put is no coroutine")(lambda tier, key, buffer: None)
mode("statistics answers None")(lambda tier: None)
mode("capabilities answers None")(lambda tier: None)

MISBEHAVIOURS = tuple(_MODES)
"""All ways to misbehave, with unique names."""
