"""An engine after a fork: calls of the child fail at once, the parent continues."""

import asyncio
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_async.engine.loop import LoopThread
from lmcache_async.errors import EngineClosedError
from tests.unit.forked_engine import calls_of

REPOSITORY = Path(__file__).parents[2]
CALLS = calls_of(None, None).keys()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The output of `forked_engine`. At the fork another thread of the parent holds the engine's locks."""
    command = [sys.executable, "-m", "tests.unit.forked_engine", str(tmp_path_factory.mktemp("kv"))]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_call_of_the_child_is_refused_and_names_the_fork(found):
    calls = {name: said for name, said in found["child"].items() if name in CALLS}

    assert set(calls) == set(CALLS)
    for name, said in calls.items():
        assert said.startswith(EngineClosedError.__name__), (name, said)
        assert f"opened in process {found['process']}" in said, (name, said)
        assert "forked" in said, (name, said)


def test_the_child_may_open_an_engine_of_its_own(found):
    assert found["child"]["own engine"] == "(40, 40)"


def test_an_engine_that_was_closed_before_the_fork_may_be_closed_again(found):
    assert found["child"]["close of a closed engine"] == "None"


def test_a_block_that_the_child_leaves_keeps_its_own_error(found):
    assert found["child"]["leave"] == "ValueError: the block's own error"


def test_the_parent_keeps_its_records_its_memory_and_its_directory(found):
    parent = found["parent"]

    assert parent["exit"] == 7
    assert (parent["lookup"], parent["retrieve"], parent["content"]) == (40, 40, True)
    assert parent["stored"] == 40
    assert "is in use by process" in parent["second engine"]


def test_a_loop_thread_refuses_every_call_in_a_forked_child(monkeypatch):
    loop = LoopThread()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            answer = asyncio.sleep(0)
            for call in (lambda: loop.submit(answer), lambda: loop.call_soon(print), loop.close):
                with pytest.raises(EngineClosedError, match="forked"):
                    call()
        assert inspect.getcoroutinestate(answer) == inspect.CORO_CLOSED
    finally:
        loop.close()
