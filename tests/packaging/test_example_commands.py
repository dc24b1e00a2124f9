"""The commands in the README of an example with tests of its own, as they are written there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ("custom_tier", "custom_stage")


def commands(readme: str) -> str:
    """The block of commands that ends in the tests."""
    [block] = [
        text
        for text in re.findall(r"^```bash\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
        if "pytest" in text
    ]
    return block


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_commands_of_the_readme_run_inside_of_a_checkout(example: str, tmp_path: Path) -> None:
    """As somebody runs them who has only what the example's own distribution asks for: no plug-ins of our suite."""
    folder = tmp_path / "checkout" / "examples" / example
    shutil.copytree(ROOT / "examples" / example, folder, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "checkout")
    site = tmp_path / "site"
    where = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(where),
        # What is installed here is enough, and the network is not asked.
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_TARGET": str(site),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "pytest_asyncio.plugin",
    }
    readme = (folder / "README.md").read_text(encoding="utf-8")

    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands(readme)],
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^\W*\d+ passed", ran.stdout, re.MULTILINE)
    assert "skipped" not in ran.stdout
    assert list(site.glob("lmcache_async_*.py"))
