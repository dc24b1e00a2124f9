"""The vLLMs of a run, asked one after the other in a random order, and what must hold of each answer."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_async.bench.serve_answers import ServeError, check_cached, check_same, first_line
from lmcache_async.bench.serve_connectors import NO_CONNECTOR
from lmcache_async.bench.serve_figures import Figures
from lmcache_async.bench.serve_load import prompt
from lmcache_async.bench.serve_setup import CHUNK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from lmcache_async.bench.serve_answers import Answer
    from lmcache_async.bench.serve_engine import Engine

IDLE_S = 1.2
"""vLLM's processes spin for a second behind their last work, and stores go on after their answer. Who is asked next
must not share cores with them."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Contest:
    """Who takes part.

    Attributes:
        plain: vLLM without a connector.
        main: Who is compared with it: our connector, and the peers that are there.
        chosen: Of prompts and orders.
        files: Where those keep KV whose hits are to come from the disk, by name.
        idle_s: Seconds between one engine's work and the next one's.
    """

    plain: Engine
    main: list[Engine]
    tokens: int
    chosen: random.Random
    peers: set[str] = field(default_factory=set)
    files: dict[str, Path] = field(default_factory=dict)
    idle_s: float = IDLE_S
    figures: Figures = field(default_factory=Figures)
    awake: Engine | None = None

    def computes(self, engine: Engine) -> bool:
        """Whether it has no cache but vLLM's own."""
        return engine is self.plain or engine.name == NO_CONNECTOR

    def new_prompt(self, tokens: int | None = None) -> list[int]:
        return prompt(self.chosen, tokens or self.tokens, self.vocabulary)

    @property
    def vocabulary(self) -> int:
        return int(self.plain.facts["vocabulary"])

    def in_turn(self, engines: Sequence[Engine]) -> list[Engine]:
        return self.chosen.sample(list(engines), len(engines))

    def turn(self, engine: Engine) -> None:
        """From here on it is asked, and nobody else: all others are idle, and its processes are awake."""
        if self.awake is not engine:
            self.rest()
            self.awake = engine
            engine.wake()

    def rest(self) -> None:
        """From here on all are idle, and leave the cores to who measures without them."""
        time.sleep(self.idle_s)
        self.awake = None

    @contextlib.contextmanager
    def excused(self, engine: Engine) -> Iterator[None]:
        """A peer that fails within is left out from then on; anybody else's failure is the run's."""
        try:
            yield
        except ServeError as error:
            if engine.name not in self.peers:
                raise
            logger.warning("%s is left out: %s", engine.name, first_line(error))
            self.figures.forget(engine.name)
            self.main.remove(engine)
            engine.kill()

    def takes_part(self, name: str) -> bool:
        """Whether it was not left out."""
        return name not in self.peers or any(engine.name == name for engine in self.main)

    def check(self, what: str, engine: Engine, answer: Answer, reference: Answer) -> None:
        """That it is what a vLLM without connector answers."""
        check_same(f"{engine.name}, {what}", answer, reference, str(self.plain.facts["dtype"]))

    def check_hit(self, what: str, engine: Engine, answer: Answer, tokens: int) -> None:
        """That all full chunks of the prompt came from a cache."""
        least = (tokens - 1) // CHUNK * CHUNK
        check_cached(f"{engine.name}, {what}", answer, least=least, most=tokens - 1)

    def check_miss(self, what: str, engine: Engine, answer: Answer) -> None:
        check_cached(f"{engine.name}, {what}", answer, least=0, most=0)
