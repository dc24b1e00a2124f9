"""Libraries of the system's that tests need: its own, or those that tools.native has brought."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from tools.native import LIBRARIES, is_loadable

PLACE = Path(sys.prefix) / "native"


def load_libraries() -> None:
    """Load into this process what the system does not have, for modules that link with it.

    Raises:
        AssertionError: It is not there either.
    """
    for library in LIBRARIES:
        if is_loadable(library.soname):
            continue
        for soname in library.files:
            path = PLACE / soname
            assert path.exists(), (
                f"{soname} is not installed and not in {PLACE}: make install, or python -m tools.native {PLACE}"
            )
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def environment() -> dict[str, str]:
    """Of a process that needs them: ours, and where they are. What the system has is not in that place."""
    places = [os.environ.get("LD_LIBRARY_PATH", ""), str(PLACE)]
    return os.environ | {"LD_LIBRARY_PATH": ":".join(place for place in places if place)}
