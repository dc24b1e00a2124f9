"""Imports vLLM once without treating its warnings as errors, and provides a short directory for sockets."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's imports warn of others' deprecations
    import vllm.distributed.kv_transfer.kv_connector.v1.base
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.engine.core  # noqa: F401

    from tests.support.vllm_simulator import Simulators, Until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A socket's path has at most 107 bytes; pytest's own temporary directories can be longer."""
    path = Path(tempfile.mkdtemp(prefix="lma"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def _own_log_handlers() -> Iterator[None]:
    ours = logging.getLogger("lmcache_async")
    saved = ours.handlers, ours.propagate, ours.level
    yield
    ours.handlers, ours.propagate, ours.level = saved


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Poll for progress of another thread, and fail after a time that only a hang takes."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 150
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.001)

    return wait


@pytest.fixture
def simulators(tmp_path: Path, socket_dir: Path, until: Until) -> Iterator[Simulators]:
    made = Simulators(tmp_path, socket_dir, until)
    yield made
    for sim in made.made:
        sim.close()
