"""The connector in vLLM's MultiConnector, behind another connector whose loads fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from tests.support.vllm_simulator import SimulatedVLLM, Simulators, expected
from tests.support.vllm_traffic import LoadingConnector

BLOCK = 16
AT_ONCE = {"skip_load": True}
"""Request parameters with which our connector looks nothing up, so that the next step has the request."""
LOADED = 8 * BLOCK


@dataclass
class Blocks(KVConnectorMetadata):
    ids: set[int] = field(default_factory=set)


class FailingConnector(LoadingConnector):
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


@dataclass
class Ended(KVConnectorMetadata):
    request_ids: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


class AsynchronousConnector(FailingConnector):
    """Offers the start of the prompts of two requests, and fills no block.

    The load of the request "failed" fails at once, and that of "aborted" ends when the request is aborted.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._ended = Ended()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not (self._offers and request.request_id in ("failed", "aborted")):
            return 0, False
        return LOADED - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens and request.request_id == "failed":
            self._ended = Ended({"failed"}, self._blocks.ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id == "aborted":
            self._ended = Ended({"aborted"})
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        ended, self._ended = self._ended, Ended()
        return ended

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Ended)
        return None, metadata.request_ids

    def get_block_ids_with_load_errors(self) -> set[int]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Ended)
        return metadata.bad_blocks


@pytest.fixture
def beside_another(simulators: Simulators) -> Callable[..., SimulatedVLLM]:
    def make(other_class: type = FailingConnector, **setup: Any) -> SimulatedVLLM:
        other = {
            "kv_connector": other_class.__name__,
            "kv_connector_module_path": __name__,
            "kv_role": "kv_both",
        }
        return simulators(
            {"tiers": ["cpu"], "vllm.max_pinned_fraction": 0.9},
            block_size=BLOCK,
            multi=True,
            others=(other,),
            **setup,
        )

    return make


def test_kv_that_another_connector_failed_to_load_is_not_stored(
    beside_another: Callable[..., SimulatedVLLM], simulators: Simulators
):
    """The step that finds the failure computes with what the other connector should have loaded."""
    simulator, prompt = beside_another(), list(range(1, 12 * BLOCK + 5))

    for name in ("failed", "computed", "loaded"):
        simulator.add(name, prompt)
        simulators.settle(simulator)  # raises if wrong KV is loaded

    assert [simulator.cached_tokens[name][1] for name in ("computed", "loaded")] == [0, 12 * BLOCK]
    assert simulator.outputs["failed"] == simulator.outputs["computed"] == simulator.outputs["loaded"]
    assert set(simulator.finish_reasons.values()) == {"length"}


def test_blocks_that_another_connector_loads_are_not_shared_until_the_end_of_the_step(
    beside_another: Callable[..., SimulatedVLLM], simulators: Simulators
):
    """The second request would find the blocks of the first one in vLLM's cache before they are loaded."""
    simulator, prompt = beside_another(), list(range(1, 12 * BLOCK + 5))

    simulator.add("failed", prompt, params=AT_ONCE)
    simulator.add("beside", prompt, params=AT_ONCE)
    while simulator.busy:
        simulator.step()
        simulators.end_calls(simulator)  # a store copies before the next step computes the blocks again
    assert simulator.cached_tokens["beside"] == (0, 0)
    simulators.settle(simulator)
    simulator.add("loaded", prompt)
    simulator.run()  # raises if wrong KV is loaded

    assert simulator.outputs["failed"] == simulator.outputs["beside"] == simulator.outputs["loaded"]
    assert simulator.cached_tokens["loaded"] == (0, 12 * BLOCK)


def test_with_overlapping_steps_blocks_are_not_shared_until_their_step_has_ended(
    beside_another: Callable[..., SimulatedVLLM], simulators: Simulators
):
    """The second request is planned while the step runs that should have loaded the blocks.

    The first one is aborted then, because vLLM does not recompute it correctly with overlapping steps.
    """
    simulator, prompt = beside_another(overlapped=True), list(range(1, 12 * BLOCK + 5))

    simulator.add("failed", prompt, max_tokens=1, params=AT_ONCE)
    simulator.step()
    simulator.add("beside", prompt, params=AT_ONCE)
    simulator.step()
    simulator.abort("failed")
    simulators.settle(simulator)  # raises if wrong KV is read
    assert simulator.cached_tokens["beside"] == (0, 0)
    simulator.add("loaded", prompt)
    simulator.run()

    assert simulator.outputs["beside"] == simulator.outputs["loaded"] == expected(prompt, 4)
    assert simulator.cached_tokens["loaded"] == (0, 12 * BLOCK)


@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
def test_blocks_that_another_connector_still_loads_are_not_stored_if_the_request_is_aborted(
    beside_another: Callable[..., SimulatedVLLM], simulators: Simulators, overlapped: bool
):
    """VLLM counts the tokens of a load as computed from its start."""
    simulator = beside_another(AsynchronousConnector, overlapped=overlapped)
    prompt = list(range(1, 12 * BLOCK + 5))

    simulator.add("aborted", prompt, params=AT_ONCE)
    simulator.step()
    simulator.abort("aborted")
    simulators.settle(simulator)
    simulator.add("computed", prompt)
    simulator.run()  # raises if wrong KV is loaded

    assert simulator.cached_tokens["computed"] == (0, 0)
    assert simulator.outputs["computed"] == expected(prompt, 4)


def test_a_request_whose_load_by_another_connector_failed_is_computed(
    beside_another: Callable[..., SimulatedVLLM], simulators: Simulators
):
    """VLLM still reserves the blocks of the failed load. It waits forever if a second load needs as many."""
    simulator = beside_another(AsynchronousConnector, num_blocks=21, overlapped=True)
    prompt = list(range(1, 12 * BLOCK + 5))
    simulator.add("cold", prompt)
    simulators.settle(simulator)

    simulator.add("failed", prompt)
    simulator.run(max_seconds=20.0)

    assert simulator.outputs["failed"] == expected(prompt, 4)


def test_the_handshake_of_another_connector_is_not_hidden(simulators: Simulators):
    """MultiConnector passes on that of the first connector that has one, and NixlConnector needs its own."""
    simulator = simulators(multi=True)

    assert simulator.ranks[0].connector.get_handshake_metadata() is None
