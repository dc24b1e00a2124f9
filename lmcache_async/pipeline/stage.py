"""What a stage is: an async callable that takes a batch and returns the next stage's batch."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from lmcache_async.errors import ChainError

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


class Stage(Protocol[In_contra, Out_co]):
    """One step of a chain. A plain async function is a stage.

    Each call is a cancellation point. A stage holds no lease of its own when it ends: leases that it
    takes go into the batch's scope, and whoever runs the chain closes that.

    Optional attributes of the object tell how it is run:
        per_request: It takes the whole request, not a batch of its chunks; such stages lead a chain.
        ordered: It starts on a batch only when the batch before has passed the whole chain.
        reads_device: When it has ended, the batch's device memory is not read any more.
        writes_device: Once begun, it is not cut short by the request's deadline: what it wrote is to
            be told. It has to end by itself, and soon.
    """

    async def __call__(self, batch: In_contra, /) -> Out_co: ...


@dataclass(frozen=True, slots=True)
class StageInfo:
    """A stage as a chain sees it."""

    name: str
    stage: Stage[Any, Any]
    takes: Any
    gives: Any
    per_request: bool
    ordered: bool
    reads_device: bool
    writes_device: bool


def describe(name: str, stage: Stage[Any, Any] | type[Stage[Any, Any]]) -> StageInfo:
    """Read a stage's types from its annotations; a class tells those of its objects.

    Raises:
        ChainError: It is not an async callable of one argument, or is not annotated.
    """
    if inspect.isfunction(stage):
        function: Any = stage
    else:
        function = (stage if isinstance(stage, type) else type(stage)).__call__
    if not inspect.iscoroutinefunction(function):
        raise ChainError(f"stage {name!r} ({function!r}) is not an async function or an object with one")
    hints = typing.get_type_hints(function)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    if len(parameters) != 1 or parameters[0].name not in hints or "return" not in hints:
        raise ChainError(
            f"stage {name!r} must take one annotated batch and be annotated with what it returns; "
            f"it is {inspect.signature(function)}"
        )
    return StageInfo(
        name=name,
        stage=typing.cast("Stage[Any, Any]", stage),
        takes=hints[parameters[0].name],
        gives=hints["return"],
        per_request=bool(getattr(stage, "per_request", False)),
        ordered=bool(getattr(stage, "ordered", False)),
        reads_device=bool(getattr(stage, "reads_device", False)),
        writes_device=bool(getattr(stage, "writes_device", False)),
    )


def build_stage(name: str, target: Any, resources: Mapping[str, Any]) -> Stage[Any, Any]:
    """A stage from what its entry point loads: a function as it is, a class called with what it asks for.

    A class names the resources that it wants as parameters of its constructor.

    Raises:
        ChainError: It wants a resource that there is not; the message lists those there are.
    """
    if not inspect.isclass(target):
        return typing.cast("Stage[Any, Any]", target)
    wanted: dict[str, Any] = {}
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in resources:
            wanted[parameter.name] = resources[parameter.name]
        elif parameter.default is parameter.empty:
            raise ChainError(
                f"stage {name!r} asks for {parameter.name!r}; an engine has {', '.join(sorted(resources))}"
            )
    return typing.cast("Stage[Any, Any]", target(**wanted))
