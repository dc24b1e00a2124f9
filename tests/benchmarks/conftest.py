"""Imports vLLM once without treating its warnings as errors, and loads the libraries of Mooncake."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from tests.support import native

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's imports warn of others' deprecations
    import vllm.v1.core.block_pool
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.engine.core  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def native_libraries() -> Iterator[None]:
    """Install the libraries for this process and its children, so that the order of tests has no effect."""
    native.load_libraries()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", native.environment()["LD_LIBRARY_PATH"])
        yield
