"""Random traffic for a simulated vLLM: requests of all kinds, aborts, resets, pauses and another connector."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState

from tests.support.vllm_simulator import (
    Image,
    SimulatedVLLM,
    expected,
    first_value,
    inputs_of,
    prompt,
    scheduler_of,
    value_after,
)

PLACEHOLDER = 7
"""Token of all images in a prompt."""

ADAPTERS = tuple(LoRARequest(f"adapter {number}", number, f"/adapters/{number}") for number in (1, 2))


def related_prompts(chosen: Random, *, num_tokens: int, count: int) -> dict[str, list[int]]:
    """Prompts by request id. Each begins like one of two prompts of `num_tokens` tokens, and some have further tokens."""
    roots = [prompt(num_tokens, seed=1000 + index) for index in range(2)]
    return {
        f"r{index}": chosen.choice(roots)[: chosen.randrange(1, num_tokens)]
        + prompt(chosen.choice([0, 1, 20]), index)
        for index in range(count)
    }


@dataclass
class Traffic:
    """Adds requests to a simulated vLLM, and disturbs it.

    Attributes:
        prompts: Prompts of the requests. A prompt may be used several times.
        updates: Whether the weights of the model are changed in pauses.
        answers: The right answer to each request.
    """

    sim: SimulatedVLLM
    chosen: Random
    prompts: Sequence[Sequence[int]]
    updates: bool = False
    answers: dict[str, list[int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    _updating: bool = False
    _asked: dict[str, list[int]] = field(default_factory=dict)

    def event(self) -> str:
        """Let a random event happen. Return its description; "" if nothing happened."""
        events = (
            (0.3, self._add),
            (0.02, self._add_several),
            (0.02, self._add_and_disturb),
            (0.02, self._abort),
            (0.02, self._abort_before_report),
            (0.05, self._reset),
            (0.01, self._pause),
            (0.02 if self.updates else 0.0, self._begin_update),
        )
        if self._updating and not self.sim.busy:
            return self._update()
        left = self.chosen.random()
        for chance, happen in events:
            left -= chance
            if left < 0:
                what = happen()
                self.counts[what.partition(" ")[0]] += 1
                return what
        paused = self.sim.scheduler.pause_state != PauseState.UNPAUSED
        if paused and not self._updating and self.chosen.random() < 0.3:
            return self.resume()
        return ""

    def resume(self) -> str:
        self._updating = False
        self.sim.scheduler.set_pause_state(PauseState.UNPAUSED)
        return "resume"

    def check(self) -> None:
        """Raise an AssertionError if the answer of a request that has ended is wrong."""
        for name, answer in self.answers.items():
            found, reason = self.sim.outputs[name], self.sim.finish_reasons.get(name)
            assert found == answer[: len(found)], f"request {name} has another answer than it should"
            assert reason in (None, "abort") or found == answer, f"the answer of request {name} is too short"

    @property
    def running(self) -> list[str]:
        return [name for name in self.answers if name not in self.sim.finish_reasons]

    def _add(self) -> str:
        chosen = self.chosen
        name = f"r{len(self.answers)}"
        if self._ended and chosen.random() < 0.1:
            self.check()
            name = chosen.choice(self._ended)
        tokens, images, params = list(chosen.choice(self.prompts)), (), None
        if chosen.random() < 0.1:
            params = chosen.choice(({"skip_load": True}, {"skip_save": True}, {"do_remote_decode": True}))
        elif self._promises and chosen.random() < 0.3:
            tokens, params = chosen.choice(self._promises)
        if len(tokens) > 20 and chosen.random() < 0.1:
            length = chosen.randrange(1, 20)
            images = (Image(chosen.randrange(len(tokens) - length), length, chosen.choice(("cat", "dog"))),)
            tokens[images[0].start : images[0].start + length] = [PLACEHOLDER] * length
        max_tokens = chosen.choice((1, 3, 20, 40))
        adapter = chosen.choice(ADAPTERS) if chosen.random() < 0.1 else None
        stop = chosen.random() < 0.2
        request = self.sim.add(
            name,
            tokens,
            max_tokens=max_tokens,
            cache_salt=chosen.choice(("a", "b")) if chosen.random() < 0.1 else None,
            adapter=adapter,
            images=images,
            priority=chosen.randrange(3),
            params=params,
            skip_reading_prefix_cache=chosen.random() < 0.05,
        )
        self._asked[name] = tokens
        if stop:
            request.sampling_params.stop_token_ids = [chosen.choice(self._answer(request))]
        self.answers[name] = self._answer(request)
        return f"add {name}"

    def _add_several(self) -> str:
        """Add more requests than are looked up on the scheduler's thread in one step."""
        return ", ".join(self._add() for _ in range(self.chosen.randint(2, 10)))

    def _add_and_disturb(self) -> str:
        """Abort a request, or reset the caches, before the first step in which vLLM can admit it."""
        what = self._add()
        if self.chosen.random() < 0.5:
            return f"{what}, {self._reset()}"
        self.sim.abort(what.removeprefix("add "))
        return f"{what} and abort it"

    def _answer(self, request: Any) -> list[int]:
        """The answer to a request if the weights do not change any more."""
        done = list(request.output_token_ids)
        value = first_value(request, self.sim.weights)
        answer = done + expected(inputs_of(request), request.max_tokens - len(done), value)
        ends = [answer.index(stop) + 1 for stop in request.sampling_params.stop_token_ids if stop in answer]
        return answer[: min(ends, default=len(answer))]

    @property
    def _promises(self) -> list[tuple[list[int], dict[str, Any]]]:
        """Prompts of requests that were handed over, and their promises."""
        told = self.sim.kv_transfer_params
        return [(list(self._asked[name]), dict(params)) for name, params in told.items() if params]

    @property
    def _ended(self) -> list[str]:
        """Requests whose ids may be used again. In vLLM no id is used again while a step with it is running."""
        running = {name for step in self.sim._queue for name in step.work}
        # The simulated vLLM knows the values of a store by the id of its request.
        running |= {store.keys.request_id for store in scheduler_of(self.sim)._stores._planned}
        return [
            name
            for name in self.answers
            if name in self.sim.finish_reasons
            and name not in self.sim.scheduler.requests
            and name not in running
        ]

    def _abort(self) -> str:
        if not self.running:
            return ""
        name = self.chosen.choice(self.running)
        self.sim.abort(name)
        return f"abort {name}"

    def _abort_before_report(self) -> str:
        self.sim.before_report = self._abort
        return "abort before report"

    def _reset(self) -> str:
        running, connector = self.chosen.random() < 0.3, self.chosen.random() < 0.2
        # With running requests vLLM raises an error while stores or loads hold blocks.
        with contextlib.suppress(RuntimeError):
            self.sim.scheduler.reset_prefix_cache(running, connector)
        return f"reset {running=} {connector=}"

    def _pause(self) -> str:
        state = self.chosen.choice((PauseState.PAUSED_NEW, PauseState.PAUSED_ALL))
        self.sim.scheduler.set_pause_state(state)
        return f"pause {state.name}"

    def _begin_update(self) -> str:
        """Pause in one of vLLM's modes, to change the weights when vLLM is idle."""
        mode = self.chosen.choice(("abort", "wait", "keep"))
        for name in self.running if mode == "abort" else ():
            self.sim.abort(name)
        state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        self.sim.scheduler.set_pause_state(state)
        self._updating = True
        return f"begin update, {mode}"

    def _update(self) -> str:
        updated = self.sim.update_weights()
        if updated:
            for name, request in self.sim.scheduler.requests.items():
                self.answers[name] = self._answer(request)
        self.resume()
        self.counts["update"] += updated
        return f"update {updated=}"


