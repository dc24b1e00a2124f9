"""The depth of a retrieve between the engine and the system call that reads a record."""

from __future__ import annotations

from pathlib import Path

from tools.benchmarks.frames import depth_of

MAX_FRAMES = 18
MAX_KINDS = 4  # of tasks, and of threads


async def test_a_retrieve_reaches_the_disk_in_few_frames_and_tasks(tmp_path: Path) -> None:
    depth = await depth_of("retrieve", tmp_path)

    assert depth.parts[-1][-1].endswith("read_all")
    assert depth.frames <= MAX_FRAMES, str(depth)
    assert len(depth.parts) <= MAX_KINDS, str(depth)
