"""One round of requests at the same time: new prompts alone, and a mixed load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_async.bench.serve_load import Request, gap_ms, mixed, tokens_per_second

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from lmcache_async.bench.serve_answers import Answer
    from lmcache_async.bench.serve_contest import Contest
    from lmcache_async.bench.serve_engine import Engine
    from lmcache_async.bench.serve_load import Mix

PARTS = (0.5, 0.95, 0.99)
NEW, MIXED = "throughput", "mixed throughput"


def loads(contest: Contest, prompts: int, mix: Mix, repeated: Sequence[list[int]]) -> None:
    """One round: both loads, the same for everybody, each from an empty prefix cache of vLLM's own.

    Args:
        prompts: How many new prompts are sent at once.
        repeated: Prompts that all but the vLLM without connector have.
    """
    new = [Request(contest.new_prompt(mix.prompt_tokens), 1) for _ in range(prompts)]
    both = {NEW: new, MIXED: mixed(mix, repeated, contest.chosen, contest.vocabulary)}
    order = contest.chosen.sample(list(both), len(both))
    answers: dict[Engine, dict[str, list[Answer]]] = {}
    for engine in contest.in_turn([contest.plain, *contest.main]):
        with contest.excused(engine):
            contest.turn(engine)
            given: dict[str, list[Answer]] = {}
            for load in order:
                engine.reset()
                given[load] = engine.serve(both[load])
            answers[engine] = given
    known = {tuple(prompt) for prompt in repeated}
    for engine, given in answers.items():
        with contest.excused(engine):
            for load, requests in both.items():
                _check(contest, engine, requests, given[load], answers[contest.plain][load], known)
            _note(contest, engine, both, given, mix)


def _note(
    contest: Contest,
    engine: Engine,
    both: Mapping[str, Sequence[Request]],
    given: Mapping[str, Sequence[Answer]],
    mix: Mix,
) -> None:
    for load, requests in both.items():
        contest.figures.note(load, engine.name, tokens_per_second(requests, given[load]))
    for part in PARTS:
        contest.figures.note(f"gap {part}", engine.name, gap_ms(given[MIXED][: mix.streams], part))


def _check(
    contest: Contest,
    engine: Engine,
    requests: Sequence[Request],
    given: Sequence[Answer],
    reference: Sequence[Answer],
    known: AbstractSet[tuple[int, ...]],
) -> None:
    for request, answer, wanted in zip(requests, given, reference, strict=True):
        if not contest.computes(engine) and tuple(request.prompt) in known:
            contest.check_hit("a known prompt under load", engine, answer, len(request.prompt))
        else:
            contest.check_miss("a new prompt under load", engine, answer)
        contest.check("under load", engine, answer, wanted)
