"""Deadlines of the calls of a tier. A late call is cancelled and abandoned; its end is not awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator

from lmcache_async.config.values import Seconds, parse_seconds, unless_none
from lmcache_async.errors import TierError, TierUnavailableError
from lmcache_async.memory.buffer import Buffer
from lmcache_async.memory.tasks import is_ending, running_task
from lmcache_async.tiers.answers import release_answers
from lmcache_async.tiers.base import Allocate, Tier
from lmcache_async.tiers.border import ContractError
from lmcache_async.tiers.layers.base import ConfiguredLayer, LayerConfig, LayerContext, TierLayer
from lmcache_async.types import ChunkKey

T = TypeVar("T")


def _parse_optional_seconds(value: object) -> float | None:
    value = unless_none(value)
    return None if value is None else parse_seconds(value)


OptionalSeconds = Annotated[float | None, BeforeValidator(_parse_optional_seconds)]


class DeadlineConfig(LayerConfig):
    """Options of the deadline layer; the tier's `timeout_s` holds beside them.

    Attributes:
        lookup_s: Longest time to say whether chunks are there, in seconds.
        read_s: Longest time of one call that reads; none means the tier's `timeout_s` alone.
        write_s: The same for one that writes or removes.
    """

    lookup_s: Seconds = 1.0
    read_s: OptionalSeconds = None
    write_s: OptionalSeconds = None


class BoundedLayer(TierLayer):
    """Ends every call within its deadline, with TierUnavailableError if it is late.

    A call that is late, or whose caller was cancelled, is cancelled and abandoned: its caller continues at
    once. Until the call has *really* ended, the buffers that it reads stay leased. Buffers that it returns
    afterwards are released.

    Args:
        inner: The tier.
        name: Tier id, for messages.
        lookup_s: Deadline in seconds of `contains`, `contains_many`, `count_prefix`; None for no deadline.
        read_s: Deadline in seconds of `get`, `get_many`; None for no deadline.
        write_s: Deadline in seconds of `put`, `put_many`, `remove`, `reject`, `clear`; None for no deadline.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        name: str,
        lookup_s: float | None,
        read_s: float | None,
        write_s: float | None,
    ) -> None:
        super().__init__(inner)
        self._name = name
        self._lookup_s = lookup_s
        self._read_s = read_s
        self._write_s = write_s
        self._late: set[asyncio.Task[Any]] = set()

    @property
    def late_calls(self) -> int:
        return len(self._late) + super().late_calls

    async def drain(self, *, timeout_s: float) -> bool:
        waits = [super().drain(timeout_s=timeout_s)]
        if self._late:
            waits.append(_ended(set(self._late), timeout_s))
        return all(await asyncio.gather(*waits))

    async def contains(self, key: ChunkKey) -> bool:
        return await self._call("contains", self._lookup_s, lambda: self.inner.contains(key))

    async def count_prefix(self, keys: Sequence[ChunkKey]) -> int:
        return await self._call("count_prefix", self._lookup_s, lambda: self.inner.count_prefix(keys))

    async def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return await self._call("contains_many", self._lookup_s, lambda: self.inner.contains_many(keys))

    async def get(self, key: ChunkKey, allocate: Allocate) -> Buffer | None:
        return await self._call("get", self._read_s, lambda: self.inner.get(key, allocate))

    async def get_many(self, keys: Sequence[ChunkKey], allocate: Allocate) -> list[Buffer | TierError | None]:
        return await self._call("get_many", self._read_s, lambda: self.inner.get_many(keys, allocate))

    async def put(self, key: ChunkKey, buffer: Buffer) -> None:
        if self._write_s is None:
            return await self.inner.put(key, buffer)
        kept = buffer.retain()
        return await self._call(
            "put", self._write_s, lambda: self.inner.put(key, kept), finally_=kept.release
        )

    async def put_many(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[TierError | None]:
        if self._write_s is None:
            return await self.inner.put_many(items)
        kept = [(key, buffer.retain()) for key, buffer in items]
        return await self._call(
            "put_many",
            self._write_s,
            lambda: self.inner.put_many(kept),
            finally_=lambda: release_answers([buffer for _, buffer in kept]),
        )

    async def remove(self, key: ChunkKey) -> bool:
        return await self._call("remove", self._write_s, lambda: self.inner.remove(key))

    async def reject(self, key: ChunkKey, cause: str) -> bool:
        return await self._call("reject", self._write_s, lambda: self.inner.reject(key, cause))

    async def clear(self) -> int:
        return await self._call("clear", self._write_s, self.inner.clear)

    async def _call(
        self,
        verb: str,
        timeout_s: float | None,
        run: Callable[[], Coroutine[Any, Any, T]],
        *,
        finally_: Callable[[], None] | None = None,
    ) -> T:
        """Await a call of the tier. The buffers of a late result are released.

        Args:
            verb: Name of the method, for messages.
            timeout_s: Deadline in seconds; None for no deadline, and then no task is created.
            run: Begins the call.
            finally_: Called when the call has really ended.
        """
        if timeout_s is None:
            return await run()
        task = asyncio.ensure_future(self._run(verb, run))
        if finally_ is not None:
            task.add_done_callback(lambda _: finally_())
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
        except asyncio.CancelledError:
            self._leave(task)
            raise
        if not done:
            self._leave(task)
            raise TierUnavailableError(f"tier {self._name!r}: {verb} gave no answer in {timeout_s} s")
        return self._result(verb, task)

    async def _run(self, verb: str, run: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the call in its own task. A SystemExit of a layer inside would end the event loop."""
        task = running_task()
        try:
            return await run()
        except Exception:
            raise
        except BaseException as error:
            if is_ending(error, task):
                raise
            raise ContractError.of(verb, error) from error

    def _result(self, verb: str, task: asyncio.Task[T]) -> T:
        """Return the result of a call that ended in time."""
        if task.cancelled():
            raise ContractError(f"{verb} cancelled its own task")
        return task.result()

    def _leave(self, task: asyncio.Task[T]) -> None:
        def ended(task: asyncio.Task[T]) -> None:
            self._late.discard(task)
            if task.cancelled() or task.exception() is not None:
                return
            answer = task.result()
            release_answers(answer if isinstance(answer, list) else [answer])

        self._late.add(task)
        task.add_done_callback(ended)
        task.cancel()


async def _ended(tasks: set[asyncio.Task[Any]], timeout_s: float) -> bool:
    _, running = await asyncio.wait(tasks, timeout=timeout_s)
    return not running


class DeadlineLayer(ConfiguredLayer):
    """Shorter deadlines than the tier's own: of lookups, of reads, of writes.

    Place it inside the breaker and retry layers, so that they treat a late call as a failed one.
    """

    options_type = DeadlineConfig

    def __init__(self, inner: Tier, options: DeadlineConfig, context: LayerContext) -> None:
        index_is_here = inner.capabilities.local_index  # lookups are answered from memory of this process
        bounded = BoundedLayer(
            inner,
            name=context.tier,
            lookup_s=None if index_is_here else options.lookup_s,
            read_s=options.read_s,
            write_s=options.write_s,
        )
        super().__init__(bounded, options, context)
