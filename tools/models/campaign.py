"""One family in one mode: the connector's answers and hits compared with those of a vLLM without connector."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from lmcache_async.memory.header import read_header
from tests.integration import model_families as models
from tests.integration.vllm_answers import TOLERANCE, Answer, Question, difference, tokens
from tests.integration.vllm_driver import CHUNK, Engine, EngineError, Engines, Reference, connector
from tools.models.families import Family
from tools.models.questions import LONGEST, STEP, Questions
from tools.models.servers import answers_of_replicas, answers_of_two_hosts
from tools.torture.outcome import Outcome

MIN_CHANGE = 0.1
"""Minimum change of log-probabilities by one changed token. It detects wrong KV."""
BLOCKS = 512
FEW_BLOCKS = (160, 128, 100, 80, 64, 52, 44, 36, 28, 20)
"""Numbers of blocks to try in turn until vLLM preempts requests."""
MIN_PREEMPTED = 4
LONG_PROMPT = 32 * 1024
TWO_RANKS = {"tensor_parallel_size": 2, "processes": True}
TWO_STAGES = {"pipeline_parallel_size": 2, "processes": True}


class DoesNotRunError(Exception):
    """A vLLM without connector does not run this family in this mode."""


class Campaign:
    """Runs one family in any mode.

    Args:
        directory: Directory of the model and of the disk tier.

    Attributes:
        model: Directory of the model.
    """

    def __init__(self, engines: Engines, family: Family, directory: Path) -> None:
        self.family = family
        self._engines = engines
        self._directory = directory
        self.model = family.make(directory / "model")
        self.adapters = tuple(
            str(models.make_adapter(directory / f"adapter-{index}", seed=100 + index))
            for index in range(family.adapters)
        )

    def questions(self) -> Questions:
        return Questions(self.family, self.adapters)

    def with_other_adapters(self, question: Question) -> list[Question]:
        """The question with each other adapter, and without one. Their records must not be used for it."""
        adapters = ("", *self.adapters) if self.adapters else ()
        return [replace(question, adapter=other) for other in adapters if other != question.adapter]

    def copy_of_adapter(self, name: str, adapter: str) -> Path:
        """A directory of this name with the files of an adapter."""
        return Path(shutil.copytree(adapter, self._directory / name, dirs_exist_ok=True))

    def model_with_tokenizer(self) -> Path:
        """The model, with a tokenizer for `vllm serve`."""
        models.write_tokenizer(self.model)
        return self.model

    def disk(self, name: str) -> Path:
        return self._directory / f"disk-{name.replace(' ', '-')}"

    @contextmanager
    def plain(self, **options: Any) -> Iterator[Reference]:
        """Start a vLLM without connector.

        Raises:
            DoesNotRunError: It does not start, or gives no answer.
        """
        try:
            with self._engine(None, options) as engine:
                engine.ask(self.questions().around_boundaries("does it run")[-1])
                yield Reference(engine)
        except EngineError as error:
            raise DoesNotRunError(reason_of(str(error))) from error

    def in_batch(self, reference: Reference, questions: Sequence[Question]) -> Sequence[list[Answer]]:
        """Return the reference's answers to batches, if they may differ from those to single requests, else nothing.

        In bfloat16 the rounding depends on the size of the batch, on a CPU with AMX by more than the tolerance.
        """
        return reference.together(questions) if self.family.rounds else ()

    @contextmanager
    def connected(self, disk: Path, **options: Any) -> Iterator[Engine]:
        """Start a vLLM with the connector."""
        with self._engine(connector(disk=disk, arena_chunks=1600), options) as engine:
            yield engine

    @contextmanager
    def _engine(self, transfer: Mapping[str, Any] | None, options: Mapping[str, Any]) -> Iterator[Engine]:
        settings = {
            "model": str(self.model),
            "num_gpu_blocks_override": BLOCKS,
            "max_num_batched_tokens": STEP,
            **self.family.options,
            **options,
        }
        with self._engines.started(transfer, **settings) as engine:
            if "pipeline_parallel_size" in options:
                engine.call("call", name="run_once")
            yield engine


def reason_of(failure: str) -> str:
    """The last error in the log of an engine."""
    lines = [line.strip() for line in failure.splitlines()]
    errors = [line for line in lines if "Error" in line.partition(":")[0] or "assert" in line]
    return (errors or lines)[-1][-300:]


def compare(
    outcome: Outcome,
    what: str,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    *right: Sequence[Answer],
) -> None:
    """Check tokens and log-probabilities.

    Args:
        right: Answers of a vLLM without connector; any of several may be given.
    """
    for question, answer, *expected in zip(questions, answers, *right, strict=True):
        distance = min(difference(answer, each) for each in expected)
        outcome.add("answers")
        outcome.counts["largest difference"] = max(outcome.counts.get("largest difference", 0.0), distance)
        outcome.expect(
            distance <= TOLERANCE and answer.finish_reason == "length",
            f"{what}: {_text(question)}, {answer.cached_tokens} tokens loaded: "
            f"log-probabilities differ by {distance:.3g}",
        )


def compare_hits(
    outcome: Outcome,
    what: str,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    own: Sequence[Answer],
    *,
    granularity: int = 1,
) -> None:
    """Check that as many tokens were loaded as vLLM's own prefix cache would have had.

    Args:
        granularity: A hit may be shorter by less than this number of tokens.
    """
    for question, answer, expected in zip(questions, answers, own, strict=True):
        outcome.add("hits", answer.cached_tokens > 0)
        outcome.add("longer hits than vLLM's own", answer.cached_tokens > expected.cached_tokens)
        outcome.expect(
            answer.cached_tokens >= expected.cached_tokens // granularity * granularity,
            f"{what}: {_text(question)}: {answer.cached_tokens} tokens loaded, "
            f"vLLM's own prefix cache has {expected.cached_tokens}",
        )


def _text(question: Question) -> str:
    parts = [f"prompt of {len(question.prompt)} tokens"]
    parts += ["with an image"] if question.images else []
    parts += ["with a video"] if question.videos else []
    parts += [f"with {Path(question.adapter).name}"] if question.adapter else []
    return " ".join(parts)


def in_turn(engine: Engine, questions: Sequence[Question], *, settle: bool = False) -> list[Answer]:
    """Ask one question after the other.

    Args:
        settle: Empty vLLM's own prefix cache after each one, so that a hit is the connector's.
    """
    answers = []
    for question in questions:
        answers.append(engine.ask(question))
        if settle:
            engine.settle()
    return answers


def chunked_prefill(campaign: Campaign, outcome: Outcome) -> None:
    """Prompts around all boundaries, alone, in a batch, after a restart, and with common prefixes."""
    questions, disk = campaign.questions(), campaign.disk("chunked prefill")
    with campaign.plain() as reference:
        for distance, one, other in questions.changed("chunked"):
            change = difference(reference(one), reference(other))
            outcome.expect(
                change > MIN_CHANGE,
                f"the token {distance} from the end changes the answer by only {change:.3g}",
            )
        asked = questions.around_boundaries("chunked")
        own = [reference.own_hit(question) for question in asked]
        right = [reference(question) for question in asked]
        right_in_batch = campaign.in_batch(reference, asked)
        sequence = questions.in_sequence("chunked")
        right_sequence = [reference(question) for question in sequence]
        own_sequence = reference.own_hits(sequence)
        elsewhere = campaign.with_other_adapters(asked[-1])
        right_elsewhere = [reference(question) for question in elsewhere]
    for question, one, two in zip(asked, right, own, strict=True):
        outcome.expect(
            difference(one, two) <= TOLERANCE,
            f"vLLM's own prefix cache changes the answer to a {_text(question)}",
        )
    with campaign.connected(disk) as engine:
        cold = in_turn(engine, asked)
        engine.settle()
        warm = in_turn(engine, asked, settle=True)
        other = in_turn(engine, elsewhere, settle=True)
        batch = engine.ask_all(asked)
        engine.settle()
        shared = in_turn(engine, sequence, settle=True)
        engine.ask(sequence[-1])  # a hit of vLLM, extended by the connector
        extended = engine.ask(sequence[0])
        engine.settle()
        engine.close()
    with campaign.connected(disk) as engine:
        restarted = in_turn(engine, asked)
    compare(outcome, "cold", asked, cold, right)
    compare(outcome, "with another adapter", elsewhere, other, right_elsewhere)
    for question, answer in zip([*asked, *elsewhere], [*cold, *other], strict=True):
        outcome.expect(
            answer.cached_tokens == 0, f"cold: {_text(question)}: {answer.cached_tokens} tokens loaded"
        )
    compare(outcome, "batch", asked, batch, right, *right_in_batch)
    for what, answers in {"warm": warm, "restart": restarted}.items():
        compare(outcome, what, asked, answers, right)
    for what, answers in {"warm": warm, "batch": batch, "restart": restarted}.items():
        compare_hits(outcome, what, asked, answers, own)
    compare(outcome, "in sequence", sequence, shared, right_sequence)
    # Of a common prefix, the connector has whole chunks.
    compare_hits(outcome, "in sequence", sequence, shared, own_sequence, granularity=CHUNK)
    compare(outcome, "extended", sequence[:1], [extended], right_sequence[:1])


def no_prefix_caching(campaign: Campaign, outcome: Outcome) -> None:
    """Only the connector has hits, as long as those of vLLM's prefix cache."""
    asked = campaign.questions().around_boundaries("no prefix caching")
    with campaign.plain() as reference:
        own = [reference.own_hit(question) for question in asked]
        right = [reference(question) for question in asked]
    with campaign.connected(campaign.disk("no prefix caching"), enable_prefix_caching=False) as engine:
        cold = in_turn(engine, asked)
        engine.settle()
        warm = in_turn(engine, asked)
        engine.settle()
        batch = engine.ask_all(asked)
    compare(outcome, "cold", asked, cold, right)
    for what, answers in {"warm": warm, "batch": batch}.items():
        compare(outcome, what, asked, answers, right)
        compare_hits(outcome, what, asked, answers, own)


