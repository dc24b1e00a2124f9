"""Async tests run on the loops of asyncio and uvloop, or on uvloop only; hypothesis profiles are seeded."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping

# Set before torch is imported: two processes that each use all cores would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import asyncio
import gc
import importlib.util
import logging
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hypothesis
import pytest
import uvloop

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling


hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("dev", deadline=None, max_examples=50)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000)
# Used by tests/support/thorough.py.
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("long"))
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev")
)

TOGETHER = "tests/integration/"
"""Its engines and servers are shared by all of its files, and take minutes to start."""

FIRST = (
    TOGETHER,
    "tests/packaging/",
    "tests/hosts/",
    "tests/torture/",
    "tests/simulation/",
    "tests/maintenance/",
    "tests/benchmarks/",
    "tests/tiers/test_disk_crash.py",
    "tests/tiers/test_mooncake_failures.py",
    "tests/web/",
    "tests/testing/",
    "tests/stateful/",
    "tests/daemon/",
    "tests/compatibility/",
)
"""Files whose tests take seconds each. Started last, one of them would keep a single process busy at the end."""

NEED_VLLM = (
    "tests/benchmarks",
    "tests/integration",
    "tests/unit/vllm",
    "tests/wrong_config/test_together.py",
)
"""Folders and files that import vLLM. In other files, the tests that need it have the marker `vllm` or `needs_vllm`."""

# In CI, as in `.ci/run`, a missing vLLM makes these tests fail.
SKIPS_VLLM = importlib.util.find_spec("vllm") is None and not os.environ.get("CI")
NO_VLLM = "vLLM is not installed: make install"

LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_configure() -> None:
    """Restore the default action for Ctrl-C, which a shell that starts the tests in the background disables."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude collected tests and imported libraries from garbage collection.

    They are millions of objects. A `gc.collect()` in a test takes a second with them and milliseconds without.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Hook of pytest-asyncio: a test runs once per factory."""
    del config
    if item.get_closest_marker("one_loop"):
        return {"uvloop": LOOPS["uvloop"]}
    return LOOPS


def pytest_collection_finish() -> None:
    """Let loggers of other packages propagate.

    pytest adds two handlers to each logger that does not, in each phase of each test: torch and vLLM have about a
    hundred such loggers.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] != "lmcache_async" and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind reports objects left at interpreter exit as leaks


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Hook of pytest-xdist: one process per file; all files that start a real vLLM run in the same process."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # keep the order of the collection, see below

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return TOGETHER if file.startswith(TOGETHER) else file

    return ByFile(config, log)


class _NeedsVLLM(pytest.File):
    """A folder or file that is skipped. No `pytest.Directory`, whose conftest.py pytest would import first."""

    def collect(self) -> NoReturn:
        pytest.skip(f"{self.nodeid}: {NO_VLLM}")


@pytest.hookimpl(tryfirst=True)
def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Skip the folders that import vLLM if it is not installed."""
    needs_it = SKIPS_VLLM and str(path.relative_to(parent.config.rootpath)) in NEED_VLLM
    return _NeedsVLLM.from_parent(parent, path=path) if needs_it else None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Skip the files that import vLLM if it is not installed."""
    return pytest_collect_directory(module_path, parent)


@pytest.hookimpl(trylast=True)  # after pytest-randomly
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files for pytest-xdist, and skip tests that need a GPU or vLLM without it. Nothing else is ever skipped."""
    import torch

    if hasattr(config, "workerinput"):
        sizes = Counter(item.location[0] for item in items)
        items.sort(key=lambda item: (_rank(item.location[0]), -sizes[item.location[0]]))

    missing = {} if torch.cuda.is_available() else {"gpu": "no CUDA device"}
    if SKIPS_VLLM:
        missing |= {"vllm": NO_VLLM, "needs_vllm": NO_VLLM}
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _rank(file: str) -> int:
    """Return the place of the file's folder in FIRST."""
    return next((rank for rank, folder in enumerate(FIRST) if file.startswith(folder)), len(FIRST))
