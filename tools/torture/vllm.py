"""A real vLLM over a disk that fails, stalls and lies: the same answers, none later than its deadline."""

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
"""What a request may wait for the cache in all."""
NOISE_S = 2.5
"""What two runs of one request may differ by on a busy machine; with the deadline less than one delay."""
DELAY_S = 5.0
FAULTS = {"error": 0.1, "delay": 0.1, "delay_s": DELAY_S, "corrupt": 0.1}
"""Three operations in ten."""
USUAL = ("metrics", "retry", "breaker", "deadline")
"""The layers of a tier whose config names none."""


def faulty(disk: Path, seed: int, layers: Sequence[str]) -> dict[str, Any]:
    """The connector of an engine whose disk has faults; its memory is emptied between the rounds.

    Args:
        disk: The directory.
        seed: Of the faults.
        layers: Around the disk with its faults, outermost first.
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
    """Ask some at once, then empty vLLM's cache and the host's memory, so that the disk is all that is left."""
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
    """Tell of an answer that is not the right one, or later than the deadline."""
    what = f"prompt of {len(question.prompt)} tokens"
    outcome.add("requests")
    outcome.expect(answer.finish_reason == "length", f"{what} ended with {answer.finish_reason!r}")
    distance = difference(answer, right)
    outcome.expect(distance <= TOLERANCE, f"{what}: log-probabilities are {distance} apart")
    late = answer.seconds - AT_ONCE * right.seconds  # they share one engine, and were alone in the other
    outcome.counts["latest, in seconds"] = round(max(outcome.counts.get("latest, in seconds", 0.0), late), 2)
    outcome.expect(late <= deadline_s + NOISE_S, f"{what} came {late:.1f} s later than without connector")


def faults_seen(counts: dict[str, int]) -> int:
    """Errors, late calls and damaged records that the engine counted."""
    return sum(count for name, count in counts.items() if ".errors." in name or ".corrupt." in name)


def rounds(seed: int) -> Iterator[list[Question]]:
    """Questions to be asked at once; each prompt begins like others, and most come more than once."""
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
    """Start an engine and ask it so many questions, or for so long if `seconds` is not 0.

    Retries hide most faults, and how many calls the tier gets is a matter of timing: where none was seen it goes on
    asking, up to ten times as many questions.
    """
    asked = outcome.counts.setdefault("requests", 0)
    outcome.counts.setdefault("latest, in seconds", 0.0)
    deadline, seen = time.monotonic() + seconds, 0
    with engines.started(transfer) as engine:
        for part in rounds(seed):
            done = outcome.counts["requests"] - asked
            enough = time.monotonic() > deadline if seconds else done >= questions
            if outcome.hopeless or (enough and (seen or done >= 10 * questions)):
                break
            ask(engine, reference, part, outcome)
            seen = faults_seen(engine.settle()["counts"])
            outcome.tell(done, questions, "requests")
        outcome.add("faults seen", seen)


def run(*, questions: int, seconds: float, seed: int) -> Outcome:
    """One vLLM without connector, and two with faults below: bare, and with the usual layers around them."""
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