def preemption(campaign: Campaign, outcome: Outcome) -> None:
    """Batches with few blocks, so that vLLM preempts requests and recomputes or reloads them."""
    asked = campaign.questions().mixed("preemption")
    with campaign.plain() as reference:
        right = [reference(question) for question in asked]
    outcome.counts["preempted requests"] = 0
    for blocks in FEW_BLOCKS:
        few = {"num_gpu_blocks_override": blocks, "max_model_len": 1024}
        try:
            with campaign.connected(campaign.disk(f"{blocks} blocks"), **few) as engine:
                rounds = {}
                for what in ("cold", "warm"):
                    rounds[what] = engine.ask_all_watched(asked)
                    engine.settle()
            right_in_batch: Sequence[list[Answer]] = ()
            if campaign.family.rounds:
                with campaign.plain(**few) as reference:
                    right_in_batch = campaign.in_batch(reference, asked)
        except EngineError as error:
            if "KV cache" in reason_of(str(error)):  # too few for vLLM to start
                break
            raise
        for what, (answers, preempted) in rounds.items():
            compared = [
                each
                for each, again in zip(
                    zip(asked, answers, right, *right_in_batch, strict=True), preempted, strict=True
                )
                if not (again and campaign.family.rounds)
            ]
            compare(outcome, f"{what}, {blocks} blocks", *zip(*compared, strict=True))
            outcome.add("preempted requests", sum(preempted))
        outcome.add("hits", sum(answer.cached_tokens > 0 for answer in rounds["warm"][0]))
        if outcome.counts["preempted requests"] >= MIN_PREEMPTED:
            break
    outcome.expect(outcome.counts["preempted requests"] > 0, "vLLM preempted no request")


