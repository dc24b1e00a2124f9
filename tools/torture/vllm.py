"""A real vLLM with a disk that fails, stalls and returns damaged data. Checks answers and deadlines."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.integration.vllm_answers import TOLERANCE, Answer, Question, difference, tokens
from tests.integration.vllm_driver import Engine, Engines, Reference, connector
from tools.torture.outcome import Outcome

AT_ONCE = 4
FAMILIES = 5
LOOKUP_S, RETRIEVE_S = 0.5, 1.0
DEADLINE_S = LOOKUP_S + RETRIEVE_S
"""Maximum wait of a request for the cache."""
NOISE_S = 2.5
"""Allowed difference of two runs of a request on a busy machine. With the deadline it is less than one delay."""
DELAY_S = 5.0
FAULTS = {"error": 0.1, "delay": 0.1, "delay_s": DELAY_S, "corrupt": 0.1}
"""Faults of three in ten operations."""
USUAL = ("metrics", "retry", "breaker", "deadline")
"""Default layers of a tier."""


def faulty(disk: Path, seed: int, layers: Sequence[str]) -> dict[str, Any]:
    """Return the connector settings of an engine whose disk has faults.

    Args:
        disk: Directory of the disk tier.
        seed: Random seed of the faults.
        layers: Layers around the faults, outermost first.
    """
    transfer = connector(disk=disk)
    settings = transfer["kv_connector_extra_config"]
    faults = {"name": "faults", "seed": seed, **FAULTS}
    settings["tiers"][1] |= {"timeout_s": RETRIEVE_S, "layers": [*layers, faults]}
    settings |= {
        "retrieve.timeout_s": RETRIEVE_S,
        "vllm.lookup_timeout_s": LOOKUP_S,
        "vllm.reset_cache": "memory",
    }
    return transfer


def ask(engine: Engine, reference: Reference, questions: Sequence[Question], outcome: Outcome) -> None:
    """Send requests concurrently, then clear vLLM's cache and the host's memory, so that only the disk has chunks."""
    expected = [reference(question) for question in questions]
    answers = engine.ask_all(questions)
    for question, answer, right in zip(questions, answers, expected, strict=True):
        compare(question, answer, right, outcome)
    outcome.add("tokens from disk", answers[0].tiers.get("disk", 0))
    engine.settle()
    engine.forget()


def compare(
    question: Question, answer: Answer, right: Answer, outcome: Outcome, *, deadline_s: float = DEADLINE_S
) -> None:
    """Check the content and the time of an answer."""
    what = f"prompt of {len(question.prompt)} tokens"
    outcome.add("requests")
    outcome.expect(answer.finish_reason == "length", f"{what} ended with {answer.finish_reason!r}")
    distance = difference(answer, right)
    outcome.expect(distance <= TOLERANCE, f"{what}: log-probabilities are {distance} apart")
    late = answer.seconds - AT_ONCE * right.seconds  # they run concurrently, the reference ran alone
    outcome.counts["latest, in seconds"] = round(max(outcome.counts.get("latest, in seconds", 0.0), late), 2)
    outcome.expect(late <= deadline_s + NOISE_S, f"{what} took {late:.1f} s longer than without a connector")


def faults_seen(counts: dict[str, int]) -> int:
    """Return the number of errors, late calls and damaged records that the engine has counted."""
    return sum(count for name, count in counts.items() if ".errors." in name or ".corrupt." in name)


def rounds(seed: int) -> Iterator[list[Question]]:
    """Yield requests to send concurrently. Prompts share prefixes, and most occur more than once."""
    generator = random.Random(seed)
    families = [tokens(f"family {seed} {family}", 640) for family in range(FAMILIES)]
    while True:
        yield [
            Question(
                generator.choice(families)[: generator.choice((320, 480, 640))]
                + tokens(f"end {seed} {generator.randrange(3)}", generator.choice((40, 100)))
            )
            for _ in range(AT_ONCE)
        ]


def torture(
    engines: Engines,
    reference: Reference,
    transfer: Mapping[str, Any],
    outcome: Outcome,
    *,
    questions: int,
    seconds: float,
    seed: int,
) -> None:
    """Start an engine and send `questions` requests, or run for `seconds` if not 0.

    Retries hide most faults, and the number of calls of the tier varies. If no fault was seen, up to ten times as
    many requests are sent.
    """
    asked = outcome.counts.setdefault("requests", 0)
    outcome.counts.setdefault("latest, in seconds", 0.0)
    deadline, seen = time.monotonic() + seconds, 0
    with engines.started(transfer) as engine:
        for part in rounds(seed):
            done = outcome.counts["requests"] - asked
            enough = time.monotonic() > deadline if seconds else done >= questions
            if outcome.aborted or (enough and (seen or done >= 10 * questions)):
                break
            ask(engine, reference, part, outcome)
            seen = faults_seen(engine.settle()["counts"])
            outcome.progress(done, questions, "requests")
        outcome.add("faults seen", seen)


def run(*, questions: int, seconds: float, seed: int) -> Outcome:
    """Run a vLLM without a connector, and two with a faulty disk: without layers, and with the default ones."""
    outcome = Outcome("vllm", {"seed": seed, "deadline, in seconds": DEADLINE_S})
    with tempfile.TemporaryDirectory(prefix="lmcache-async-vllm-") as name:
        engines = Engines(Path(name))
        try:
            reference = Reference(engines.start())
            for layers in ((), USUAL):
                transfer = faulty(Path(name) / f"kv-{len(layers)}", seed, layers)
                torture(
                    engines,
                    reference,
                    transfer,
                    outcome,
                    questions=questions // 2,
                    seconds=seconds / 2,
                    seed=seed,
                )
        finally:
            engines.close()
    outcome.expect(outcome.counts["faults seen"] > 0, "no fault was seen: nothing was tested")
    return outcome.end()