@dataclass
class _Load:
    """A load of another connector: the blocks of the tokens from `start` on, and their values."""

    request_id: str
    start: int
    blocks: list[int]
    values: list[int]
    asynchronous: bool
    steps_left: int = 0


@dataclass
class _Loads(KVConnectorMetadata):
    loads: list[_Load] = field(default_factory=list)


class LoadingConnector(KVConnectorBase_V1):
    """Base class of connectors that store nothing, and do not load layer by layer."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


class AnotherConnector(LoadingConnector):
    """Another connector of a MultiConnector. It may have the start of any prompt, and some of its loads fail.

    `kv_connector_extra_config` has the `seed`, and with `sync_failures` whether loads fail in the step that uses the KV.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        rank = vllm_config.parallel_config.rank
        self._sync_failures = options["sync_failures"]
        self._chosen = Random(f"{options['seed']} {role} {rank}")
        self._rank = rank
        self._block_size = vllm_config.cache_config.block_size
        self._offers: dict[tuple[str, int], tuple[int, bool]] = {}
        self._new = _Loads()
        self._caches: list[torch.Tensor] = []
        self._loading: list[_Load] = []
        self._bad_blocks: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        at = request.request_id, request.num_preemptions
        if at not in self._offers:
            if self._chosen.random() < 0.3:
                return None, False
            most = (request.num_tokens - 1) // self._block_size
            tokens = self._chosen.randint(0, most) * self._block_size if self._chosen.random() < 0.3 else 0
            self._offers[at] = tokens, self._chosen.random() < 0.7
        tokens, asynchronous = self._offers[at]
        external = max(0, tokens - num_computed_tokens)
        return external, asynchronous and external > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        tokens, asynchronous = self._offers[request.request_id, request.num_preemptions]
        self._offers[request.request_id, request.num_preemptions] = 0, False  # once
        values = [first_value(request)]
        for token in inputs_of(request)[:tokens]:
            values.append(value_after(values[-1], token))
        start = tokens - num_external_tokens
        first, stop = start // self._block_size, tokens // self._block_size
        load = _Load(
            request.request_id,
            start,
            blocks.get_block_ids()[0][first:stop],
            values[start + 1 :],
            asynchronous,
        )
        self._new.loads.append(load)

    def build_connector_meta(self, scheduler_output: Any) -> _Loads:
        new, self._new = self._new, _Loads()
        return new

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        for at in [at for at in self._offers if at[0] == request.request_id]:
            del self._offers[at]
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Loads)
        for load in metadata.loads:
            if load.asynchronous:
                self._loading.append(replace(load, steps_left=self._chosen.randrange(5)))
            else:
                self._load(load)

    def _load(self, load: _Load) -> None:
        filled = len(load.blocks)
        if (load.asynchronous or self._sync_failures) and self._chosen.random() < 0.3:
            filled = self._chosen.randrange(filled)
        self._bad_blocks.update(load.blocks[filled:])
        for index, block in enumerate(load.blocks[:filled]):
            values = load.values[index * self._block_size : (index + 1) * self._block_size]
            for layer, cache in enumerate(self._caches):
                # As the simulated model writes it.
                cache[block] = torch.tensor(values).reshape(1, -1, 1) * 4.0 + layer * 2 + self._rank % 2

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        ended = {load.request_id for load in self._loading if not load.steps_left}
        for load in self._loading:
            if load.steps_left:
                load.steps_left -= 1
            else:
                self._load(load)
        self._loading = [load for load in self._loading if load.request_id not in ended]
        return None, ended

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad


def another_connector(seed: int, *, sync_failures: bool) -> dict[str, Any]:
    """Return the `kv_transfer_config` of another connector."""
    return {
        "kv_connector": AnotherConnector.__name__,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"seed": seed, "sync_failures": sync_failures},
    }