def two_ranks(campaign: Campaign, outcome: Outcome) -> None:
    """Two tensor-parallel ranks."""
    in_processes(campaign, outcome, "two ranks", TWO_RANKS)


def pipeline(campaign: Campaign, outcome: Outcome) -> None:
    """Two pipeline stages."""
    in_processes(campaign, outcome, "pipeline", TWO_STAGES)


def in_processes(campaign: Campaign, outcome: Outcome, name: str, options: Mapping[str, Any]) -> None:
    """Several workers in separate processes; also after a restart."""
    questions, disk = campaign.questions(), campaign.disk(name)
    asked = questions.around_boundaries(name)
    with campaign.plain(**options) as reference:
        own = [reference.own_hit(question) for question in asked]
        right = [reference(question) for question in asked]
        right_in_batch = campaign.in_batch(reference, asked)
    with campaign.connected(disk, **options) as engine:
        cold = in_turn(engine, asked)
        engine.settle()
        warm = in_turn(engine, asked)
        engine.settle()
        batch = engine.ask_all(asked)
        engine.settle()
        engine.close()
    with campaign.connected(disk, **options) as engine:
        # Before the workers are connected, there is no hit.
        for _ in engine.until("has no hit after a restart"):
            if engine.ask(asked[-1]).cached_tokens:
                break
            engine.call("reset", connector=False)
        engine.settle()
        restarted = in_turn(engine, asked)
    compare(outcome, "cold", asked, cold, right)
    compare(outcome, "batch", asked, batch, right, *right_in_batch)
    for what, answers in {"warm": warm, "restart": restarted}.items():
        compare(outcome, what, asked, answers, right)
    for what, answers in {"warm": warm, "batch": batch, "restart": restarted}.items():
        compare_hits(outcome, what, asked, answers, own)


