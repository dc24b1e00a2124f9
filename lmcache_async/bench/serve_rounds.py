"""One round of requests that are alone: new ones, hits in memory and on disk, after a restart, in a slow tier."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_async.bench import serve_files
from lmcache_async.bench.serve_answers import ServeError
from lmcache_async.bench.serve_figures import FLOOR, OWN_HIT, RAW

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from lmcache_async.bench.serve_answers import Answer
    from lmcache_async.bench.serve_contest import Contest
    from lmcache_async.bench.serve_engine import Engine

REPEATS = 5  # of what takes milliseconds; a round keeps their median


@dataclass(frozen=True, slots=True)
class Stored:
    """A prompt that is on disk, and what the answers to it must be.

    Attributes:
        files: The disk tier's, of this prompt alone; none where they do not matter.
        cold: Of a vLLM without connector that computed it.
        hit: Of the same from its own prefix cache, which rounds in another way.
    """

    prompt: list[int]
    files: tuple[Path, ...]
    cold: Answer
    hit: Answer


@dataclass(slots=True)
class Asked:
    """What one of them answered in its turn of a round.

    Attributes:
        cold: To the prompt when it was new.
        hits: From the connector, vLLM's own prefix cache being empty.
        own: From vLLM's own prefix cache.
        raw: Milliseconds of reading the files of each hit, where it came from files.
    """

    engine: Engine
    cold: Answer
    hits: list[Answer] = field(default_factory=list)
    own: list[Answer] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)


def alone(contest: Contest, disk: Engine | None = None, slow: tuple[Engine, Stored] | None = None) -> None:
    """One round: a new prompt and then the same again, of each in a turn of its own."""
    prompt = contest.new_prompt()
    turns: list[Callable[[], Asked | None]] = [
        functools.partial(_new_and_known, contest, engine, prompt)
        for engine in (contest.plain, *contest.main, *(() if disk is None else (disk,)))
    ]
    if slow is not None:
        turns.append(functools.partial(_from_slow_tier, contest, *slow))
    asked = [turn() for turn in contest.chosen.sample(turns, len(turns))]
    results = {each.engine: each for each in asked if each is not None}
    reference = results[contest.plain]
    for engine, each in results.items():
        with contest.excused(engine):
            _judge(contest, each, reference)


def store(contest: Contest, engine: Engine, directory: Path) -> Stored:
    """A new prompt, put on disk by `engine`, beside computing it without a connector."""
    before = serve_files.sizes(directory)
    prompt = contest.new_prompt()
    answers: dict[Engine, Answer] = {}
    own: list[Answer] = []
    for each in contest.in_turn([contest.plain, engine]):
        contest.turn(each)
        answers[each] = each.ask(prompt)
        if each is contest.plain:
            own.append(own_hit(contest, prompt))
    contest.check_miss("a new prompt", engine, answers[engine])
    contest.check("a new prompt", engine, answers[engine], answers[contest.plain])
    serve_files.wait_still(directory)
    files = tuple(sorted(serve_files.sizes(directory).keys() - before.keys()))
    return Stored(prompt, files, answers[contest.plain], own[0])


def own_hit(contest: Contest, prompt: list[int]) -> Answer:
    """Of the vLLM without connector, which must have the prompt in its own prefix cache."""
    answer = contest.plain.ask(prompt)
    contest.check_hit("its own hit", contest.plain, answer, len(prompt))
    return answer


def restarted(contest: Contest, engine: Engine, stored: Stored) -> None:
    """The first request for a prompt in a new process, beside computing it and vLLM's own hit."""
    plain, figures = contest.plain, contest.figures
    contest.turn(plain)
    plain.reset()
    figures.note("cold beside restart", plain.name, plain.ask(stored.prompt).ttft_ms)
    own = [own_hit(contest, stored.prompt).ttft_ms for _ in range(REPEATS)]
    figures.note("own hit beside restart", plain.name, *own)
    contest.turn(engine)
    serve_files.drop(stored.files)
    answer = engine.ask(stored.prompt)
    contest.check_hit("after the restart", engine, answer, len(stored.prompt))
    contest.check("after the restart", engine, answer, stored.hit)
    figures.note("restart", engine.name, answer.ttft_ms)


def known_to_slow_tier(contest: Contest, engine: Engine, stored: Stored) -> Answer:
    """A prompt that only a tier slower than computing has. Which of the two was done is the engine's choice."""
    engine.reset()
    answer = engine.ask(stored.prompt)
    reference = stored.hit if answer.cached_tokens else stored.cold
    contest.check("a prompt that a slow tier has", engine, answer, reference)
    return answer


def _new_and_known(contest: Contest, engine: Engine, prompt: list[int]) -> Asked | None:
    with contest.excused(engine):
        contest.turn(engine)
        directory = contest.files.get(engine.name)
        before = set() if directory is None else serve_files.sizes(directory).keys()
        asked = Asked(engine, engine.ask(prompt))
        files = [] if directory is None else _written(engine, directory, before)
        for _ in range(REPEATS):
            serve_files.drop(files)
            if not contest.computes(engine):
                engine.reset()
                asked.hits.append(engine.ask(prompt))
            asked.own.append(engine.ask(prompt))
        if files:
            contest.rest()
            with serve_files.RawReads(files) as reads:
                asked.raw += [reads.milliseconds() for _ in range(REPEATS)]
    return asked if contest.takes_part(engine.name) else None


def _written(engine: Engine, directory: Path, before: Collection[Path]) -> list[Path]:
    """Files of the prompt that it was asked last: as new as anybody else's."""
    serve_files.wait_still(directory)
    engine.wake()
    files = sorted(serve_files.sizes(directory).keys() - before)
    if not files:
        raise ServeError(f"{engine.name} kept no file of a new prompt")
    return files


def _from_slow_tier(contest: Contest, engine: Engine, stored: Stored) -> None:
    contest.turn(engine)
    answer = known_to_slow_tier(contest, engine, stored)
    contest.figures.note("known to slow tier", engine.name, answer.ttft_ms)
    contest.figures.note("loaded from slow tier", engine.name, answer.cached_tokens)


def _judge(contest: Contest, asked: Asked, reference: Asked) -> None:
    """All its answers are right, and go into the figures."""
    engine, figures = asked.engine, contest.figures
    contest.check_miss("a new prompt", engine, asked.cold)
    contest.check("a new prompt", engine, asked.cold, reference.cold)
    for answer in (*asked.hits, *asked.own):
        contest.check_hit("a known prompt", engine, answer, contest.tokens)
        contest.check("a known prompt", engine, answer, reference.own[0])
    own = [answer.ttft_ms for answer in asked.own]
    figures.note("cold", engine.name, asked.cold.ttft_ms)
    figures.note(OWN_HIT, engine.name, *own)
    if asked.hits:
        figures.note("hit", engine.name, *(answer.ttft_ms for answer in asked.hits))
    if asked.raw:
        figures.note(RAW, engine.name, *asked.raw)
        figures.note(FLOOR, engine.name, *map(operator.add, asked.raw, own))
