"""Copies of recurrent states between blocks without Triton, which vLLM uses for them and a CPU lacks."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any


def copy_without_triton() -> None:
    """Replace the copies of this process."""
    from vllm.v1.worker import mamba_utils

    def batch_memcpy(sources: Any, targets: Any, sizes: Any) -> None:
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)

    mamba_utils.batch_memcpy = batch_memcpy


def install(directory: Path) -> None:
    """Write the metadata of a vLLM plug-in that replaces the copies in each process with `directory` on its path."""
    metadata = directory / "cpu_states-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-states\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\ncpu_states = {__name__}:{copy_without_triton.__name__}\n"
    )
