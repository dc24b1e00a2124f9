"""Unpack system libraries that tests need into a directory, without root and without installation.

Mooncake's wheel links with libibverbs and libnuma, also for TCP. Libraries that the system has are skipped. The
others are downloaded with apt and unpacked into the directory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Library:
    """A library that may be missing.

    Attributes:
        files: Its soname, preceded by those of its dependencies.
        packages: Debian packages of these files.
    """

    files: tuple[str, ...]
    packages: tuple[str, ...]

    @property
    def soname(self) -> str:
        return self.files[-1]


LIBRARIES = (
    Library(("libnuma.so.1",), ("libnuma1",)),
    Library(
        ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1"),
        ("libnl-3-200", "libnl-route-3-200", "libibverbs1"),
    ),
)

ADVICE = (
    "tests of the tier mooncake will fail. Install it and run this again: on Debian and Ubuntu:"
    " apt install libibverbs1 libnuma1; on Fedora: dnf install libibverbs numactl-libs"
)

CONFIG = """
Dir::Etc::main "/dev/null";
Dir::Etc::parts "/dev/null";
Dir::State "{0}/state";
Dir::Cache "{0}/cache";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Retries "3";
"""


def is_loadable(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def missing() -> list[Library]:
    """Return the libraries that the system does not have."""
    return [library for library in LIBRARIES if not is_loadable(library.soname)]


def fetch(packages: Sequence[str], target: Path) -> None:
    """Unpack the libraries of these packages into the directory.

    Raises:
        OSError: There is no apt.
        subprocess.SubprocessError: apt or dpkg failed or timed out.
    """
    with apt() as (place, environment):
        run_quietly(["apt-get", "-q", "download", *packages], place, environment)
        unpacked = place / "unpacked"
        unpacked.mkdir()
        for package in place.glob("*.deb"):
            run_quietly(["dpkg", "-x", str(package), str(unpacked)], place)
        target.mkdir(parents=True, exist_ok=True)
        for library in unpacked.rglob("*.so.*"):
            if library.is_symlink():  # a soname: copy its target under that name
                shutil.copyfile(library, target / library.name)


@contextlib.contextmanager
def apt(options: str = "") -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield a temporary directory, and the environment of apt commands that keep their state and files in it.

    Args:
        options: Further lines of apt's configuration.

    Raises:
        OSError: There is no apt.
        subprocess.SubprocessError: apt failed or timed out.
    """
    with tempfile.TemporaryDirectory(prefix="apt-") as name:
        place = Path(name)
        for directory in ("state/lists/partial", "cache/archives/partial"):
            (place / directory).mkdir(parents=True)
        # The settings of this machine, such as its proxy, without its hooks.
        settings = run_quietly(["apt-config", "dump"], place).splitlines()
        own = [line for line in settings if "-Invoke" not in line]
        config = place / "apt.conf"
        config.write_text("\n".join(own) + CONFIG.format(place) + options, encoding="utf-8")
        environment = os.environ | {"APT_CONFIG": str(config), "LC_ALL": "C"}
        with contextlib.suppress(subprocess.CalledProcessError):  # one of several sources may be unreachable
            run_quietly(["apt-get", "-q", "update"], place, environment)
        yield place, environment


def run_quietly(command: Sequence[str], directory: Path, environment: dict[str, str] | None = None) -> str:
    """Run a command and return its output.

    Raises:
        OSError: The program does not exist.
        subprocess.SubprocessError: It failed or timed out.
    """
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    return done.stdout


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools.native", description=__doc__)
    parser.add_argument("directory", type=Path, help="where to unpack missing libraries")
    target = parser.parse_args(arguments).directory
    packages = [package for library in missing() for package in library.packages]
    if not packages:
        return 0
    try:
        fetch(packages, target)
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "output", None) or ""
        sonames = " and ".join(library.soname for library in missing())
        sys.stderr.write(f"{told}== {error}\n== {sonames} cannot be downloaded: {ADVICE}\n")
        return 1
    sys.stdout.write(f"== unpacked into {target}, for tests only: {', '.join(packages)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
