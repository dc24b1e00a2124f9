"""Small projects: installed into a folder of their own without the network, and tested as their authors test them."""

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


def run_tests(project: Path, *, site: Path | None = None) -> None:
    """Run the project's own tests with what is installed in `site`. All must pass, and none be skipped.

    Of pytest's plug-ins it has the one that the test kit needs; ours are not loaded.
    """
    paths = [str(site) if site else "", os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."],
        cwd=project,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "pytest_asyncio.plugin",
        },
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout
    assert "skipped" not in ran.stdout
    assert " passed" in ran.stdout
