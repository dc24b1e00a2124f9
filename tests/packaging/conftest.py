"""`examples` is not an installed package: its tests import it from the root of the tree."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
