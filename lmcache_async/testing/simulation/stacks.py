"""Where a task waits: all frames down to the innermost await."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any


def stack_of(task: asyncio.Task[Any]) -> str:
    """The task's coroutines, outermost first, each with the line that it waits at."""
    lines = [f"{task.get_name()}:"]
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            code = frame.f_code
            lines.append(f"  {Path(code.co_filename).name}:{frame.f_lineno} in {code.co_qualname}")
        following = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
        if following is None and frame is None:
            lines.append(f"  {awaited!r}"[:200])
        awaited = following
    return "\n".join(lines)
