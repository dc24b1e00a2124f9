"""The browser that tests of the status page need: nothing is done where there is one, and what is done where not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tools.browser import PROGRAMS, find, main


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where programs are found; there are none yet."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def write(programs: Path, name: str, script: str) -> Path:
    path = programs / name
    path.write_text(f"#!/bin/sh\nset -e\nPATH={os.defpath}\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_done_where_the_system_has_one(tmp_path, programs, name):
    path = write(programs, name, "true")

    assert main([str(tmp_path / "browser")]) == 0
    assert not (tmp_path / "browser").exists()
    assert find(tmp_path / "browser") == path


def test_without_apt_it_says_what_to_install(tmp_path, programs, capsys):
    assert main([str(tmp_path / "browser")]) == 1
    told = capsys.readouterr().err
    assert "apt install chromium" in told
    assert "dnf install" in told
    assert find(tmp_path / "browser") is None


def test_with_apt_its_packages_are_unpacked_with_a_script_that_finds_them(tmp_path, programs, capsys):
    write(programs, "apt-config", """echo 'X::Post-Invoke:: "rm -rf /";'""")
    write(
        programs,
        "apt-get",
        """
        ! grep -q Invoke "$APT_CONFIG" && grep -q 'Dir::State::status "/var' "$APT_CONFIG"
        case "$2" in
            update) touch updated; exit 100 ;;  # one of many sources does not answer
            -y) test -e updated; case "$*" in *--download-only*chromium-headless-shell*) ;; *) exit 9 ;; esac
                touch cache/archives/one.deb cache/archives/two.deb ;;
            *) exit 8 ;;
        esac""",
    )
    write(
        programs,
        "dpkg",
        """
        mkdir -p "$3/usr/lib/x86_64-linux-gnu" "$3/usr/lib/chromium"
        program="$3/usr/lib/chromium/chromium-headless-shell"
        printf '#!/bin/sh\\necho "$LD_LIBRARY_PATH" "$FONTCONFIG_FILE" "$@"\\n' > "$program"
        chmod +x "$program" """,
    )
    target = tmp_path / "browser"

    assert main([str(target)]) == 0
    assert find(target) == target / "chromium"
    said = subprocess.run(
        [target / "chromium", "--one", "two three"], capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith(f"{target}/usr/lib/x86_64-linux-gnu:")
    assert said.stdout.endswith(f"{target}/fonts.conf --one two three\n")
    assert "for tests alone: chromium-headless-shell" in capsys.readouterr().out


def test_what_apt_says_when_it_fails_is_told(tmp_path, programs, capsys):
    write(programs, "apt-config", "true")
    write(programs, "apt-get", "echo E: unable to locate; exit 100")

    assert main([str(tmp_path / "browser")]) == 1
    assert "E: unable to locate" in capsys.readouterr().err
