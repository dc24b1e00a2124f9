"""Tiers that an engine builds from its config, with access for the test."""

from __future__ import annotations

import asyncio
import logging

from lmcache_async.logging import LimitedLogger
from lmcache_async.testing.fakes import DictTier, FakeRegistry, ForwardingTier
from lmcache_async.tiers.base import Capabilities
from lmcache_async.tiers.handle import TierHandle
from lmcache_async.tiers.results import release_results


def registry_of(**tiers) -> FakeRegistry:
    """Return a registry of the installed plug-ins and the given tiers by name."""
    return FakeRegistry(tiers=tiers)


def altered(**members) -> type[DictTier]:
    """Return a class of DictTiers with other methods, or other capabilities."""
    return type("Altered", (DictTier,), members)


async def hang(*_):
    """Never answer, as a method of a tier."""
    await asyncio.Event().wait()


def gives(value):
    """Return a method of a tier that returns the value."""

    async def method(*_):
        return value

    return method


def raises(error):
    """Return a method of a tier that raises the error."""

    async def method(*_):
        raise error

    return method


class Made:
    """A registry with the tier `dict`: a DictTier over `records`, wrapped by `wrap`.

    Attributes:
        tiers: Tiers made, in order.
        records: Records of these tiers. They outlive the tiers.
    """

    def __init__(self, wrap=lambda tier: tier):
        self.tiers = []
        self.records = {}
        made = self

        class Persistent(DictTier):
            @property
            def capabilities(self):
                return Capabilities(persistent=True, removes=True, lists=True, local_index=True)

        class Kept(DictTier):
            def __new__(cls, *arguments):
                inner = Persistent(*arguments)
                inner.records = made.records
                made.tiers.append(wrap(inner))
                return made.tiers[-1]

        self.tier_class = Kept

    @property
    def tier(self):
        return self.tiers[-1]

    @property
    def registry(self):
        return registry_of(dict=self.tier_class)


def handle_of(tier, *, name="t", timeout_s=60.0, **options):
    """Return a handle of the tier without layers other than the deadline."""
    logger = LimitedLogger(logging.getLogger("lmcache_async"))
    return TierHandle(tier, name=name, timeout_s=timeout_s, logger=logger, **options)


class ParkingTier(ForwardingTier):
    """A tier that blocks the calls of one method until the gate is opened. Other calls pass.

    Attributes:
        verb: Name of the method; "" for none.
        parked: Set when a call is blocked.
        stubborn: A blocked call ignores cancellation, like a thread in the middle of a write.
    """

    def __init__(self, inner, verb="", *, stubborn=False):
        super().__init__(inner)
        self.verb = verb
        self.stubborn = stubborn
        self.parked = asyncio.Event()
        self._gate = asyncio.Event()

    def close_gate(self, verb):
        self.verb = verb
        self.parked, self._gate = asyncio.Event(), asyncio.Event()

    def open_gate(self):
        self.verb = ""
        self._gate.set()

    async def around(self, verb, nbytes, call):
        verb = verb.removesuffix("_many")
        await self._park(verb)
        result = await call()
        try:
            await self._park({"get": "got", "put": "have put"}.get(verb))
        except asyncio.CancelledError:
            release_results(result)
            raise
        return result

    async def clear(self):
        await self._park("clear")
        return await super().clear()

    async def _park(self, verb):
        if verb != self.verb:
            return
        self.parked.set()
        gate = self._gate
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise
