"""Make vLLM fork its engine and its workers, as it does with a GPU.

On a CPU it spawns them, and each one spends ten seconds of CPU on importing vLLM.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import BaseContext

_get_context = multiprocessing.get_context


def fork_instead_of_spawn() -> None:
    """Replace the start method `spawn` in this process and its children."""
    multiprocessing.get_context = _forking  # type: ignore[assignment]


def _forking(method: str | None = None) -> BaseContext:
    return _get_context("fork" if method == "spawn" else method)
