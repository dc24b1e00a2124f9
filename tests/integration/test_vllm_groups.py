"""Models with several KV groups in a real vLLM: equal answers, and hits as long as those of vLLM's own prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
import torch

from lmcache_async.memory.header import read_header
from tests.integration import late_reads
from tests.integration.model_families import (
    GPT_OSS_WINDOW,
    WINDOW,
    make_eagle3_head,
    make_eagle_head,
    make_gemma4,
    make_gpt_oss,
    make_granite4,
    make_jamba,
    make_mla_model,
    make_recurrent_model,
    make_sliding_window_model,
    make_windows_only_model,
)
from tests.integration.vllm_answers import BFLOAT16_TOLERANCE, TOLERANCE, Question, assert_same, tokens
from tests.integration.vllm_driver import (
    BLOCK,
    CHUNK,
    OFFLOADING,
    Engine,
    Engines,
    Reference,
    complaints,
    connector,
    several,
)
from tests.integration.vllm_records import change_first_payload_byte, namespace_of, starts_in

pytestmark = pytest.mark.vllm

T = TypeVar("T")
TIMEOUT_S = 60.0
"""Timeout of the disk tier whose reads block. Only a call without the shorter deadline takes so long."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model with groups of full attention and groups of another kind.

    Attributes:
        kind: Name of the other kind in the namespace of a record.
        block: Tokens per block.
        stored: Tokens in the records of the other groups for one boundary.
        options: Options of vLLM.
        settings: Settings of the connector with two ranks.
        full_groups: Number of groups of full attention.
    """

    name: str
    make: Callable[[Path], Path]
    kind: str
    block: int
    stored: int
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    full_groups: int = 1

    @property
    def tolerance(self) -> float:
        """For answers in a batch."""
        return BFLOAT16_TOLERANCE if self.options.get("dtype") == "bfloat16" else TOLERANCE


WINDOWS = Family("windows", make_sliding_window_model, f"window={WINDOW}", BLOCK, 2 * WINDOW)
STATES = Family(
    "states",
    make_recurrent_model,
    "state=",
    2 * BLOCK,
    3 * 2 * BLOCK,  # the record of a state has the tokens of its block
    # The smallest block that is as large as a state depends on the processor.
    {"dtype": "bfloat16", "block_size": 2 * BLOCK},
    {"vllm.lookup_transport": "tcp"},
)
# One layer with a window and two of full attention: vLLM gives all groups the same number of layers.
TWO_FULL = Family(
    "two of full attention",
    partial(make_sliding_window_model, pattern="fwf"),
    f"window={WINDOW}",
    BLOCK,
    WINDOW,
    full_groups=2,
)
GPT_OSS = Family("gpt-oss", make_gpt_oss, f"window={GPT_OSS_WINDOW}", BLOCK, 2 * GPT_OSS_WINDOW)


@pytest.fixture(scope="module", params=[WINDOWS, TWO_FULL, STATES], ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="module")
def options(family: Family, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of an engine with the model."""
    return {"model": str(family.make(tmp_path_factory.mktemp("family") / "model")), **family.options}


@pytest.fixture(scope="module")
def plain(engines: Engines, options: dict[str, Any]) -> Reference:
    return Reference(engines.start(**options))


