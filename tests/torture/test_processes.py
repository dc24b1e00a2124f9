"""Programs with a time limit."""

from __future__ import annotations

import os
import select
from pathlib import Path

from tools.processes import run_logged


def test_a_program_that_exceeds_its_time_limit_ends_with_its_children(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    script = f"exec 5>'{fifo}'; sleep 1000 & echo started >&5; wait"  # both hold the other end of the FIFO

    status = run_logged(
        ["sh", "-c", script], tmp_path / "log", cwd=tmp_path, environment=os.environ, timeout_s=0.5
    )

    assert status is None
    with os.fdopen(reader, "rb") as end:
        assert select.select([end], [], [], 60)[0]
        os.set_blocking(reader, True)
        assert end.read() in {b"started\n", b""}  # returns when both have ended


def test_the_exit_status_and_the_output_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"

    status = run_logged(
        ["sh", "-c", "echo out; echo err >&2; exit 3"],
        log,
        cwd=tmp_path,
        environment=os.environ,
        timeout_s=60,
    )

    assert status == 3
    assert log.read_text() == "out\nerr\n"