def replicas(campaign: Campaign, outcome: Outcome) -> None:
    """Two data-parallel replicas of `vllm serve`, each with its own cache."""
    served(campaign, outcome, "replicas", answers_of_replicas)


def two_hosts(campaign: Campaign, outcome: Outcome) -> None:
    """A rank of `vllm serve` on each of two hosts: the scheduler looks up over TCP. The hosts are network namespaces."""
    served(campaign, outcome, "two hosts", answers_of_two_hosts)


def served(
    campaign: Campaign, outcome: Outcome, name: str, ask: Callable[..., Mapping[str, Sequence[Answer]]]
) -> None:
    """Compare the answers of a `vllm serve`, by description, with those of a vLLM without connector."""
    asked = campaign.questions().around_boundaries(name)
    with campaign.plain() as reference:
        own = [reference.own_hit(question) for question in asked]
        right = [reference(question) for question in asked]
    hits = [answer.cached_tokens for answer in own]
    found = ask(campaign.model_with_tokenizer(), campaign.disk(name), asked, hits)
    for what, answers in found.items():
        compare(outcome, what, asked, answers, right)
        if what.startswith("cold"):
            hit = sum(answer.cached_tokens for answer in answers)
            outcome.expect(hit == 0, f"{what}: {hit} tokens loaded")
        else:
            compare_hits(outcome, what, asked, answers, own)


def reloaded_adapter(campaign: Campaign, outcome: Outcome) -> None:
    """An adapter whose files change, and which vLLM reloads under its name: records of the old weights are no hits."""
    first, other = (
        Question(tokens("reloaded adapter", LONGEST), adapter=adapter) for adapter in campaign.adapters
    )
    with campaign.plain() as reference:
        right = [reference(first), reference(other)]
    outcome.expect(difference(*right) > MIN_CHANGE, "both adapters have the same answer")
    reloaded = replace(first, adapter=str(campaign.copy_of_adapter("reloaded", first.adapter)), reloads=True)
    with campaign.connected(campaign.disk("reloaded adapter")) as engine:
        answers = in_turn(engine, [reloaded, reloaded], settle=True)
        campaign.copy_of_adapter("reloaded", other.adapter)
        answers += in_turn(engine, [reloaded, reloaded], settle=True)
    compare(outcome, "reloaded adapter", [reloaded] * 4, answers, [right[0]] * 2 + [right[1]] * 2)
    hits = [answer.cached_tokens > 0 for answer in answers]
    outcome.expect(hits == [False, True, False, True], f"of the adapter, reloaded, were hits: {hits}")


