"""The measured rounds: the order of requests to the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from examples.demo import pagecache

if TYPE_CHECKING:
    from pathlib import Path

    from examples.demo.cases import Cases
    from examples.demo.client import Engine

SETTLE_S = 1.0  # stores continue after the answer, and must not run during the next measurement
REPEATS = 5  # repetitions of short requests; a round uses their median

Prompt: TypeAlias = list[int]
Tell: TypeAlias = Callable[[str], None]


def compare(
    plain: Engine, cached: Engine, rounds: Sequence[Sequence[Prompt]], cases: Cases, tell: Tell
) -> None:
    """Measure two running engines in turn, with a new document in each round, so that drift affects both.

    Args:
        rounds: For each round the prompts of a document with several questions.
    """
    for number, (prompt, *others) in enumerate(rounds):
        first, second = (cached, plain) if number % 2 else (plain, cached)
        answers = {first.name: first.ask(prompt)}
        second.settle(SETTLE_S)  # the processes of the first engine poll for a while after their answer
        answers[second.name] = second.ask(prompt)
        without, with_cache = answers[plain.name], answers[cached.name]
        cases.no_connector.add([without])
        cases.cold.add([with_cache], reference=without)
        cached.settle(SETTLE_S)

        pool = [plain.ask(prompt) for _ in range(REPEATS)]
        cached.settle(SETTLE_S)
        warm, own = [], []
        for _ in range(REPEATS):
            cached.reset()
            warm.append(cached.ask(prompt))
            own.append(cached.ask(prompt))
        cases.pool.add(pool, reference=without)
        cases.warm.add(warm, reference=pool[0])
        cases.pool_with_connector.add(own, reference=pool[0])

        references = [plain.ask(other) for other in others]
        cached.settle(SETTLE_S)
        for other, reference in zip(others, references, strict=True):
            cached.reset()
            cases.questions.add([cached.ask(other)], reference=reference)
        tell(
            f"round {number + 1}: cold {with_cache.ttft_s:.3f} s (no connector {without.ttft_s:.3f}),"
            f" warm {cases.warm.ttft_s[-1]:.3f}, vLLM's own cache {cases.pool.ttft_s[-1]:.3f}"
        )


def compare_restarted(
    plain: Engine,
    restarted: Engine,
    rounds: Sequence[Sequence[Prompt]],
    directory: Path,
    cases: Cases,
    tell: Tell,
) -> int:
    """Measure the same documents in a new process with empty memory, with `directory` dropped from the page cache.

    Returns:
        Maximum over the rounds of the bytes that could not be dropped from the page cache.
    """
    kept = 0
    for number, (prompt, *_) in enumerate(rounds):
        pool = plain.ask(prompt)
        restarted.settle(SETTLE_S)
        kept = max(kept, pagecache.drop(directory))
        answer = restarted.ask(prompt)
        cases.pool_at_restart.add([pool])
        cases.restart.add([answer], reference=pool)
        tell(
            f"round {number + 1}: after the restart {answer.ttft_s:.3f} s, vLLM's own cache {pool.ttft_s:.3f}"
        )
    return kept
