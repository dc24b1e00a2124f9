"""Processes with a time limit, and their output in a file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

END_S = 10.0
"""Time between SIGTERM and SIGKILL of a process that exceeds its limit."""


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that this process ends the programs that it has started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def run_logged(
    command: Sequence[str], log: Path, *, cwd: Path, environment: Mapping[str, str], timeout_s: float
) -> int | None:
    """Run a program and wait for it. After the time limit, end it and all of its children.

    Args:
        log: File for its output, which is replaced.

    Returns:
        Its exit status, or None if it exceeded the time limit.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process, which leads a process group, and all of its children."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, kind)
            process.wait(END_S)