def long_prompt(campaign: Campaign, outcome: Outcome) -> None:
    """A prompt of 32k tokens for realistic layers: five with a window of 1 024 tokens, and one of full attention.

    The layers with a window store and load less than a fifth of what full attention would.
    """
    model = models.make_sliding_window_model(
        campaign.disk("long model"), pattern="wwwwwf", window=1024, max_tokens=2 * LONG_PROMPT
    )
    options = {
        "model": str(model),
        "max_model_len": LONG_PROMPT + 64,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": 2048,
    }
    prompt = tokens("long prompt", LONG_PROMPT + 1)
    changed = Question((*prompt[:9999], 3 + (prompt[9999] + 100) % 500, *prompt[10_000:]))
    question = Question(prompt)
    with campaign.plain(**options) as reference:
        own, right = reference.own_hit(question), reference(question)
        change = difference(right, reference(changed))
    outcome.expect(change > 10 * TOLERANCE, f"a token changes the answer by only {change:.3g}")
    disk = campaign.disk("long prompt")
    with campaign.connected(disk, **options) as engine:
        cold = engine.ask(question)
        engine.settle()
        records = [read_header(memoryview(path.read_bytes())) for path in disk.glob("??/*")]
        payload = sum(record.payload_bytes for record in records)
        stored = metric(engine, "store_bytes_total", payload)
        warm = engine.ask(question)
        engine.settle()
        loaded = metric(engine, "retrieve_bytes_total", payload)
    compare(outcome, "cold", [question], [cold], [right])
    compare(outcome, "warm", [question], [warm], [right])
    compare_hits(outcome, "warm", [question], [warm], [own])
    full = LONG_PROMPT * 2 * models.HEADS * models.HEAD_SIZE * 4  # of one layer with full attention
    for what, nbytes in {"stored": stored, "loaded": loaded}.items():
        share = (nbytes - full) / (5 * full)
        outcome.counts[f"bytes {what}, of those of full attention"] = round(share, 3)
        outcome.expect(
            0 < share < 1 / 5, f"of the layers with a window, {share:.2f} of the bytes were {what}"
        )


def transformers(campaign: Campaign, outcome: Outcome) -> None:
    """A vLLM without connector has the log-probabilities of Hugging Face transformers, also after a hit of its own.

    For models of which some operations are replaced; see `tests.integration.cpu_models`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    asked = campaign.questions().around_boundaries("transformers")
    with campaign.plain() as reference:
        answers = [answer for one in asked for answer in (reference(one), reference.own_hit(one))]
    model = AutoModelForCausalLM.from_pretrained(campaign.model, dtype=torch.float32)
    for question, answer in zip([one for one in asked for _ in range(2)], answers, strict=True):
        text = [*question.prompt, *answer.tokens]
        with torch.inference_mode():
            logits = model(torch.tensor([text])).logits[0, len(question.prompt) - 1 : -1]
        expected = logits.log_softmax(-1).tolist()
        found = [
            float(place[str(token)]) for place, token in zip(answer.logprobs, answer.tokens, strict=True)
        ]
        right = [row[token] for row, token in zip(expected, answer.tokens, strict=True)]
        distance = max(abs(one - other) for one, other in zip(found, right, strict=True))
        outcome.add("answers")
        outcome.expect(
            distance <= TOLERANCE,
            f"{_text(question)}: the log-probabilities of vLLM and of transformers differ by {distance:.3g}",
        )


def metric(engine: Engine, name: str, least: float) -> float:
    """Sum of the samples of one of our metrics in vLLM's /metrics, once it reaches a value."""
    for _ in engine.until(f"does not count {least} {name}"):
        engine.ask(Question(tokens("beside", 20), max_tokens=1))  # the worker's counts arrive with a step
        families = text_string_to_metric_families(engine.call("metrics"))
        samples = [sample for family in families for sample in family.samples]
        value = sum(sample.value for sample in samples if sample.name == f"lmcache_async_{name}")
        if value >= least:
            return value
    raise AssertionError


MODES: Mapping[str, Callable[[Campaign, Outcome], None]] = {
    "chunked prefill": chunked_prefill,
    "preemption": preemption,
    "no prefix caching": no_prefix_caching,
    "two ranks": two_ranks,
    "pipeline": pipeline,
    "replicas": replicas,
    "two hosts": two_hosts,
    "long prompt": long_prompt,
    "reloaded adapter": reloaded_adapter,
    "transformers": transformers,
}
EVERY_FAMILY = ("chunked prefill", "preemption", "no prefix caching", "two ranks")
"""Modes of all families; the others are for single families."""
