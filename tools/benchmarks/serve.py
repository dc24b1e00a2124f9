"""A real vLLM with this connector compared with one without: TTFT, hits, restarts, mixed loads, a slow tier.

Each vLLM is a process of its own. All run at the same time and get requests strictly one after the other, in
a random order for each round, so that a drift of the machine affects all of them. Every answer must equal
that of the vLLM without a connector, and every hit must be one by vLLM's own count; otherwise there are no
figures.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcache_async.bench.measure import Frame, Parameter, Row
from lmcache_async.integration.vllm.load_policy import MIN_RUNS
from tools.benchmarks import serve_files
from tools.benchmarks.command import option
from tools.benchmarks.serve_engine import (
    CHUNK,
    NO_CONNECTOR,
    POOL_PROMPTS,
    Answer,
    Contestant,
    Engine,
    Request,
    ServeError,
    Shape,
    Starter,
    check_cached,
    check_same,
    choose,
    chosen_connectors,
    disk_tier,
    ours,
)

PARTS = ("alone", "disk", "slow", "load")
MIB = 1 << 20
SHORT_TOKENS = 66
REPEATS = 5  # of requests of milliseconds; a round uses their median
STORED_PROMPTS = 3  # requested after the restart
SLOWER = 3.0  # duration of a read of the slow tier, relative to computing
WARM_HITS = 25  # the first dozens of loads, and of vLLM's hits after them, are slower
IDLE_S = 1.2
"""Pause before another engine gets requests, in seconds. vLLM's processes spin for a second after their last
work, and stores continue after their answer. They must not share cores with the measured engine."""

PLAIN = "no connector"
OURS = "lmcache-async"
DISK = "lmcache-async, disk"
RESTARTED = "lmcache-async, disk, restarted"
SLOW = "lmcache-async, slow tier"
OWN_HIT = "own hit"
RAW = "O_DIRECT read of the same files"
FLOOR = "that read, then the own hit"
NEW, MIXED = "throughput", "mixed throughput"
PERCENTILES = (0.5, 0.95, 0.99)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mix:
    """A mixed load: streams that decode, and prompts that arrive meanwhile.

    Prompts arrive by the progress of the streams and not by the clock. Every vLLM gets the same prompts
    within the same number of decoded tokens, regardless of its speed.

    Attributes:
        streams: Requests that decode throughout.
        stream_tokens: Tokens that each of them generates.
        new: Number of new prompts.
        repeated: Number of prompts that were sent before.
        prompt_tokens: Tokens of each prompt.
    """

    streams: int
    stream_tokens: int
    new: int
    repeated: int
    prompt_tokens: int
    answer_tokens: int = 4

    def moments(self, chosen: random.Random) -> list[tuple[int, bool]]:
        """Return, for each prompt, the number of stream tokens before it is sent, and whether it is new.

        The prompts are spread evenly over all but the first and last tenth.
        """
        kinds = [True] * self.new + [False] * self.repeated
        chosen.shuffle(kinds)
        tokens = self.streams * self.stream_tokens
        first, last = tokens // 10, tokens * 9 // 10
        step = (last - first) / max(len(kinds), 1)
        return [(max(1, int(first + step * number)), new) for number, new in enumerate(kinds)]


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes with a help text are options; see docs/benchmarks.md.

    Attributes:
        shape: Sizes of the model that is created if none is named.
        prompts: Number of new prompts that are sent at the same time.
    """

    tokens: int = option(4098, "tokens of a single prompt")
    model: str = option("", "name or folder of a model; by default a small Llama is created", parse=str)
    path: str = option("", "directory to write in; by default that for temporary files", parse=str)
    arena_mib: int = option(2048, "MiB of host memory for the cache")
    parts: str = option(",".join(PARTS), "parts to measure", parse=str)
    connectors: str = option("", "peers to run, names separated by commas, or all", parse=str)
    shape: Shape = field(default_factory=Shape)
    prompts: int = field(default=10)
    mix: Mix = field(default=Mix(streams=4, stream_tokens=64, new=10, repeated=5, prompt_tokens=514))


QUICK = Settings(
    tokens=514,
    arena_mib=256,
    parts="alone,load",
    shape=Shape(layers=2, hidden=128, heads=2, head_dim=64),
    prompts=2,
    mix=Mix(streams=2, stream_tokens=20, new=2, repeated=2, prompt_tokens=514),
)


