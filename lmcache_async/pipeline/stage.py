"""Stages: async callables that take a batch and return the batch for the next stage."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from lmcache_async.errors import ChainError

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


class Stage(Protocol[In_contra, Out_co]):
    """One step of a chain. A plain async function is a stage.

    Each call is a cancellation point. A stage holds no lease of its own when it ends: leases that it takes
    are added to the batch's scope, which is closed by the runner of the chain.

    Attributes:
        per_request: Optional. The stage takes the whole request instead of a batch of its chunks. Such stages
            come first in a chain.
        ordered: Optional. The stage processes a batch only after the batch before has passed the whole chain.
        reads_device: Optional. When the stage has ended, device memory of the batch is no longer read.
        writes_device: Optional. A call that has begun is not cancelled at the request's deadline, so that the
            rows it wrote are reported. It must end by itself within a short time.
    """

    async def __call__(self, batch: In_contra, /) -> Out_co: ...


@dataclass(frozen=True, slots=True)
class StageInfo:
    """Description of a stage in a chain. The flags are those of `Stage`.

    Attributes:
        name: Name for messages.
        stage: The stage.
        takes: Annotated type of its argument.
        gives: Annotated type of its result.
        result_type: Class of its result; object if `gives` is not a class.
    """

    name: str
    stage: Stage[Any, Any]
    takes: Any
    gives: Any
    result_type: type
    per_request: bool = False
    ordered: bool = False
    reads_device: bool = False
    writes_device: bool = False


_FLAGS = ("per_request", "ordered", "reads_device", "writes_device")


def describe_stage(name: str, stage: Stage[Any, Any] | type[Stage[Any, Any]]) -> StageInfo:
    """Read the types of a stage, or of its class, from its annotations.

    Raises:
        ChainError: The stage is not an async callable with one argument, or is not annotated with types that exist
            when it is imported.
    """
    if inspect.isfunction(stage):
        function: Any = stage
    else:
        function = (stage if isinstance(stage, type) else type(stage)).__call__
    if not inspect.iscoroutinefunction(function):
        raise ChainError(f"stage {name!r} ({function!r}) is not an async function or an object with one")
    try:
        types = _annotated_types(function)
    except NameError as error:
        raise ChainError(
            f"stage {name!r}: {error}; import the types of its annotations outside of `if TYPE_CHECKING:`"
        ) from error
    if types is None:
        raise ChainError(
            f"stage {name!r} must take one annotated batch and be annotated with what it returns; "
            f"it is {inspect.signature(function)}"
        )
    takes, gives = types
    return StageInfo(
        name=name,
        stage=typing.cast("Stage[Any, Any]", stage),
        takes=takes,
        gives=gives,
        result_type=gives if isinstance(gives, type) else object,
        **{flag: bool(getattr(stage, flag, False)) for flag in _FLAGS},
    )


def build_stage(name: str, target: Any, resources: Mapping[str, Any]) -> Stage[Any, Any]:
    """Create a stage from the target of its entry point.

    A function is returned as it is. A class is called with the resources that are named by the
    parameters of its constructor.

    Raises:
        ChainError: A parameter names no resource; the message lists those available.
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
                f"stage {name!r} requests {parameter.name!r}; an engine has {', '.join(sorted(resources))}"
            )
    return typing.cast("Stage[Any, Any]", target(**wanted))


@functools.lru_cache(maxsize=256)  # all engines of a process have mostly the same stages
def _annotated_types(function: Callable[..., Any]) -> tuple[Any, Any] | None:
    """Return the types of argument and result; None unless there is exactly one argument and both are annotated."""
    hints = typing.get_type_hints(function)
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    if len(parameters) != 1 or parameters[0] not in hints or "return" not in hints:
        return None
    return hints[parameters[0]], hints["return"]
