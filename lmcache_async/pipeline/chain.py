"""Chains of stages, with the types checked when a chain is built."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Generic, TypeVar, cast

from lmcache_async.errors import ChainError
from lmcache_async.pipeline.stage import Stage, StageInfo, describe_stage

In = TypeVar("In")
Mid = TypeVar("Mid")
Out = TypeVar("Out")


class Chain(Generic[In, Out]):
    """An immutable sequence of stages with matching types.

    `Chain.of(a).then(b)` is checked by the type checker and again at run time. Chains from a configuration
    are only checked at run time. The error names the two stages that do not match and both types.

    Raises:
        ChainError: The sequence is empty, the types of two neighbours do not match, or a stage for whole
            requests follows one for batches.

    Attributes:
        stages: All stages.
        head: Leading stages that take a whole request.
        tail: Stages that take batches.
    """

    def __init__(self, stages: Sequence[StageInfo]) -> None:
        if not stages:
            raise ChainError("a chain needs at least one stage")
        for left, right in pairwise(stages):
            if not _fits(left.gives, right.takes):
                raise ChainError(
                    f"stage {left.name!r} gives {_name(left.gives)}, "
                    f"but stage {right.name!r} after it takes {_name(right.takes)}"
                )
            if right.per_request and not left.per_request:
                raise ChainError(
                    f"stage {right.name!r} takes a whole request and cannot stand after "
                    f"stage {left.name!r}, which takes batches"
                )
        self.stages = tuple(stages)
        self.head = tuple(info for info in stages if info.per_request)
        self.tail = tuple(info for info in stages if not info.per_request)

    @classmethod
    def of(cls, stage: Stage[In, Mid], *, name: str | None = None) -> Chain[In, Mid]:
        return Chain[In, Mid]([describe_stage(name or _stage_name(stage), stage)])

    @classmethod
    def named(cls, stages: Sequence[tuple[str, Stage[Any, Any]]]) -> Chain[Any, Any]:
        """Build a chain from configured stages, in order, with the name of each."""
        return Chain[Any, Any]([describe_stage(name, stage) for name, stage in stages])

    def then(self, stage: Stage[Out, Mid], *, name: str | None = None) -> Chain[In, Mid]:
        return Chain[In, Mid]([*self.stages, describe_stage(name or _stage_name(stage), stage)])

    def check_ends(self, takes: type, gives: type) -> None:
        """Check the types of the chain's ends. Raise ChainError if one does not match."""
        first, last = self.stages[0], self.stages[-1]
        if not _fits(takes, first.takes):
            raise ChainError(
                f"the chain is given {_name(takes)}, but its first stage {first.name!r} "
                f"takes {_name(first.takes)}"
            )
        if not _fits(last.gives, gives):
            raise ChainError(
                f"the chain must end in {_name(gives)}, but its last stage {last.name!r} "
                f"gives {_name(last.gives)}"
            )

    async def __call__(self, batch: In) -> Out:
        """Pass one batch through all stages."""
        value: Any = batch
        for info in self.stages:
            value = await info.stage(value)
        return cast("Out", value)

    def __repr__(self) -> str:
        return " → ".join(info.name for info in self.stages)


def _stage_name(stage: object) -> str:
    return getattr(stage, "__name__", type(stage).__name__)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def _fits(gives: Any, takes: Any) -> bool:
    if gives is Any or takes is Any:
        return True
    if isinstance(gives, type) and isinstance(takes, type):
        return issubclass(gives, takes)
    return bool(gives == takes)
