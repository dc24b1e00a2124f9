"""torchvision for the tests of image models on a CPU.

PyPI has torchvision only for CUDA. On a CPU, image processors use only its Python part, but that is imported only if
two operators of its compiled part are registered, and vLLM fails if torchvision is found and not imported. Therefore
it is in a separate directory, and only processes that request it here can import it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

PLACE = Path(sys.prefix) / "vision"

_libraries: list[Any] = []  # operators stay registered while their library is referenced


def is_installed() -> bool:
    return importlib.util.find_spec("torchvision") is not None or (PLACE / "torchvision").is_dir()


def prepare() -> bool:
    """Make torchvision importable; call it before transformers is imported. Return False if it is not installed."""
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
