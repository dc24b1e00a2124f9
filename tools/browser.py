"""Find headless Chromium, or unpack it into a directory, for tests and screenshots of the status page.

`python -m tools.browser DIRECTORY` does nothing if the system has a Chromium. Otherwise it downloads Debian's package
and the missing dependencies with apt and unpacks them into the directory. It needs no root and installs nothing.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.native import apt, run_quietly

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PACKAGES = ("chromium-headless-shell", "fonts-dejavu-core", "fonts-inter")
STATUS = 'Dir::State::status "/var/lib/dpkg/status";\n'  # installed packages are not downloaded again
PLACE = Path(sys.prefix) / "browser"
"""Directory in the virtual environment in use."""
FLAGS = (
    "--no-sandbox",  # the sandbox does not work as root; the pages are our own
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""Flags of Chromium in addition to Playwright's own."""

ADVICE = (
    "tests of the status page will fail. Install it and run this again: on Debian and Ubuntu: apt install chromium;"
    " on Fedora: dnf install chromium-headless"
)

FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>{0}/usr/share/fonts</dir>
  <dir>/usr/share/fonts</dir>
  <cachedir>{0}/cache</cachedir>
  <alias binding="same"><family>system-ui</family><prefer><family>Inter</family></prefer></alias>
  <alias binding="same"><family>sans-serif</family><prefer><family>Inter</family></prefer></alias>
</fontconfig>
"""

SCRIPT = """#!/bin/sh
export LD_LIBRARY_PATH='{0}'/usr/lib/{1}:'{0}'/usr/lib/{1}/pulseaudio
export FONTCONFIG_FILE='{0}'/fonts.conf
exec '{0}'/usr/lib/chromium/chromium-headless-shell "$@"
"""


def find(place: Path = PLACE) -> Path | None:
    """Return the browser in the directory, or else the one of the system; None if there is none."""
    ours = place / "chromium"
    if ours.exists():
        return ours
    found = (shutil.which(name) for name in PROGRAMS)
    return next((Path(path) for path in found if path), None)


def require() -> Path:
    """Return the path of the browser.

    Raises:
        FileNotFoundError: There is none.
    """
    if (path := find()) is None:
        raise FileNotFoundError(
            "Chromium is not installed: run `make install` or `python -m tools.browser DIRECTORY`"
        )
    return path


def fetch(target: Path) -> None:
    """Unpack a browser into the directory.

    Raises:
        OSError: There is no apt.
        subprocess.SubprocessError: apt or dpkg failed or timed out.
    """
    with apt(STATUS) as (place, environment):
        command = ["apt-get", "-q", "-y", "install", "--download-only", "--no-install-recommends", *PACKAGES]
        run_quietly(command, place, environment)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for package in (place / "cache/archives").glob("*.deb"):
            run_quietly(["dpkg", "-x", str(package), str(target)], place)
    triplet = next((target / "usr/lib").glob("*-linux-gnu")).name
    (target / "fonts.conf").write_text(FONTS.format(target), encoding="utf-8")
    script = target / "chromium"
    script.write_text(SCRIPT.format(target, triplet), encoding="utf-8")
    script.chmod(0o755)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools.browser", description=__doc__)
    parser.add_argument("directory", type=Path, help="where to unpack it if the system has none")
    target = parser.parse_args(arguments).directory.resolve()
    if find(target) is not None:
        return 0
    try:
        fetch(target)
    except (OSError, subprocess.SubprocessError) as error:
        output = error.output if isinstance(error, subprocess.CalledProcessError) else ""
        sys.stderr.write(f"{output or ''}== {error}\n== Chromium cannot be downloaded: {ADVICE}\n")
        return 1
    sys.stdout.write(f"== {PACKAGES[0]} is in {target}, for tests only\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
