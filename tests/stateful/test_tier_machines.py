"""Every bundled tier and fake compared with a dict, on both loops."""

import asyncio

import pytest
import uvloop
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from lmcache_async.plugins.cpu import CPUConfig, CPUTier
from lmcache_async.testing.fakes import DictConfig, DictTier, FaultyTier, HandleTier, LatencyTier
from lmcache_async.testing.machines import TierMachine
from lmcache_async.testing.records import key_of
from lmcache_async.testing.steps import turns
from lmcache_async.testing.strategies import fault_plans
from tests.support.thorough import machine_settings
from tests.support.tiers import handle_of


class DictMachine(TierMachine):
    def make_tier(self, directory, max_bytes):
        return DictTier(DictConfig(max_bytes=max_bytes))


class PersistentDictMachine(TierMachine):
    def make_tier(self, directory, max_bytes):
        if not hasattr(self, "records"):
            self.records = {}
        return DictTier(DictConfig(max_bytes=max_bytes), records=self.records)

    async def damage_content(self, key, edit):
        self.records[key] = edit(self.records[key])
        return True


class CPUMachine(TierMachine):
    def make_tier(self, directory, max_bytes):
        return CPUTier(CPUConfig(max_bytes=max_bytes))


class HandleMachine(TierMachine):
    def make_tier(self, directory, max_bytes):
        inner = LatencyTier(DictTier(DictConfig(max_bytes=max_bytes)))
        return HandleTier(handle_of(inner))


class FaultyMachine(TierMachine):
    reliable = False

    def make_tier(self, directory, max_bytes):
        self.faulty = FaultyTier(DictTier(DictConfig(max_bytes=max_bytes)))
        return HandleTier(handle_of(self.faulty))

    @rule(plan=fault_plans(), again=st.booleans())
    def plan(self, plan, again):
        self.faulty.faults.extend(plan.faults * (1 + again))


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize(
    "machine", [DictMachine, PersistentDictMachine, CPUMachine, HandleMachine, FaultyMachine]
)
def test_a_tier_behaves_like_a_dict(machine, loop_factory):
    on_loop = type(machine.__name__, (machine,), {"loop_factory": staticmethod(loop_factory)})

    run_state_machine_as_test(on_loop, settings=machine_settings(12, 20))


class LatePutTier(DictTier):
    """Publishes a record some turns of the loop after the call."""

    async def put(self, key, buffer):
        await turns(20)
        await super().put(key, buffer)


class LatePutMachine(PersistentDictMachine):
    def make_tier(self, directory, max_bytes):
        self.records = {}
        return LatePutTier(DictConfig(max_bytes=max_bytes), records=self.records)


def test_a_put_may_publish_a_chunk_again_after_its_damaged_record_was_read_and_removed():
    machine = LatePutMachine()
    machine.start(max_slabs=None)
    machine.put_some([0])
    machine.damage(which=0, edit="cut in half")

    machine.overlap(puts=[0, 1], gets=[0], removals=[])

    assert key_of(0) in machine.records
    machine.the_tier_is_sound()
    machine.teardown()
