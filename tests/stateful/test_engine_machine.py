"""The engine compared with a model: a hit is a prefix, and its content is what was stored."""

import asyncio

import pytest
import uvloop
from hypothesis.stateful import run_state_machine_as_test

from lmcache_async.testing.fakes import DictTier
from lmcache_async.testing.machines import CacheMachine
from tests.support.thorough import machine_settings
from tests.support.tiers import registry_of


class SlowerTierMachine(CacheMachine):
    """A small third-party tier in front of the disk."""

    def make_tiers(self, directory, max_bytes):
        return [
            {"name": "dict", "max_bytes": 3 * self.rig.slab_bytes},
            *super().make_tiers(directory, max_bytes)[1:],
        ]

    def make_registry(self):
        return registry_of(dict=DictTier)


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("machine", [CacheMachine, SlowerTierMachine])
def test_an_engine_keeps_its_promises(machine, loop_factory):
    on_loop = type(machine.__name__, (machine,), {"loop_factory": staticmethod(loop_factory)})

    run_state_machine_as_test(on_loop, settings=machine_settings(12))
