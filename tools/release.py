"""What a release is made of: `python -m tools.release build`, then `python -m tools.release try dist/*.whl`.

`build` writes wheel and source distribution into dist/ and compares their modules with the tree's.
`try` makes a clean environment for each extra and installs the wheel with it, as a user would; with `--resolve` pip only
finds out whether it could. docs/release.md has the rest.
"""

from __future__ import annotations

import argparse
import email
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("lmcache_async", "stages", "plugins")
NONE = "none"
"""Stands for the wheel without any extra."""

SMOKE = {
    NONE: "import lmcache_async.engine.engine, lmcache_async.plugins.cpu, lmcache_async.plugins.disk",
    "blake3": "from lmcache_async.hashing import digest_function; digest_function('blake3')",
    "encryption": "import cryptography; from lmcache_async.memory.encryption import RecordCipher; RecordCipher([bytes(32)])",
    "valkey": "import lmcache_async.plugins.valkey",
    "cli": "from lmcache_async.cli.app import load_commands; load_commands()",
    "s3": "import obstore, lmcache_async.plugins.s3",
    "mooncake": "import lmcache_async.plugins.mooncake",
    "http": "import aiohttp, lmcache_async.web",
    "otel": "from opentelemetry import trace; import lmcache_async.observability.tracing",
    "testing": "from lmcache_async.testing import TierConformance, TierMachine",
}
"""What must run where an extra is installed; what runs without one, where nothing is said."""

ONLY_RESOLVED = {"vllm": "it is gigabytes, and its CPU build has another name"}
"""Extras that `try` never installs, and why."""


class ReleaseError(RuntimeError):
    """What was built is not what it should be."""


def build(dist: Path) -> tuple[Path, Path]:
    """Wheel and source distribution of the tree, in `dist`.

    Raises:
        ReleaseError: A module is missing in one of them, or is there that is not in the tree.
    """
    dist.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        tree = _copy(Path(directory) / "tree")
        sdist, wheel = (_built(tree, kind, dist.resolve()) for kind in ("sdist", "wheel"))
    expected = modules()
    for built, found in ((sdist, _in_sdist(sdist)), (wheel, _in_wheel(wheel))):
        if found != expected:
            raise ReleaseError(f"{built.name}: other modules than the tree's: {sorted(found ^ expected)}")
    return wheel, sdist


def modules() -> set[str]:
    """The package's Python files as they are installed."""
    names: set[str] = set()
    for folder in FOLDERS:
        prefix = "" if folder == "lmcache_async" else "lmcache_async/"
        names |= {f"{prefix}{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    return {name for name in names if "/__pycache__/" not in name}


def extras(wheel: Path) -> list[str]:
    """The wheel's extras, as it says itself."""
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = email.message_from_bytes(archive.read(metadata))
    return message.get_all("Provides-Extra") or []


def try_extra(wheel: Path, extra: str, *, resolve_only: bool) -> str:
    """Install the wheel with an extra into a clean environment and use it.

    Returns:
        What was done.

    Raises:
        ReleaseError: pip, or what must run then, fails.
    """
    wanted = str(wheel) if extra == NONE else f"{wheel}[{extra}]"
    with tempfile.TemporaryDirectory() as directory:
        python = clean_environment(Path(directory) / "venv")
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--python",
            str(python),
            "install",
            "-q",
        ]
        if resolve_only or extra in ONLY_RESOLVED:
            _run([*command, "--dry-run", wanted])
            return "resolved"
        _run([*command, wanted])
        _run([str(python), "-c", SMOKE.get(extra, SMOKE[NONE])])
        return "installed, runs"


def clean_environment(folder: Path) -> Path:
    """A virtual environment with nothing in it, not even pip; its Python."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    return folder / "bin" / "python"


def _built(tree: Path, kind: str, dist: Path) -> Path:
    """A process of its own for each: setuptools remembers what it has built."""
    script = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    before = set(dist.iterdir())
    _run([sys.executable, "-c", script, str(dist)], cwd=tree)
    [made] = [path for path in dist.iterdir() if path not in before and path.suffix in {".gz", ".whl"}]
    return made


def _copy(target: Path) -> Path:
    """The tree, links as links: setuptools leaves a build folder whose stale files would get into the next wheel."""
    names = (".*", "build", "dist", "docs", "tests", "*.egg-info", "__pycache__", "*.so")
    shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(*names))
    return target


def _in_sdist(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    return {name for name in names if name.endswith(".py") and name.startswith("lmcache_async/")}


def _in_wheel(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return {name for name in archive.namelist() if name.endswith(".py")}


def _run(command: Sequence[str], cwd: Path | None = None) -> str:
    ran = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=1800
    )
    if ran.returncode != 0:
        raise ReleaseError(f"{' '.join(command)} failed ({ran.returncode}):\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build").add_argument("--dist", type=Path, default=ROOT / "dist")
    trying = commands.add_parser("try")
    trying.add_argument("wheel", type=Path)
    trying.add_argument("--extra", action="append", help="only this one; none is the wheel alone")
    trying.add_argument("--resolve", action="store_true", help="only find out whether pip could install it")
    options = parser.parse_args(arguments)
    try:
        if options.command == "build":
            sys.stdout.writelines(f"{path}\n" for path in build(options.dist))
            return 0
        for extra in options.extra or [NONE, *extras(options.wheel)]:
            start = time.perf_counter()
            done = try_extra(options.wheel.resolve(), extra, resolve_only=options.resolve)
            sys.stdout.write(f"{extra:14} {done}, {time.perf_counter() - start:.0f} s\n")
            sys.stdout.flush()
    except ReleaseError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
