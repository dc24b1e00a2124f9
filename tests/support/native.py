"""System libraries that tests need, either installed or downloaded by tools.native."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from tools.native import LIBRARIES, is_loadable

PLACE = Path(sys.prefix) / "native"


def load_libraries() -> None:
    """Load the libraries that the system lacks into this process, for modules that link with them.

    Raises:
        AssertionError: A library is neither installed nor downloaded.
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
    """Return the environment of a process that needs the libraries. Only missing ones are downloaded."""
    places = [os.environ.get("LD_LIBRARY_PATH", ""), str(PLACE)]
    return os.environ | {"LD_LIBRARY_PATH": ":".join(place for place in places if place)}
