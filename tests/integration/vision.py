"""torchvision for the tests of image models on a CPU.

PyPI has torchvision for CUDA alone. On a CPU its Python part is all that image processors use, but it is
imported only where two operators of its compiled part are known, and vLLM fails where it is found and not
imported. So it lies in a directory of its own, and only processes that ask for it here see it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

PLACE = Path(sys.prefix) / "vision"

_libraries: list[Any] = []  # an operator is known for as long as the library that defines it is referred to


def is_installed() -> bool:
    return importlib.util.find_spec("torchvision") is not None or (PLACE / "torchvision").is_dir()


def prepare() -> bool:
    """Make torchvision importable; call it before transformers is imported. False where it is not installed."""
    if not is_installed() or importlib.util.find_spec("torchvision") is not None:
        return is_installed()
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
    sys.path.append(str(PLACE))
    try:
        importlib.import_module("torchvision")
    finally:
        sys.path.remove(str(PLACE))  # spawned processes get a copy of sys.path, and lack the two operators
    return True
