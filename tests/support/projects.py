"""Small distributions, installed into a folder of their own without the network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OPTIONS = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")


def install(source: Path, target: Path) -> None:
    """Build the distribution in `source`, which is left with build products, and install it into `target`."""
    command = [sys.executable, "-m", "pip", "install", *OPTIONS, "--target", str(target), str(source)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def run_tests(project: Path, *, site: Path) -> None:
    """The project's own tests, with what is installed in `site`; all must pass, and none be left out."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."]
    ran = subprocess.run(
        command,
        cwd=project,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout
    assert "skipped" not in ran.stdout
    assert " passed" in ran.stdout
