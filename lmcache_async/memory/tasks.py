"""Current task, and detection of exceptions that cancel or close it."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

Task: TypeAlias = "asyncio.Task[Any] | None"


def running_task() -> Task:
    """Return the running task; None if there is none."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no running loop
        return None


def is_ending(error: BaseException, task: Task) -> bool:
    """Whether `error` ends the task of the caller, so that it must propagate.

    A CancelledError does if cancellation of the task was requested; otherwise the client of a plug-in raised
    it. A GeneratorExit does if the task is not running, because its coroutine is being closed.

    Args:
        error: Exception raised by the call.
        task: Task that made the call.
    """
    if isinstance(error, asyncio.CancelledError):
        return task is None or task.cancelling() > 0
    return isinstance(error, GeneratorExit) and (task is None or running_task() is not task)
