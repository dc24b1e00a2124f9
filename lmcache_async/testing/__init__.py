"""The test kit: conformance suites for tiers and layers, state machines, Hypothesis strategies and fakes.

Install it with `pip install 'lmcache-async[testing]'`. docs/test-your-tier.md shows its use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from lmcache_async.errors import MissingDependencyError

if TYPE_CHECKING:
    from lmcache_async.testing.conformance import (
        LayerConformance,
        SuffixEvictionConformance,
        TierConformance,
    )
    from lmcache_async.testing.fakes import (
        DictConfig,
        DictTier,
        FakeRegistry,
        Fault,
        FaultPlan,
        FaultyRegistry,
        FaultyTier,
        GatedTier,
        LatencyTier,
    )
    from lmcache_async.testing.machines import CacheMachine, TierMachine
    from lmcache_async.testing.steps import cancelled_at_await, cancelled_at_each_await
    from lmcache_async.testing.strategies import (
        chunk_keys,
        fault_plans,
        kv_layouts,
        payloads,
        tier_stacks,
        token_streams,
    )

__all__ = [
    "CacheMachine",
    "DictConfig",
    "DictTier",
    "FakeRegistry",
    "Fault",
    "FaultPlan",
    "FaultyRegistry",
    "FaultyTier",
    "GatedTier",
    "LatencyTier",
    "LayerConformance",
    "SuffixEvictionConformance",
    "TierConformance",
    "TierMachine",
    "cancelled_at_await",
    "cancelled_at_each_await",
    "chunk_keys",
    "fault_plans",
    "kv_layouts",
    "payloads",
    "tier_stacks",
    "token_streams",
]

_MODULES = {  # every other name is in `fakes`
    "conformance": ("LayerConformance", "SuffixEvictionConformance", "TierConformance"),
    "machines": ("CacheMachine", "TierMachine"),
    "steps": ("cancelled_at_await", "cancelled_at_each_await"),
    "strategies": ("chunk_keys", "fault_plans", "kv_layouts", "payloads", "tier_stacks", "token_streams"),
}
_NEEDED = ("pytest", "pytest_asyncio", "hypothesis")


def __getattr__(name: str) -> object:
    """Import the module of a public name on first use. The fakes need no test runner.

    Raises:
        AttributeError: No such name.
        MissingDependencyError: The name needs a package that is not installed.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "fakes")
    return getattr(_import(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__


def _import(module: str) -> object:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        raise MissingDependencyError(
            f"{module} needs the package {error.name}, which is not installed:"
            " pip install 'lmcache-async[testing]'"
        ) from error


def _explain_assertions() -> None:
    """Enable pytest's assertion rewriting for the modules of the kit, so that failures show the values."""
    pytest = sys.modules.get("pytest")
    modules = [f"{__name__}.{name}" for name in ("conformance", "machines", "records")]
    if pytest is not None and not any(module in sys.modules for module in modules):
        pytest.register_assert_rewrite(*modules)


_explain_assertions()
