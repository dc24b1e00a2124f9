"""Each async test runs on asyncio's loop and on uvloop's; hypothesis profiles are seeded."""

from __future__ import annotations

import os

# Before torch is imported: two processes that each use all cores wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xdist.scheduler import LoadScopeScheduling


hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=50)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000)
hypothesis.settings.register_profile(
    "thorough", parent=hypothesis.settings.get_profile("long")
)  # tests/support/thorough.py
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev")
)

TOGETHER = "tests/integration/"
"""Its engines and servers are shared by all of its files, and take minutes to start."""

LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_configure() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and all that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """pytest-asyncio's hook: a test is run once for each factory."""
    del config, item
    return LOOPS


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """pytest-xdist's hook: each file is one process's own, and all that start a real vLLM are the same one's."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return TOGETHER if file.startswith(TOGETHER) else file

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`gpu` tests need a GPU; nothing else is ever skipped."""
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
