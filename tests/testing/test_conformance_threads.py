"""Threads of the conformance suite's event loop."""

import asyncio
import threading

import pytest

from lmcache_async.testing.conformance import base


def test_threads_of_a_loop_end_if_not_all_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    async def run() -> None:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            base.start_threads_of_loop()
        monkeypatch.undo()

    monkeypatch.setattr(base, "DEADLINE_S", 0.01)
    monkeypatch.setattr(threading.Thread, "start", start_one)
    # `asyncio.run` waits for the threads of the loop.
    ending = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    start(ending)
    ending.join(10)
    assert not ending.is_alive()