async def run(settings: Settings, frame: Frame) -> AsyncIterator[Row]:
    """Measure the selected parts.

    Raises:
        ConfigError: There is no such part or connector.
        ServeError: A vLLM other than a peer's did not start or answered wrongly.
    """
    for row in measure(settings, frame):
        yield row


def measure(settings: Settings, frame: Frame) -> list[Row]:
    """See `run`."""
    import torch

    parts = choose("part", settings.parts, PARTS)
    peers = chosen_connectors(settings.connectors)
    with (
        tempfile.TemporaryDirectory(
            dir=settings.path or None, prefix="lmcache-async-serve", ignore_cleanup_errors=True
        ) as directory,
        tempfile.TemporaryDirectory(prefix="lma", ignore_cleanup_errors=True) as sockets,
        contextlib.ExitStack() as stack,
    ):
        starter = Starter(
            Path(directory),
            Path(sockets),
            settings.model,
            settings.shape,
            settings.tokens,
            gpu=torch.cuda.is_available(),
            together=2 + ("disk" in parts) + ("slow" in parts) + len(peers),
        )
        contest = Contest(settings, frame, starter, stack, parts)
        for peer in peers:
            contest.start_peer(peer.missing, peer.contestant(settings.arena_mib * MIB, Path(directory)))
        contest.measure()
        facts: dict[str, Parameter] = {
            "tokens": settings.tokens,
            "model": settings.model or "made",
            "device": "gpu" if starter.gpu else "cpu",
        }
        main = [engine.name for engine in contest.main]
        return contest.figures.rows(main, [name for name in main if name in contest.files], facts)


def prompt(chosen: random.Random, count: int, vocabulary: int) -> list[int]:
    """Return random token ids without special ones."""
    return [chosen.randrange(3, vocabulary) for _ in range(count)]


def mixed(
    mix: Mix, repeated: Sequence[Sequence[int]], chosen: random.Random, vocabulary: int
) -> list[Request]:
    """Return one mixed load, the streams first."""
    requests = [
        Request(prompt(chosen, SHORT_TOKENS, vocabulary), mix.stream_tokens) for _ in range(mix.streams)
    ]
    known = iter(repeated)
    for after, new in mix.moments(chosen):
        tokens = prompt(chosen, mix.prompt_tokens, vocabulary) if new else next(known)
        requests.append(Request(tokens, mix.answer_tokens, after))
    return requests


def tokens_per_second(requests: Sequence[Request], answers: Sequence[Answer]) -> float:
    """Return the tokens of prompts and answers per second, from the first request to the last token."""
    tokens = sum(len(request.prompt) for request in requests) + sum(len(answer.tokens) for answer in answers)
    start = min(answer.sent for answer in answers)
    return tokens / (max(answer.times[-1] for answer in answers) - start)


def gap_ms(answers: Sequence[Answer], part: float) -> float:
    """Return a percentile of the milliseconds between consecutive tokens.

    The minimum is a microsecond: tokens that are read together on a busy machine have no gap to compare.
    """
    return max(percentile([gap for answer in answers for gap in answer.gaps_ms], part), 1e-3)


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least `part` of all values do not exceed.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("there are no values")
    return sorted(values)[max(math.ceil(part * len(values)), 1) - 1]


