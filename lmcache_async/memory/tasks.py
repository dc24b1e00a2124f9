"""The running task, and whether an exception ends it on our own behalf."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

Task: TypeAlias = "asyncio.Task[Any] | None"


def running_task() -> Task:
    """The task that runs; None where there is none."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs
        return None


def is_ending(error: BaseException, task: Task) -> bool:
    """Whether `error` ends a call on our own behalf, so that it must be passed on.

    A CancelledError does where the task was asked to cancel; otherwise a plug-in's own client raised it. A
    GeneratorExit does where the task does not run: its coroutine is being closed.

    Args:
        error: What came out of the call.
        task: The task that began the call.
    """
    if isinstance(error, asyncio.CancelledError):
        return task is None or task.cancelling() > 0
    return isinstance(error, GeneratorExit) and (task is None or running_task() is not task)
