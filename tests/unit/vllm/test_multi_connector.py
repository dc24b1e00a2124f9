"""The connector in vLLM's MultiConnector, behind another connector whose loads fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from tests.support.vllm_simulator import Setup, SimulatedVLLM

Until = Callable[[Callable[[], bool]], None]

BLOCK = 16
LOADED = 8 * BLOCK


@dataclass
class Blocks(KVConnectorMetadata):
    ids: set[int] = field(default_factory=set)


class FailingConnector(KVConnectorBase_V1):
    """Offers the start of the first prompt, and loads nothing of it in the step that uses it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._offers = True
        self._blocks = Blocks()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return LOADED - num_computed_tokens if self._offers else 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._offers = False
            self._blocks.ids.update(blocks.get_block_ids()[0][: LOADED // BLOCK])

    def build_connector_meta(self, scheduler_output: Any) -> Blocks:
        blocks, self._blocks = self._blocks, Blocks()
        return blocks

    def get_block_ids_with_load_errors(self) -> set[int]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Blocks)
        return metadata.ids

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


@pytest.fixture
def simulator(tmp_path: Path, socket_dir: Path, until: Until) -> Iterator[SimulatedVLLM]:
    options = {
        "chunk_size": 4 * BLOCK,
        "arena.max_bytes": "8MiB",
        "vllm.load_policy": "always",
        "vllm.lookup_timeout_s": 20.0,
        "vllm.socket_dir": str(socket_dir),
        "tiers": ["cpu"],
    }
    other = {
        "kv_connector": FailingConnector.__name__,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
    }
    setup = Setup(folder=tmp_path / "model", options=options, block_size=BLOCK, multi=True, others=(other,))
    sim = SimulatedVLLM(setup)
    until(lambda: sim.connector.sub_connectors[1].scheduler.ready)
    yield sim
    sim.close()


def test_kv_that_another_connector_failed_to_load_is_not_stored(simulator: SimulatedVLLM, until: Until):
    """The step that finds the failure computes with what the other connector should have loaded."""
    prompt = list(range(1, 12 * BLOCK + 5))

    for name in ("failed", "computed", "loaded"):
        simulator.add(name, prompt)
        simulator.run()  # raises if wrong KV is loaded
        assert simulator.scheduler.reset_prefix_cache()

    assert [simulator.cached_tokens[name][1] for name in ("computed", "loaded")] == [0, 12 * BLOCK]
    assert simulator.outputs["failed"] == simulator.outputs["computed"] == simulator.outputs["loaded"]
    assert set(simulator.finish_reasons.values()) == {"length"}


def test_kv_that_another_request_should_have_loaded_in_the_same_step_is_not_stored(simulator: SimulatedVLLM):
    """The second request finds the blocks of the first one in vLLM's cache before they are loaded."""
    prompt = list(range(1, 12 * BLOCK + 5))

    simulator.add("failed", prompt)
    simulator.add("beside", prompt)
    while simulator.busy:
        simulator.step()
        time.sleep(0.1)  # a store copies before the next step computes the blocks again
    assert simulator.cached_tokens["beside"] == (12 * BLOCK, 0)
    assert simulator.scheduler.reset_prefix_cache()
    simulator.add("computed", prompt)
    simulator.run()  # raises if wrong KV is loaded

    assert simulator.outputs["failed"] == simulator.outputs["beside"] == simulator.outputs["computed"]
