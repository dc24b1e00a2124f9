"""Imports vLLM once without treating its warnings as errors, and provides a short directory for sockets."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's imports warn of others' deprecations
    import vllm.distributed.kv_transfer.kv_connector.v1.base
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.engine.core  # noqa: F401

    from lmcache_async.integration import vllm as integration
    from lmcache_async.integration.vllm import worker
    from lmcache_async.logging import LimitedLogger
    from tests.support.vllm_simulator import (
        Simulators,
        Until,
        assert_nothing_is_held,
        several_groups_served,
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of several KV groups if this vLLM does not serve them."""
    if several_groups_served():
        return
    deselected = [item for item in items if item.get_closest_marker("kv_groups")]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if not item.get_closest_marker("kv_groups")]


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


@pytest.fixture(autouse=True)
def _own_log_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log every cause, also those that another test has caused."""
    for module in vars(integration).values():
        if isinstance(limited := getattr(module, "logger", None), LimitedLogger):
            monkeypatch.setattr(module, "logger", LimitedLogger(limited.logger))


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
def simulators(
    tmp_path: Path, socket_dir: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Simulators]:
    monkeypatch.setattr(worker, "BEGIN_S", 60.0)  # the machine may be busy, and these tests need hits
    made = Simulators(tmp_path, socket_dir, until)
    yield made
    for sim in made.made:
        sim.close()
    for sim in made.made:
        if not sim.busy:  # otherwise the test has ended in the middle of a request
            assert_nothing_is_held(sim)
