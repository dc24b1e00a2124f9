"""What the serve benchmark measures, and how large."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_async.bench.frame import option
from lmcache_async.bench.serve_load import Mix
from lmcache_async.bench.serve_model import SMALL, Shape
from lmcache_async.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS = ("alone", "disk", "slow", "load")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Attributes with a help text are options; see docs/benchmarks.md.

    Attributes:
        shape: Of the model that is made where none is named.
        prompts: How many new prompts are sent at once.
    """

    tokens: int = option(4098, "tokens of a prompt that is alone")
    model: str = option("", "a model's name or folder; without it a small one is made", parse=str)
    path: str = option("", "directory to write in; that for temporary files by default", parse=str)
    arena_mib: int = option(2048, "MiB of host memory for the cache")
    parts: str = option(",".join(PARTS), "what is measured", parse=str)
    connectors: str = option("", "peers beside ours, by name, or all", parse=str)
    shape: Shape = field(default_factory=Shape)
    prompts: int = field(default=10)
    mix: Mix = field(default=Mix(streams=4, stream_tokens=64, new=10, repeated=5, prompt_tokens=514))

    @property
    def arena_bytes(self) -> int:
        return self.arena_mib * MIB

    def chosen_parts(self) -> tuple[str, ...]:
        """Those named.

        Raises:
            ConfigError: There is no such part.
        """
        return choose("part", self.parts, PARTS)


QUICK = Settings(
    tokens=514,
    arena_mib=256,
    parts="alone,load",
    shape=SMALL,
    prompts=2,
    mix=Mix(streams=2, stream_tokens=20, new=2, repeated=2, prompt_tokens=514),
)


def choose(what: str, text: str, names: Sequence[str]) -> tuple[str, ...]:
    """Names between commas, in the order in which they are known.

    Raises:
        ConfigError: One of them is none.
    """
    given = [name.strip() for name in text.split(",") if name.strip()]
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f" did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"benchmark serve: there is no {what} {name!r};{hint} there are: {', '.join(names)}"
            )
    return tuple(name for name in names if name in given)
