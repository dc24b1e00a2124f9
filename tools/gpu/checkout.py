"""Use of a checkout in which the package is not installed, and facts about the commit and the machine."""

from __future__ import annotations

import importlib.metadata
import os
import tomllib
from pathlib import Path
from typing import Any

from lmcache_async.bench.measure import machine_facts
from tools.benchmarks.command import commit_of_checkout

ROOT = Path(__file__).parents[2]


def environment(folder: Path, *, device: str, interpret: bool = False) -> dict[str, str]:
    """Return the environment of processes that use this checkout.

    Tiers and stages are found by the entry points of the installed package. If it is not installed, its metadata is
    written to `folder`, which is put on the path.

    Args:
        folder: Directory for the metadata.
        device: `cuda` or `cpu`; with `cpu` a GPU is hidden.
        interpret: Whether to run the kernel in Triton's interpreter.
    """
    path = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        importlib.metadata.distribution("lmcache-async")
    except importlib.metadata.PackageNotFoundError:
        write_metadata(folder)
        path.insert(0, str(folder))
    made = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        made |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if interpret:
        made["TRITON_INTERPRET"] = "1"
    return made


def write_metadata(folder: Path) -> None:
    """Write the package's name, version and entry points to a `.dist-info` directory in `folder`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"lmcache_async-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def facts(device: str) -> dict[str, Any]:
    """Return commit, date, machine, device and versions."""
    import torch

    found: dict[str, Any] = {"commit": commit_of_checkout() or "unknown", **machine_facts()}
    for name in ("triton", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["torch"] = torch.__version__  # with the name of its build
    found["device"] = "CPU in place of a GPU: figures have no meaning"
    if device == "cuda":
        found |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found
