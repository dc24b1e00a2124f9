"""Build and try a release: `python -m tools.release build`, then `python -m tools.release try dist/*.whl`.

`build` writes wheel and source distribution to dist/ and compares their modules with those of the repository.
`try` installs the wheel with each extra in a clean environment; with `--resolve` pip only resolves the versions. See
docs/release.md.
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
"""Name for the wheel without extras."""

SMOKE = {
    NONE: "import lmcache_async.engine.engine, lmcache_async.plugins.cpu, lmcache_async.plugins.disk",
    "blake3": "from lmcache_async.hashing import digest_function; digest_function('blake3')",
    "encryption": "import cryptography; from lmcache_async.memory.encryption import RecordCipher; RecordCipher([bytes(32)])",
    "valkey": "import lmcache_async.plugins.valkey",
    "cli": "from lmcache_async.cli.app import load_commands; load_commands()",
    "s3": "import obstore, lmcache_async.plugins.s3",
    "mooncake": "import lmcache_async.plugins.mooncake",
    "http": "import aiohttp, lmcache_async.metrics.server",
    "otel": "from opentelemetry import trace; import lmcache_async.metrics.tracing",
    "testing": "from lmcache_async.testing import TierConformance, TierMachine",
}
"""Code that must run with an extra. Extras that are not listed run the code of the wheel without extras."""

ONLY_RESOLVED = {"vllm": "it is gigabytes, and its CPU build has another name"}
"""Extras that `try` never installs, with the reason."""


class ReleaseError(RuntimeError):
    """A built distribution is wrong or does not work."""


def build(dist: Path) -> tuple[Path, Path]:
    """Build wheel and source distribution in `dist`.

    Raises:
        ReleaseError: The modules of one of them differ from those of the repository.
    """
    dist.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        tree = _copy(Path(directory) / "tree")
        sdist, wheel = (_built(tree, kind, dist.resolve()) for kind in ("sdist", "wheel"))
    check_modules(wheel, sdist)
    return wheel, sdist


def check_modules(wheel: Path, sdist: Path) -> None:
    """Compare the modules of both distributions with those of the repository.

    Raises:
        ReleaseError: They differ.
    """
    expected = modules()
    for built, found in ((sdist, _in_sdist(sdist)), (wheel, _in_wheel(wheel))):
        if found != expected:
            raise ReleaseError(
                f"{built.name}: modules differ from the repository: {sorted(found ^ expected)}"
            )


def modules() -> set[str]:
    """Return the installed paths of the package's Python files."""
    names: set[str] = set()
    for folder in FOLDERS:
        prefix = "" if folder == "lmcache_async" else "lmcache_async/"
        names |= {f"{prefix}{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    return {name for name in names if "/__pycache__/" not in name}


def extras(wheel: Path) -> list[str]:
    """Return the extras in the wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = email.message_from_bytes(archive.read(metadata))
    return message.get_all("Provides-Extra") or []


def try_extra(wheel: Path, extra: str, *, resolve_only: bool) -> str:
    """Install the wheel with an extra in a clean environment and run code that uses it.

    Returns:
        A description of what was done.

    Raises:
        ReleaseError: pip or the code fails.
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
    """Create an empty virtual environment without pip and return its Python."""
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    return folder / "bin" / "python"


def _built(tree: Path, kind: str, dist: Path) -> Path:
    """Build in a process of its own, because setuptools keeps state between builds."""
    script = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    before = set(dist.iterdir())
    _run([sys.executable, "-c", script, str(dist)], cwd=tree)
    [made] = [path for path in dist.iterdir() if path not in before and path.suffix in {".gz", ".whl"}]
    return made


def _copy(target: Path) -> Path:
    """Copy the repository. setuptools leaves a build folder whose stale files would get into the next wheel."""
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
    trying.add_argument(
        "--extra", action="append", help="only this extra; `none` is the wheel without extras"
    )
    trying.add_argument("--resolve", action="store_true", help="only resolve the versions with pip")
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