class Figures:
    """Figures of all rounds, by measurement and engine."""

    def __init__(self) -> None:
        self._taken: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    def note(self, what: str, who: str, *values: float) -> None:
        """Add the figure of a round: the median of the values measured in it."""
        self._taken[what, who].append(statistics.median(values))

    def forget(self, who: str) -> None:
        for key in [key for key in self._taken if key[1] == who]:
            del self._taken[key]

    def rows(
        self, main: Sequence[str], on_disk: Collection[str], facts: Mapping[str, Parameter]
    ) -> list[Row]:
        """Return all rows with figures.

        Args:
            main: This connector and the peers that took part.
            on_disk: The peers whose hits came from the disk.
        """
        taken, rows = self._taken, list[Row]()

        def add(
            name: str, unit: str, what: str, who: str, limits: dict[str, tuple[str, str]], **more: str
        ) -> None:
            figure = taken.get((what, who))
            if not figure:
                return
            suffix = f", {who}" if who in main and who != OURS else ""
            extra = {key: statistics.median(taken[more[key], who]) for key in more}
            rows.extend(
                Row.of(f"{name}{suffix}", unit, figure, limit, taken[key], {**facts, "connector": who}, extra)
                for limit, key in limits.items()
                if taken.get(key)
            )

        def own_hits(who: str) -> dict[str, tuple[str, str]]:
            return {OWN_HIT: (OWN_HIT, PLAIN), "own hit, same process": (OWN_HIT, who)}

        def reads(who: str) -> dict[str, tuple[str, str]]:
            return {RAW: (RAW, who), FLOOR: (FLOOR, who)}

        for who in main:
            add("new prompt", "ms", "cold", who, {PLAIN: ("cold", PLAIN)})
            limits = own_hits(who)
            if who == OURS:
                limits |= {peer: ("hit", peer) for peer in main if peer not in (OURS, *on_disk)}
            if who in on_disk:
                limits |= reads(who)
            add("known prompt", "ms", "hit", who, limits)
        add("new prompt, disk tier", "ms", "cold", RESTARTED, {PLAIN: ("cold", PLAIN)})
        limits = own_hits(RESTARTED) | reads(RESTARTED) | {peer: ("hit", peer) for peer in on_disk}
        add("known prompt, disk tier", "ms", "hit", RESTARTED, limits)
        after = {OWN_HIT: ("own hit beside restart", PLAIN), PLAIN: ("cold beside restart", PLAIN)}
        add("known prompt, after a restart", "ms", "restart", RESTARTED, after)
        add("slow tier", "ms", "slow", SLOW, {PLAIN: ("cold", PLAIN)}, loaded_tokens="loaded from slow tier")
        for who in main:
            add("new prompts at once", "tokens/s", NEW, who, {PLAIN: (NEW, PLAIN)})
            gaps = {"p50": "gap 0.5", "p99": "gap 0.99"}
            add("mixed load, p95 between tokens", "ms", "gap 0.95", who, {PLAIN: ("gap 0.95", PLAIN)}, **gaps)
            add("mixed load", "tokens/s", MIXED, who, {PLAIN: (MIXED, PLAIN)})
        return rows


@dataclass(frozen=True, slots=True)
class Stored:
    """A prompt on disk, and the answers of the vLLM without a connector.

    Attributes:
        files: The files of the disk tier for this prompt alone.
        cold: The answer with the prompt computed.
        hit: The answer from vLLM's prefix cache, with different rounding.
    """

    prompt: list[int]
    files: tuple[Path, ...]
    cold: Answer
    hit: Answer


@dataclass(slots=True)
class Asked:
    """Answers of one engine in its turn of a round.

    Attributes:
        cold: Answer to the prompt when it was new.
        hits: Answers from the connector, with vLLM's prefix cache empty.
        own: Answers from vLLM's prefix cache.
        raw: Milliseconds of reading the files of each hit, if it came from files.
    """

    engine: Engine
    cold: Answer
    hits: list[Answer] = field(default_factory=list)
    own: list[Answer] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)