@pytest.fixture(scope="module")
def disk(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the disk tier of `engine`."""
    return tmp_path_factory.mktemp(family.kind.rstrip("=")) / "kv"


@pytest.fixture(scope="module")
def engine(engines: Engines, options: dict[str, Any], disk: Path) -> Engine:
    return engines.start(connector(disk=disk), **options)


@pytest.mark.parametrize("blocks", [WINDOW // BLOCK, 2 * CHUNK // BLOCK, 10])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_prompt_is_loaded_as_far_as_vllm_would_use_it(
    engine: Engine, plain: Reference, family: Family, blocks: int, more: int
) -> None:
    length = blocks * family.block + more
    question = Question(tokens(f"{family.name} {length}", length))
    own = plain.own_hit(question)

    cold = engine.ask(question)
    engine.settle()
    warm = engine.ask(question)

    assert cold.cached_tokens == 0
    assert warm.cached_tokens == own.cached_tokens == (length - 1) // family.block * family.block
    assert_same(cold, plain(question))
    assert_same(warm, plain(question))


def test_a_longer_prompt_continues_where_the_shorter_one_ended(
    engine: Engine, plain: Reference, family: Family
) -> None:
    prompt = tokens("longer", 700)
    engine.ask(Question(prompt[:420]))
    engine.settle()

    answer = engine.ask(Question(prompt))

    assert answer.cached_tokens == 420 // family.block * family.block
    assert_same(answer, plain(Question(prompt)))


def test_prompts_with_a_common_prefix_continue_there_from_the_third_on(
    engine: Engine, plain: Reference
) -> None:
    """VLLM no longer has the first prompt when the second one comes, so only the connector knows where they differ."""
    common = tokens("common", 300)
    answers = []
    for name in ("first", "second", "third"):
        question = Question((*common, *tokens(name, 200)))
        answers.append(engine.ask(question))
        engine.settle()
        assert_same(answers[-1], plain(question))

    assert [answer.cached_tokens for answer in answers] == [0, 0, 256]


@pytest.mark.parametrize("local", [200, 560], ids=["before the window", "in the window"])
def test_vllms_own_hit_is_extended(engine: Engine, plain: Reference, local: int) -> None:
    prompt = tokens(f"extended from {local}", 600)
    engine.ask(Question(prompt))
    engine.settle()
    engine.ask(Question(prompt[:local]))  # leaves its blocks in vLLM's own prefix cache

    answer = engine.ask(Question(prompt))

    assert answer.cached_tokens == 576
    assert_same(answer, plain(Question(prompt)))


@dataclass(frozen=True, slots=True)
class Damaged:
    """An engine that loads from its disk only, with a file that lists late records.

    Attributes:
        disk: Directory of the disk tier.
        late: File with the names of the records whose reads block.
    """

    engine: Engine
    disk: Path
    late: Path


@pytest.fixture(scope="module")
def damaged(
    engines: Engines, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Damaged]:
    directory = tmp_path_factory.mktemp("damaged")
    layer = late_reads.install(directory)
    # Chunks of one block, so that a window has a record between its first and its last one.
    settings = {
        "vllm.reset_cache": "memory",
        "chunk_size": BLOCK,
        # On a busy machine, the copies of stores hold all blocks for a while, and the queue of the disk has room later.
        "vllm.max_pinned_fraction": 1.0,
        "store.allocate_timeout_s": 20.0,
    }
    transfer = connector(disk=directory / "kv", **settings)
    deadline = {"name": "deadline", "lookup_s": TIMEOUT_S}
    transfer["kv_connector_extra_config"]["tiers"][1] |= {"timeout_s": TIMEOUT_S, "layers": [deadline, layer]}
    with engines.started(transfer, path=[str(directory)], **options) as engine:
        yield Damaged(engine, directory / "kv", directory / "late")


def change(record: Path, late: Path) -> None:
    del late
    change_first_payload_byte(record)


def remove(record: Path, late: Path) -> None:
    del late
    record.unlink()


def delay(record: Path, late: Path) -> None:
    with late.open("a") as names:
        names.write(f"{record.name}\n")


def at(place: int, items: list[T]) -> T:
    """The first, the middle or the last item, for place 0, 1 or 2."""
    return items[place * (len(items) - 1) // 2]


@pytest.mark.parametrize("group", ["full", "other"])
@pytest.mark.parametrize("damage", [change, remove, delay])
def test_damage_of_one_group_is_never_used(
    damaged: Damaged, plain: Reference, family: Family, group: str, damage: Callable[[Path, Path], None]
) -> None:
    """The first, the middle and the last record, each of another request in the same batch."""
    engine = damaged.engine
    questions = [Question(tokens(f"{family.name} {group} {n} {damage.__name__}", 450)) for n in range(3)]
    before = set(damaged.disk.glob("??/*"))
    engine.ask_all(questions)
    engine.forget()
    records = set(damaged.disk.glob("??/*")) - before
    kind = "full" if group == "full" else family.kind

    victims = []
    for place, question in enumerate(questions):
        starts = starts_in(question.prompt, records)
        namespaces = {path: name for path in starts if kind in (name := namespace_of(path))}
        assert namespaces, complaints(engine.log())
        chosen = at(place, sorted(set(namespaces.values())))  # of the groups of this kind
        own = sorted((path for path, name in namespaces.items() if name == chosen), key=starts.__getitem__)
        assert len(own) >= 3 or kind == STATES.kind, complaints(engine.log())
        victims.append(at(place, own))
    for victim in victims:
        damage(victim, damaged.late)
    answers = engine.ask_all(questions)
    damaged.late.write_text("")
    engine.forget()  # damaged records are stored again
    again = engine.ask_all(questions)
    engine.forget()

    for question, answer, other in zip(questions, answers, again, strict=True):
        assert answer.cached_tokens < 448
        assert answer.seconds < plain(question).seconds + TIMEOUT_S - late_reads.DEADLINE_S
        assert other.cached_tokens == 448, complaints(other.log)
        for each in (answer, other):
            assert_same(each, plain(question), family.tolerance)


def test_other_groups_than_full_attention_are_stored_for_one_position(
    engine: Engine, disk: Path, family: Family
) -> None:
    engine.settle()
    before = set(disk.glob("??/*"))
    engine.ask(Question(tokens("bytes", 1500)))
    engine.settle()
    stored: Counter[str] = Counter()
    for path in set(disk.glob("??/*")) - before:
        header = read_header(memoryview(path.read_bytes()))
        stored["other" if family.kind in header.namespace else "full"] += len(header.tokens)

    assert stored == {"full": 1472 * family.full_groups, "other": family.stored}


def speculation(method: str, make: Callable[[Path], Path]) -> dict[str, Any]:
    """Options for a draft model written by `made`."""
    config = {"method": method, "num_speculative_tokens": 3, "model": make}
    return {"speculative_config": config, "num_gpu_blocks_override": 512}


def made(options: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Options with the draft model written to a directory, if there is one."""
    draft = options.get("speculative_config", {})
    if "model" not in draft:
        return options
    return options | {"speculative_config": draft | {"model": str(draft["model"](directory))}}


MODES: dict[str, tuple[Family, dict[str, Any]]] = {
    "windows, no prefix caching": (WINDOWS, {"enable_prefix_caching": False}),
    "windows, preemption": (WINDOWS, {"num_gpu_blocks_override": 100}),
    "windows, speculation": (
        WINDOWS,
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    ),
    "two of full attention, EAGLE": (TWO_FULL, speculation("eagle", make_eagle_head)),
    "windows, EAGLE": (WINDOWS, speculation("eagle", make_eagle_head)),
    # Blocks of 64 tokens, except 32 in the group of the draft model, which has full attention too.
    "gpt-oss, EAGLE-3": (GPT_OSS, speculation("eagle3", make_eagle3_head)),
    # Preemption is tested by `tools.models`: it changes the rounding of bfloat16 in plain vLLM too.
    "a state for each block": (STATES, {"prefix_cache_retention_interval": STATES.block}),
}


@pytest.mark.parametrize(
    ("family", "mode"),
    [(family, mode) for mode, (family, _) in MODES.items()],
    indirect=["family"],
    ids=MODES,
)
def test_batches_of_many_lengths_have_the_same_answers(
    engines: Engines, plain: Reference, family: Family, options: dict[str, Any], tmp_path: Path, mode: str
) -> None:
    common, generator = tokens("shared by some", 260), Random(mode)
    questions = []
    for index in range(8):
        own = tokens(f"{mode} {index}", generator.randrange(70, 600))
        prompt = own if index % 3 else (*common[: generator.randrange(64, 260)], *own)
        questions.append(Question(prompt, max_tokens=generator.randrange(4, 24)))
    questions += questions[:4]

    own = made(MODES[mode][1], tmp_path / "draft")
    pinned = {"vllm.max_pinned_fraction": 0.9}  # copies may be slow on a busy machine, and drop chunks then
    with engines.started(connector(disk=tmp_path / "kv", **pinned), **options, **own) as engine:
        rounds = []
        for _ in range(2):
            rounds.append(engine.ask_all(questions))
            engine.settle()

    assert sum(answer.cached_tokens > 0 for answer in rounds[1]) > len(questions) // 2
    for answers in rounds:
        for question, answer in zip(questions, answers, strict=True):
            assert_same(answer, plain(question), family.tolerance)


@pytest.mark.parametrize(
    ("family", "behind"),
    [(WINDOWS, False), (WINDOWS, True), (STATES, True)],
    indirect=["family"],
    ids=["windows, before it", "windows, behind it", "states, behind it"],
)
def test_hits_beside_another_connector(
    engines: Engines, plain: Reference, options: dict[str, Any], tmp_path: Path, behind: bool
) -> None:
    """After a reset the other connector has nothing, and ours has the disk."""
    own = connector(disk=tmp_path, **{"vllm.reset_cache": "memory"})
    both = several(OFFLOADING, own) if behind else several(own, OFFLOADING)
    question = Question(tokens(f"beside another {behind}", 450))
    beginning = Question(question.prompt[:200], params={"skip_save": True})  # only the other one has it
    with engines.started(both, **options) as engine:
        answers = []
        for asked in (beginning, question):
            answers.append(engine.ask(asked))
            engine.settle()
        answers.append(engine.ask(question))
        engine.forget()
        answers.append(engine.ask(question))

    assert [answer.cached_tokens for answer in answers] == [0, 192, 448, 448]
    assert ["disk" in answer.tiers for answer in answers] == [False, False, False, True]
    assert ("cpu" in answers[2].tiers) is not behind
    for asked, answer in zip((beginning, question, question, question), answers, strict=True):
        assert_same(answer, plain(asked))


def test_two_ranks_hit_as_far_as_vllm_would(
    engines: Engines, plain: Reference, family: Family, options: dict[str, Any], tmp_path: Path
) -> None:
    questions = [Question(tokens(f"ranks {length}", length)) for length in (100, 320, 777)]
    own = [plain.own_hit(question).cached_tokens for question in questions]
    two = {"tensor_parallel_size": 2, "processes": True}
    with engines.started(connector(disk=tmp_path, **family.settings), **options, **two) as engine:
        engine.wait_for_hit()
        cold = [engine.ask(question) for question in questions]
        engine.settle()
        warm = [engine.ask(question) for question in questions]

    assert [answer.cached_tokens for answer in warm] == own
    for question, one, other in zip(questions, cold, warm, strict=True):
        assert_same(one, other)
        if family is WINDOWS:  # in bfloat16 two ranks round differently from one
            assert_same(one, plain(question))


def test_a_new_engine_loads_from_disk(
    engines: Engines, plain: Reference, options: dict[str, Any], tmp_path: Path
) -> None:
    questions = [Question(tokens(f"restart {index}", 450)) for index in range(3)]
    with engines.started(connector(disk=tmp_path), **options) as before:
        for question in questions:
            before.ask(question)
        before.settle()
        before.close()
    with engines.started(connector(disk=tmp_path), **options) as after:
        answers = [after.ask(question) for question in questions]

    for question, answer in zip(questions, answers, strict=True):
        assert answer.cached_tokens == 448
        assert_same(answer, plain(question))


ALONE: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "windows in every layer": (make_windows_only_model, {}),
    "heads of two sizes": (make_gemma4, {}),  # blocks of 64 tokens with a window, of 32 with full attention
    # Short steps change the rounding of a state in bfloat16, so the plain engine takes the same steps.
    "states, steps shorter than a block": (
        make_recurrent_model,
        {"max_num_batched_tokens": 48, "dtype": "bfloat16"},
    ),
    "Mamba 1 beside attention": (make_jamba, {}),
    "Mamba 2 beside attention": (make_granite4, {}),
    "MLA": (
        make_mla_model,
        {"attention_backend": "CPU_MLA", "block_size": 16, "enable_prefix_caching": True},
    ),
}
if torch.cpu._is_avx512_supported():  # vLLM has no 8-bit KV on other processors
    ALONE["windows, 8-bit KV"] = (make_sliding_window_model, {"kv_cache_dtype": "fp8", "dtype": "bfloat16"})


@pytest.mark.parametrize("case", ALONE)
def test_hits_are_those_of_a_plain_engine_with_the_same_options(
    engines: Engines, tmp_path: Path, case: str
) -> None:
    make, options = ALONE[case]
    options = {"model": str(make(tmp_path / "model")), **options}
    questions = [Question(tokens(f"{case} {length}", length)) for length in (2 * BLOCK + 1, 5 * CHUNK, 500)]
    with engines.started(**options) as engine:
        plain = Reference(engine)
        own = [plain.own_hit(question).cached_tokens for question in questions]
        expected = [plain(question) for question in questions]
    with engines.started(connector(disk=tmp_path / "kv"), **options) as engine:
        cold = [engine.ask(question) for question in questions]
        engine.settle()
        warm = [engine.ask(question) for question in questions]

    if case == "MLA":  # a prompt that ends with a block is loaded as a whole, as with every single group
        own[1] = len(questions[1].prompt)
    assert [answer.cached_tokens for answer in warm] == own
    assert own[-1] >= 448
    for answers in (cold, warm):
        for answer, wanted in zip(answers, expected, strict=True):
            assert_same(answer, wanted)
