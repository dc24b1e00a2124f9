"""Random traffic on real vLLMs with small caches: requests, aborts, preemption and resets. Checks answers and blocks."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from tests.integration.vllm_answers import TOLERANCE, Question, difference, tokens
from tests.integration.vllm_driver import Engine, Engines, Reference, connector
from tools.models.families import FAMILIES
from tools.torture.outcome import Outcome
from tools.torture.vllm import faults_seen

MODELS = {
    "llama": (32, 40, 48),
    "gemma-3": (64, 72, 80),
    "llama-4": (72, 80, 96),
    "granite-4": (32, 40, 48),
}
"""Models with full attention, sliding windows, chunked local attention and recurrent states, and numbers of blocks of vLLM's
pool: enough for one of the longest requests, too few for all of a round. All are float32: in bfloat16, the answer of a
preempted request also differs in a vLLM without connector."""
FAULTS = {"name": "faults", "error": 0.1, "corrupt": 0.1}
"""The only layer of the disk tier in half of the runs, so that loads fail."""
MAX_TOKENS = 928
AT_ONCE = 10


def settings(generator: random.Random, disk: Path) -> dict[str, Any]:
    """Return connector settings with a small arena and a small disk, and other settings at random."""
    transfer = connector(disk=disk, arena_chunks=generator.choice((12, 40, 120)))
    extra = transfer["kv_connector_extra_config"]
    extra["tiers"][1]["max_bytes"] = generator.choice(("8MiB", "32MiB", "1GiB"))
    if generator.random() < 0.5:
        extra["tiers"][1]["layers"] = [{**FAULTS, "seed": generator.randrange(1 << 16)}]
    extra |= {
        "store.generated_tokens": generator.choice((False, True)),
        "vllm.layerwise_load": generator.choice(("never", "auto")),
        "vllm.lookup_pin_ttl_s": generator.choice((0.2, 600.0)),
        "vllm.lookup_timeout_s": generator.choice((0.05, 10.0)),
        "vllm.reset_cache": generator.choice(("memory", "all", "new_namespace")),
    }
    return transfer


class Traffic:
    """Random calls of one vLLM, in rounds.

    Prompts share prefixes, so that hits end inside chunks and blocks, and most prompts occur more than once.
    """

    def __init__(
        self,
        engine: Engine,
        reference: Reference,
        generator: random.Random,
        outcome: Outcome,
        *,
        name: str,
    ) -> None:
        self._engine = engine
        self._reference = reference
        self._random = generator
        self._outcome = outcome
        self._name = name
        seed = generator.random()
        self._prefixes = [tokens(f"prefix {seed} {index}", 640) for index in range(4)]
        self._ends = [tokens(f"end {seed} {index}", 200) for index in range(6)]

    def round(self) -> None:
        """Send requests, abort some, reset the cache and step in any order. Then finish the others and check the answers."""
        asked: dict[str, Question] = {}
        calls = [self._call(asked) for _ in range(self._random.choice((4, 12, 30)))]
        self._engine.call("run")
        for name, question in asked.items():
            self._check(question, name, calls)
        if self._random.random() < 0.3:
            self._engine.settle()
            free, total = self._engine.call("free_blocks")
            self._outcome.expect(
                free == total, f"{self._name}: {total - free} blocks are held after {', '.join(calls)}"
            )

    def _call(self, asked: dict[str, Question]) -> str:
        """Make one call at random and return its description. `asked` are the requests that are not aborted."""
        kind = self._random.random()
        if kind < 0.6 and len(asked) < AT_ONCE:
            question = self._question()
            self._reference(question)  # computed now, while its time does not delay the requests of the round
            [name] = self._engine.add(question)
            asked[name] = question
            return f"{name} of {len(question.prompt)} tokens"
        if kind < 0.68 and asked:
            name = self._random.choice(list(asked))
            self._engine.call("abort", names=[name])
            del asked[name]
            self._outcome.add("aborts")
            return f"abort of {name}"
        if kind < 0.72:
            everything = self._random.random() < 0.5
            done = self._engine.call("reset", connector=everything)
            self._outcome.add("resets" if done else "refused resets")
            return f"reset of {'all caches' if everything else 'the cache of vLLM'}"
        steps = self._random.choice((1, 1, 2, 5))
        for _ in range(steps):
            self._engine.call("step")
        return f"{steps} steps"

    def _question(self) -> Question:
        prefix = self._random.choice(self._prefixes)[: self._random.choice((0, 64, 130, 256, 300, 512, 640))]
        end = self._random.choice(self._ends)[: self._random.choice((3, 20, 64, 97, 200))]
        salt = self._random.choice(("", "", "", "tenant"))
        return Question(prefix + end, max_tokens=self._random.choice((1, 4, 8, 80)), cache_salt=salt)

    def _check(self, question: Question, name: str, calls: list[str]) -> None:
        answer, right = self._engine.take(name), self._reference(question)
        self._outcome.add("requests")
        self._outcome.add("hits", answer.cached_tokens > 0)
        distance = difference(answer, right, TOLERANCE)
        self._outcome.expect(
            distance <= TOLERANCE and answer.finish_reason == "length",
            f"{self._name}: {name} of {len(question.prompt)} tokens, {answer.cached_tokens} of them from caches, ended with"
            f" {answer.finish_reason!r}, log-probabilities are {distance} apart; calls: {', '.join(calls)}",
        )


def run(*, requests: int, seconds: float, seed: int) -> Outcome:
    """Send the same number of requests to each model, or send requests to each for the same time."""
    outcome = Outcome("traffic", {"seed": seed, "requests": 0})
    with tempfile.TemporaryDirectory(prefix="lmcache-async-traffic-") as directory:
        engines = Engines(Path(directory))
        try:
            for number, name in enumerate(MODELS, start=1):
                _run_model(
                    engines,
                    Path(directory) / name,
                    name,
                    outcome,
                    seed=seed,
                    requests=requests * number // len(MODELS),
                    seconds=seconds * number / len(MODELS),
                )
        finally:
            engines.close()
    outcome.expect(outcome.counts["hits"] > 0, "there was no hit: nothing was tested")
    return outcome.end()


def _run_model(
    engines: Engines,
    directory: Path,
    name: str,
    outcome: Outcome,
    *,
    seed: int,
    requests: int,
    seconds: float,
) -> None:
    """Run rounds with one model until the campaign has had this number of requests or has taken this time."""
    family = FAMILIES[name]
    options = {**family.options, "model": str(family.make(directory / "model"))}
    generator = random.Random(f"{name} {seed}")
    blocks, transfer = generator.choice(MODELS[name]), settings(generator, directory / "disk")
    with (
        engines.started(None, **options) as plain,
        engines.started(
            transfer, num_gpu_blocks_override=blocks, max_model_len=MAX_TOKENS, **options
        ) as engine,
    ):
        traffic = Traffic(engine, Reference(plain), generator, outcome, name=name)
        before = engine.call("counters")["vllm:num_preemptions"]
        while outcome.left("requests", requests, seconds):
            traffic.round()
        outcome.add("faults seen", faults_seen(engine.settle()["counts"]))
        outcome.add("preemptions", engine.call("counters")["vllm:num_preemptions"] - before)
