"""Frames between a call of the engine, or of the vLLM connector, and the system call that reads a record."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.benchmarks.frames import depth_of


@pytest.mark.parametrize(("verb", "frames", "kinds"), [("retrieve", 18, 4), ("load", 21, 5)])
async def test_a_record_is_read_through_few_frames_and_tasks(
    tmp_path: Path, verb: str, frames: int, kinds: int
) -> None:
    depth = await depth_of(verb, tmp_path)

    assert depth.parts[-1][-1].endswith("read_all")
    assert depth.frames <= frames, str(depth)
    assert len(depth.parts) <= kinds, str(depth)  # of tasks and threads
