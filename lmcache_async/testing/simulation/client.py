"""One of several callers of the engine: draws an operation, makes it, and checks its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmcache_async.engine.engine import CacheEngine
from lmcache_async.errors import EngineClosedError, TierError
from lmcache_async.pipeline.batch import StoreRequest
from lmcache_async.testing.simulation.checks import check_always
from lmcache_async.testing.simulation.device import Region
from lmcache_async.testing.simulation.errors import Violation
from lmcache_async.testing.simulation.model import Promise
from lmcache_async.testing.simulation.prompts import Prompt
from lmcache_async.testing.simulation.scenario import CHUNK, RETRIEVE_S, STORE_S
from lmcache_async.types import StoreReport

if TYPE_CHECKING:
    from lmcache_async.testing.simulation.world import World

CANCELLED = object()
"""What a call came to that was cancelled."""


class Client:
    """Works on a region of device memory of its own.

    Args:
        world: What it draws from, and tells.
        name: Distinguishes its lookups.
    """

    def __init__(self, world: World, engine: CacheEngine, region: Region, name: str) -> None:
        self._world = world
        self._model = world.model
        self._rng = world.rng
        self._engine = engine
        self._region = region
        self._name = name
        self._verbs: tuple[Callable[[], Awaitable[None]], ...]
        self._verbs, self._weights = zip(
            (self._store, 30),
            (self._retrieve, 34),
            (self._lookup, 12),
            (self._prefetch, 8),
            (self._unpin, 5),
            (self._pause, 5),
            (self._flush, 4),
            (self._clear, 2),
            strict=True,
        )

    async def run(self, operations: int) -> None:
        """So many operations, one after another; fewer when the engine is closed meanwhile."""
        for _ in range(operations):
            [verb] = self._rng.choices(self._verbs, self._weights)
            self._world.begin_step(verb.__name__)
            try:
                await verb()
                check_always(self._engine)
            except EngineClosedError:
                if not self._world.closing:
                    raise
                return
            except Exception:
                self._world.freeze()  # what comes later is not what led to it
                raise

    # Operations.

    async def _store(self) -> None:
        prompt = self._world.draw_prompt()
        region, model = self._region, self._model
        region.write(prompt.content)
        begun, copied, epoch = False, 0, model.epoch

        def on_copied() -> None:
            nonlocal copied
            copied += 1
            region.poison()  # whoever reads it now stores poison

        async def store_chunks() -> StoreReport:
            nonlocal begun
            begun = True
            model.begin(prompt, store=True)
            request = StoreRequest(
                tokens=prompt.tokens,
                row_ids=region.rows[: len(prompt.tokens)],
                root=self._engine._root(prompt.request_namespace),
                request_namespace=self._engine._label(prompt.request_namespace),
                on_copied=on_copied,
            )
            return await self._engine.store_chunks(request)

        async def store() -> StoreReport:
            model.begin(prompt, store=True)
            return await self._engine.store(prompt.tokens, region.rows, namespace=prompt.request_namespace)

        if self._rng.random() < 0.5:
            report = await self._call(store_chunks(), STORE_S, twice=True)
            for _ in range(10_000):  # cancelled twice, the caller is back before the copy has ended
                if copied or not begun:
                    break
                await asyncio.sleep(1e-3)
            if copied != begun:
                raise Violation(f"the end of a store's copy was told {copied} times, not {int(begun)}")
        else:
            report = await self._call(store(), STORE_S)
        region.poison()
        self._note_stored(prompt, report, epoch)

    def _note_stored(self, prompt: Prompt, report: StoreReport | object, epoch: int) -> None:
        if not isinstance(report, StoreReport):
            return
        given = report.stored + report.present + sum(report.dropped.values())
        # A chain that failed as a whole does not know how many chunks there were.
        if given != len(prompt.chunks) and not {"BudgetExceededError", "TierError"} & report.dropped.keys():
            raise Violation(f"a store of {len(prompt.chunks)} chunks answers for {given}: {report}")
        if not report.dropped:
            self._model.stored(prompt, since=epoch)
        elif self._model.all_fits:
            raise Violation(f"there was room for everything, but a store dropped {dict(report.dropped)}")

    async def _retrieve(self) -> None:
        prompt = self._world.draw_prompt()
        num_tokens = len(prompt.tokens)
        skip = self._rng.randrange(num_tokens) if self._rng.random() < 0.3 else 0
        mask: torch.Tensor | None = None
        rows = self._region.rows
        if skip and self._rng.random() < 0.5:
            mask = torch.ones(num_tokens, dtype=torch.bool)
            mask[:skip] = False
        elif skip:
            rows = rows.copy()
            rows[:skip] = -1
        promise = Promise()

        async def retrieve() -> torch.Tensor:
            nonlocal promise
            self._model.begin(prompt, store=False)
            promise = self._model.promise(prompt, skip // CHUNK)
            return await self._engine.retrieve(
                prompt.tokens, rows, mask=mask, namespace=prompt.request_namespace
            )

        result = await self._call(retrieve(), RETRIEVE_S)
        if result is CANCELLED:
            self._region.poison()
            return
        hit = np.flatnonzero(result.numpy())
        stop = skip + len(hit)
        if len(hit) and (hit[0] != skip or hit[-1] != stop - 1):
            raise Violation(f"the mask is not of the form F*T*F* from token {skip} on: {hit.tolist()}")
        self._check_bounds(prompt, skip, stop, promise)
        self._region.check(prompt.content, skip, stop)
        self._world.count("hit tokens", len(hit))

    async def _lookup(self) -> None:
        prompt = self._world.draw_prompt()
        lookup_id = f"{self._name}-{self._rng.randrange(3)}" if self._rng.random() < 0.5 else None
        promise = Promise()

        async def lookup() -> int:
            nonlocal promise
            promise = self._model.promise(prompt)
            return await self._engine.lookup(
                prompt.tokens, namespace=prompt.request_namespace, lookup_id=lookup_id
            )

        found = await self._call(lookup(), RETRIEVE_S)
        if found is not CANCELLED:
            self._check_bounds(prompt, 0, found, promise, hearsay=True)

    async def _prefetch(self) -> None:
        prompt = self._world.draw_prompt()
        promise = Promise()

        async def prefetch() -> int:
            nonlocal promise
            self._model.begin(prompt, store=False)
            promise = self._model.promise(prompt)
            return await self._engine.prefetch(prompt.tokens, namespace=prompt.request_namespace)

        found = await self._call(prefetch(), RETRIEVE_S)
        if found is not CANCELLED:
            self._check_bounds(prompt, 0, found, promise)

    async def _unpin(self) -> None:
        self._engine.unpin(f"{self._name}-{self._rng.randrange(3)}")

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.choice((0.0, 1e-3, 0.1)) * self._rng.random())

    async def _flush(self) -> None:
        since = self._model.begin_flush()
        if await self._call(self._engine.flush(timeout_s=1.0), 1.0) is True:
            self._model.flushed(since)
            if self._rng.random() < 0.1:
                self._world.crash_now()

    async def _clear(self) -> None:
        memory_only = self._rng.random() < 0.5
        self._model.begin_clear(memory_only=memory_only)
        done = False
        try:
            tiers_s = self._world.scenario.slow_tiers * self._world.scenario.call_s
            clearing = self._engine.clear(memory_only=memory_only)
            done = await self._call(clearing, 2 * STORE_S + tiers_s) is not CANCELLED
        except TierError as error:
            if self._model.all_fits and not self._world.closing:
                raise Violation(f"nothing fails, but a clearing did: {error}") from None
        finally:
            self._model.end_clear(memory_only=memory_only, done=done)
        if done:  # what is late is on its way now
            await self._pause()
            for _ in range(3):
                await self._lookup()

    # What all of them need.

    async def _call(self, coroutine: Coroutine[Any, Any, Any], limit_s: float, *, twice: bool = False) -> Any:
        """The call's answer, in time; it may be cancelled in the middle.

        Args:
            twice: Whether the caller may even lose its patience with the end of a cancelled call.
        """
        loop = asyncio.get_running_loop()
        start = loop.time()
        if self._rng.random() >= self._world.scenario.weather.odds.cancel:
            answer = await coroutine
        else:
            task = loop.create_task(coroutine)
            await self._while_it_runs(task)
            task.cancel()
            if twice and self._rng.random() < 0.5:
                await self._while_it_runs(task)
                task.cancel()
            await asyncio.wait({task})
            answer = CANCELLED if task.cancelled() else task.result()
            self._world.count("cancelled", answer is CANCELLED)
        seconds = loop.time() - start
        if seconds > limit_s + self._world.slack_s:
            raise Violation(f"a call took {seconds:.3f} s of virtual time; its deadline is {limit_s} s")
        return answer

    async def _while_it_runs(self, task: asyncio.Task[Any]) -> None:
        if self._rng.random() < 0.7:
            for _ in range(self._rng.randrange(60)):
                await asyncio.sleep(0)
        else:
            await asyncio.wait({task}, timeout=self._rng.choice((2e-3, 1.0)) * self._rng.random())

    def _check_bounds(
        self, prompt: Prompt, skip: int, stop: int, promise: Promise, *, hearsay: bool = False
    ) -> None:
        """A hit of tokens `skip` to `stop` may be, and is all that has to be.

        Args:
            promise: What was known when the call began.
            hearsay: Nobody has looked at the records yet: a tier that lies is believed.
        """
        first = skip // CHUNK
        ends = [end for _, end in prompt.chunks[first:]]
        least, most = self._model.bounds(promise, prompt, first)
        if stop > skip and stop not in ends:
            raise Violation(f"a hit ends at token {stop}, which is no chunk's end ({ends})")
        if stop > max(skip, ends[most - 1] if most else 0) and not (
            hearsay and self._world.scenario.weather.odds.lie
        ):
            raise Violation(
                f"a hit up to token {stop}, but of this prompt, in this namespace, "
                f"{most} chunks were ever stored: up to token {ends[most - 1] if most else skip}"
            )
        if least and stop < ends[least - 1]:
            raise Violation(
                f"a miss from token {stop} on, but everything fits, nothing failed, and "
                f"{least} chunks were stored: up to token {ends[least - 1]}"
            )
