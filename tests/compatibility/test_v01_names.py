"""Names that version 0.1 documented for authors of tiers, layers and stages are still importable.

`v01_names.txt` has the names of docs/reference/{tiers,layers,stages,keys,errors,testing}.md of commit da0f82e,
without the simulation and the benchmarks, which are no longer in the package, and without `ConfiguredLayer`: a layer
now has one method, `around`.
"""

from __future__ import annotations

import pkgutil
from pathlib import Path

import pytest

NAMES = (Path(__file__).parent / "v01_names.txt").read_text(encoding="utf-8").split()


@pytest.mark.parametrize("name", NAMES)
def test_a_documented_name_of_version_0_1_can_be_imported(name: str) -> None:
    assert pkgutil.resolve_name(name) is not None
