"""A whole run: who is started when, and who is asked what."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_async.bench import serve_files
from lmcache_async.bench.serve_answers import ServeError, first_line
from lmcache_async.bench.serve_connectors import chosen_peers
from lmcache_async.bench.serve_contest import IDLE_S, Contest
from lmcache_async.bench.serve_figures import DISK, OURS, PLAIN, RESTARTED, SLOW, Figures, rows_of
from lmcache_async.bench.serve_load import Request
from lmcache_async.bench.serve_loads import loads
from lmcache_async.bench.serve_rounds import Stored, alone, known_to_slow_tier, own_hit, restarted, store
from lmcache_async.bench.serve_setup import (
    POOL_PROMPTS,
    Contestant,
    Machine,
    Starter,
    disk_tier,
    ours,
    slow_tier,
)

if TYPE_CHECKING:
    from lmcache_async.bench.frame import Frame, Parameter, Row
    from lmcache_async.bench.serve_engine import Engine
    from lmcache_async.bench.serve_settings import Settings

STORED_PROMPTS = 3  # asked for after the restart
SLOWER = 3.0  # than computing
WARM_HITS = 25

logger = logging.getLogger(__name__)


def measure(settings: Settings, frame: Frame) -> list[Row]:
    """All parts that are asked for.

    Raises:
        ConfigError: There is no such part or connector.
        ServeError: A vLLM but for the peers' did not start, or answered wrongly.
    """
    parts, peers = settings.chosen_parts(), chosen_peers(settings.connectors)
    with (
        tempfile.TemporaryDirectory(
            dir=settings.path or None, prefix="lmcache-async-serve", ignore_cleanup_errors=True
        ) as directory,
        tempfile.TemporaryDirectory(prefix="lma", ignore_cleanup_errors=True) as sockets,
        contextlib.ExitStack() as stack,
    ):
        machine = Machine.detect()
        starter = Starter.of(
            (Path(directory), Path(sockets)),
            settings.model,
            settings.shape,
            settings.tokens,
            machine=machine,
            together=2 + ("disk" in parts) + ("slow" in parts) + len(peers),
        )
        run = Run(settings, frame, starter, stack, parts)
        run.start_main()
        for peer in peers:
            run.start_peer(peer.missing, peer.contestant(settings.arena_bytes, Path(directory)))
        run.rounds()
        facts: dict[str, Parameter] = {
            "tokens": settings.tokens,
            "model": settings.model or "made",
            "device": "gpu" if machine.gpu else "cpu",
        }
        main = [engine.name for engine in run.contest.main]
        on_disk = [name for name in main if name in run.contest.files]
        return rows_of(run.contest.figures, main, facts, on_disk)


class Run:
    """One run."""

    contest: Contest

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
        self._done = 0

    def start_main(self) -> None:
        """The vLLM without connector, and ours."""
        self._step(0)
        settings = self._settings
        wanted = [Contestant(PLAIN), Contestant(OURS, ours(["cpu"], settings.arena_bytes))]
        plain, own = self._stack.enter_context(self._starter.started(wanted))
        self.contest = Contest(
            plain, [own], settings.tokens, self._frame.chosen, idle_s=0.0 if self._frame.quick else IDLE_S
        )
        self._step()

    def start_peer(self, missing: str, contestant: Contestant) -> None:
        """One that does not start is left out, and the log says why."""
        name = contestant.name
        if missing:
            logger.warning("%s is left out: the package %s is not installed", name, missing)
            return
        try:
            [engine] = self._stack.enter_context(self._starter.started([contestant]))
        except ServeError as error:
            logger.warning("%s is left out: %s", name, first_line(error))
            return
        self.contest.peers.add(name)
        self.contest.main.append(engine)
        if contestant.files is not None:
            self.contest.files[name] = contestant.files

    def rounds(self) -> None:
        """Everything that is measured."""
        cold_s = self._warm_up()
        if self._alone:
            with contextlib.ExitStack() as stack:
                self._alone_rounds(stack, cold_s)
        if "load" in self._parts:
            self._load_rounds()

    def _warm_up(self) -> float:
        """Every block of the pools is touched; seconds that a prompt takes."""
        contest = self.contest
        prompt = contest.new_prompt()
        for engine in list(contest.main):
            with contest.excused(engine):
                warm_up(contest, engine, prompt, hits=0 if self._frame.quick else WARM_HITS)
        cold_s = warm_up(contest, contest.plain, prompt)
        self._step()
        return cold_s

    def _alone_rounds(self, stack: contextlib.ExitStack, cold_s: float) -> None:
        contest = self.contest
        stored = self._store_on_disk() if "disk" in self._parts else []
        contest.files[RESTARTED] = self._disk_directory
        disk, slow = self._start_others(stack, cold_s)
        if disk is not None:
            for each in stored:
                restarted(contest, disk, each)
        lesson = self._teach(slow) if slow is not None else None
        self._step()
        for _ in range(self._frame.rounds):
            alone(contest, disk, (slow, lesson) if slow is not None and lesson is not None else None)
            self._step()

    def _store_on_disk(self) -> list[Stored]:
        """Prompts that a vLLM with a disk tier stores and leaves behind."""
        contest, directory = self.contest, self._disk_directory
        with self._starter.started([self._disk(DISK)]) as [engine]:
            warm_up(contest, engine, contest.new_prompt())
            serve_files.wait_still(directory)
            stored = [store(contest, engine, directory) for _ in range(STORED_PROMPTS)]
            engine.close()
        self._step()
        return stored

    def _start_others(
        self, stack: contextlib.ExitStack, cold_s: float
    ) -> tuple[Engine | None, Engine | None]:
        """The one with a disk tier again, and the one with a slow tier."""
        wanted = [self._disk(RESTARTED)] if "disk" in self._parts else []
        if "slow" in self._parts:
            wanted.append(self._slow(cold_s))
        if not wanted:
            self._step()
            return None, None
        engines = {engine.name: engine for engine in stack.enter_context(self._starter.started(wanted))}
        if RESTARTED in engines:
            # Another prompt, so that what vLLM does once is done; the disk's hits come from the disk.
            warm_up(self.contest, engines[RESTARTED], self.contest.new_prompt())
        self._step()
        return engines.get(RESTARTED), engines.get(SLOW)

    @property
    def _disk_directory(self) -> Path:
        return self._starter.directory / "disk"

    def _disk(self, name: str) -> Contestant:
        tiers = [disk_tier(self._disk_directory)]
        arena = self._settings.arena_bytes // 2
        return Contestant(name, ours(tiers, arena, **{"vllm.load_policy": "always"}))

    def _slow(self, cold_s: float) -> Contestant:
        """Reads take longer than computing. Where steps overlap, the model's speed must be told."""
        delay_s = max(SLOWER * cold_s, 0.2)
        settings: dict[str, Any] = {"retrieve.timeout_s": 60.0 + 4 * delay_s}
        if self.contest.plain.facts["overlapping_steps"]:
            settings["vllm.prefill_tokens_per_s"] = self._settings.tokens / cold_s
        tiers = [slow_tier(self._starter.directory / "slow", delay_s)]
        return Contestant(SLOW, ours(tiers, self._settings.arena_bytes // 2, **settings))

    def _teach(self, slow: Engine) -> Stored:
        """Let it store a prompt and load it, until it knows that computing is sooner."""
        contest = self.contest
        prompt = contest.new_prompt()
        contest.turn(contest.plain)
        computed = contest.plain.ask(prompt)
        lesson = Stored(prompt, (), computed, own_hit(contest, prompt))
        contest.turn(slow)
        slow.ask(prompt)
        serve_files.wait_still(self._starter.directory / "slow")
        lessons = [known_to_slow_tier(contest, slow, lesson).cached_tokens > 0 for _ in range(POOL_PROMPTS)]
        if not any(lessons) or lessons[-1]:
            done = "was never learnt" if lessons[-1] else "was never loaded from"
            raise ServeError(f"{slow.name}: a tier {SLOWER:.0f} times as slow as computing {done}")
        return lesson

    def _load_rounds(self) -> None:
        """Once to warm up, and the rounds. The repeated prompts are the same throughout."""
        contest, settings = self.contest, self._settings
        mix = settings.mix
        repeated = [contest.new_prompt(mix.prompt_tokens) for _ in range(mix.repeated)]
        for engine in list(contest.main):
            with contest.excused(engine):
                contest.turn(engine)
                engine.serve([Request(prompt, 1) for prompt in repeated])
        measured = contest.figures
        for number in range(self._frame.rounds + 1):
            contest.figures = measured if number else Figures()
            loads(contest, settings.prompts, mix, repeated)
            self._step()

    def _step(self, count: int = 1) -> None:
        rounds = self._frame.rounds
        steps = (
            2 + (2 + rounds) * self._alone + ("disk" in self._parts) + (rounds + 1) * ("load" in self._parts)
        )
        self._done += count
        self._frame.progress(self._done, steps)


def warm_up(contest: Contest, engine: Engine, prompt: list[int], *, hits: int = 0) -> float:
    """Compile what is compiled on first use, and touch every block of vLLM's pool.

    Args:
        hits: So many hits more. The first dozens of loads and of own hits behind them are slower than the rest.

    Returns:
        Seconds of the last request.
    """
    contest.turn(engine)
    seconds = 0.0
    for number in range(POOL_PROMPTS + hits):
        engine.reset()
        seconds = engine.ask(prompt).ttft_ms / 1e3
        if number >= POOL_PROMPTS:
            engine.ask(prompt)
    return seconds
