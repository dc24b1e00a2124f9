"""Small projects: installed into a folder of their own without the network, and tested as their authors test them."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import forked_python

PYTEST = """
import os
import sys

import pytest

os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_asyncio.plugin"}
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", "."]))
"""
OPTIONS = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")


def install(source: Path, target: Path) -> None:
    """Build the distribution in `source`, which is left with build products, and install it into `target`."""
    command = [sys.executable, "-m", "pip", "install", *OPTIONS, "--target", str(target), str(source)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def run_tests(project: Path, *, site: Path | None = None) -> None:
    """Run the project's own tests with what is installed in `site`. All must pass, and none be skipped.

    The only pytest plug-in is the one that the test kit needs. Those of this repository are not loaded.
    """
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "tests.py"
        program.write_text(PYTEST, encoding="utf-8")
        ran = forked_python.run(str(program), cwd=project, path=[site] if site else [], timeout_s=300)
    assert ran.status == 0, ran.output
    assert "skipped" not in ran.output
    assert re.search(r"^\W*\d+ passed", ran.output, re.MULTILINE)
