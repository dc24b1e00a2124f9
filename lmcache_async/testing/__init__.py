"""The test kit: conformance suites for tiers and layers, state machines, Hypothesis strategies and fakes.

Install it with `pip install 'lmcache-async[testing]'`. docs/test-your-tier.md shows its use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from lmcache_async.errors import MissingDependencyError

if TYPE_CHECKING:
    from lmcache_async.testing.conformance import LayerConformance as LayerConformance
    from lmcache_async.testing.conformance import SuffixEvictionConformance as SuffixEvictionConformance
    from lmcache_async.testing.conformance import TierConformance as TierConformance
    from lmcache_async.testing.fakes import DictConfig as DictConfig
    from lmcache_async.testing.fakes import DictTier as DictTier
    from lmcache_async.testing.fakes import FakeRegistry as FakeRegistry
    from lmcache_async.testing.fakes import Fault as Fault
    from lmcache_async.testing.fakes import FaultPlan as FaultPlan
    from lmcache_async.testing.fakes import FaultyRegistry as FaultyRegistry
    from lmcache_async.testing.fakes import FaultyTier as FaultyTier
    from lmcache_async.testing.fakes import GatedTier as GatedTier
    from lmcache_async.testing.fakes import LatencyTier as LatencyTier
    from lmcache_async.testing.machines import CacheMachine as CacheMachine
    from lmcache_async.testing.machines import TierMachine as TierMachine
    from lmcache_async.testing.steps import cancelled_at_await as cancelled_at_await
    from lmcache_async.testing.steps import cancelled_at_each_await as cancelled_at_each_await
    from lmcache_async.testing.strategies import chunk_keys as chunk_keys
    from lmcache_async.testing.strategies import fault_plans as fault_plans
    from lmcache_async.testing.strategies import kv_layouts as kv_layouts
    from lmcache_async.testing.strategies import payloads as payloads
    from lmcache_async.testing.strategies import tier_stacks as tier_stacks
    from lmcache_async.testing.strategies import token_streams as token_streams

_MODULES = {
    "conformance": ("LayerConformance", "SuffixEvictionConformance", "TierConformance"),
    "fakes": (
        *("DictConfig", "DictTier", "FakeRegistry", "Fault", "FaultPlan", "FaultyRegistry", "FaultyTier"),
        *("GatedTier", "LatencyTier"),
    ),
    "machines": ("CacheMachine", "TierMachine"),
    "steps": ("cancelled_at_await", "cancelled_at_each_await"),
    "strategies": ("chunk_keys", "fault_plans", "kv_layouts", "payloads", "tier_stacks", "token_streams"),
}
"""The public names by module."""
__all__ = [name for names in _MODULES.values() for name in names]

_NEEDED = ("pytest", "pytest_asyncio", "hypothesis")


def __getattr__(name: str) -> object:
    """Import the module of a public name on first use. The fakes need no test runner.

    Raises:
        AttributeError: No such name.
        MissingDependencyError: The name needs a package that is not installed.
    """
    for module, names in _MODULES.items():
        if name in names:
            return getattr(_import(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
