"""What a user installs: the wheel, with the two linked folders in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HAS_COMPILER = bool(shutil.which("cc")) and (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """Built from a copy: setuptools leaves a build folder whose stale files would get into the next wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "build", "tests", "docs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, directory / "tree", symlinks=True, ignore=unwanted)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run(
        [*command, "--wheel-dir", str(directory), str(directory / "tree")],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = directory.glob("*.whl")
    return zipfile.Path(path)


def test_the_wheel_contains_every_module_of_the_package_its_stages_and_its_plugins(
    wheel: zipfile.Path,
) -> None:
    packed = {name for name in wheel.root.namelist() if name.endswith(".py")}

    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "lmcache_async").rglob("*.py")}
    for folder in ("stages", "plugins"):  # rglob does not follow links
        expected |= {f"lmcache_async/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
    assert packed == expected
    assert any(name.startswith("lmcache_async/stages/") for name in packed)
    assert any(name.startswith("lmcache_async/plugins/") for name in packed)


def test_the_wheel_has_the_files_of_the_status_page(wheel: zipfile.Path) -> None:
    packed = {name for name in wheel.root.namelist() if "/metrics/page/" in name and not name.endswith("/")}

    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "lmcache_async/metrics/page").iterdir()}
    assert packed == expected
    assert "lmcache_async/metrics/page/index.html" in packed


def test_the_wheel_has_the_compiled_module_for_every_later_python(wheel: zipfile.Path) -> None:
    assert ("lmcache_async/memory/_rows.abi3.so" in wheel.root.namelist()) == HAS_COMPILER
    tag = "-cp311-abi3-linux_" if HAS_COMPILER else "-py3-none-any"
    assert tag in Path(str(wheel.root.filename)).name


def test_the_wheel_says_that_it_is_typed_and_carries_its_licence(wheel: zipfile.Path) -> None:
    names = wheel.root.namelist()

    assert "lmcache_async/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_nothing_but_the_package_is_installed(wheel: zipfile.Path) -> None:
    """A top-level `stages` or `plugins` would be a second copy, and would take those names from everybody."""
    top = {name.partition("/")[0] for name in wheel.root.namelist()}

    assert {name for name in top if not name.endswith(".dist-info")} == {"lmcache_async"}