class Contest:
    """One run: the participating engines, their turns, and the checks of their answers.

    Attributes:
        plain: vLLM without a connector.
        main: The engines compared with it: this connector, and the peers.
        files: KV directories of engines whose hits come from the disk.
    """

    def __init__(
        self,
        settings: Settings,
        frame: Frame,
        starter: Starter,
        stack: contextlib.ExitStack,
        parts: tuple[str, ...],
    ) -> None:
        self._settings = settings
        self._frame = frame
        self._starter = starter
        self._stack = stack
        self._parts = parts
        self._alone = bool({"alone", "disk", "slow"} & set(parts))
        self._chosen = frame.chosen
        self._idle_s = 0.0 if frame.quick else IDLE_S
        self._awake: Engine | None = None
        self._peers: set[str] = set()
        self._disk = starter.directory / "disk"
        self._done = 0
        self.files: dict[str, Path] = {}
        self.figures = Figures()
        self._step(0)
        wanted = [Contestant(PLAIN), Contestant(OURS, ours(["cpu"], settings.arena_mib * MIB))]
        self.plain, own = stack.enter_context(starter.started(wanted))
        self.main = [own]
        self._step()

    def start_peer(self, missing: str, contestant: Contestant) -> None:
        """Start a peer. If it does not start, it is left out and the reason is logged."""
        name = contestant.name
        if missing:
            logger.warning("%s is left out: the package %s is not installed", name, missing)
            return
        try:
            [engine] = self._stack.enter_context(self._starter.started([contestant]))
        except ServeError as error:
            logger.warning("%s is left out: %s", name, error.first_line)
            return
        self._peers.add(name)
        self.main.append(engine)
        if contestant.files is not None:
            self.files[name] = contestant.files

    def measure(self) -> None:
        """Measure all selected parts."""
        new = self._new_prompt()
        for engine in list(self.main):
            with self._excused(engine):
                self._warm_up(engine, new, hits=0 if self._frame.quick else WARM_HITS)
        cold_s = self._warm_up(self.plain, new)
        self._step()
        if self._alone:
            with contextlib.ExitStack() as stack:
                self._alone_rounds(stack, cold_s)
        if "load" in self._parts:
            self._load_rounds()

    def _alone_rounds(self, stack: contextlib.ExitStack, cold_s: float) -> None:
        stored = self._store_on_disk() if "disk" in self._parts else []
        self.files[RESTARTED] = self._disk
        wanted = [self._with_disk(RESTARTED)] if "disk" in self._parts else []
        if "slow" in self._parts:
            wanted.append(self._with_slow_tier(cold_s))
        started = stack.enter_context(self._starter.started(wanted))
        engines = {engine.name: engine for engine in started}
        disk, slow = engines.get(RESTARTED), engines.get(SLOW)
        self._step()
        if disk is not None:
            # A different prompt, so that vLLM's first-time work is done but the hits come from the disk.
            self._warm_up(disk, self._new_prompt())
            for each in stored:
                self._ask_after_restart(disk, each)
        lesson = self._teach(slow) if slow is not None else None
        self._step()
        for _ in range(self._frame.rounds):
            self._alone_round(disk, slow, lesson)
            self._step()

    def _store_on_disk(self) -> list[Stored]:
        """Store prompts with a vLLM that has a disk tier, and end that vLLM."""
        with self._starter.started([self._with_disk(DISK)]) as [engine]:
            self._warm_up(engine, self._new_prompt())
            serve_files.wait_still(self._disk)
            stored = [self._store(engine) for _ in range(STORED_PROMPTS)]
            engine.close()
        self._step()
        return stored

    def _store(self, engine: Engine) -> Stored:
        before = serve_files.sizes(self._disk)
        new, answers, own = self._new_prompt(), dict[Engine, Answer](), list[Answer]()
        for each in self._chosen.sample([self.plain, engine], 2):
            self._turn(each)
            answers[each] = each.ask(new)
            if each is self.plain:
                own.append(self._own_hit(new))
        self._check_miss("a new prompt", engine, answers[engine])
        self._check("a new prompt", engine, answers[engine], answers[self.plain])
        serve_files.wait_still(self._disk)
        files = tuple(sorted(serve_files.sizes(self._disk).keys() - before.keys()))
        return Stored(new, files, answers[self.plain], own[0])

    def _with_disk(self, name: str) -> Contestant:
        arena = self._settings.arena_mib * MIB // 2
        return Contestant(name, ours([disk_tier(self._disk)], arena, **{"vllm.load_policy": "always"}))

    def _with_slow_tier(self, cold_s: float) -> Contestant:
        """Return a vLLM with a tier whose reads take longer than computing and reach no deadline."""
        delay_s = max(SLOWER * cold_s, 0.2)
        timeout_s = 60.0 + 4 * delay_s
        settings: dict[str, Any] = {"retrieve.timeout_s": timeout_s}
        delay = {"name": "faults", "delay_s": delay_s, "get": {"delay": 1.0}}
        tier = disk_tier(self._starter.directory / "slow", layers=[delay], timeout_s=timeout_s)
        return Contestant(SLOW, ours([tier], self._settings.arena_mib * MIB // 2, **settings))

    def _teach(self, slow: Engine) -> Stored:
        """Let the engine store a prompt and load it until it has measured that computing is faster."""
        new = self._new_prompt()
        self._turn(self.plain)
        computed = self.plain.ask(new)
        lesson = Stored(new, (), computed, self._own_hit(new))
        self._turn(slow)
        for each in [*(self._new_prompt() for _ in range(MIN_RUNS)), new]:
            slow.ask(each)
        serve_files.wait_still(self._starter.directory / "slow")
        loaded = [self._ask_slow_tier(slow, lesson).cached_tokens > 0 for _ in range(POOL_PROMPTS)]
        if not any(loaded) or loaded[-1]:
            what = "was always loaded from" if loaded[-1] else "was never loaded from"
            raise ServeError(f"{slow.name}: a tier {SLOWER:.0f} times as slow as computing {what}")
        return lesson

    def _ask_slow_tier(self, engine: Engine, stored: Stored) -> Answer:
        """Send a prompt that only a slow tier has. The engine decides between loading and computing."""
        engine.reset()
        answer = engine.ask(stored.prompt)
        reference = stored.hit if answer.cached_tokens else stored.cold
        self._check("a prompt that a slow tier has", engine, answer, reference)
        return answer

    def _ask_after_restart(self, engine: Engine, stored: Stored) -> None:
        """Send the first request for a prompt to a new process; also measure computing and vLLM's own hit."""
        self._turn(self.plain)
        self.plain.reset()
        self.figures.note("cold beside restart", PLAIN, self.plain.ask(stored.prompt).ttft_ms)
        own = [self._own_hit(stored.prompt).ttft_ms for _ in range(REPEATS)]
        self.figures.note("own hit beside restart", PLAIN, *own)
        self._turn(engine)
        serve_files.drop(stored.files)
        answer = engine.ask(stored.prompt)
        self._check_hit("after the restart", engine, answer, len(stored.prompt))
        self._check("after the restart", engine, answer, stored.hit)
        self.figures.note("restart", engine.name, answer.ttft_ms)

    def _alone_round(self, disk: Engine | None, slow: Engine | None, lesson: Stored | None) -> None:
        """Run one round of single requests: in each engine's turn a new prompt, then the same again."""
        new = self._new_prompt()
        results: dict[Engine, Asked] = {}
        turns: list[Callable[[], None]] = [
            functools.partial(self._new_and_known, engine, new, results)
            for engine in (self.plain, *self.main, *(() if disk is None else (disk,)))
        ]
        if slow is not None and lesson is not None:
            turns.append(functools.partial(self._from_slow_tier, slow, lesson))
        for turn in self._chosen.sample(turns, len(turns)):
            turn()
        for engine, each in results.items():
            with self._excused(engine):
                self._judge(each, results[self.plain])

    def _new_and_known(self, engine: Engine, new: list[int], results: dict[Engine, Asked]) -> None:
        with self._excused(engine):
            self._turn(engine)
            directory = self.files.get(engine.name)
            before = set() if directory is None else serve_files.sizes(directory).keys()
            asked, files = Asked(engine, engine.ask(new)), list[Path]()
            if directory is not None:
                serve_files.wait_still(directory)
                engine.wake()
                files = sorted(serve_files.sizes(directory).keys() - before)
                if not files:
                    raise ServeError(f"{engine.name} kept no file of a new prompt")
            for _ in range(REPEATS):
                serve_files.drop(files)
                if not self._computes(engine):
                    engine.reset()
                    asked.hits.append(engine.ask(new))
                asked.own.append(engine.ask(new))
            if files:
                self._rest()
                with serve_files.RawReads(files) as reads:
                    asked.raw += [reads.milliseconds() for _ in range(REPEATS)]
            results[engine] = asked

    def _from_slow_tier(self, engine: Engine, stored: Stored) -> None:
        self._turn(engine)
        answer = self._ask_slow_tier(engine, stored)
        self.figures.note("slow", engine.name, answer.ttft_ms)
        self.figures.note("loaded from slow tier", engine.name, answer.cached_tokens)

    def _judge(self, asked: Asked, reference: Asked) -> None:
        """Check all answers of a turn and add them to the figures."""
        engine, note = asked.engine, self.figures.note
        self._check_miss("a new prompt", engine, asked.cold)
        self._check("a new prompt", engine, asked.cold, reference.cold)
        for answer in (*asked.hits, *asked.own):
            self._check_hit("a known prompt", engine, answer, self._settings.tokens)
            self._check("a known prompt", engine, answer, reference.own[0])
        own = [answer.ttft_ms for answer in asked.own]
        note("cold", engine.name, asked.cold.ttft_ms)
        note(OWN_HIT, engine.name, *own)
        if asked.hits:
            note("hit", engine.name, *(answer.ttft_ms for answer in asked.hits))
        if asked.raw:
            note(RAW, engine.name, *asked.raw)
            note(FLOOR, engine.name, *map(operator.add, asked.raw, own))

    def _load_rounds(self) -> None:
        """Run one warm-up and the rounds. The repeated prompts are the same throughout."""
        mix = self._settings.mix
        repeated = [self._new_prompt(mix.prompt_tokens) for _ in range(mix.repeated)]
        for engine in list(self.main):
            with self._excused(engine):
                self._turn(engine)
                engine.serve([Request(one, 1) for one in repeated])
        measured = self.figures
        for number in range(self._frame.rounds + 1):
            self.figures = measured if number else Figures()
            self._load_round(repeated)
            self._step()

    def _load_round(self, repeated: Sequence[list[int]]) -> None:
        """Run both loads, the same for every engine, each with an empty prefix cache of vLLM."""
        mix, vocabulary = self._settings.mix, self._vocabulary
        new = [Request(self._new_prompt(mix.prompt_tokens), 1) for _ in range(self._settings.prompts)]
        both = {NEW: new, MIXED: mixed(mix, repeated, self._chosen, vocabulary)}
        order = self._chosen.sample(list(both), len(both))
        engines = [self.plain, *self.main]
        answers: dict[Engine, dict[str, list[Answer]]] = {}
        for engine in self._chosen.sample(engines, len(engines)):
            with self._excused(engine):
                self._turn(engine)
                given: dict[str, list[Answer]] = {}
                for load in order:
                    engine.reset()
                    given[load] = engine.serve(both[load])
                answers[engine] = given
        known = {tuple(one) for one in repeated}
        for engine, given in answers.items():
            with self._excused(engine):
                for load, requests in both.items():
                    for request, answer, reference in zip(
                        requests, given[load], answers[self.plain][load], strict=True
                    ):
                        if not self._computes(engine) and tuple(request.prompt) in known:
                            self._check_hit("a known prompt under load", engine, answer, len(request.prompt))
                        else:
                            self._check_miss("a new prompt under load", engine, answer)
                        self._check("under load", engine, answer, reference)
                    self.figures.note(load, engine.name, tokens_per_second(requests, given[load]))
                for part in PERCENTILES:
                    self.figures.note(f"gap {part}", engine.name, gap_ms(given[MIXED][: mix.streams], part))

    def _warm_up(self, engine: Engine, new: list[int], *, hits: int = 0) -> float:
        """Run first-time work and touch all blocks of vLLM's pool. Return the seconds of the last request."""
        self._turn(engine)
        seconds = 0.0
        for number in range(POOL_PROMPTS + hits):
            engine.reset()
            seconds = engine.ask(new).ttft_ms / 1e3
            if number >= POOL_PROMPTS:
                engine.ask(new)
        return seconds

    def _own_hit(self, known: list[int]) -> Answer:
        """Return the answer of the vLLM without a connector from its prefix cache."""
        answer = self.plain.ask(known)
        self._check_hit("its own hit", self.plain, answer, len(known))
        return answer

    def _computes(self, engine: Engine) -> bool:
        """Return whether the engine has no cache except vLLM's own."""
        return engine is self.plain or engine.name == NO_CONNECTOR

    @property
    def _vocabulary(self) -> int:
        return int(self.plain.facts["vocabulary"])

    def _new_prompt(self, tokens: int | None = None) -> list[int]:
        return prompt(self._chosen, tokens or self._settings.tokens, self._vocabulary)

    def _turn(self, engine: Engine) -> None:
        """Begin the turn of an engine: the others are idle, and its processes are awake."""
        if self._awake is not engine:
            self._rest()
            self._awake = engine
            engine.wake()

    def _rest(self) -> None:
        """Wait until all engines are idle."""
        time.sleep(self._idle_s)
        self._awake = None

    @contextlib.contextmanager
    def _excused(self, engine: Engine) -> Iterator[None]:
        """Leave out a peer that fails in the block. The failure of another engine ends the run."""
        try:
            yield
        except ServeError as error:
            if engine.name not in self._peers:
                raise
            logger.warning("%s is left out: %s", engine.name, error.first_line)
            self.figures.forget(engine.name)
            self.main.remove(engine)
            engine.kill()

    def _check(self, what: str, engine: Engine, answer: Answer, reference: Answer) -> None:
        check_same(f"{engine.name}, {what}", answer, reference, str(self.plain.facts["dtype"]))

    def _check_hit(self, what: str, engine: Engine, answer: Answer, tokens: int) -> None:
        """Check that all full chunks of the prompt came from a cache."""
        least = (tokens - 1) // CHUNK * CHUNK
        check_cached(f"{engine.name}, {what}", answer, least=least, most=tokens - 1)

    def _check_miss(self, what: str, engine: Engine, answer: Answer) -> None:
        check_cached(f"{engine.name}, {what}", answer, least=0, most=0)

    def _step(self, count: int = 1) -> None:
        rounds = self._frame.rounds
        steps = 2 + (2 + rounds) * self._alone + ("disk" in self._parts)
        self._done += count
        self._frame.progress(self._done, steps + (rounds + 1) * ("load" in self._parts))
